"""The real trainer under its agents: a rank that computes for ever is found and named, a full disk
costs nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from orchestrator.backends.local.backend import LocalBackend
from orchestrator.run.request import read_request
from tests.beds.bundles import events, submit, wait_end
from tests.beds.plans import make_plan

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.full]

PROGRAM = str(Path(__file__).parents[1] / "beds" / "faulty_trainer.py")


def test_a_rank_that_spins_is_named_and_a_full_disk_loses_nothing(tmp_path, corpus):
    files = {
        "data_paths": [str(corpus)],
        "cache_dir": str(tmp_path / "cache"),
        "checkpoint_every_steps": 5,
    }
    plan = make_plan(dp=2, nodes=2, zero=1, steps=8, seq_len=32, **files)
    limits = {"hang_after_s": 3.0, "start_hang_after_s": 120.0, "max_restarts": 1, "grace_s": 30}
    folder = submit(plan, tmp_path / "runs", command=(sys.executable, PROGRAM), backend=limits)
    state = wait_end(folder, 300)
    cause = state.epochs[0].cause
    assert (cause.kind, cause.rank, cause.node, cause.step) == ("worker_spinning", 1, "node1", 3), (
        cause
    )
    assert cause.text.startswith(
        "rank 1 on node1 (gpu 0) did not enter all-reduce (dp) of step 4: it co"
    ), cause.text
    assert "in compute_for_ever" in (folder.path / cause.stack).read_text()

    assert (state.state, state.exit_code, state.cause.kind, state.restarts) == (
        "stopped",
        75,
        "disk_full",
        1,
    ), state
    assert "No space left on device" in state.reason and state.reason.endswith(
        "make room and resume"
    )
    assert [path.name for path in (folder.path / "checkpoints").glob("step-*")] == ["step-00000005"]
    (folder.path / "room").touch()
    LocalBackend().resume(folder, read_request(folder), os.environ)
    state = wait_end(folder, 300)
    assert state.state == "done", state.reason
    assert [event["step"] for event in events(folder, "resumed")] == [5]
