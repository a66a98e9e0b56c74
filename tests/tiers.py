"""`python -m tests.tiers WORKERS`: what `make test` runs, tier by tier (docs/testing.md).

The tier on a real Slurm mostly waits for its scheduler, so it runs beside the rest, which computes.
The tier on a real Kubernetes begins when Slurm is over, so that one cluster at a time shares the
processor; its programs are built in the meantime where they are missing. Tests that measure seconds
run last and alone; only they are tried a second time, and a second try is printed. What the rest
says is seen at once; what the other tiers say, skips with their reasons included, when all are
over. A test that waits for ever fails after `TEST_LIMIT_S` with its stack; tests that have not
ended when their tier is interrupted are named in the last lines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.beds.kubernetes import ready
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
#: Seconds after which a test that waits for ever fails. What waits with patience of its own ends
#: before, and says more.
TEST_LIMIT_S = int(2 * PATIENCE_S)
#: Where even that does not end it (it waits outside of Python), its process prints all stacks and
#: exits.
PROCESS_LIMIT_S = TEST_LIMIT_S + 60
#: Where not even that is noticed, the tier is interrupted.
TIER_LIMIT_S = 2 * TEST_LIMIT_S
LIMITS = (
    f"--timeout={TEST_LIMIT_S}",
    f"--override-ini=faulthandler_timeout={PROCESS_LIMIT_S}",
    "--override-ini=faulthandler_exit_on_timeout=true",
)
PYTEST = (sys.executable, "-m", "pytest", *LIMITS)
REST = "rest"
SLURM = "Slurm"
KUBERNETES = "Kubernetes"
TIMING = "timing"
TIERS = (REST, SLURM, KUBERNETES)
QUICK = "not full and not timing"
#: A file keeps to one worker: its tests share fixtures and oracles.
FILES = ("--dist", "loadfile", "--no-loadscope-reorder")
#: A worker that dies ends the tier: one that replaces it may wait for ever (pytest-xdist 3.8.0,
#: issue 1378).
NO_OTHER_WORKERS = ("--max-worker-restart", "0")
ARGUMENTS = {
    REST: (*FILES, *NO_OTHER_WORKERS, "-m", f"not slurm and not kubernetes and {QUICK}"),
    # Tests mostly wait: three workers, each with clusters of its own, take turns at the processor.
    SLURM: (
        "-n",
        "3",
        *NO_OTHER_WORKERS,
        "--dist",
        "loadgroup",
        "-rfEs",
        "-m",
        f"slurm and {QUICK}",
        "tests/slurm",
    ),
    # One bed after the other: each is a whole control plane.
    KUBERNETES: ("-p", "no:xdist", "-rfEs", "-m", f"kubernetes and {QUICK}", "tests/kubernetes"),
    TIMING: ("-n", "0", "-rfEs", "-m", "timing and not full"),
}
NO_TESTS = 5  # pytest's exit code
_LOOK_S = 0.2


class Tiers:
    """The processes of one run. `folder`: for what they say, and for what the canary measures."""

    def __init__(self, workers: str, folder: Path):
        self._workers = workers
        self._folder = folder
        self._began: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, int] = {}

    def run(self) -> None:
        """All tiers, the timing stage at the end."""
        self._start("canary", (sys.executable, "-m", "tests.canary", str(self._folder / "starved")))
        self._start(SLURM, (*PYTEST, *ARGUMENTS[SLURM]), quiet=True)
        self._start("build", (sys.executable, "-m", "tests.beds.kubernetes.ready"))
        self._start(REST, (*PYTEST, "-n", self._workers, *ARGUMENTS[REST]))
        while self._running.keys() - {"canary"}:
            self._reap()
            self._interrupt_stuck()
            if KUBERNETES not in self._began and not {SLURM, "build"} & self._running.keys():
                self._start(KUBERNETES, (*PYTEST, *ARGUMENTS[KUBERNETES]), quiet=True)
            time.sleep(_LOOK_S)
        self._time()

    def _start(self, name: str, command: Sequence[str], quiet: bool = False) -> None:
        """`quiet`: what it says is shown at the end."""
        output: IO[bytes] | None = self._said(name).open("wb") if quiet else None
        environment = os.environ | {"ORCH_TEST_STARVED": str(self._folder / "starved")}
        if name in TIERS:
            self._running_tests(name).touch()
            environment["ORCH_TEST_RUNNING"] = str(self._running_tests(name))
        if name == KUBERNETES and (reason := self._why_no_kubernetes()):
            environment[ready.WHY] = reason
        self._began[name] = time.monotonic()
        where = subprocess.PIPE if name == "build" else output
        self._running[name] = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=where,
            stderr=subprocess.STDOUT if quiet else None,
        )
        if output is not None:
            output.close()

    def _why_no_kubernetes(self) -> str:
        """What the build has printed: nothing where every program is there."""
        return (self._folder / "why").read_text() if (self._folder / "why").exists() else ""

    def _said(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _running_tests(self, name: str) -> Path:
        """The file in which tests/conftest.py keeps the tests that a tier runs."""
        return self._folder / f"{name}.running"

    def _reap(self) -> None:
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[name]
            self._seconds[name] = time.monotonic() - self._began[name]
            if name == "build":
                assert process.stdout is not None
                (self._folder / "why").write_text(process.stdout.read().decode().strip())
            elif name != "canary":
                self.codes[name] = code

    def _interrupt_stuck(self) -> None:
        """End a tier in which no test has begun or ended for long: a worker may have gone without
        being missed."""
        for name in self._running.keys() & set(TIERS):
            running_tests = self._running_tests(name)
            if time.time() - running_tests.stat().st_mtime > TIER_LIMIT_S:
                self._running[name].send_signal(signal.SIGINT)
                running_tests.touch()  # it has as long to end

    def _time(self) -> None:
        """Tests that measure, on idle cores; those that fail, once more."""
        cache = ("-o", f"cache_dir={self._folder / 'cache'}")
        measuring = [
            str(path)
            for path in ROOT.glob("tests/*/test_*.py")
            if "mark.timing" in path.read_text()
        ]
        command = (*PYTEST, *ARGUMENTS[TIMING], *cache, *measuring)
        begin = time.monotonic()
        print(f"\n{' the timing stage ':=^80}", flush=True)
        code = subprocess.call(command, cwd=ROOT)
        if code == 1:
            print("the timing stage: a second try of what failed", flush=True)
            code = subprocess.call((*command, "--last-failed"), cwd=ROOT)
        self._seconds[TIMING] = time.monotonic() - begin
        self.codes[TIMING] = 0 if code == NO_TESTS else code

    def interrupt(self) -> None:
        """Their fixtures end daemons and clusters."""
        for process in self._running.values():
            process.send_signal(signal.SIGINT)
        for process in self._running.values():
            process.wait()

    def end(self) -> None:
        """The canary goes; what was said is shown, what each tier took, and which tests were
        interrupted."""
        if canary := self._running.pop("canary", None):
            canary.terminate()
            canary.wait()
        for name in (SLURM, KUBERNETES):
            if self._said(name).exists():
                tier_output = self._said(name).read_text(errors="replace")
                print(f"\n{f' the {name} tier ':=^80}\n{tier_output}", end="", flush=True)
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self._seconds.items())
        print(f"\nseconds by tier: {spent}", flush=True)
        for name in self._began.keys() & set(TIERS):
            if unfinished := self._running_tests(name).read_text():
                print(f"{name}: these tests did not end: {unfinished}", flush=True)


def main(argv: list[str]) -> int:
    """The exit code of the first that failed; 130 when interrupted, by SIGTERM too."""
    # A shell in the background lets SIGINT be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="orch-tiers-"))
        tiers = Tiers(argv[0] if argv else "2", Path(folder))
        stack.callback(tiers.end)
        try:
            tiers.run()
        except KeyboardInterrupt:
            tiers.interrupt()
            return 130
        return next((code for code in tiers.codes.values() if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
