"""The workers of one node, as the agent sees them. The worker supervisor starts, signals and reaps
them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType

from orchestrator import start
from orchestrator.run.processes import StoppedProcessGuard, become_subreaper, kill_descendants

from .fork_server import LARGEST_PACKET, waiting_packets
from .worker_reports import ReportPipe

_PIPE_BYTES = 1 << 20
_STOPPED_LOOKS = 4  # of a worker supervisor, until it is continued


class Workers:
    """Workers of at most one epoch at a time. Callbacks run in the event loop.

    `on_exit(rank, code, asked)`: one worker has ended (negative code: by that signal; asked: it had
    been told to stop). `on_empty()`: all have, and nothing that they started is left.
    `on_line(rank, line)`: one report, unread. `on_started()`: all that were ordered run, or have
    ended. `on_warm()`: from now on workers start as fast as they ever will.
    """

    def __init__(
        self,
        on_exit: Callable[[int, int, bool], None],
        on_empty: Callable[[], None],
        on_line: Callable[[int, bytes], None],
        program: Sequence[str] = (),
        on_warm: Callable[[], None] = lambda: None,
        environment: Mapping[str, str] = MappingProxyType({}),
        on_started: Callable[[], None] = lambda: None,
    ):
        """`environment`: what all workers will be told alike, as far as it is known before there
        are any."""
        self._environment = dict(environment)
        self._program = (
            program  # a command that begins so is forked from a preloaded process (fork server.py)
        )
        self._on_exit = on_exit
        self._on_empty = on_empty
        self._on_line = on_line
        self._on_warm = on_warm
        self._on_started = on_started
        self._starting = False
        self._stops = StoppedProcessGuard(_STOPPED_LOOKS)
        self.warm = not program  # what they import has been imported, or is not known
        self._supervisor: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._alive: dict[int, int] = {}  # rank -> pid, 0 until the worker supervisor has said it
        self._pipes: dict[int, ReportPipe] = {}
        self._asked = False
        self._kill_timer: asyncio.TimerHandle | None = None

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._alive)

    @property
    def supervisor_pid(self) -> int | None:
        return self._supervisor.pid if self._supervisor else None

    def open(self) -> None:
        """Start the worker supervisor. Its environment, this process's own, is what the workers
        inherit."""
        become_subreaper()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [
                *start.command("orchestrator.agent.node.worker_supervisor"),
                str(theirs.fileno()),
                *self._program,
            ]
            self.warm = not self._program
            self._supervisor = subprocess.Popen(
                argv,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | self._environment,
            )
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._heard)

    def start(
        self,
        rank: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        cwd: str,
        log: Path,
        banner: str = "",
        store: int | None = None,
        cores: Set[int] = frozenset(),
    ) -> None:
        """Start one worker. Its standard output and error are appended to `log`. `store`: a
        descriptor that it gets as number STORE_FD. `cores`: it is bound to them, if there are
        any."""
        if self._socket is None:
            self.open()
        read, write = os.pipe2(
            os.O_NONBLOCK | os.O_CLOEXEC
        )  # a worker that writes faster than we read never waits
        with contextlib.suppress(OSError, AttributeError):  # a larger pipe is a courtesy
            import fcntl

            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        pipe = ReportPipe(read, lambda line: self._on_line(rank, line))
        made = os.fstat(write)
        known = {
            "ORCH_REPORT_PIPE": f"{made.st_dev}:{made.st_ino}"
        }  # children have the variables, not the pipe
        order = {
            "do": "start",
            "rank": rank,
            "argv": list(argv),
            "environment": {**environment, **known},
            "cwd": cwd,
            "log": str(log),
            "banner": banner,
            "cores": sorted(cores),
        }
        try:
            self._order(order, [write] if store is None else [write, store])
        except ValueError:
            pipe.close()
            raise
        finally:
            os.close(write)
        self._alive[rank] = 0
        self._pipes[rank] = pipe
        self._starting = True

    def watch(self) -> str:
        """To be called every half second. A worker supervisor that somebody stopped would hide dead
        workers: what was done about it, in words, "" for nothing. Workers die with one that has to
        be killed."""
        done = self._stops.look(self._supervisor.pid) if self._supervisor and self._socket else ""
        return f"the worker supervisor was stopped by a signal: {done}" if done else ""

    def signal(self, signum: int) -> None:
        """Pass a signal on to every worker, to the worker itself and not to what it started."""
        self._order({"do": "signal", "signal": int(signum)})

    def stop(self, signum: int, grace_s: float) -> None:
        """Ask all to end; kill what is left after `grace_s`. A second call shortens the time, never
        lengthens it."""
        if not self._alive:
            return
        self._asked = True
        self.signal(signum)
        self.signal(signal.SIGCONT)  # a stopped process would not hear it
        loop = asyncio.get_running_loop()
        due = loop.time() + grace_s
        if self._kill_timer is None or self._kill_timer.when() > due:
            self._cancel_timer()
            self._kill_timer = loop.call_at(due, self.kill)

    def kill(self) -> None:
        """SIGKILL to all workers and everything below them."""
        if self._alive:
            self._asked = True
            self._order({"do": "kill"})

    def close(self) -> None:
        """Kill everything and let the worker supervisor go. Blocks for the milliseconds that
        takes."""
        self._cancel_timer()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()  # the worker supervisor's sign to clear up and leave
            self._socket = None
        if self._supervisor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(15)
        kill_descendants(reap=False)  # nothing, unless the worker supervisor was killed
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()

    def _order(self, order: dict, descriptors: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        packet = json.dumps(order).encode()
        if len(packet) > LARGEST_PACKET:
            raise ValueError(
                f"the command and environment of a worker take {len(packet)} bytes, over"
                f" {LARGEST_PACKET}"
            )
        with contextlib.suppress(OSError):  # the worker supervisor is gone: _heard tells
            socket.send_fds(self._socket, [packet], list(descriptors))

    def _heard(self) -> None:
        assert self._socket is not None
        for answer in waiting_packets(self._socket):
            if answer is None:
                self._supervisor_lost()
                return
            if "started" in answer:
                self._alive[answer["started"]] = answer["pid"]
            elif "exit" in answer:
                self._ended(answer["exit"], answer["code"])
            elif "empty" in answer:
                self._all_ended()
            elif "warm" in answer and not self.warm:
                self.warm = True
                self._on_warm()
            if self._starting and all(self._alive.values()):
                self._starting = False
                self._on_started()

    def _ended(self, rank: int, code: int) -> None:
        if self._alive.pop(rank, None) is None:
            return
        pipe = self._pipes.pop(rank, None)
        if pipe:
            pipe.read(_PIPE_BYTES)  # all that it said last: why it failed is at the end
            pipe.close()
        self._on_exit(rank, code, self._asked)

    def _all_ended(self) -> None:
        if self._alive:
            return
        self._cancel_timer()
        self._asked = False
        self._on_empty()

    def _supervisor_lost(self) -> None:
        """Somebody killed the worker supervisor: the kernel has killed the workers, the rest is
        ours now."""
        assert self._socket is not None and self._supervisor is not None
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._supervisor.wait()
        kill_descendants()
        had = list(self._alive)
        for rank in had:
            self._ended(rank, -signal.SIGKILL)
        if had:
            self._all_ended()

    def _cancel_timer(self) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None
