"""The nursery: a process of a node that has imported the program once, and forks workers which start in milliseconds.

Importing torch costs seconds and hundreds of MiB a process. The workers of a node, and those of every later life of the
run, share one import and its memory: a restart waits for nothing.

The warden starts the nursery and keeps all that it promises, because a worker becomes the warden's own child: it is
forked twice, the process between leaves, and the kernel gives the orphan to the nearest subreaper, the warden. It waits
for the warden's word before it runs, so that the warden knows every worker that lives. Where the nursery is gone the
warden starts workers the plain way.

The program is a package with two modules: `<package>.preload`, imported here, whose `prepare(arguments, environment)`
runs here before a worker is forked (more to import for this worker) and `after_fork()` first in every worker; and
`<package>.__main__` with `main(arguments)`. Forking is safe because this process has one thread and
computes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from types import ModuleType
from typing import NoReturn

from orchestrator.plan.exits import Exit
from orchestrator.run.processes import die_with_parent, name_process

from .packets import LARGEST_PACKET

REPORT_FD = 3  # where a worker finds its report pipe
#: What warden and nursery ignore and a worker takes as usual.
SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)
_ADOPTION_S = 10.0  # the kernel's part of it takes microseconds


def settle(warden: int, log: int, report: int) -> None:
    """In a new worker: own session, usual signals, output to the log, pipe on descriptor 3, dead when the warden is."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in (*SIGNALS, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    die_with_parent(warden)
    report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, REPORT_FD + 1)  # out of the way of the numbers below
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, number in ((nothing, 0), (log, 1), (log, 2), (report, REPORT_FD)):
        os.dup2(source, number)
    for left in {nothing, log, report}:
        if left > REPORT_FD:
            os.close(left)


class Nursery:
    """Serves one warden. One packet a worker: JSON, and the descriptors of its log, reports and word."""

    def __init__(self, orders: socket.socket, warden: int, program: ModuleType, preload: ModuleType):
        self._orders, self._warden = orders, warden
        self._program, self._preload = program, preload

    def serve(self) -> None:
        """Until the warden is gone."""
        with contextlib.suppress(Exception):  # as below; no worker has been asked for, its program is known
            self._preload.prepare([], os.environ)
        gc.collect()
        with contextlib.suppress(OSError):  # the warden is gone: the next packet says so
            self._orders.send(json.dumps({"warm": True}).encode())
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self._orders, LARGEST_PACKET, 3)
            if not packet:
                return
            order = json.loads(packet)
            with contextlib.suppress(Exception):  # the worker meets it again, and says so in its own log
                self._preload.prepare(order["arguments"], order["environment"])
            gc.freeze()  # a collection in a worker would write to, and so copy, every page it shares with this process
            between = os.fork()
            if between == 0:
                self._bear(order, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(between, 0)

    def _bear(self, order: dict, log: int, report: int, word: int) -> NoReturn:
        """In the process between: fork the worker, say its number, leave."""
        try:
            pid = os.fork()
            if pid == 0:
                self._live(order, log, report, word)
            self._orders.send(json.dumps({"ticket": order["ticket"], "pid": pid}).encode())
        finally:
            os._exit(0)

    def _live(self, order: dict, log: int, report: int, word: int) -> NoReturn:
        """In the worker."""
        code = int(Exit.FENCED)  # not wanted
        try:
            end = time.monotonic() + _ADOPTION_S
            while os.getppid() != self._warden and time.monotonic() < end:
                time.sleep(0.0005)
            settle(self._warden, log, report)
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # as in every Python program
                signal.signal(signum, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if os.read(word, 1):  # nothing: the warden does not want this worker any more
                for inherited in (word, report, self._orders.fileno()):
                    os.close(inherited)
                os.environ.update(order["environment"])
                os.chdir(order["cwd"])
                sys.argv = [self._program.__name__, *order["arguments"]]
                name_process(order["name"])  # its command line is still the nursery's
                self._preload.after_fork()
                self._program.main(order["arguments"])
                code = int(Exit.DONE)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        except BaseException:
            code = 1
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def main() -> int:
    """`python -m orchestrator.agent.node.fork_server DESCRIPTOR PACKAGE`, started by the warden."""
    orders, package, warden = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], os.getppid()
    die_with_parent(warden)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # so that no descriptor that arrives later has a worker's report number
        while os.open(os.devnull, os.O_RDONLY) <= REPORT_FD:
            pass
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of this process would be missing in its children
    preload = importlib.import_module(f"{package}.preload")
    program = importlib.import_module(f"{package}.__main__")
    with orders:
        Nursery(orders, warden, program, preload).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
