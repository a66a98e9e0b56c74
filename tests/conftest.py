"""All tests get this: a home of their own, examples that are not timed, and what the machine was
like when one failed.

What the user has measured (`orch bench`) or run must not change a test, nor a test the user's home.
A machine that is busy with other ranks is no failure of the code.
"""

import atexit
import gc
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None, derandomize=True)
settings.load_profile("untimed")

if (
    "PYTEST_XDIST_WORKER" not in os.environ
):  # workers inherit the home of the process that starts them
    os.environ["ORCH_HOME"] = tempfile.mkdtemp(prefix="orch-test-home-")
    atexit.register(shutil.rmtree, os.environ["ORCH_HOME"], ignore_errors=True)

SLOWEST_FILES = 20
_seconds_by_file = Counter[str]()
_running_tests = set[str]()


#: Seconds that a test of this mark takes, about; others take next to none.
SECONDS = {"slow": 12.0, "process": 3.0}


@pytest.hookimpl(trylast=True)  # after those that are left out by their marks
def pytest_collection_modifyitems(items) -> None:
    """Files that take long come first: a worker that begins one at the end would work on alone.

    The tiers on clusters have orders of their own.
    """
    on_a_cluster = any(item.get_closest_marker("slurm") for item in items)
    if on_a_cluster or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    seconds = Counter[str]()
    for item in items:
        marked = [SECONDS[mark] for mark in SECONDS if item.get_closest_marker(mark)]
        seconds[item.location[0]] += max(marked, default=0)
    items.sort(key=lambda item: -seconds[item.location[0]])


def pytest_collection_finish() -> None:
    """Collections look no more through all that torch and Hydra brought, and come more rarely, in
    forked ranks too.

    They were a tenth of the processor time of some modules.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure says how busy the machine was."""
    report = yield
    if report.failed:
        report.sections.append(("the machine", _machine()))
    return report


def _machine() -> str:
    """Its load, and how late the canary of `make test` came at most (tests/canary.py)."""
    load_text = "load average {:.1f} {:.1f} {:.1f}".format(*os.getloadavg())
    starved = Path(os.environ.get("ORCH_TEST_STARVED", os.devnull))
    late = starved.read_text() if starved.exists() else ""
    return f"{load_text}; longest starved tick of the last minute: {late or '?'} s"


def pytest_runtest_logstart(nodeid) -> None:
    _running_tests.add(nodeid)
    _write_running_tests()


def pytest_runtest_logfinish(nodeid) -> None:
    _running_tests.discard(nodeid)
    _write_running_tests()


def _write_running_tests() -> None:
    """Writes the file of tests/tiers.py, which names those that never end. Workers leave it to the
    process that started them."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (path := os.environ.get("ORCH_TEST_RUNNING")):
        Path(path).write_text(" ".join(sorted(_running_tests)))


def pytest_runtest_logreport(report) -> None:
    _seconds_by_file[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or len(_seconds_by_file) < SLOWEST_FILES:
        return
    terminalreporter.section(f"the {SLOWEST_FILES} slowest files, seconds")
    for file, seconds in _seconds_by_file.most_common(SLOWEST_FILES):
        terminalreporter.write_line(f"{seconds:7.1f}  {file}")


@pytest.fixture
def runs(tmp_path):
    """A folder for local runs, which end with the test."""
    from .beds.bundles import kill_runs  # not every test has runs

    folder = tmp_path / "runs"
    yield folder
    kill_runs(folder)
