"""Runs a function on N gloo ranks forked from this process: a parity test takes a tenth of a second
instead of twenty seconds.

Forking after `import torch` shares the time and memory of imports between ranks. The children make
it safe: one thread before the first operation, a `file://` rendezvous (no ports), `os._exit` (no
exit handlers of the parent), death with the parent. Results return over a pipe as JSON and
safetensors, never as pickle.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import selectors
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes

from trainer import compat
from trainer.huge_pages import collapse

compat.import_compiler()  # optimizers need it: here once, instead of a second in every rank

_START_S = 300.0  # for all ranks to be forked and connected
_GRACE_S = 2.0  # after the first failure: time for the other ranks to report theirs
_STACKS_S = 30.0  # for the late ranks to write their stacks
_BEGUN = b"!"  # first byte of a rank's pipe: it is connected and begins its work, or has failed


class RankError(RuntimeError):
    """A rank raised, died or did not finish. `rank` is the first to fail; the message carries its
    traceback."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def join_gloo(**rendezvous: Any) -> None:
    """Makes this rank a member of gloo's group. `rendezvous`: arguments of torch's
    `init_process_group`."""
    dist.init_process_group("gloo", **rendezvous)


def join_gpus(rank: int, **rendezvous: Any) -> None:
    """Makes this rank a member of a group of gloo and NCCL, bound to the GPU of its number: groups
    are split from it as in a run (`trainer.comm.connect`)."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, device_id=device, **rendezvous)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 300.0,
    join: Callable[..., None] = join_gloo,
) -> list[Any]:
    """Returns fn(rank, *args) of each rank, each a process that `join` has made a member of a group
    of `world`. It is the only default group of its process: torch 2.11 dies when it splits a group
    from a second one.

    `fn` may be a closure. It returns any nesting of dicts (string keys), lists and tuples (which
    become lists) of tensors and JSON values. Raises RankError with the first failing rank's
    traceback, or, `timeout` seconds after the last rank has begun its work, with the stacks of the
    ranks that still run. No process outlives the call.
    """
    home = Path(tempfile.mkdtemp(prefix="ranks-"))
    ranks: list[_Rank] = []
    collapse()
    # A garbage collection in a child would write to, and so copy, every page that it shares with
    # this process.
    gc.freeze()
    try:
        for index in range(world):
            work = _Work(fn, args, index, world, home=home, timeout=timeout, join=join)
            ranks.append(_start(work))
        return _collect(ranks, timeout)
    finally:
        for rank in ranks:
            rank.end()
        gc.unfreeze()
        shutil.rmtree(home, ignore_errors=True)


# --------------------------------------------------------------------------------------------
#     parent


@dataclass(frozen=True)
class _Work:
    """The call of one rank."""

    fn: Callable[..., Any]
    args: tuple
    rank: int
    world: int
    home: Path
    timeout: float
    join: Callable[..., None]

    @property
    def stacks(self) -> Path:
        """The file of the rank's stack dump."""
        return self.home / f"stacks-{self.rank}"

    @property
    def signals(self) -> Path:
        """The file of the numbers of handled signals; SIGUSR1 follows a complete stack dump."""
        return self.home / f"signals-{self.rank}"


@dataclass
class _Rank:
    work: _Work
    pid: int
    pipe: int
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False  # the pipe is closed: `data` is complete
    status: int | None = None

    @property
    def answer(self) -> bytes:
        return bytes(self.data[len(_BEGUN) :])

    @property
    def has_dumped(self) -> bool:
        signals = self.work.signals
        return signals.exists() and signal.SIGUSR1 in signals.read_bytes()

    def end(self) -> None:
        os.close(self.pipe)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def read(self) -> None:
        chunk = os.read(self.pipe, 1 << 20)
        self.data += chunk
        if not chunk:
            self.ended = True
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def failure(self) -> str | None:
        if self.status == 0:
            return None
        reason = f"ended with code {self.status} and no result"
        if self.answer:
            reason = _decode(self.answer)["error"]
        return f"rank {self.index}: {reason}"

    @property
    def index(self) -> int:
        return self.work.rank


def _start(work: _Work) -> _Rank:
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(work, pipe=write, parent=parent)
    os.close(write)
    return _Rank(work, pid, pipe=read)


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    first: _Rank | None = None
    deadline = time.monotonic() + _START_S
    begun = False
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                rank = key.data
                rank.read()
                if rank.ended:
                    selector.unregister(rank.pipe)
                    if first is None and rank.failure():
                        first = rank
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
            if first is None and not begun and all(rank.data for rank in ranks):
                deadline = time.monotonic() + timeout
                begun = True
    if first is not None:
        raise RankError(first.index, first.failure() or "")
    late = [rank for rank in ranks if not rank.ended]
    if late:
        raise RankError(late[0].index, _stacks(late))
    return [_decode(rank.answer) for rank in ranks]


def _stacks(late: list[_Rank]) -> str:
    """Returns the stacks of the ranks that did not finish, from faulthandler's dump on SIGUSR1."""
    for rank in late:
        os.kill(rank.pid, signal.SIGUSR1)
    end = time.monotonic() + _STACKS_S
    while not all(rank.has_dumped for rank in late) and time.monotonic() < end:
        time.sleep(0.01)
    paragraphs = [
        f"rank {rank.index} did not finish in time:\n{rank.work.stacks.read_text()}"
        for rank in late
    ]
    return "\n".join(paragraphs)


# --------------------------------------------------------------------------------------------
#     child


def _child(work: _Work, pipe: int, parent: int) -> NoReturn:
    """Runs the work in the forked process, sends its result and ends the process."""
    code = 1
    head = _BEGUN
    try:
        _die_with(parent)
        stacks = work.stacks.open("w")
        signals = os.open(work.signals, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
        signal.set_wakeup_fd(signals)
        # A handler makes Python write the signal's number, after the stacks.
        signal.signal(signal.SIGUSR1, lambda *_: None)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=True)
        # Before the first operation: the parent's thread pool did not survive the fork.
        torch.set_num_threads(1)
        work.join(
            init_method=f"file://{work.home}/store",
            rank=work.rank,
            world_size=work.world,
            # The parent's timeout ends first, and names the late ranks.
            timeout=timedelta(seconds=_START_S + work.timeout),
        )
        # Work that ends this group at once would close connections that a peer is still making.
        dist.barrier()
        os.write(pipe, head)
        head = b""
        answer = _encode(work.fn(work.rank, *work.args))
        code = 0
        dist.barrier()  # a rank that leaves early closes connections that others still read
    except BaseException:
        answer = _encode({"error": traceback.format_exc()})
        code = 1
    try:
        view = memoryview(head + answer)
        while view:
            view = view[os.write(pipe, view) :]
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends (Linux prctl PR_SET_PDEATHSIG)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux: the parent still kills by pid
    if os.getppid() != parent:
        os._exit(1)


# --------------------------------------------------------------------------------------------
#     results


def _encode(value: Any) -> bytes:
    """Encodes as 8 bytes with the length of the JSON, the JSON, and safetensors with the tensors
    that it refers to."""
    tensors: dict[str, torch.Tensor] = {}

    def plain(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors[str(len(tensors))] = item.detach().cpu().contiguous().clone()
            return {"$tensor": str(len(tensors) - 1)}
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [plain(inner) for inner in item]
        return item

    document = json.dumps(plain(value)).encode()
    return len(document).to_bytes(8, "little") + document + tensors_to_bytes(tensors)


def _decode(raw: bytes) -> Any:
    size = int.from_bytes(raw[:8], "little")
    tensors = tensors_from_bytes(raw[8 + size :])

    def full(item: Any) -> Any:
        if isinstance(item, dict):
            if "$tensor" in item:
                return tensors[item["$tensor"]]
            return {key: full(inner) for key, inner in item.items()}
        return [full(inner) for inner in item] if isinstance(item, list) else item

    return full(json.loads(raw[8 : 8 + size]))
