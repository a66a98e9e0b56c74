"""The worker supervisor: a small process between an agent and its workers.

It starts, signals and reaps them. Workers are its children, and it is a subreaper, so all processes
that a worker starts stay below it, also after fork and `setsid`. When the agent ends in any way,
the socket between them closes; the supervisor then kills all processes below it and exits. If the
supervisor itself is killed, the kernel kills the workers (PR_SET_PDEATHSIG), and their descendants
fall to the agent, which is a subreaper as well.

It is single-threaded on purpose (only then is code between fork and exec safe) and imports only the
standard library. Workers of a program that can be preloaded come from its fork server
(fork_server.py), all others from fork and exec. Requests and answers are JSON, one per packet, over
a Unix socketpair of type SEQPACKET, which keeps message borders, shows an end of file, and carries
descriptors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.plan.exits import Exit, is_of_the_machine
from orchestrator.run.processes import (
    StoppedProcessGuard,
    become_subreaper,
    descendants,
    kill_descendants,
    reap_children,
)

from .fork_server import LARGEST_PACKET, SIGNALS, set_up_worker, waiting_packets

_LOOK_S = 0.5
_STOPPED_LOOKS = 4  # looks after which a stopped fork server that owes an answer is continued


@dataclass
class PendingFork:
    """A worker that the fork server has been asked for.

    It holds descriptors of the worker's log, reports and go-ahead pipe, and for rank 0 of the
    store's socket.
    """

    order: dict
    log: int
    report: int
    go_ahead: int
    store: int | None = None

    def close(self) -> None:
        for descriptor in (self.log, self.report, self.go_ahead, self.store):
            if descriptor is not None:
                os.close(descriptor)


class WorkerSupervisor:
    """Serves one agent. `program` is the command that can be preloaded, if there is one."""

    def __init__(self, agent: socket.socket, program: Sequence[str] = ()):
        self._agent = agent
        self._program = list(program)  # interpreter, flags, "-m", package
        self._fork_server: socket.socket | None = None
        self._fork_server_pid = 0
        #: Pending forks by ticket: a rank may be ordered again before the fork server has answered.
        self._pending: dict[int, PendingFork] = {}
        self._tickets = itertools.count()
        self._ranks: dict[int, int] = {}  # pid -> rank of living workers
        self._stops = StoppedProcessGuard(_STOPPED_LOOKS)
        self._sweep_needed = False  # processes that ended workers left behind must be killed

    def run(self) -> None:
        """Serves the agent until it is gone, then kills all processes below this one."""
        become_subreaper()
        # The agent decides about a Ctrl-C or a scheduler's signal to the whole process group.
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        wake, tick = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(tick, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._program:
            self._start_fork_server()
        try:
            while self._serve(wake):
                pass
        finally:
            kill_descendants()

    def _serve(self, wake: int) -> bool:
        sources: list[socket.socket | int] = [self._agent, wake]
        if self._fork_server:
            sources.append(self._fork_server)
        readable, _, _ = select.select(
            sources,
            [],
            [],
            _LOOK_S if self._pending else None,
        )
        if self._pending:
            # A fork server that is killed for this is lost: its workers start by fork and exec.
            self._stops.look(self._fork_server_pid)
        if self._fork_server and self._fork_server in readable:
            # Before reaping: a worker may just have been forked.
            self._on_fork_server(self._fork_server)
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)
            self._reap()
        if self._agent not in readable:
            return True
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._agent, LARGEST_PACKET, 2)
        except ConnectionResetError:  # the agent ended without reading all answers
            return False
        if not packet:
            return False
        try:
            self._handle_order(json.loads(packet), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _handle_order(self, order: dict, descriptors: list[int]) -> None:
        verb = order["do"]
        if verb == "start":
            self._start(order, *descriptors)
        elif verb == "signal":
            for pid in list(self._ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, order["signal"])
            if order["signal"] != signal.SIGCONT:
                self._cancel_pending(order["signal"])
        elif verb == "kill":
            for pid in descendants(os.getpid()):
                if pid != self._fork_server_pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._cancel_pending(signal.SIGKILL)

    def _send(self, **answer: object) -> None:
        with contextlib.suppress(OSError):  # the agent is gone: the next recv notices
            self._agent.send(json.dumps(answer).encode())

    def _start(self, order: dict, report: int, store: int | None = None) -> None:
        rank = order["rank"]
        argv = order["argv"]
        cwd = order["cwd"]
        environment = {**os.environ, **order["environment"]}
        problem = None
        if not os.path.isdir(cwd):
            problem = f"folder {cwd} does not exist"
        else:
            os.chdir(cwd)  # the path of a program may be relative to it
            if shutil.which(argv[0], path=environment.get("PATH", os.defpath)) is None:
                problem = f"program {argv[0]!r} is not on PATH or not executable"
        log = _open_log(order["log"])
        try:
            lines = [order.get("banner")]
            if problem:
                lines.append(f"orch: {problem}\n")
            with contextlib.suppress(OSError):  # a full disk must not stop the worker
                os.write(log, "".join(filter(None, lines)).encode(errors="replace"))
            if problem:
                self._send(exit=rank, code=int(Exit.USAGE))
                self._sweep_needed = True
                self._reap()  # answers "empty" if no other process is left
                return
            self._sweep_needed = True
            if self._fork_server and argv[: len(self._program)] == self._program:
                self._request_fork(self._fork_server, order, log, report, store)
            else:
                self._exec(order, environment, log, report, store)
        finally:
            os.close(log)

    def _exec(
        self,
        order: dict,
        environment: dict[str, str],
        log: int,
        report: int,
        store: int | None,
    ) -> None:
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(
                supervisor,
                order,
                environment,
                log=log,
                report=report,
                store=store,
            )
        self._worker_started(order["rank"], pid)

    def _worker_started(self, rank: int, pid: int) -> None:
        self._ranks[pid] = rank
        self._send(started=rank, pid=pid)

    # ---------------------------------------------------------------------------------- fork server

    def _start_fork_server(self) -> None:
        self._fork_server, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        *interpreter, package = self._program
        argv = [
            *interpreter,
            "orchestrator.agent.node.fork_server",
            str(server_end.fileno()),
            package,
        ]
        with server_end:
            self._fork_server_pid = subprocess.Popen(
                argv,
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            ).pid

    def _request_fork(
        self,
        server: socket.socket,
        order: dict,
        log: int,
        report: int,
        store: int | None,
    ) -> None:
        go_ahead_reader, go_ahead = os.pipe2(os.O_CLOEXEC)
        pending = PendingFork(
            order,
            os.dup(log),
            os.dup(report),
            go_ahead,
            None if store is None else os.dup(store),
        )
        ticket = next(self._tickets)
        self._pending[ticket] = pending
        fork_order = {
            "ticket": ticket,
            "name": f"orch-rank-{order['rank']}",
            "cwd": order["cwd"],
            "arguments": order["argv"][len(self._program) :],
            "environment": order["environment"],
            "cores": order["cores"],
        }
        try:
            descriptors = [log, report, go_ahead_reader]
            if store is not None:
                descriptors.append(store)
            socket.send_fds(
                server,
                [json.dumps(fork_order).encode()],
                descriptors,
            )
        except OSError:
            self._fork_server_lost(server)
        finally:
            os.close(go_ahead_reader)

    def _on_fork_server(self, server: socket.socket) -> None:
        for answer in waiting_packets(server):
            if answer is None:
                self._fork_server_lost(server)
                return
            if "warm" in answer:
                self._send(warm=True)
                continue
            pending = self._pending.pop(answer["ticket"], None)
            if pending is not None:  # a cancelled worker finds its go-ahead pipe closed
                self._worker_started(pending.order["rank"], answer["pid"])
                with contextlib.suppress(BrokenPipeError):  # it is dead: reaping reports it
                    os.write(pending.go_ahead, b"!")
                pending.close()

    def _fork_server_lost(self, server: socket.socket) -> None:
        """Handles the loss of the fork server: from now on workers start by fork and exec.

        It could not import the program, or was killed.
        """
        server.close()
        self._fork_server = None
        self._fork_server_pid = 0
        self._send(warm=True)  # no import will make later starts faster
        waiting = self._pending
        self._pending = {}
        for pending in waiting.values():
            order = pending.order
            os.chdir(order["cwd"])
            environment = {**os.environ, **order["environment"]}
            self._exec(
                order,
                environment,
                pending.log,
                pending.report,
                pending.store,
            )
            pending.close()

    def _cancel_pending(self, signum: int) -> None:
        """Cancels workers that are not forked yet; they count as ended by that signal."""
        cancelled = self._pending
        self._pending = {}
        for pending in cancelled.values():
            pending.close()
            self._send(exit=pending.order["rank"], code=-signum)
        if cancelled:
            self._reap()

    def _reap(self) -> None:
        for pid, code in reap_children():
            rank = self._ranks.pop(pid, None)
            if rank is not None:  # other children are orphans of workers
                self._send(exit=rank, code=code)
        if self._sweep_needed and not self._ranks and not self._pending:
            survivors = kill_descendants(spare=self._fork_server_pid)
            self._sweep_needed = False
            self._send(empty=True, survivors=survivors)


def _open_log(path: str) -> int:
    """Opens a worker's log, or /dev/null if it cannot be opened."""
    try:
        return os.open(
            path,
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _become_worker(
    supervisor: int,
    order: dict,
    environment: dict[str, str],
    log: int,
    report: int,
    store: int | None,
) -> None:
    """Runs a worker's program in the forked child. Never returns."""
    argv = order["argv"]
    code = Exit.USAGE
    try:
        set_up_worker(supervisor, log, report, store, order["cores"])
        os.execvpe(argv[0], argv, environment)
    except BaseException as error:
        if is_of_the_machine(error):
            code = Exit.USER  # the next start may succeed
        os.write(2, f"orch: cannot start {argv[0]!r}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        WorkerSupervisor(agent, sys.argv[2:]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
