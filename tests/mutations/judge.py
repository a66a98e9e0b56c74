"""Judges one mutant: the tests that run its line are run in a copy of the tree whose file holds the
change.

Everything that a test starts finds the change too: ranks, agents, workers, command lines. The
process that forks has imported what tests import and nothing of orch, so that a mutant costs a
second and not ten.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from .reach import ROOT, Reach
from .sites import Site, mutated

OURS = ("tests", "trainer", "orchestrator", "conf", "orch_report", "orch_start")
BUDGET_S = 20.0  # of tests for one mutant, as they took when they were recorded
MORE_S = 120.0  # for one that has lived
FILE_S = 1.0  # of it for each file of tests, whose modules are imported
PATIENCE_S = 60.0  # beyond three times what the tests took: then it hangs
LIVES = ""
BY_TEST = "a test"
BY_IMPORT = "its import"
HANGS = "it hangs"
ODD = "it ends oddly"
UNSEEN = "no quick test runs it"
#: Ends that say nothing of what notices a mutant.
UNCOUNTED = (HANGS, ODD)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl


class Result(NamedTuple):
    """`killed` by what, or LIVES; `by`: the first test that failed."""

    site: Site
    killed: str
    by: str
    seconds: float


class Copy:
    """A copy of the tree, in which one file at a time is changed."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mutant-"))
        left_out = shutil.ignore_patterns(
            ".git", ".venv", "build", ".mypy_cache", ".ruff_cache", ".hypothesis"
        )
        shutil.copytree(ROOT, self.root, ignore=left_out, symlinks=True, dirs_exist_ok=True)
        (self.root / ".venv").symlink_to((ROOT / ".venv").resolve())

    def write(self, path: str, tree: ast.Module) -> None:
        (self.root / path).write_text(ast.unparse(tree) + "\n")

    def restore(self, path: str) -> None:
        shutil.copy2(ROOT / path, self.root / path)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def chosen(seconds: dict[str, float], budget_s: float) -> list[str]:
    """Tests, quick ones first and of all files in turn, that take the budget together; one at
    least."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(seconds, key=lambda test: (seconds[test], test)):
        by_file[test.partition("::")[0]].append(test)
    picked: list[str] = []
    spent = 0.0
    for turn, tests in enumerate(zip_longest(*by_file.values())):
        for test in filter(None, tests):
            spent += seconds[test] + (FILE_S if turn == 0 else 0.0)
            if picked and spent > budget_s:
                return picked
            picked.append(test)
    return picked


def reaching(reach: Reach, site: Site) -> dict[str, float]:
    """Seconds of the tests that run the site's line; of those that run its file where the line runs
    at import."""
    exact = reach.tests(site.path, range(site.line, site.line + 1))
    exact = exact or reach.tests(site.path, range(site.first, site.last + 1))
    if exact or not reach.lines(site.path) & set(range(site.first, site.last + 1)):
        return exact
    length = len((ROOT / site.path).read_text().splitlines())
    return reach.tests(site.path, range(1, length + 1))


class Judge:
    """Judges mutants one after the other in a copy of its own."""

    def __init__(self, reach: Reach):
        self._reach = reach
        self._copy = Copy()
        _warm()
        ctypes.CDLL(None).prctl(
            _SUBREAPER, 1
        )  # what a mutant's tests leave behind comes here, and is ended

    def judged(self, site: Site) -> Result:
        start = time.monotonic()
        seconds = reaching(self._reach, site)
        if not seconds:
            return Result(site, LIVES, UNSEEN, 0.0)
        self._copy.write(site.path, mutated((ROOT / site.path).read_text(), site.number))
        try:
            killed, by = self._asked_in_turn(seconds)
        finally:
            self._copy.restore(site.path)
        return Result(site, killed, by, time.monotonic() - start)

    def green(self, tests: Sequence[str], paths: Sequence[str]) -> set[str]:
        """The tests of `tests` that pass without a mutant, in files written from their trees as a
        mutant's is."""
        if not tests:  # pytest would run all there are
            return set()
        for path in paths:
            self._copy.write(path, ast.parse((ROOT / path).read_text()))
        answer = self._run(tests, limit_s=3600.0, stop=False)
        for path in paths:
            self._copy.restore(path)
        return set(tests) - set(answer["failed"]) if answer and answer["code"] in (0, 1) else set()

    def end(self) -> None:
        self._copy.remove()

    def _asked_in_turn(self, seconds: dict[str, float]) -> tuple[str, str]:
        """First the quick ones, then the others; then all of the same files, since what a fixture
        runs is recorded for the first test that asks for it."""
        run_tests: set[str] = set()
        for candidates, budget_s in (
            (seconds, BUDGET_S),
            (seconds, MORE_S),
            (self._reach.beside(seconds), MORE_S),
        ):
            untried = {test: took for test, took in candidates.items() if test not in run_tests}
            if untried:
                tests = chosen(untried, budget_s)
                killed, by = self._asked(tests, untried)
                if killed != LIVES:
                    return killed, by
                run_tests.update(tests)
        return LIVES, ""

    def _asked(self, tests: Sequence[str], seconds: dict[str, float]) -> tuple[str, str]:
        limit_s = PATIENCE_S + 3 * sum(seconds[test] for test in tests)
        answer = self._run(tests, limit_s * _load(), stop=True)
        if answer is None:
            return HANGS, ""
        if answer["unread"]:
            return BY_IMPORT, answer["unread"][0]
        if answer["failed"]:
            return BY_TEST, answer["failed"][0]
        return (LIVES, "") if answer["code"] == 0 else (ODD, "")

    def _run(self, tests: Sequence[str], limit_s: float, stop: bool) -> dict[str, Any] | None:
        """What a forked pytest says; None where it has not ended within the limit."""
        with tempfile.TemporaryDirectory(prefix="m") as folder:
            pid = os.fork()
            if pid == 0:
                _child(self._copy.root, Path(folder), tests, stop)
            ended = _ends(pid, time.monotonic() + limit_s)
            _end_the_rest()
            report_path = Path(folder) / "said"
            if not ended:
                return None
            silent = {"code": -1, "failed": [], "unread": []}
            return json.loads(report_path.read_text()) if report_path.exists() else silent


def _warm() -> None:
    """Imports once what tests import, and nothing of orch."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed.fsdp

    torch.compiler.reset()  # imports the compiler, a second or ten


def _load() -> float:
    """The factor by which a busy machine makes everything slower: never below 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class _Witness:
    """A plugin of pytest: which tests failed, and which files could not be imported."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.unread: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.unread.append(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _child(root: Path, folder: Path, tests: Sequence[str], stop: bool) -> None:
    """Never returns."""
    import pytest

    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silent, stream)
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        os.chdir(root)
        sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(folder))
        sys.dont_write_bytecode = True
        tempfile.tempdir = None
        witness = _Witness()
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            f"--rootdir={root}",
            *(["-x"] if stop else []),
        ]
        code = pytest.main([*options, *tests], plugins=[witness])
        report = {"code": int(code), "failed": witness.failed, "unread": witness.unread}
        (folder / "said").write_text(json.dumps(report))
    finally:
        os._exit(0)


def _ends(pid: int, deadline: float) -> bool:
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    return False


def _end_the_rest() -> None:
    """Kills what a mutant's tests have left behind, until nothing is left."""
    while children := psutil.Process().children(recursive=True):
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.01)
