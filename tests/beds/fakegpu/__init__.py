"""GPUs that compute nothing: torch's own CUDA, cuBLAS and NCCL code runs on a machine without a
GPU, every call noted.

The library in this folder stands in for libcudart, libcuda, cuBLAS and NCCL (`fakegpu.h`). What
runs above it is real: the host side of every operator with its checks of shapes and dtypes, the
caching allocator, streams and events, and the process groups, whose ranks must agree on every split
and every collective. What is below does nothing, so numbers on the device are zeros or what the
host has put there.

A process must be started with the library: `call` runs a function in one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
_TRAINER = f"{ROOT / 'trainer'}{os.sep}"
KINDS = {
    "K": "kernel",
    "C": "copy",
    "S": "host waits",
    "R": "event recorded",
    "W": "stream waits",
    "N": "NCCL",
    "I": "communicator",
    "T": "stream",
    "E": "event",
    "M": "allocation",
    "F": "free",
    "H": "host function",
}


class Note(NamedTuple):
    """One call. `stream` and `event` are handles; `bytes` of copies, allocations and messages,
    m·n·k of products."""

    kind: str  # see KINDS
    name: str
    stream: int
    event: int
    bytes: int
    a: int
    b: int


class _Note(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char),
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_uint64) for name in Note._fields[2:]),
    ]


@functools.cache
def missing() -> str:
    """Why there can be no fake GPUs here; "" if there can."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not _headers():
        return "the headers of CUDA are not installed"
    return "" if _compiler() else "there is no C compiler"


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def _headers() -> Path | None:
    import torch

    packages = Path(torch.__file__).parents[1]
    return next(
        (header.parent for header in sorted(packages.glob("nvidia/*/include/cuda_runtime_api.h"))),
        None,
    )


@functools.cache
def library() -> Path:
    """The compiled library; compiled anew when its source changes."""
    sources = sorted([*HERE.glob("*.c"), *HERE.glob("*.h"), *HERE.glob("crt/*.h")])
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in sources) + bytes(_headers() or "")
    )
    folder = Path(tempfile.gettempdir()) / f"fakegpu-{os.getuid()}-{digest.hexdigest()[:16]}"
    target = folder / "libfakegpu.so"
    if not target.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        partial = folder / f"making-{os.getpid()}"
        argv = [_compiler(), "-O1", "-w", "-fPIC", "-shared", f"-I{HERE}", f"-I{_headers()}"]
        subprocess.run([*argv, *HERE.glob("*.c"), "-o", partial, "-lpthread"], check=True)
        partial.rename(target)
        for name in (
            "libcuda.so.1",
            "libnvidia-ml.so.1",
        ):  # torch opens the driver and NVML by these names
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target.name)
    return target


def environment(devices: int = 8) -> dict[str, str]:
    """Variables with which a process sees `devices` fake GPUs. There is no cuDNN, so attention is
    torch's own."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    return os.environ | {
        "LD_PRELOAD": str(library()),
        "LD_LIBRARY_PATH": f"{library().parent}:{path}".rstrip(":"),
        "FAKEGPU_DEVICES": str(devices),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }


def call(function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> Any:
    """function(*args) in a process with fake GPUs. A function of a module; the arguments, which
    may hold parts of a plan, arrive as JSON values; the result is one.

    Raises AssertionError with what the process said if it fails.
    """
    argv = [
        sys.executable,
        "-m",
        "tests.beds.fakegpu",
        function.__module__,
        function.__qualname__,
        msgspec.json.encode(args).decode(),
    ]
    with tempfile.TemporaryFile() as stderr_file:
        run = subprocess.run(
            argv,
            env=environment(),
            cwd=ROOT,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            text=True,
        )
        stderr_file.seek(0)
        stderr = stderr_file.read().decode(errors="replace")
    assert run.returncode == 0, (
        f"{function.__qualname__} ended with {run.returncode}: {stderr[:6000]}"
    )
    return json.loads(run.stdout.splitlines()[-1])


class Record:
    """What has been called, and where the host waited for the device: (call, places in our
    code)."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.waits: list[tuple[str, str]] = []

    def names(self, kinds: str) -> list[str]:
        return [note.name for note in self.notes if note.kind in kinds]


@contextmanager
def recording() -> Iterator[Record]:
    """Records every call of this process into the library inside the block; complete when the block
    ends."""
    fake = ctypes.CDLL(None)
    record = Record()
    fake.fakegpu_notes.restype = ctypes.POINTER(_Note)
    fake.fakegpu_count.restype = ctypes.c_long

    def waited(name: bytes) -> None:
        frames = [
            frame for frame in traceback.extract_stack() if frame.filename.startswith(_TRAINER)
        ]
        names = [f"{frame.filename.removeprefix(_TRAINER)}:{frame.name}" for frame in frames[-2:]]
        record.waits.append((name.decode(), " > ".join(names)))

    sync_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(waited)
    fake.fakegpu_on_sync(sync_callback)
    fake.fakegpu_record(1)
    try:
        yield record
    finally:
        fake.fakegpu_record(0)
        fake.fakegpu_on_sync(None)
        notes = fake.fakegpu_notes()
        for at in range(fake.fakegpu_count()):
            kind, name, *numbers = (getattr(notes[at], field) for field in Note._fields)
            record.notes.append(Note(kind.decode(), name.decode(), *numbers))


def noted() -> int:
    """How many calls have been recorded so far, inside `recording`."""
    count = ctypes.CDLL(None).fakegpu_count
    count.restype = ctypes.c_long
    return count()


def events_pending(state: bool) -> None:
    """Whether events, when they are asked, answer that they have not happened yet."""
    ctypes.CDLL(None).fakegpu_pending(int(state))


def run_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """[function(rank, *args) for each rank], each a process with the GPU of its number, in a group
    of gloo and NCCL.

    Call it in a process with fake GPUs that has not used them yet.
    """
    from trainer.verify.ranks import join_gpus
    from trainer.verify.ranks import run_ranks as forked

    return forked(function, world, *args, join=join_gpus)
