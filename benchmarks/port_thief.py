"""Starts of rank 0's store side by side with processes that take free ports all the time: how many
of them fail.

A start is what an agent and two ranks do: the port is chosen, a while passes (processes start,
programs import), rank 0 opens torch's store there, rank 1 meets it. The ranks are real processes,
forked with torch in memory. Three ways:

chosen   the port was free when somebody looked, and rank 0 opens it by its number
kept     the agent keeps it bound, and rank 0 opens it by its number: programs of users
handed   the agent listens, and rank 0 inherits the socket: the bundled trainer

All of it runs in a network namespace of its own (root, or a kernel that lets users have one), or it
would rob other programs of this machine. Two thieves hold up to 4,000 ports each and change them as
fast as they can: one asks the kernel for any free port, one draws numbers. Once more with the
second setting SO_REUSEADDR, as a server does that means the very number.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import platform
import random
import resource
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from orchestrator.run.store_socket import StoreSocket

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "127.0.0.1"
HELD = 4000
WAIT = timedelta(seconds=60)
WAYS = ("chosen", "kept", "handed")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=2000, help="of each way")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--between-s", type=float, default=0.1, help="from the choice of the port to its use"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "port_thief.json"
    )
    args = parser.parse_args()
    own_network()
    found: dict[str, object] = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()}
    }
    found |= {"starts": args.starts, "at_once": args.at_once, "between_s": args.between_s}
    for reuse in (False, True):
        with thieves(reuse):
            failed = {
                way: trial(way, args.starts, args.at_once, args.between_s) for way in args.ways
            }
        name = "thieves that name a port set SO_REUSEADDR" if reuse else "thieves"
        found[name] = {"failed": failed}
        print(name, failed, flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def own_network() -> None:
    """Moves this process into a new network namespace, whose loopback is up. OSError where that is
    not allowed."""
    users = 0 if os.geteuid() == 0 else 0x10000000  # CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x40000000 | users):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "no network namespace of our own")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP


def trial(way: str, starts: int, at_once: int, between_s: float) -> int:
    """Of so many starts, so many at once, how many failed."""
    running: set[int] = set()
    failed = begun = 0
    while begun < starts or running:
        if begun < starts and len(running) < at_once:
            running.add(_forked(_start, way, between_s))
            begun += 1
            continue
        pid, status = os.wait()
        if pid in running:
            running.remove(pid)
            failed += status != 0
    return failed


@contextlib.contextmanager
def thieves(reuse: bool) -> Iterator[None]:
    pids = [_forked(_steal, False, False), _forked(_steal, True, reuse)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _start(way: str, between_s: float) -> bool:
    """The agent's part. Whether both ranks have met."""
    with contextlib.ExitStack() as stack:
        if way == "chosen":
            with socket.socket() as probe:
                probe.bind((ADDRESS, 0))
                port = probe.getsockname()[1]
                fd = None
        else:
            store = stack.enter_context(StoreSocket(ADDRESS, listens=way == "handed"))
            port = store.port
            fd = store.fileno() if way == "handed" else None
        ranks = [_forked(_rank, rank, port, fd, between_s) for rank in range(2)]
        if not _met(ranks[0]):  # else rank 1 would wait for it
            os.kill(ranks[1], signal.SIGKILL)
        return _met(ranks[1])


def _met(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


def _rank(rank: int, port: int, fd: int | None, between_s: float) -> bool:
    time.sleep(between_s)
    mine = {"master_listen_fd": fd} if fd is not None and rank == 0 else {}
    store = dist.TCPStore(ADDRESS, port, 2, rank == 0, WAIT, wait_for_workers=False, **mine)
    store.set(f"from {rank}", "here")
    store.wait([f"from {1 - rank}"])
    if rank == 0:
        store.wait(["met"])  # the store is here: the other has to leave first
    else:
        store.set("met", "")
    return True


def _steal(by_number: bool, reuse: bool) -> bool:
    """Never ends by itself."""
    held: deque[socket.socket] = deque()
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (HELD + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    while True:
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        try:
            taken.bind(("", random.randrange(1024, 65536) if by_number else 0))
            taken.listen()
        except OSError:
            taken.close()
        else:
            held.append(taken)
        if len(held) > HELD:
            held.popleft().close()
        time.sleep(0.0002)  # the starts need the processor as well


def _forked(does, *arguments: object) -> int:
    """The pid of a new process that ends with 0 where `does(*arguments)` is true, and with its
    parent."""
    parent = os.getpid()
    pid = os.fork()
    return pid or _ends(parent, does, *arguments)


def _ends(parent: int, does, *arguments: object) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        code = int(os.getppid() != parent or not does(*arguments))
    except Exception as error:
        if "EADDRINUSE" not in str(error):
            print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
