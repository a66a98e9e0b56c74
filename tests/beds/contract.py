"""What a user may expect of a run on any backend: the same command lines on local, Slurm,
Kubernetes and others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.plan.exits import Exit


def cancel_and_resume(
    orch: Callable[..., Any], run: Any, go: Callable[[], object] = lambda: None
) -> None:
    """A run that trains is not resumed; it saves when it is cancelled, is not cancelled twice, and
    goes on to its end.

    `orch`: runs a command line and checks its exit code. `run`: id, state() and wait(). `go`: lets
    its workers end.
    """
    begun = run.wait("running")
    assert begun.exit_code is None and begun.ended_at is None
    (row,) = [
        row for row in json.loads(orch("list", "--json").stdout) if row["state"]["run_id"] == run.id
    ]
    assert row["state"]["backend"] == begun.backend and row["state"]["plan_hash"] == begun.plan_hash
    assert "cancel it first" in orch("resume", run.id, code=Exit.USAGE).stderr
    orch("cancel", run.id)
    ended = run.wait("cancelled")
    assert ended.exit_code == Exit.RESTART and ended.ended_at
    assert "has ended: cancelled" in orch("cancel", run.id, code=Exit.USAGE).stderr
    go()
    handle = json.loads(orch("resume", "--json", run.id).stdout)["handle"]
    assert handle == f"{begun.backend}://{run.id}"
    done = run.wait("done")
    assert (done.exit_code, len(done.pauses)) == (Exit.DONE, 1) and done.epoch > begun.epoch
    assert "there are no steps left" in orch("resume", run.id, code=Exit.USAGE).stderr


def refusals(orch: Callable[..., Any], overrides: Sequence[str]) -> None:
    """What the backend cannot take ends with its code and one line, before there is a run
    folder."""
    for arguments, code, reason in (
        (["backend.options.nonsense=1"], Exit.CONFIG, "backend.options.nonsense is not an option"),
        (["model=tiny_bert", "train.objective=next_token"], Exit.CONFIG, "is not causal"),
        (["--run-id", "Refused"], Exit.USAGE, "run id"),
    ):
        completed = orch("submit", *overrides, *arguments, code=code)
        assert reason in completed.stderr and len(completed.stderr.strip().splitlines()) == 1
    assert json.loads(orch("list", "--json").stdout) == []
