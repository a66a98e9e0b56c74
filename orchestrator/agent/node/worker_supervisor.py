"""The warden: a small process between an agent and its workers. It starts them, waits for them, and outlives the agent.

Workers are its children, and it is a subreaper, so everything that a worker starts stays below it, forks and `setsid`
included. When the agent goes away in whatever manner, the socket between them closes, and the warden kills all that is
below it before it leaves too. If the warden itself is killed, the kernel kills the workers (PR_SET_PDEATHSIG), and what
they had started falls to the agent, which is a subreaper as well.

It is single-threaded on purpose (code between fork and exec is only safe there) and imports only the standard library.
Workers of a program that can be preloaded come from its nursery (nursery.py), everything else by fork and exec.
Requests and answers are JSON, one a packet, over a Unix socketpair of type SEQPACKET: message borders and an end of
file come with it, and descriptors can travel along.
"""

from __future__ import annotations

import contextlib
import errno
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

from orchestrator.plan.exits import Exit
from orchestrator.run.processes import become_subreaper, descendants, kill_descendants, reap_children

from .fork_server import SIGNALS, settle
from .packets import LARGEST_PACKET, waiting_packets


@dataclass
class Unborn:
    """A worker that the nursery was asked for. Descriptors of its log, its reports, and the word that lets it run."""

    order: dict
    log: int
    report: int
    word: int

    def close(self) -> None:
        for descriptor in (self.log, self.report, self.word):
            os.close(descriptor)


class Warden:
    def __init__(self, agent: socket.socket, program: Sequence[str] = ()):
        self._agent = agent
        self._program = list(program)  # interpreter, flags, "-m", package: what can be preloaded
        self._nursery: socket.socket | None = None
        self._nurse = 0  # the nursery's pid
        self._unborn: dict[int, Unborn] = {}  # by ticket: a rank may be asked for again before the nursery has answered
        self._tickets = itertools.count()
        self._ranks: dict[int, int] = {}  # pid -> rank of the workers that live
        self._sweep = False  # workers have lived; what they left behind must go

    def run(self) -> None:
        """Serve the agent until it is gone, then kill everything below."""
        become_subreaper()
        for signum in SIGNALS:  # a Ctrl-C or a scheduler's signal to the whole group is the agent's to judge
            signal.signal(signum, signal.SIG_IGN)
        wake, tick = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(tick, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if self._program:
            self._open_nursery()
        try:
            while self._serve(wake):
                pass
        finally:
            kill_descendants()

    def _serve(self, wake: int) -> bool:
        heard = [self._agent, wake] + ([self._nursery] if self._nursery else [])
        readable, _, _ = select.select(heard, [], [])
        if self._nursery in readable:
            self._hear_nursery()  # before the dead are counted: one may just have been born
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)
            self._reap()
        if self._agent not in readable:
            return True
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._agent, LARGEST_PACKET, 1)
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
            self._start(order, descriptors[0])
        elif what == "signal":
            for pid in list(self._ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, order["signal"])
            if order["signal"] != signal.SIGCONT:
                self._forget_unborn(order["signal"])
        elif what == "kill":
            for pid in descendants(os.getpid()):
                if pid != self._nurse:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._forget_unborn(signal.SIGKILL)

    def _tell(self, **answer: object) -> None:
        with contextlib.suppress(OSError):  # the agent is gone: the next recv says so
            self._agent.send(json.dumps(answer).encode())

    def _start(self, order: dict, report: int) -> None:
        rank, argv, cwd = order["rank"], order["argv"], order["cwd"]
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
                self._reap()  # says "empty" where nothing else lives
                return
            self._sweep = True
            if self._nursery and argv[: len(self._program)] == self._program:
                self._ask_nursery(order, log, report)
            else:
                self._exec(rank, argv, environment, log, report)
        finally:
            os.close(log)

    def _exec(self, rank: int, argv: list[str], environment: dict[str, str], log: int, report: int) -> None:
        warden = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(warden, argv, environment, log, report)
        self._born(rank, pid)

    def _born(self, rank: int, pid: int) -> None:
        self._ranks[pid] = rank
        self._tell(started=rank, pid=pid)

    # ---------------------------------------------------------------------------------- the nursery

    def _open_nursery(self) -> None:
        self._nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        *interpreter, package = self._program
        argv = [*interpreter, "orchestrator.agent.node.fork_server", str(theirs.fileno()), package]
        with theirs:
            self._nurse = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            ).pid

    def _ask_nursery(self, order: dict, log: int, report: int) -> None:
        theirs, word = os.pipe2(os.O_CLOEXEC)
        unborn = Unborn(order, os.dup(log), os.dup(report), word)
        ticket = next(self._tickets)
        self._unborn[ticket] = unborn
        wanted = {"ticket": ticket, "name": f"orch-rank-{order['rank']}", "cwd": order["cwd"]}
        wanted |= {"arguments": order["argv"][len(self._program) :], "environment": order["environment"]}
        try:
            socket.send_fds(self._nursery, [json.dumps(wanted).encode()], [log, report, theirs])
        except OSError:
            self._lose_nursery()
        finally:
            os.close(theirs)

    def _hear_nursery(self) -> None:
        for born in waiting_packets(self._nursery):
            if born is None:
                self._lose_nursery()
                return
            if "warm" in born:
                self._tell(warm=True)
                continue
            unborn = self._unborn.pop(born["ticket"], None)
            if unborn is not None:  # else it was not wanted any more, and finds its word's pipe closed
                self._born(unborn.order["rank"], born["pid"])
                with contextlib.suppress(BrokenPipeError):  # it has died already: the next reaping tells
                    os.write(unborn.word, b"!")
                unborn.close()

    def _lose_nursery(self) -> None:
        """It could not import the program, or somebody killed it: workers start the plain way from now on."""
        self._nursery.close()
        self._nursery, self._nurse = None, 0
        self._tell(warm=True)  # as warm as it will ever be
        waiting, self._unborn = self._unborn, {}
        for unborn in waiting.values():
            order = unborn.order
            os.chdir(order["cwd"])
            self._exec(order["rank"], order["argv"], {**os.environ, **order["environment"]}, unborn.log, unborn.report)
            unborn.close()

    def _forget_unborn(self, signum: int) -> None:
        """Told to end before they began: that is how they ended."""
        gone, self._unborn = self._unborn, {}
        for unborn in gone.values():
            unborn.close()
            self._tell(exit=unborn.order["rank"], code=-signum)
        if gone:
            self._reap()

    def _reap(self) -> None:
        for pid, code in reap_children():
            rank = self._ranks.pop(pid, None)
            if rank is not None:  # the others are orphans that fell to this process
                self._tell(exit=rank, code=code)
        if self._sweep and not self._ranks and not self._unborn:
            left = kill_descendants(spare=self._nurse)
            self._sweep = False
            self._tell(empty=True, survivors=left)


def _open_log(path: str) -> int:
    """A worker's log; where there is no room for one, a worker without a log."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _become_worker(warden: int, argv: list[str], environment: dict[str, str], log: int, report: int) -> None:
    """In the child. Never returns."""
    try:
        settle(warden, log, report)
        os.execvpe(argv[0], argv, environment)
    except BaseException as error:
        os.write(2, f"orch: cannot start {argv[0]!r}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(Exit.USAGE)


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        Warden(agent, sys.argv[2:]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
