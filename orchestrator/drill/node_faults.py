"""Injects faults into the processes of one node of a run: its agent, and the agent's descendants.
Runs on that node.

Only users who may signal these processes can do this, so the run needs no interface for it.
"""

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
from orchestrator.plan import Exit, load_plan
from orchestrator.plan.worker import checkpoint_dir
from orchestrator.run.folder import NO_ROOM, RunFolder
from orchestrator.run.processes import Identity, descendants, identity, is_alive, send_signal

_RANK_NAME = "orch-rank-"
#: A slow worker's period, and how much of it the worker is stopped: short enough that every step
#: is slow, not one of several.
DUTY_S = (0.02, 0.01)
_SMALL_DISK = 1 << 30  # bytes; a larger disk is never filled on purpose


class NodeProcesses:
    """The agent of a node, and everything below it, as it is now."""

    def __init__(self, folder: RunFolder, agent: Identity):
        self._folder = folder
        self._agent = agent

    def inject(
        self,
        fault: str,
        rank: int,
        for_s: float,
        pick: float,
    ) -> Callable[[], None]:
        """Injects the fault and returns what undoes it. A process that has ended in the meantime
        is not an error."""
        return getattr(self, f"_{fault}")(rank, for_s, pick)

    def _everything(self) -> list[Identity]:
        """Returns the agent and its descendants, the agent first."""
        return [self._agent, *filter(None, map(identity, descendants(self._agent.pid)))]

    def _worker(self, rank: int) -> Identity:
        worker = self._workers().get(rank)
        if worker is None:
            raise OrchError(f"rank {rank} does not run on its node now", Exit.CAPACITY)
        return worker

    def _workers(self) -> dict[int, Identity]:
        """Returns the workers by rank. The processes that a worker starts (compilers, data
        loaders) have its name or its variables too: the eldest is the worker."""
        workers: dict[int, Identity] = {}
        for process in sorted(self._everything()[1:], key=lambda process: process.started):
            rank = _rank_of(process.pid)
            if rank is not None:
                workers.setdefault(rank, process)
        return workers

    # ---------------------------------------------------------------------------------- faults

    def _kill_worker(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        send_signal(self._worker(rank), signal.SIGKILL)
        return no_undo

    def _stop_worker(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        worker = self._worker(rank)
        send_signal(worker, signal.SIGSTOP)
        return lambda: _continue([worker])

    def _slow_worker(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        worker = self._worker(rank)
        end = time.monotonic() + for_s
        period, stopped = DUTY_S
        try:
            while time.monotonic() < end and send_signal(worker, signal.SIGSTOP):
                time.sleep(stopped)
                send_signal(worker, signal.SIGCONT)
                time.sleep(period - stopped)
        finally:
            _continue([worker])
        return no_undo

    def _kill_agent(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        send_signal(self._agent, signal.SIGKILL)
        return no_undo

    def _stop_agent(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        send_signal(self._agent, signal.SIGSTOP)
        return lambda: _continue([self._agent])

    def _kill_node(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        for process in self._everything():
            send_signal(process, signal.SIGKILL)
        return no_undo

    def _stop_node(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        processes = self._everything()
        for process in processes:
            send_signal(process, signal.SIGSTOP)
        return lambda: _continue(processes)

    def _notice(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        processes = self._everything()
        send_signal(self._agent, signal.SIGTERM)

        def kill_rest() -> None:
            for process in processes:
                send_signal(process, signal.SIGKILL)

        return kill_rest

    def _disk_full(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        """Fills the disk of the checkpoints if it is a small filesystem of their own, for all
        that write to it (ENOSPC). Else it stops the files of these workers, and of no others,
        from growing (RLIMIT_FSIZE: EFBIG)."""
        folder = checkpoints_of(self._folder)
        if is_small_disk(folder, self._folder.path):
            return fill(folder)
        previous_limits = {
            worker: resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
            for worker in self._workers().values()
        }
        for worker, (_, hard_limit) in previous_limits.items():
            _limit_files(worker, (0, hard_limit))

        def free() -> None:
            for worker, limits in previous_limits.items():
                _limit_files(worker, limits)

        return free

    def _bit_flip(self, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        check_two_saves(self._folder)
        flip_bit(saves(self._folder)[-1], random.Random(pick))
        return self._kill_worker(rank, for_s, pick)


# ------------------------------------------------------------------------------------------
#     checkpoints


def checkpoints_of(folder: RunFolder) -> Path:
    plan = load_plan(folder.plan)
    return checkpoint_dir(plan.job.checkpoint.dir, str(folder.path))


def saves(folder: RunFolder) -> list[Path]:
    """Returns the committed checkpoints, oldest first."""
    folders = checkpoints_of(folder).glob("step-????????")
    return sorted(path for path in folders if (path / "manifest.json").is_file())


def check_two_saves(folder: RunFolder) -> None:
    """Raises OrchError (64) if a damaged checkpoint would be the only one."""
    if len(saves(folder)) < 2:
        problem = "bit_flip damages the newest checkpoint, and there are not two yet"
        raise OrchError(f"{problem}: nothing could be resumed", Exit.USAGE)


def flip_bit(checkpoint: Path, draw: random.Random) -> tuple[Path, int]:
    """Flips one bit of one file of a checkpoint and returns (file, number of the bit)."""
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


def is_small_disk(folder: Path, run: Path) -> bool:
    """Tells whether a folder is on another filesystem than the run, and on one that may be
    filled."""
    with contextlib.suppress(OSError):
        filesystem = os.statvfs(folder)
        is_small = filesystem.f_blocks * filesystem.f_frsize <= _SMALL_DISK
        return folder.stat().st_dev != run.stat().st_dev and is_small
    return False


def fill(folder: Path) -> Callable[[], None]:
    """Takes all free space of a folder's filesystem, with an unnamed file: it disappears with
    this process."""
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    size = 0
    piece = 1 << 24
    while piece >= 4096:
        try:
            os.posix_fallocate(fd, size, piece)
            size += piece
        except OSError as error:
            if error.errno not in NO_ROOM:
                os.close(fd)
                raise
            piece //= 2
    open_files = [fd]

    def free() -> None:
        while open_files:
            os.close(open_files.pop())

    return free


# ------------------------------------------------------------------------------------------ who is
#     who


def _rank_of(pid: int) -> int | None:
    """Returns the rank of a process: by its name if it was forked, else by its environment."""
    with contextlib.suppress(OSError, ValueError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith(_RANK_NAME):
            return int(name.removeprefix(_RANK_NAME))
        variables = dict(_variables(Path(f"/proc/{pid}/environ").read_bytes()))
        parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        parent_variables = dict(_variables(Path(f"/proc/{parent}/environ").read_bytes()))
        is_worker = b"RANK" in variables and b"ORCH_EPOCH" in variables
        if is_worker and parent_variables.get(b"RANK") != variables[b"RANK"]:
            return int(variables[b"RANK"])
    return None


def _variables(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    for pair in block.split(b"\0"):
        name, _, value = pair.partition(b"=")
        yield name, value


def _limit_files(process: Identity, limits: tuple[int, int]) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)


def _continue(processes: list[Identity]) -> None:
    for process in processes:
        send_signal(process, signal.SIGCONT)


def no_undo() -> None:
    """Does nothing: the fault needs no undoing."""
