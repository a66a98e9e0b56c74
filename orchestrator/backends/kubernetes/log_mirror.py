"""Log mirror: the pods' logs as files of the run folder, so that `orch logs` reads them as any
others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.run.folder import RunFolder, write_private

from .api.client import Cluster
from .phases import ObservedRun, index_of
from .pod.rank_mapping import node_names
from .pod.rendezvous import Join
from .pod.status_lines import parse_rank_line, parse_status_line

_POLL_S = 2.0  # for new pods


def copy_logs(folder: RunFolder, cluster: Cluster, run: ObservedRun) -> None:
    """Replace the local logs by the pods' logs of now. Of a pod that is gone, what was read before
    stays."""
    names = pod_node_names(run.pods)
    for pod in run.pods:
        texts: dict[int | None, list[str]] = {}
        for rank, line in _by_writer(cluster.log(pod["metadata"]["name"])):
            texts.setdefault(rank, []).append(line)
        for rank, lines in texts.items():
            path = folder.agent_log(names[index_of(pod)]) if rank is None else folder.rank_log(rank)
            write_private(
                path, "".join(f"{line}\n" for line in lines).encode(errors="replace"), durable=False
            )


@contextlib.contextmanager
def follow_logs(
    folder: RunFolder, cluster: Cluster, observe: Callable[[], ObservedRun]
) -> Iterator[None]:
    """While the body runs, local logs grow with the pods' own, those of pods that come later
    too."""
    end = threading.Event()

    def watch() -> None:
        known: set[str] = set()
        while not end.wait(_POLL_S if known else 0.0):
            with contextlib.suppress(OrchError):
                pods = observe().pods
                names = pod_node_names(pods)
                for pod in pods:
                    name = pod["metadata"]["name"]
                    if name not in known and pod.get("status", {}).get("phase") != "Pending":
                        known.add(name)
                        node = names[index_of(pod)]
                        threading.Thread(
                            target=_append, args=(folder, cluster, pod, node), daemon=True
                        ).start()

    for path in folder.logs.glob("*.log"):
        path.unlink()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        end.set()


def _append(folder: RunFolder, cluster: Cluster, pod: dict, node: str) -> None:
    with contextlib.suppress(OrchError, OSError):
        for rank, line in _by_writer(cluster.log(pod["metadata"]["name"], follow=True)):
            path = folder.agent_log(node) if rank is None else folder.rank_log(rank)
            with path.open("a", encoding="utf-8", errors="replace") as log:
                log.write(f"{line}\n")


def _by_writer(lines: Iterable[str]) -> Iterator[tuple[int | None, str]]:
    """(rank, line) of workers, (None, line) of the agent; status lines are left out."""
    for line in lines:
        if found := parse_rank_line(line):
            yield found
        elif parse_status_line(line) is None:
            yield None, line


def pod_node_names(pods: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Index -> what the plan calls that pod's share of a node."""
    members = [
        Join(index_of(pod), pod["spec"].get("nodeName") or "unplaced", "", "") for pod in pods
    ]
    return {member.index: name for member, name in zip(members, node_names(members), strict=True)}
