"""Faults of runs of the local backend: exactly the processes of the run, found below its supervisor."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.launch import namespaces
from orchestrator.launch.local import LocalRecord, read_options, read_record
from orchestrator.launch.processes import Identity, descendants, identity, is_alive, send_signal
from orchestrator.launch.request import LaunchRequest
from orchestrator.launch.run_folder import RunFolder
from orchestrator.plan import Exit, load_plan
from orchestrator.plan.worker import checkpoint_dir

_RANK_NAME = "orch-rank-"
_DUTY_S = 0.2, 0.1  # a slow worker's period, and how much of it it is stopped


class LocalTargets:
    """The processes of one run, as they are now."""

    def __init__(self, folder: RunFolder, request: LaunchRequest):
        self._folder, self._request = folder, request

    def check(self, fault: str) -> None:
        """OrchError (64, 76) for a fault that this run cannot have."""
        self._record()
        if fault == "partition" and read_options(self._request).network != "namespaces":
            raise OrchError("partition: the nodes share one network; submit with cluster=local_shaped", Exit.USAGE)
        if fault == "bit_flip" and len(self._checkpoints()) < 2:
            text = "bit_flip damages the newest checkpoint, and there are not two yet: nothing could be resumed"
            raise OrchError(text, Exit.USAGE)

    def inject(self, fault: str, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        """Do it; what takes it back. A process that is gone already is no error: something was faster."""
        return getattr(self, f"_{fault}")(node, rank, for_s, pick)

    # ---------------------------------------------------------------------------------- who is who

    def _record(self) -> LocalRecord:
        record = read_record(self._folder)
        if record is None or not is_alive(Identity(*record.supervisor)):
            raise OrchError(f"run {self._folder.run_id} has no supervisor here: it is not running", Exit.USAGE)
        return record

    def _agent(self, node: str) -> Identity:
        """The agent, if it really descends from the run's supervisor."""
        record = self._record()
        pid = record.agents.get(node)
        found = identity(pid) if pid is not None and node not in record.exit_codes else None
        if found is None or pid not in descendants(record.supervisor[0]):
            raise OrchError(f"node {node} of run {self._folder.run_id} has no agent here", Exit.CAPACITY)
        return found

    def _of_node(self, node: str) -> list[Identity]:
        """Everything of that node, the agent first."""
        agent = self._agent(node)
        return [agent, *filter(None, map(identity, descendants(agent.pid)))]

    def _worker(self, node: str, rank: int) -> Identity:
        found = self._workers(node).get(rank)
        if found is None:
            raise OrchError(f"rank {rank} does not run on node {node} now", Exit.CAPACITY)
        return found

    def _workers(self, node: str) -> dict[int, Identity]:
        return {rank: one for one in self._of_node(node)[1:] if (rank := _rank_of(one.pid)) is not None}

    # ---------------------------------------------------------------------------------- faults

    def _kill_worker(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        send_signal(self._worker(node, rank), signal.SIGKILL)
        return _nothing

    def _stop_worker(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        worker = self._worker(node, rank)
        send_signal(worker, signal.SIGSTOP)
        return lambda: _wake([worker])

    def _slow_worker(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        worker, end = self._worker(node, rank), time.monotonic() + for_s
        period, stopped = _DUTY_S
        try:
            while time.monotonic() < end and send_signal(worker, signal.SIGSTOP):
                time.sleep(stopped)
                send_signal(worker, signal.SIGCONT)
                time.sleep(period - stopped)
        finally:
            _wake([worker])
        return _nothing

    def _kill_agent(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        send_signal(self._agent(node), signal.SIGKILL)
        return _nothing

    def _stop_agent(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        agent = self._agent(node)
        send_signal(agent, signal.SIGSTOP)
        return lambda: _wake([agent])

    def _kill_node(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        for one in self._of_node(node):
            send_signal(one, signal.SIGKILL)
        return _nothing

    def _stop_node(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        everything = self._of_node(node)
        for one in everything:
            send_signal(one, signal.SIGSTOP)
        return lambda: _wake(everything)

    def _notice(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        everything = self._of_node(node)
        send_signal(everything[0], signal.SIGTERM)

        def pull_the_plug() -> None:
            for one in everything:
                send_signal(one, signal.SIGKILL)

        return pull_the_plug

    def _partition(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        record = self._record()
        largest = max(self._request.sizes, default=0)
        plan = load_plan(self._folder.sized_plan(largest) if largest else self._folder.plan)
        index = plan.cluster.node_names.index(node)
        namespaces.cut([record.supervisor[0], *record.agents.values()], record.switches, index)

        def plug_in() -> None:
            now = self._record()
            namespaces.heal([now.supervisor[0], *now.agents.values()], now.switches, index)

        return plug_in

    def _disk_full(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        """No file of these workers may grow (RLIMIT_FSIZE: EFBIG where a full disk gives ENOSPC), and no other's."""
        before = {one: resource.prlimit(one.pid, resource.RLIMIT_FSIZE) for one in self._workers(node).values()}
        for one, (_, most) in before.items():
            _limit_files(one, (0, most))

        def make_room() -> None:
            for one, limits in before.items():
                _limit_files(one, limits)

        return make_room

    def _bit_flip(self, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        self.check("bit_flip")
        flip_bit(self._checkpoints()[-1], random.Random(pick))
        return self._kill_worker(node, rank, for_s, pick)

    def _checkpoints(self) -> list[Path]:
        """Committed ones, oldest first."""
        plan = load_plan(self._folder.plan)
        folder = checkpoint_dir(plan.job.checkpoint.dir, str(self._folder.path))
        return sorted(path for path in folder.glob("step-????????") if (path / "manifest.json").is_file())


def flip_bit(checkpoint: Path, draw: random.Random) -> tuple[Path, int]:
    """Turn over one bit of one file of a checkpoint; (file, number of the bit)."""
    path = draw.choice(sorted(checkpoint.glob("*.safetensors")))
    bit = draw.randrange(8 * path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))
        file.flush()
        os.fsync(file.fileno())
    return path, bit


def _rank_of(pid: int) -> int | None:
    """The rank that a process is: by its name where it was forked, else by its environment; children have no rank."""
    with contextlib.suppress(OSError, ValueError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith(_RANK_NAME):
            return int(name.removeprefix(_RANK_NAME))
        mine = dict(_variables(Path(f"/proc/{pid}/environ").read_bytes()))
        parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        above = dict(_variables(Path(f"/proc/{parent}/environ").read_bytes()))
        if b"RANK" in mine and b"ORCH_EPOCH" in mine and above.get(b"RANK") != mine[b"RANK"]:
            return int(mine[b"RANK"])
    return None


def _variables(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    for word in block.split(b"\0"):
        name, _, value = word.partition(b"=")
        yield name, value


def _limit_files(process: Identity, limits: tuple[int, int]) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)


def _wake(processes: list[Identity]) -> None:
    for one in processes:
        send_signal(one, signal.SIGCONT)


def _nothing() -> None:
    """There is nothing to take back."""
