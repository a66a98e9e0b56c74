"""For all tests: a home of their own, and examples that are not timed.

What the user has measured (`orch bench`) or run must not change a test, nor a test the user's home. A machine that is
busy with other ranks is no failure of the code.
"""

import atexit
import gc
import os
import shutil
import tempfile

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None, derandomize=True)
settings.load_profile("untimed")

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the home of the process that starts them
    os.environ["ORCH_HOME"] = tempfile.mkdtemp(prefix="orch-test-home-")
    atexit.register(shutil.rmtree, os.environ["ORCH_HOME"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Collections look no more through all that torch and Hydra brought, and come more rarely, in forked ranks too.

    They were a tenth of the processor time of some modules.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def runs(tmp_path):
    """A folder for local runs, which end with the test."""
    from .beds.bundles import kill_runs  # not every test has runs

    folder = tmp_path / "runs"
    yield folder
    kill_runs(folder)
