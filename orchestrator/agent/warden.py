"""The warden: a small process between an agent and its workers. It starts them, waits for them, and outlives the agent.

Workers are its children, and it is a subreaper, so everything that a worker starts stays below it, forks and `setsid`
included. When the agent goes away in whatever manner, the socket between them closes, and the warden kills all that is
below it before it leaves too. If the warden itself is killed, the kernel kills the workers (PR_SET_PDEATHSIG), and what
they had started falls to the agent, which is a subreaper as well.

It is single-threaded on purpose (code between fork and exec is only safe there) and imports only the standard library.
Requests and answers are JSON, one a packet, over a Unix socketpair of type SEQPACKET: message borders and an end of
file come with it, and descriptors can travel along.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys

from orchestrator.launch.processes import (
    become_subreaper,
    descendants,
    die_with_parent,
    kill_descendants,
    reap_children,
)
from orchestrator.plan.exits import Exit

REPORT_FD = 3  # where a worker finds its report pipe
LARGEST_PACKET = 1 << 17  # bytes
_HANDLED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)


class Warden:
    def __init__(self, agent: socket.socket):
        self._agent = agent
        self._ranks: dict[int, int] = {}  # pid -> rank of the workers that live
        self._sweep = False  # workers have lived; what they left behind must go

    def run(self) -> None:
        """Serve the agent until it is gone, then kill everything below."""
        become_subreaper()
        for signum in _HANDLED:  # a Ctrl-C or a scheduler's signal to the whole group is the agent's to judge
            signal.signal(signum, signal.SIG_IGN)
        wake, tick = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(tick, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            while self._serve(wake):
                pass
        finally:
            kill_descendants()

    def _serve(self, wake: int) -> bool:
        readable, _, _ = select.select([self._agent, wake], [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)
            self._reap()
        if self._agent not in readable:
            return True
        packet, descriptors, _, _ = socket.recv_fds(self._agent, LARGEST_PACKET, 1)
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
        elif what == "kill":
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

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
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if order.get("banner"):
                os.write(log, order["banner"].encode(errors="replace"))
            if problem:
                os.write(log, f"orch: {problem}\n".encode(errors="replace"))
                self._tell(exit=rank, code=int(Exit.USAGE))
                self._sweep = True
                self._reap()  # says "empty" where nothing else lives
                return
            warden = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_worker(warden, argv, environment, log, report)
        finally:
            os.close(log)
        self._ranks[pid] = rank
        self._sweep = True
        self._tell(started=rank, pid=pid)

    def _reap(self) -> None:
        for pid, code in reap_children():
            rank = self._ranks.pop(pid, None)
            if rank is not None:  # the others are orphans that fell to this process
                self._tell(exit=rank, code=code)
        if self._sweep and not self._ranks:
            left = kill_descendants()
            self._sweep = False
            self._tell(empty=True, survivors=left)


def _become_worker(warden: int, argv: list[str], environment: dict[str, str], log: int, report: int) -> None:
    """In the child: own session, output to the log, pipe on descriptor 3, dead when the warden is. Never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in (*_HANDLED, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        die_with_parent(warden)
        nothing = os.open(os.devnull, os.O_RDONLY)
        kept = os.dup(report)  # out of the way of the numbers below
        kept = kept if kept > REPORT_FD else os.dup(kept)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(kept, REPORT_FD)
        os.execvpe(argv[0], argv, environment)
    except BaseException as error:
        os.write(2, f"orch: cannot start {argv[0]!r}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(Exit.USAGE)


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        Warden(agent).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
