"""The agent's side of its workers, with a real worker supervisor and small real programs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.agent.node.workers import Workers
from orchestrator.run.processes import identity, is_alive, is_stopped
from tests.beds.bundles import wait_for
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "tests.agent.preloadable"]


class Harness:
    def __init__(self, tmp_path, forked=False):
        self.tmp_path = tmp_path
        self.forked = forked
        self.ended: dict[int, tuple[int, bool]] = {}
        self.lines: list[tuple[int, bytes]] = []
        self.empty = asyncio.Event()
        program = PROGRAM if forked else ()
        self.started = 0
        callbacks = (
            self._exit,
            self.empty.set,
            lambda rank, line: self.lines.append((rank, line)),
            program,
        )
        self.workers = Workers(*callbacks, on_started=self._count)

    async def __aenter__(self) -> Harness:
        return self

    async def __aexit__(self, *_):
        self.workers.close()

    @property
    def supervisor_pid(self) -> int:
        return self.workers._supervisor.pid

    def _count(self):
        self.started += 1

    def _exit(self, rank, code, stop_asked):
        assert rank not in self.ended, "told twice"
        self.ended[rank] = (code, stop_asked)

    def argv(self, code: str) -> list[str]:
        return [*(PROGRAM if self.forked else [sys.executable, "-S", "-c"]), code]

    def start(self, code: str, rank: int = 0, environment=(), argv=None, **options):
        self.workers.start(
            rank,
            argv or self.argv(code),
            dict(environment),
            str(self.tmp_path),
            self.log(rank),
            **options,
        )

    def log(self, rank: int = 0):
        return self.tmp_path / f"rank-{rank}.log"

    async def until_empty(self, timeout_s=PATIENCE_S):
        await asyncio.wait_for(self.empty.wait(), timeout_s)
        self.empty.clear()

    async def until_logged(self, log_line: str, rank: int = 0):
        end = time.monotonic() + PATIENCE_S
        while not self.has_logged(log_line, rank):
            assert time.monotonic() < end, f"{log_line!r} never came"
            await asyncio.sleep(0.01)

    def has_logged(self, log_line: str, rank: int = 0) -> bool:
        return self.log(rank).exists() and log_line in self.log(rank).read_text()


@pytest.fixture(params=["plain", "forked"])
def h(request, monkeypatch, tmp_path):
    """Workers that are programs of their own, and workers from a preloaded process."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Harness(tmp_path, forked=request.param == "forked")


async def test_a_worker_runs_on_the_cores_that_it_was_given_where_they_still_exist(h):
    *_, last = sorted(os.sched_getaffinity(0))
    for rank, cores in enumerate([{last}, {1023}, ()]):
        h.start("import os; print(sorted(os.sched_getaffinity(0)), flush=True)", rank, cores=cores)
    await h.until_empty()
    everywhere = str(sorted(os.sched_getaffinity(0)))
    assert [h.log(rank).read_text().strip() for rank in range(3)] == [
        f"[{last}]",
        everywhere,
        everywhere,
    ]


async def test_a_worker_has_four_descriptors_its_own_session_and_default_signals(h):
    code = """
import os, signal, sys
print(sorted(map(int, os.listdir('/proc/self/fd')))[:5], os.getsid(0) == os.getpid(), repr(sys.stdin.read()))
print([s.name for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE) if s not in ()
       and int(next(l for l in open('/proc/self/status') if l.startswith('SigIgn')).split()[1], 16) >> (s - 1) & 1])
"""
    h.start(code)
    await h.until_empty()
    # descriptor 4 is the listing itself; Python ignores SIGPIPE by itself
    assert h.log().read_text() == "[0, 1, 2, 3, 4] True ''\n['SIGPIPE']\n"
    assert h.ended == {0: (0, False)}


async def test_reports_arrive_whole_and_the_last_ones_before_the_exit(h):
    code = "import os\nfor i in range(2000): os.write(3, b'line %d\\n' % i)\nos.write(3, b'no end')"
    h.start(code)
    await h.until_empty()
    assert h.lines == [(0, b"line %d" % i) for i in range(2000)]


async def test_the_last_word_of_a_worker_that_said_much_is_heard(h):
    """The agent was busy: more lies in the pipe than is read at a time, and why the worker failed
    comes last."""
    code = """
import os
for _ in range(40): os.write(3, (b'x' * 99 + b'\\n') * 160)
os.write(3, b'why\\n')
print('said', flush=True)
"""
    h.start(code)
    wait_for(lambda: h.has_logged("said"), what="what the worker says")
    time.sleep(0.2)  # its end is to be there before its words are read
    await h.until_empty()
    assert len(h.lines) == 6401 and h.lines[-1] == (0, b"why")


async def test_a_worker_that_floods_its_pipe_is_never_blocked_by_us(h):
    """Nobody reads while the loop is stuck; the writes fail instead of waiting."""
    code = """
import os
while True:  # a write that waited would not come back before the agent reads again
    try: os.write(3, b'x' * 100 + b'\\n')
    except BlockingIOError: break
print('full', flush=True)
"""
    h.start(code)
    # The agent is stuck: its loop does not run until the worker has been refused.
    wait_for(lambda: h.has_logged("full\n"), what="a write that is refused")
    assert h.log().read_text() == "full\n"
    await h.until_empty()


async def test_asked_and_unasked_ends_are_told_apart(h):
    h.start("import sys; sys.exit(7)", rank=0)
    h.start("import time; print('up', flush=True); time.sleep(3600)", rank=1)
    await h.until_logged("up", 1)
    while 0 not in h.ended:
        await asyncio.sleep(0.01)
    h.workers.stop(signal.SIGTERM, 2 * PATIENCE_S)
    await h.until_empty()
    assert h.ended == {0: (7, False), 1: (-15, True)}
    h.ended.clear()
    h.start("import sys; sys.exit(3)")  # the next life starts unasked
    await h.until_empty()
    assert h.ended == {0: (3, False)}


async def test_a_kill_of_nothing_does_not_colour_the_next_life(h):
    h.workers.kill()
    h.workers.stop(signal.SIGTERM, 0.0)
    h.start("import sys; sys.exit(3)")
    await h.until_empty()
    assert h.ended == {0: (3, False)}


UP = "print('up', flush=True); time.sleep(3600)"


async def test_the_grace_ends_in_a_kill(h):
    h.start(f"import signal, time; signal.signal(15, signal.SIG_IGN); {UP}")
    await h.until_logged("up")
    begun = time.monotonic()
    h.workers.stop(signal.SIGTERM, 0.5)
    await h.until_empty()
    assert h.ended == {0: (-9, True)}
    assert time.monotonic() - begun >= 0.5


async def test_a_stopped_worker_hears_that_it_shall_end(h):
    """Its grace is longer than the test waits."""
    h.start(f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); {UP}")
    await h.until_logged("up")
    os.kill(h.workers.pids[0], signal.SIGSTOP)
    h.workers.stop(signal.SIGTERM, 2 * PATIENCE_S)
    await h.until_empty()
    assert h.ended == {0: (75, True)}


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(identity(pid)):
        time.sleep(0.001)


async def test_a_stopped_worker_supervisor_hides_no_death(h):
    h.start("import time; time.sleep(600)")
    while not h.workers.pids[0]:
        await asyncio.sleep(0.01)
    assert h.started == 1
    stop(h.supervisor_pid)
    os.kill(h.workers.pids[0], signal.SIGKILL)
    notes = [h.workers.watch() for _ in range(4)]
    assert notes == ["", "", "", "the worker supervisor was stopped by a signal: continued"]
    await h.until_empty()
    assert h.ended == {0: (-9, False)}


async def test_a_worker_supervisor_that_is_stopped_again_and_again_is_killed(h):
    h.start("import time; time.sleep(600)")
    while not h.workers.pids[0]:
        await asyncio.sleep(0.01)
    pid = h.supervisor_pid
    notes = []
    while not notes or "killed" not in notes[-1]:
        stop(pid)
        notes.append(h.workers.watch())
    assert len([note for note in notes if note.endswith("continued")]) == 3
    await h.until_empty()
    assert h.ended == {0: (-9, False)}


async def test_workers_have_started_when_all_of_them_run(h):
    """Not when they were ordered: a worker supervisor that does not answer has started nobody."""
    h.workers.open()
    stop(h.supervisor_pid)
    for rank in (0, 1):
        h.start("import time; time.sleep(600)", rank)
    await asyncio.sleep(0.3)
    assert h.started == 0
    os.kill(h.supervisor_pid, signal.SIGCONT)
    while not h.started:
        await asyncio.sleep(0.01)
    assert all(h.workers.pids.values()) and len(h.workers.pids) == 2 and h.started == 1


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
async def test_signals_reach_the_worker_and_not_what_it_started(h, signum):
    code = f"""
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(3600)'])
def heard(number, frame):
    time.sleep(0.2)
    print('heard', number, 'child', child.poll(), flush=True)
    sys.exit(0)
signal.signal({int(signum)}, heard)
print('up', flush=True)
time.sleep(3600)
"""
    h.start(code)
    await h.until_logged("up")
    h.workers.signal(signum)
    await h.until_empty()
    assert f"heard {int(signum)} child None" in h.log().read_text()


async def test_what_a_worker_leaves_behind_is_gone_when_all_have_ended(h, tmp_path):
    """A double fork with setsid, as daemons do it: only a subreaper still finds it."""
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(tmp_path / "daemon")!r}, 'w').write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists({str(tmp_path / "daemon")!r}) or not open({str(tmp_path / "daemon")!r}).read():
    time.sleep(0.01)
"""
    h.start(code)
    while not (tmp_path / "daemon").exists() or not (tmp_path / "daemon").read_text():
        await asyncio.sleep(0.005)
    daemon = identity(int((tmp_path / "daemon").read_text()))
    await h.until_empty()
    assert h.ended == {0: (0, False)}
    assert daemon is None or not is_alive(daemon)


@pytest.mark.parametrize("argv", [["no-such-program"], ["/no/such/program"], ["./relative"]])
async def test_a_program_that_is_not_there_ends_with_64_and_a_line(h, argv):
    h.start("", rank=0, argv=argv)
    h.start("print('fine')", rank=1)
    await h.until_empty()
    assert h.ended == {0: (64, False), 1: (0, False)}
    assert "is not on PATH or not executable" in h.log(0).read_text()


async def test_words_and_values_arrive_byte_exact(h):
    arguments = ["a b", "new\nline", "quote'\"", "$(id)", "ü\udcff", ""]
    code = (
        "import os, sys; os.write(1, repr((sys.argv[1:],"
        " os.environ['WORD'])).encode(errors='backslashreplace'))"
    )
    h.start("", argv=[sys.executable, "-c", code, *arguments], environment={"WORD": arguments[-2]})
    await h.until_empty()
    assert h.log().read_text() == repr((arguments, arguments[-2])), h.log().read_text()


async def test_an_environment_that_is_too_large_is_an_error_not_a_hang(h):
    with pytest.raises(ValueError, match=r"take \d+ bytes, over"):
        h.start("", environment={"X": "x" * 200_000})
    assert h.workers.pids == {}


def test_an_agent_that_dies_without_listening_is_no_error_of_the_supervisor():
    """Seen when an agent was killed while workers started: the socket is reset, not closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(b"never read")
        ours.close()
        argv = [
            sys.executable,
            "-m",
            "orchestrator.agent.node.worker_supervisor",
            str(theirs.fileno()),
        ]
        supervisor = subprocess.run(
            argv, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert (supervisor.returncode, supervisor.stderr) == (0, "")
