"""Which size to submit for its estimated start, and which runs a run may wait for. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.base import After
from orchestrator.backends.slurm.dependency import add_dependencies, without_dependency
from orchestrator.backends.slurm.starts import Start, choose
from orchestrator.cli.main import main
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import RunState

NOW = datetime(2026, 11, 21, 12, 0, 0)


def starts(*waits: float | str) -> list[Start]:
    """Largest first; a text is a refusal, -1 an unknown start."""
    return [
        Start(nodes=8 - i, refusal=wait, code=int(Exit.CAPACITY))
        if isinstance(wait, str)
        else Start(nodes=8 - i, at="" if wait < 0 else (NOW + timedelta(seconds=wait)).isoformat())
        for i, wait in enumerate(waits)
    ]


@pytest.mark.parametrize(
    ("waits", "index"),
    [
        ((0,), 0),
        ((10, 0), 0),  # soon enough: the largest
        ((3600, 600), 1),
        ((3600, 7200, 1800, 1800), 2),  # none is soon: the first to start, the larger of equals
        (("too many nodes", 30), 1),
        (("too many nodes", -1), 1),
        ((-1, -1), 0),
    ],
)
def test_the_largest_that_starts_soon(waits, index):
    assert choose(starts(*waits), NOW, within_s=900) == index


def test_none_of_the_sizes():
    with pytest.raises(OrchError, match="none of the sizes 8, 7: first") as refused:
        choose(starts("first", "second"), NOW, 900)
    assert refused.value.exit == Exit.CAPACITY


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8), st.integers(0, 10**6))
def test_nothing_larger_would_have_been_soon_enough(waits, within):
    index = choose(starts(*waits), NOW, within)
    if waits[index] <= within:
        assert all(wait > within for wait in waits[:index])
    else:
        assert waits[index] == min(waits) and min(waits) > within


@pytest.mark.parametrize(
    ("wait", "text"),
    [(-1, "no start in sight"), (5, "starts at once"), (1200, "starts about 2026-11-21 12:20:00, in 20 min"),
     (7500, "in 2 h 05 min"), ("Invalid account", "no start in sight (Invalid account)")],
)  # fmt: skip
def test_what_is_said(wait, text):
    assert starts(wait)[0].text(NOW).endswith(text)


@pytest.mark.parametrize("scontrol", [None, "exit 1", "echo 'Slurmctld(primary) at x is DOWN'", "exec sleep 600"])
def test_a_plan_needs_no_slurm(scontrol, tmp_path, monkeypatch, capsys):
    """Not installed, not configured, not answering: the plan is told without a word of a start."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("orchestrator.backends.slurm.backend._GLANCE_S", 0.5)
    for name in ("scontrol", "sbatch") if scontrol else ():
        (tmp_path / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{scontrol}\n")
        (tmp_path / name).chmod(0o755)
    assert main(["plan", "cluster=h100x64", "model=llama3_8b"]) == 0
    said = capsys.readouterr()
    assert "Time of one step" in said.out and "Slurm" not in said.out and not said.err
    assert not (tmp_path / "home" / "runs").exists()


# ------------------------------------------------------------------------------------------ --after


def wish(how: str, state: str = "running", job: str | None = "7"):
    found = RunState(
        schema="", run_id="a", state=state, created_at=0, updated_at=0, writer="", backend="slurm", plan_hash=""
    )
    return After(how, RunFolder(Path("/runs/a"))), found, job


@pytest.mark.parametrize(
    ("options", "wishes", "dependency"),
    [
        ({}, [wish("ok")], "afterok:7"),
        ({}, [wish("any", job="8_3"), wish("notok")], "afterany:8_3,afternotok:7"),
        ({"dependency": "singleton"}, [wish("ok", "pending")], "singleton,afterok:7"),
        ({}, [wish("ok", "done"), wish("any", "failed"), wish("notok", "stopped")], None),  # no wait is needed
    ],
)
def test_dependencies(options, wishes, dependency):
    found = add_dependencies({"partition": "main", **options}, wishes)
    assert found.get("dependency") == dependency and found["partition"] == "main"


@pytest.mark.parametrize(
    ("options", "found", "text"),
    [
        ({}, wish("ok", "failed"), "would never start"),
        ({}, wish("notok", "done"), "would never start"),
        ({}, wish("ok", "pending", None), "not been submitted"),
        ({"dependency": "afterok:1?afterok:2"}, wish("ok"), "an `or`"),
    ],
)
def test_dependencies_that_cannot_be(options, found, text):
    with pytest.raises(OrchError, match=text) as refused:
        add_dependencies(options, [found])
    assert refused.value.exit == Exit.USAGE


def test_a_resumed_run_waits_for_nobody():
    assert without_dependency({"dependency": "afterok:7,singleton", "qos": "x"}) == {
        "qos": "x",
        "dependency": "singleton",
    }
    assert without_dependency({"dependency": "afterany:7"}) == without_dependency({}) == {}
