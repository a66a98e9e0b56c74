"""The pods' logs as files of the run folder, so that `orch logs` reads them as any others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.run.folder import RunFolder, write_private

from .api.client import Cluster
from .phases import Seen, index_of
from .pod.rank_mapping import node_names
from .pod.rendezvous import Here
from .pod.status_lines import parse, rank_of

_LOOK_S = 2.0  # for pods that have come


def fill(folder: RunFolder, cluster: Cluster, seen: Seen) -> None:
    """Replace the local logs by what the pods have said until now. A pod that is gone leaves what was read before."""
    names = names_of(seen.pods)
    for pod in seen.pods:
        texts: dict[int | None, list[str]] = {}
        for rank, line in _sorted(cluster.log(pod["metadata"]["name"])):
            texts.setdefault(rank, []).append(line)
        for rank, lines in texts.items():
            path = folder.agent_log(names[index_of(pod)]) if rank is None else folder.rank_log(rank)
            write_private(path, "".join(f"{line}\n" for line in lines).encode(errors="replace"), durable=False)


@contextlib.contextmanager
def followed(folder: RunFolder, cluster: Cluster, look: Callable[[], Seen]) -> Iterator[None]:
    """While the body runs, local logs grow with the pods' own, those of pods that come later too."""
    end = threading.Event()

    def watch() -> None:
        known: set[str] = set()
        while not end.wait(_LOOK_S if known else 0.0):
            with contextlib.suppress(OrchError):
                pods = look().pods
                names = names_of(pods)
                for pod in pods:
                    name = pod["metadata"]["name"]
                    if name not in known and pod.get("status", {}).get("phase") != "Pending":
                        known.add(name)
                        node = names[index_of(pod)]
                        threading.Thread(target=_append, args=(folder, cluster, pod, node), daemon=True).start()

    for path in folder.logs.glob("*.log"):
        path.unlink()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        end.set()


def _append(folder: RunFolder, cluster: Cluster, pod: dict, node: str) -> None:
    with contextlib.suppress(OrchError, OSError):
        for rank, line in _sorted(cluster.log(pod["metadata"]["name"], follow=True)):
            path = folder.agent_log(node) if rank is None else folder.rank_log(rank)
            with path.open("a", encoding="utf-8", errors="replace") as log:
                log.write(f"{line}\n")


def _sorted(lines: Iterable[str]) -> Iterator[tuple[int | None, str]]:
    """(rank, line) of workers, (None, line) of the agent; what is meant for `orch status` is left out."""
    for line in lines:
        if found := rank_of(line):
            yield found
        elif parse(line) is None:
            yield None, line


def names_of(pods: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Index -> what the plan calls that pod's share of a node."""
    here = [Here(index_of(pod), pod["spec"].get("nodeName") or "unplaced", "", "") for pod in pods]
    return {pod.index: name for pod, name in zip(here, node_names(here), strict=True)}
