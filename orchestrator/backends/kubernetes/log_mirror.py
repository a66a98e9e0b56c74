"""Mirrors the pods' logs as files of the run folder, where `orch logs` reads them like any
others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from orchestrator.backends.kubernetes.names import Body
from orchestrator.errors import OrchError
from orchestrator.run.folder import RunFolder, write_private

from .api.client import Cluster
from .phases import ObservedRun, index_of
from .pod.rank_mapping import node_names
from .pod.rendezvous import Join
from .pod.status_lines import parse_rank_line, parse_status_line

_POLL_S = 2.0  # how often it looks for new pods


def copy_logs(folder: RunFolder, cluster: Cluster, run: ObservedRun) -> None:
    """Replaces the local logs by the pods' current logs. The log of a pod that is gone stays as it
    was last read."""
    names = pod_node_names(run.pods)
    for pod in run.pods:
        node = names[index_of(pod)]
        lines_by_rank: dict[int | None, list[str]] = {}
        for rank, line in _by_writer(cluster.log(pod["metadata"]["name"])):
            lines_by_rank.setdefault(rank, []).append(line)
        for rank, lines in lines_by_rank.items():
            log = "".join(f"{line}\n" for line in lines)
            path = _path(folder, node, rank)
            write_private(path, log.encode(errors="replace"), durable=False)


def _path(folder: RunFolder, node: str, rank: int | None) -> Path:
    return folder.agent_log(node) if rank is None else folder.rank_log(rank)


@contextlib.contextmanager
def follow_logs(
    folder: RunFolder,
    cluster: Cluster,
    observe: Callable[[], ObservedRun],
) -> Iterator[None]:
    """Lets the local logs grow with the pods' logs while the body runs, those of later pods
    included."""
    end = threading.Event()

    def watch() -> None:
        followed_pods: set[str] = set()
        while not end.wait(_POLL_S if followed_pods else 0.0):
            with contextlib.suppress(OrchError):
                pods = observe().pods
                names = pod_node_names(pods)
                for pod in pods:
                    name = pod["metadata"]["name"]
                    if name in followed_pods or pod.get("status", {}).get("phase") == "Pending":
                        continue
                    followed_pods.add(name)
                    follower = (folder, cluster, pod, names[index_of(pod)])
                    threading.Thread(target=_append, args=follower, daemon=True).start()

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
            with _path(folder, node, rank).open("a", encoding="utf-8", errors="replace") as log:
                log.write(f"{line}\n")


def _by_writer(lines: Iterable[str]) -> Iterator[tuple[int | None, str]]:
    """Yields (rank, line) for workers and (None, line) for the agent; it leaves out status
    lines."""
    for line in lines:
        if rank_line := parse_rank_line(line):
            yield rank_line
        elif parse_status_line(line) is None:
            yield None, line


def pod_node_names(pods: Sequence[Body]) -> dict[int, str]:
    """Index -> the plan's name of that pod's share of a node."""
    members = [
        Join(
            index_of(pod),
            pod["spec"].get("nodeName") or "unplaced",
            "",
            "",
        )
        for pod in pods
    ]
    return {member.index: name for member, name in zip(members, node_names(members), strict=True)}
