"""The worker supervisor: a small process between an agent and its workers. It starts, signals and
reaps them.

Workers are its children, and it is a subreaper, so everything that a worker starts stays below it,
forks and `setsid` included. When the agent goes away in whatever manner, the socket between them
closes; the supervisor then kills all that is below it and exits. If the supervisor itself is
killed, the kernel kills the workers (PR_SET_PDEATHSIG), and what they had started falls to the
agent, which is a subreaper as well.

It is single-threaded on purpose (code between fork and exec is only safe there) and imports only
the standard library. Workers of a program that can be preloaded come from its fork server
(fork_server.py), all others from fork and exec. Requests and answers are JSON, one a packet, over a
Unix socketpair of type SEQPACKET: it keeps message borders, shows an end of file, and carries
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

from .fork_server import LARGEST_PACKET, SIGNALS, settle, waiting_packets

_LOOK_S = 0.5
_STOPPED_LOOKS = 4  # at a fork server that owes an answer


@dataclass
class PendingFork:
    """A worker that the fork server was asked for. Descriptors of its log, its reports, its
    go-ahead pipe, and of the store's socket, which rank 0 gets."""

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
    def __init__(self, agent: socket.socket, program: Sequence[str] = ()):
        self._agent = agent
        self._program = list(program)  # interpreter, flags, "-m", package: what can be preloaded
        self._fork_server: socket.socket | None = None
        self._fork_server_pid = 0  # the fork server's pid
        self._pending: dict[
            int, PendingFork
        ] = {}  # by ticket: a rank may be asked for again before the fork server has answered
        self._tickets = itertools.count()
        self._ranks: dict[int, int] = {}  # pid -> rank of the workers that live
        self._stops = StoppedProcessGuard(_STOPPED_LOOKS)
        self._sweep = False  # workers have lived; what they left behind must go

    def run(self) -> None:
        """Serve the agent until it is gone, then kill everything below."""
        become_subreaper()
        for (
            signum
        ) in SIGNALS:  # a Ctrl-C or a scheduler's signal to the whole group is the agent's to judge
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
        heard: list[socket.socket | int] = [self._agent, wake]
        if self._fork_server:
            heard.append(self._fork_server)
        readable, _, _ = select.select(heard, [], [], _LOOK_S if self._pending else None)
        if self._pending:
            self._stops.look(
                self._fork_server_pid
            )  # one that is killed is gone: its workers start by fork and exec
        if self._fork_server and self._fork_server in readable:
            self._on_fork_server(
                self._fork_server
            )  # before reaping: a worker may just have been forked
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)
            self._reap()
        if self._agent not in readable:
            return True
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._agent, LARGEST_PACKET, 2)
        except ConnectionResetError:  # it went without having read all that we said
            return False
        if not packet:
            return False
        try:
            self._obey(json.loads(packet), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _obey(self, order: dict, descriptors: list[int]) -> None:
        what = order["do"]
        if what == "start":
            self._start(order, *descriptors)
        elif what == "signal":
            for pid in list(self._ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, order["signal"])
            if order["signal"] != signal.SIGCONT:
                self._cancel_pending(order["signal"])
        elif what == "kill":
            for pid in descendants(os.getpid()):
                if pid != self._fork_server_pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._cancel_pending(signal.SIGKILL)

    def _tell(self, **answer: object) -> None:
        with contextlib.suppress(OSError):  # the agent is gone: the next recv says so
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
            os.chdir(cwd)  # a relative program is relative to where it runs
            if shutil.which(argv[0], path=environment.get("PATH", os.defpath)) is None:
                problem = f"program {argv[0]!r} is not on PATH or not executable"
        log = _open_log(order["log"])
        try:
            lines = [order.get("banner"), f"orch: {problem}\n" if problem else ""]
            with contextlib.suppress(OSError):  # a log that is full stops no worker
                os.write(log, "".join(filter(None, lines)).encode(errors="replace"))
            if problem:
                self._tell(exit=rank, code=int(Exit.USAGE))
                self._sweep = True
                self._reap()  # says "empty" when no other process is left
                return
            self._sweep = True
            if self._fork_server and argv[: len(self._program)] == self._program:
                self._request_fork(self._fork_server, order, log, report, store)
            else:
                self._exec(order, environment, log, report, store)
        finally:
            os.close(log)

    def _exec(
        self, order: dict, environment: dict[str, str], log: int, report: int, store: int | None
    ) -> None:
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(supervisor, order, environment, log, report, store)
        self._worker_started(order["rank"], pid)

    def _worker_started(self, rank: int, pid: int) -> None:
        self._ranks[pid] = rank
        self._tell(started=rank, pid=pid)

    # ---------------------------------------------------------------------------------- fork server

    def _start_fork_server(self) -> None:
        self._fork_server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        *interpreter, package = self._program
        argv = [*interpreter, "orchestrator.agent.node.fork_server", str(theirs.fileno()), package]
        with theirs:
            self._fork_server_pid = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            ).pid

    def _request_fork(
        self, server: socket.socket, order: dict, log: int, report: int, store: int | None
    ) -> None:
        theirs, go_ahead = os.pipe2(os.O_CLOEXEC)
        pending = PendingFork(
            order, os.dup(log), os.dup(report), go_ahead, None if store is None else os.dup(store)
        )
        ticket = next(self._tickets)
        self._pending[ticket] = pending
        wanted = {"ticket": ticket, "name": f"orch-rank-{order['rank']}", "cwd": order["cwd"]}
        wanted |= {
            "arguments": order["argv"][len(self._program) :],
            "environment": order["environment"],
        }
        wanted["cores"] = order["cores"]
        try:
            descriptors = [log, report, theirs] if store is None else [log, report, theirs, store]
            socket.send_fds(server, [json.dumps(wanted).encode()], descriptors)
        except OSError:
            self._fork_server_lost(server)
        finally:
            os.close(theirs)

    def _on_fork_server(self, server: socket.socket) -> None:
        for answer in waiting_packets(server):
            if answer is None:
                self._fork_server_lost(server)
                return
            if "warm" in answer:
                self._tell(warm=True)
                continue
            pending = self._pending.pop(answer["ticket"], None)
            if pending is not None:  # else it was cancelled, and finds its go-ahead pipe closed
                self._worker_started(pending.order["rank"], answer["pid"])
                with contextlib.suppress(
                    BrokenPipeError
                ):  # it has died already: the next reaping tells
                    os.write(pending.go_ahead, b"!")
                pending.close()

    def _fork_server_lost(self, server: socket.socket) -> None:
        """It could not import the program, or was killed: from now on workers start by fork and
        exec."""
        server.close()
        self._fork_server = None
        self._fork_server_pid = 0
        self._tell(warm=True)  # as warm as it will ever be
        waiting = self._pending
        self._pending = {}
        for pending in waiting.values():
            order = pending.order
            os.chdir(order["cwd"])
            environment = {**os.environ, **order["environment"]}
            self._exec(order, environment, pending.log, pending.report, pending.store)
            pending.close()

    def _cancel_pending(self, signum: int) -> None:
        """Workers that are told to end before they were forked count as ended by that signal."""
        gone = self._pending
        self._pending = {}
        for pending in gone.values():
            pending.close()
            self._tell(exit=pending.order["rank"], code=-signum)
        if gone:
            self._reap()

    def _reap(self) -> None:
        for pid, code in reap_children():
            rank = self._ranks.pop(pid, None)
            if rank is not None:  # the others are orphans that fell to this process
                self._tell(exit=rank, code=code)
        if self._sweep and not self._ranks and not self._pending:
            left = kill_descendants(spare=self._fork_server_pid)
            self._sweep = False
            self._tell(empty=True, survivors=left)


def _open_log(path: str) -> int:
    """A worker's log; where none can be opened, a worker without a log."""
    try:
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
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
    """In the child. Never returns."""
    argv = order["argv"]
    code = Exit.USAGE
    try:
        settle(supervisor, log, report, store, order["cores"])
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
