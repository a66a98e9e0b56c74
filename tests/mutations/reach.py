"""Finds which tests run which lines: recorded once by coverage.py, in forked ranks and started
processes too.

`record` runs tests with this module as a plugin of pytest, which names the test to every process
that it brings into being. `Reach` reads what they wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = "ORCH_REACH"  # where a recording writes
_TEST = "ORCH_REACH_TEST"  # the test that a started process works for
_QUICK = "not slow and not full and not timing and not slurm and not kubernetes"


def record(folder: Path, sources: Sequence[str], tests: Sequence[str], workers: int = 2) -> None:
    """Adds what `tests` (pytest's arguments) run of the folders `sources` to the recording in
    `folder`.

    Of files that have changed since it was begun, it forgets what other tests run: their lines have
    moved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _forget(folder, changed(folder, sources))
    rules = folder / "rules"
    included = "".join(f"\n    {ROOT / source}/*" for source in sources)
    rules.write_text(
        f"[run]\nparallel = true\npatch =\n    _exit\n    fork\ndata_file = {folder / 'data'}\n"
        f"context = ${{{_TEST}-}}\ninclude ={included}\n"
    )
    # A run of the tests in which this is one would hand down that it is a worker of xdist.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment = inherited | {
        "COVERAGE_PROCESS_START": str(rules),
        "OMP_NUM_THREADS": "1",
        _FOLDER: str(folder),
        _TEST: "",
    }
    pytest_command = [sys.executable, "-m", "pytest", "-p", __name__, "-m", _QUICK]
    spread = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    subprocess.run([*pytest_command, *spread, *tests], cwd=ROOT, env=environment)
    combine = [
        sys.executable,
        "-m",
        "coverage",
        "combine",
        "--append",
        "--quiet",
        f"--rcfile={rules}",
        str(folder),
    ]
    subprocess.run(combine, cwd=ROOT, check=True)
    (folder / "digests.json").write_text(json.dumps(digests(sources)))


def digests(sources: Sequence[str]) -> dict[str, str]:
    """A hash of each source file, by its path below the root."""
    files = [file for source in sources for file in sorted((ROOT / source).rglob("*.py"))]
    return {
        str(file.relative_to(ROOT)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def changed(folder: Path, sources: Sequence[str]) -> list[str]:
    """The files that are not as they were recorded."""
    digest_path = folder / "digests.json"
    then = json.loads(digest_path.read_text()) if digest_path.exists() else {}
    return [path for path, digest in digests(sources).items() if then.get(path) != digest]


def _forget(folder: Path, paths: Sequence[str]) -> None:
    if paths and (folder / "data").exists():
        data = coverage.CoverageData(str(folder / "data"))
        data.read()
        data.purge_files([str(ROOT / path) for path in paths])


def collected(tests: Sequence[str]) -> set[str]:
    """The names of the quick tests that there are now: what was recorded may have another name
    since."""
    pytest_command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-q",
        "--collect-only",
        "-p",
        "no:xdist",
        "-m",
        _QUICK,
    ]
    done = subprocess.run(
        [*pytest_command, *tests], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return {line for line in done.stdout.splitlines() if "::" in line}


class Reach:
    """A recording, read. Raises ValueError where a source file has changed since.

    Only the tests of `names` are asked for.
    """

    def __init__(self, folder: Path, sources: Sequence[str], names: Collection[str]):
        if not (folder / "digests.json").exists():
            raise ValueError(f"{folder} holds no recording")
        moved = changed(folder, sources)
        if moved:
            raise ValueError(f"{folder} was recorded before {moved[0]} changed")
        self.digests = digests(sources)
        self._file = folder / "data"
        self._seconds: dict[str, float] = {}
        for file in sorted(folder.glob("seconds-*.jsonl")):
            for line in file.read_text().splitlines():
                self._seconds.update(
                    (test, took) for test, took in json.loads(line).items() if test in names
                )

    def tests(self, path: str, lines: range) -> dict[str, float]:
        """Seconds of each test that has passed and runs one of the lines; the lines that run at
        import have none."""
        contexts = self._data().contexts_by_lineno(str(ROOT / path))
        reached = {test for line in lines for test in contexts.get(line, [])}
        return {test: self._seconds[test] for test in sorted(reached) if test in self._seconds}

    def beside(self, tests: Collection[str]) -> dict[str, float]:
        """Seconds of all tests of the files of these."""
        files = {test.partition("::")[0] for test in tests}
        return {
            test: took
            for test, took in sorted(self._seconds.items())
            if test.partition("::")[0] in files
        }

    def lines(self, path: str) -> set[int]:
        """The lines of a file that have run, by any test or at import."""
        return set(self._data().lines(str(ROOT / path)) or ())

    def _data(self) -> coverage.CoverageData:
        """Opened anew: a forked process would look for a file of its own, and find nothing."""
        data = coverage.CoverageData(str(self._file))
        data.read()
        return data


# ----------------------------------------------------------------------------------------- a plugin
#     of pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Processes that are forked or started now, and this one, work for `item`."""
    recorder = coverage.Coverage.current()
    if recorder is not None:
        os.environ[_TEST] = item.nodeid
        recorder.set_option("run:context", item.nodeid)
        recorder.switch_context(item.nodeid)
    result = yield
    if recorder is not None:
        os.environ[_TEST] = ""
        recorder.set_option("run:context", "")
        recorder.switch_context("")
    return result


_seconds: dict[str, float] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """Notes what a test took with its fixtures, unless it has failed or was skipped."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + (
        report.duration if report.passed else float("inf")
    )
    if report.when == "teardown" and _seconds[report.nodeid] < float("inf"):
        path = Path(os.environ[_FOLDER]) / f"seconds-{os.getpid()}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps({report.nodeid: round(_seconds[report.nodeid], 3)}) + "\n")
