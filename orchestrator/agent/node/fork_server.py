"""The fork server: imports the program once per node and forks workers that start in milliseconds.

Importing torch costs seconds, and hundreds of MiB per process. All workers of a node, in every
epoch of the run, share one import and its memory, so a restart does not wait for it.

The worker supervisor starts the fork server. A worker becomes the supervisor's own child: it is
forked twice, the intermediate process exits, and the kernel gives the orphan to the nearest
subreaper, which is the supervisor. The worker waits for the supervisor's go-ahead before it runs,
so the supervisor knows every worker that runs. If the fork server is gone, the supervisor starts
workers by fork and exec.

The program is a package with two modules. `<package>.preload` is imported here; its
`prepare(arguments, environment)` runs here before a worker is forked (more imports for this
worker), and its `after_fork()` runs first in every worker. `<package>.__main__` has
`main(arguments)`. Forking is safe because this process has one thread and computes nothing.

Agent, supervisor and fork server exchange packets, one JSON object each, over a Unix socketpair of
type SEQPACKET.
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
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

from orchestrator.plan.exits import Exit
from orchestrator.run.processes import die_with_parent, name_process

LARGEST_PACKET = 1 << 17  # bytes
REPORT_FD = 3  # a worker's report pipe
STORE_FD = 4  # the socket of rank 0's store
#: Signals that the worker supervisor and the fork server ignore. Workers get the default handlers.
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
_ADOPTION_S = 10.0  # until the supervisor is the parent, which the kernel does in microseconds


def waiting_packets(peer: socket.socket) -> Iterator[dict | None]:
    """Yields packets that are available now; None, always last, if the peer is gone."""
    while True:
        try:
            packet = peer.recv(LARGEST_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            yield None
            return
        yield json.loads(packet)


def set_up_worker(
    supervisor: int,
    log: int,
    report: int,
    store: int | None,
    cores: Sequence[int],
) -> None:
    """Sets up a new worker process, which dies with its supervisor.

    It gets its own session, default signal handlers, the log as output, the report pipe as
    descriptor 3 and the socket of rank 0's store as descriptor 4. It is bound to `cores`, if any.
    """
    os.setsid()
    if cores:
        with contextlib.suppress(OSError):  # the job's cores have just changed: it stays unbound
            os.sched_setaffinity(0, cores)
    signal.set_wakeup_fd(-1)
    for signum in (*SIGNALS, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    die_with_parent(supervisor)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    sources = {0: null, 1: log, 2: log, REPORT_FD: report}
    if store is not None:
        sources[STORE_FD] = store
    # Duplicates above the fixed numbers, so that no source is overwritten before it is copied.
    free = {
        fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, STORE_FD + 1) for fd in set(sources.values())
    }
    for fd in free:
        os.close(fd)
    for number, fd in sources.items():
        os.dup2(free[fd], number)
    for fd in free.values():
        os.close(fd)


class ForkServer:
    """Serves one worker supervisor.

    Each worker is ordered by one packet: JSON, and descriptors of its log, reports and go-ahead
    pipe, and for rank 0 of the store's socket.
    """

    def __init__(
        self,
        orders: socket.socket,
        supervisor: int,
        program: ModuleType,
        preload: ModuleType,
    ):
        self._orders = orders
        self._supervisor = supervisor
        self._program = program
        self._preload = preload

    def serve(self) -> None:
        """Forks workers on request until the supervisor is gone."""
        # No worker has been ordered, but its program is known. Errors are handled as below.
        with contextlib.suppress(Exception):
            self._preload.prepare([], os.environ)
        gc.collect()
        with contextlib.suppress(OSError):  # the supervisor is gone: the next recv notices
            self._orders.send(json.dumps({"warm": True}).encode())
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self._orders, LARGEST_PACKET, 4)
            if not packet:
                return
            order = json.loads(packet)
            with contextlib.suppress(Exception):  # the worker will log the same error
                self._preload.prepare(order["arguments"], order["environment"])
            # A garbage collection in a worker would write to, and so copy, every shared page.
            gc.freeze()
            intermediate = os.fork()
            if intermediate == 0:
                self._fork_worker(order, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(intermediate, 0)

    def _fork_worker(
        self,
        order: dict,
        log: int,
        report: int,
        go_ahead: int,
        store: int | None = None,
    ) -> NoReturn:
        """Forks the worker, sends its pid and exits. Runs in the intermediate process."""
        try:
            pid = os.fork()
            if pid == 0:
                self._run_worker(order, log, report, go_ahead, store)
            self._orders.send(json.dumps({"ticket": order["ticket"], "pid": pid}).encode())
        finally:
            os._exit(0)

    def _run_worker(
        self,
        order: dict,
        log: int,
        report: int,
        go_ahead: int,
        store: int | None,
    ) -> NoReturn:
        """Runs the program in the worker process."""
        code = int(Exit.FENCED)  # stays if the worker is cancelled
        try:
            end = time.monotonic() + _ADOPTION_S
            while os.getppid() != self._supervisor and time.monotonic() < end:
                time.sleep(0.0005)
            set_up_worker(self._supervisor, log, report, store, order["cores"])
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # as in every Python program
                signal.signal(signum, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if os.read(go_ahead, 1):  # nothing: the supervisor cancelled this worker
                for inherited in (go_ahead, self._orders.fileno()):
                    os.close(inherited)
                os.environ.update(order["environment"])
                os.chdir(order["cwd"])
                sys.argv = [self._program.__name__, *order["arguments"]]
                name_process(order["name"])  # its command line is still the fork server's
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
    """Runs `python -m orchestrator.agent.node.fork_server DESCRIPTOR PACKAGE`."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    package = sys.argv[2]
    supervisor = os.getppid()
    die_with_parent(supervisor)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    # Descriptors that arrive later must not get the fixed numbers of a worker's own ones.
    with contextlib.suppress(OSError):
        while os.open(os.devnull, os.O_RDONLY) <= STORE_FD:
            pass
    # Threads of this process would be missing in its children.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    preload = importlib.import_module(f"{package}.preload")
    program = importlib.import_module(f"{package}.__main__")
    with orders:
        ForkServer(orders, supervisor, program, preload).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
