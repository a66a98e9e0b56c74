"""The pods' logs as files of the run folder, so that `orch logs` reads them as any others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from orchestrator.errors import OrchError
from orchestrator.launch.run_folder import RunFolder, write_private

from .client import Cluster
from .phases import Seen, index_of
from .relay import parse, rank_of

_LOOK_S = 2.0  # for pods that have come


def fill(folder: RunFolder, cluster: Cluster, seen: Seen) -> None:
    """Replace the local logs by what the pods have said until now. A pod that is gone leaves what was read before."""
    for pod in seen.pods:
        texts: dict[int | None, list[str]] = {}
        for rank, line in _sorted(cluster.log(pod["metadata"]["name"])):
            texts.setdefault(rank, []).append(line)
        for rank, lines in texts.items():
            path = folder.agent_log(_node(pod)) if rank is None else folder.rank_log(rank)
            write_private(path, "".join(f"{line}\n" for line in lines).encode(errors="replace"), durable=False)


@contextlib.contextmanager
def followed(folder: RunFolder, cluster: Cluster, look: Callable[[], Seen]) -> Iterator[None]:
    """While the body runs, local logs grow with the pods' own, those of pods that come later too."""
    end = threading.Event()

    def watch() -> None:
        known: set[str] = set()
        while not end.wait(_LOOK_S if known else 0.0):
            with contextlib.suppress(OrchError):
                for pod in look().pods:
                    name = pod["metadata"]["name"]
                    if name not in known and pod.get("status", {}).get("phase") != "Pending":
                        known.add(name)
                        threading.Thread(target=_append, args=(folder, cluster, pod), daemon=True).start()

    for path in folder.logs.glob("*.log"):
        path.unlink()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        end.set()


def _append(folder: RunFolder, cluster: Cluster, pod: dict) -> None:
    with contextlib.suppress(OrchError, OSError):
        for rank, line in _sorted(cluster.log(pod["metadata"]["name"], follow=True)):
            path = folder.agent_log(_node(pod)) if rank is None else folder.rank_log(rank)
            with path.open("a", encoding="utf-8", errors="replace") as log:
                log.write(f"{line}\n")


def _sorted(lines: Iterable[str]) -> Iterator[tuple[int | None, str]]:
    """(rank, line) of workers, (None, line) of the agent; what is meant for `orch status` is left out."""
    for line in lines:
        if found := rank_of(line):
            yield found
        elif parse(line) is None:
            yield None, line


def _node(pod: dict) -> str:
    return pod["spec"].get("nodeName") or f"pod-{index_of(pod)}"
