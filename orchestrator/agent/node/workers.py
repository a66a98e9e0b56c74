"""The workers of one node, as the agent sees them.

The worker supervisor starts, signals and reaps them.
"""

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
_STOPPED_LOOKS = 4  # looks after which a stopped worker supervisor is continued


class Workers:
    """The workers of at most one epoch at a time. Callbacks run in the event loop.

    `on_exit(rank, code, after_stop)`: one worker has ended. A negative code is the signal that
    killed it; `after_stop`: it had been asked to stop. `on_empty()`: all workers have ended, and no
    process that they started is left. `on_line(rank, line)`: one unparsed report. `on_started()`:
    all workers that were ordered have started. `on_warm()`: from now on workers start as fast as
    they ever will.
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
        """Creates the workers' control without starting any process.

        Commands that begin with `program` are forked from a preloaded process (fork_server.py).
        `environment`: variables common to all workers that are known before the first one starts.
        """
        self._environment = dict(environment)
        self._program = program
        self._on_exit = on_exit
        self._on_empty = on_empty
        self._on_line = on_line
        self._on_warm = on_warm
        self._on_started = on_started
        self._starting = False
        self._stops = StoppedProcessGuard(_STOPPED_LOOKS)
        self.warm = not program  # their imports are done, or unknown
        self._supervisor: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        # rank -> pid, 0 until the worker supervisor has reported it
        self._alive: dict[int, int] = {}
        self._pipes: dict[int, ReportPipe] = {}
        self._stop_requested = False
        self._kill_timer: asyncio.TimerHandle | None = None

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._alive)

    def open(self) -> None:
        """Starts the worker supervisor, through which workers inherit this environment."""
        become_subreaper()
        agent_end, supervisor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with supervisor_end:
            argv = [
                *start.command("orchestrator.agent.node.worker_supervisor"),
                str(supervisor_end.fileno()),
                *self._program,
            ]
            self.warm = not self._program
            self._supervisor = subprocess.Popen(
                argv,
                pass_fds=[supervisor_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | self._environment,
            )
        self._socket = agent_end
        asyncio.get_running_loop().add_reader(agent_end.fileno(), self._on_supervisor_packets)

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
        """Starts one worker, whose standard output and error are appended to `log`.

        `store` is a descriptor that it gets as number STORE_FD. It is bound to `cores`, if any.
        """
        if self._socket is None:
            self.open()
        # The write end does not block: a worker that writes faster than the agent reads never
        # waits.
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError, AttributeError):  # a larger pipe is optional
            import fcntl

            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        pipe = ReportPipe(read_end, lambda line: self._on_line(rank, line))
        pipe_stat = os.fstat(write_end)
        # A worker's children inherit its variables but not the pipe: this variable identifies it.
        pipe_variable = {"ORCH_REPORT_PIPE": f"{pipe_stat.st_dev}:{pipe_stat.st_ino}"}
        order = {
            "do": "start",
            "rank": rank,
            "argv": list(argv),
            "environment": {**environment, **pipe_variable},
            "cwd": cwd,
            "log": str(log),
            "banner": banner,
            "cores": sorted(cores),
        }
        try:
            self._send_order(order, [write_end] if store is None else [write_end, store])
        except ValueError:
            pipe.close()
            raise
        finally:
            os.close(write_end)
        self._alive[rank] = 0
        self._pipes[rank] = pipe
        self._starting = True

    def watch(self) -> str:
        """Continues a worker supervisor that was stopped by a signal, or kills it if that recurs.

        A stopped one would hide dead workers; workers die with one that is killed. To be called
        every half second. Returns what was done in words, or "".
        """
        if self._supervisor is None or self._socket is None:
            return ""
        outcome = self._stops.look(self._supervisor.pid)
        return f"the worker supervisor was stopped by a signal: {outcome}" if outcome else ""

    def signal(self, signum: int) -> None:
        """Sends a signal to every worker, but not to the processes that it started."""
        self._send_order({"do": "signal", "signal": int(signum)})

    def stop(self, signum: int, grace_s: float) -> None:
        """Asks all workers to end, and kills those that are left after `grace_s`.

        A second call can shorten the time but not lengthen it.
        """
        if not self._alive:
            return
        self._stop_requested = True
        self.signal(signum)
        self.signal(signal.SIGCONT)  # a stopped process would not handle it
        loop = asyncio.get_running_loop()
        kill_at = loop.time() + grace_s
        if self._kill_timer is None or self._kill_timer.when() > kill_at:
            self._cancel_timer()
            self._kill_timer = loop.call_at(kill_at, self.kill)

    def kill(self) -> None:
        """Kills all workers and all processes below them."""
        if self._alive:
            self._stop_requested = True
            self._send_order({"do": "kill"})

    def close(self) -> None:
        """Kills everything and ends the worker supervisor; blocks for some milliseconds."""
        self._cancel_timer()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()  # the worker supervisor then kills its processes and exits
            self._socket = None
        if self._supervisor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(15)
        kill_descendants(reap=False)  # finds processes only if the worker supervisor was killed
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()

    def _send_order(self, order: dict, descriptors: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        packet = json.dumps(order).encode()
        if len(packet) > LARGEST_PACKET:
            raise ValueError(
                f"the command and environment of a worker take {len(packet)} bytes, over"
                f" {LARGEST_PACKET}"
            )
        with contextlib.suppress(OSError):  # it is gone: _on_supervisor_packets notices
            socket.send_fds(self._socket, [packet], list(descriptors))

    def _on_supervisor_packets(self) -> None:
        assert self._socket is not None
        for answer in waiting_packets(self._socket):
            if answer is None:
                self._supervisor_lost()
                return
            if "started" in answer:
                self._alive[answer["started"]] = answer["pid"]
            elif "exit" in answer:
                self._on_worker_end(answer["exit"], answer["code"])
            elif "empty" in answer:
                self._on_all_ended()
            elif "warm" in answer and not self.warm:
                self.warm = True
                self._on_warm()
            if self._starting and all(self._alive.values()):
                self._starting = False
                self._on_started()

    def _on_worker_end(self, rank: int, code: int) -> None:
        if self._alive.pop(rank, None) is None:
            return
        pipe = self._pipes.pop(rank, None)
        if pipe:
            pipe.read(_PIPE_BYTES)  # its last reports tell why it failed
            pipe.close()
        self._on_exit(rank, code, self._stop_requested)

    def _on_all_ended(self) -> None:
        if self._alive:
            return
        self._cancel_timer()
        self._stop_requested = False
        self._on_empty()

    def _supervisor_lost(self) -> None:
        """Handles the death of the worker supervisor.

        The kernel has killed the workers; the processes that they started are left to this one.
        """
        assert self._socket is not None and self._supervisor is not None
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._supervisor.wait()
        kill_descendants()
        ranks = list(self._alive)
        for rank in ranks:
            self._on_worker_end(rank, -signal.SIGKILL)
        if ranks:
            self._on_all_ended()

    def _cancel_timer(self) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None
