"""What is decided before a job is sent: whether it fits, which size starts first, which jobs it
waits for. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.base import After
from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.backends.slurm.preflight import (
    StartEstimate,
    add_dependencies,
    check_partition,
    choose_size,
    local_folder,
    warnings,
    without_dependency,
)
from orchestrator.cli.main import main
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import save_seconds
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import RunState
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan
from tests.beds.recorded_runs import environment, restore

PLAN = make_plan(tp=2, dp=4, nodes=4)
MAIN = {"PartitionName": "main", "MaxTime": "1-00:00:00", "DefaultTime": "00:30:00", "MaxNodes": "UNLIMITED",
        "TotalNodes": "8", "GraceTime": "20", "PreemptMode": "REQUEUE"}  # fmt: skip


def test_a_job_that_fits_is_accepted():
    check_partition(PLAN, SlurmOptions(time="1-00:00:00"), MAIN)
    check_partition(PLAN, SlurmOptions(), {})
    assert warnings(PLAN, SlurmOptions(), MAIN, 30) == []


@pytest.mark.parametrize(
    ("options", "partition", "exit", "complaint"),
    [
        ({"time": "1-00:00:01"}, {}, Exit.CONFIG, "over the 1-00:00:00 that partition main allows"),
        ({"time": "UNLIMITED"}, {}, Exit.CONFIG, "main allows"),
        ({}, {"MaxNodes": "3"}, Exit.CONFIG, "needs 4 nodes, partition main allows 3"),
        ({}, {"TotalNodes": "2"}, Exit.CAPACITY, "partition main has 2"),
    ],
)
def test_what_would_wait_for_ever_is_refused(options, partition, exit, complaint):
    with refusal(complaint, exit):
        check_partition(PLAN, SlurmOptions(**options), MAIN | partition)


def test_a_save_that_does_not_fit_is_a_warning():
    slow = SlurmOptions(checkpoint_gb_per_s=1e-12, notice_s=60)
    assert save_seconds(PLAN, 1e-12) > 60
    warning_text = " ".join(warnings(PLAN, slow, MAIN, 5))
    assert (
        "raise backend.options.notice_s" in warning_text
        and "preempted job of partition main has 20 s" in warning_text
    )
    assert "preempted" not in " ".join(warnings(PLAN, slow, MAIN | {"PreemptMode": "OFF"}, 5))


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"time": "2", "notice_s": 180}, "the signal comes at once"),
        ({"requeue": False}, "requeue is false"),
    ],
)
def test_other_warnings(options, warning):
    assert any(warning in line for line in warnings(PLAN, SlurmOptions(**options), MAIN, 30))


# ------------------------------------------------------------------------------------------ starts

NOW = datetime(2026, 11, 21, 12, 0, 0)


def starts(*waits: float | str) -> list[StartEstimate]:
    """Largest first; a text is a refusal, -1 an unknown start."""
    return [
        (
            StartEstimate(nodes=8 - i, refusal=wait, code=int(Exit.CAPACITY))
            if isinstance(wait, str)
            else StartEstimate(
                nodes=8 - i, at="" if wait < 0 else (NOW + timedelta(seconds=wait)).isoformat()
            )
        )
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
    assert choose_size(starts(*waits), NOW, within_s=900) == index


def test_none_of_the_sizes():
    with refusal("none of the sizes 8, 7: first", Exit.CAPACITY):
        choose_size(starts("first", "second"), NOW, 900)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8), st.integers(0, 10**6))
def test_nothing_larger_would_have_been_soon_enough(waits, within):
    index = choose_size(starts(*waits), NOW, within)
    if waits[index] <= within:
        assert all(wait > within for wait in waits[:index])
    else:
        assert waits[index] == min(waits) and min(waits) > within


@pytest.mark.parametrize(
    ("wait", "phrase"),
    [(-1, "no start in sight"), (5, "starts at once"), (1200, "starts about 2026-11-21 12:20:00, in 20 min"),
     (7500, "in 2 h 05 min"), ("Invalid account", "no start in sight (Invalid account)")],
)  # fmt: skip
def test_the_phrase_for_people(wait, phrase):
    assert starts(wait)[0].describe(NOW).endswith(phrase)


@pytest.mark.parametrize(
    "scontrol", [None, "exit 1", "echo 'Slurmctld(primary) at x is DOWN'", "exec sleep 600"]
)
def test_a_plan_needs_no_slurm(scontrol, tmp_path, monkeypatch, capsys):
    """Not installed, not configured, not answering: the plan is printed without a start."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("orchestrator.backends.slurm.backend._PLAN_TIMEOUT_S", 0.5)
    for name in ("scontrol", "sbatch") if scontrol else ():
        (tmp_path / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{scontrol}\n")
        (tmp_path / name).chmod(0o755)
    assert main(["plan", "cluster=h100x64", "model=llama3_8b"]) == 0
    printed = capsys.readouterr()
    assert "Time of one step" in printed.out and "Slurm" not in printed.out and not printed.err
    assert not (tmp_path / "home" / "runs").exists()


# ------------------------------------------------------------------------------------------ --after


def after(condition: str, state: str = "running", job: str | None = "7"):
    fields = {"schema": "", "run_id": "a", "writer": "", "backend": "slurm", "plan_hash": ""}
    run_state = RunState(**fields, state=state, created_at=0, updated_at=0)
    return After(condition, RunFolder(Path("/runs/a"))), run_state, job


@pytest.mark.parametrize(
    ("options", "awaited_runs", "dependency"),
    [
        ({}, [after("ok")], "afterok:7"),
        ({}, [after("any", job="8_3"), after("notok")], "afterany:8_3,afternotok:7"),
        ({"dependency": "singleton"}, [after("ok", "pending")], "singleton,afterok:7"),
        (
            {},
            [after("ok", "done"), after("any", "failed"), after("notok", "stopped")],
            None,
        ),  # no wait is needed
    ],
)
def test_dependencies(options, awaited_runs, dependency):
    new_options = add_dependencies({"partition": "main", **options}, awaited_runs)
    assert new_options.get("dependency") == dependency and new_options["partition"] == "main"


@pytest.mark.parametrize(
    ("options", "awaited_run", "complaint"),
    [
        ({}, after("ok", "failed"), "would never start"),
        ({}, after("notok", "done"), "would never start"),
        ({}, after("ok", "pending", None), "not been submitted"),
        ({"dependency": "afterok:1?afterok:2"}, after("ok"), "an `or`"),
    ],
)
def test_dependencies_that_cannot_be(options, awaited_run, complaint):
    with refusal(complaint, Exit.USAGE):
        add_dependencies(options, [awaited_run])


def test_a_resumed_run_waits_for_nobody():
    rest = {"qos": "x", "dependency": "singleton"}
    assert without_dependency({"dependency": "afterok:7,singleton", "qos": "x"}) == rest
    assert without_dependency({"dependency": "afterany:7"}) == without_dependency({}) == {}


@pytest.mark.parametrize(
    ("run_dir", "warned"),
    [
        ("/home/u/runs/a", False),
        ("/tmp/u/a", True),
        ("/tmp/shared/a", False),  # something is mounted there
        ("/scratch/a", True),  # in memory
        ("/tmpx/a", True),  # on this machine's disk
        ("/nvme/u/a", True),
        ("/local/u/a", True),
        ("/lustre/u/a", False),
        ("/export/home/u/a", False),  # this machine is the server
        ("/export/homes/a", True),
        ("/data/a", False),
    ],
)
def test_a_run_folder_of_one_machine_is_warned_of(run_dir, warned):
    mounts = (
        "/dev/sda1 / ext4 rw 0 0\nfs:/home /home nfs4 rw 0 0\nfs:/s /tmp/shared nfs4 rw 0 0\nx"
        " /scratch tmpfs rw 0 0\n/dev/nvme0n1 /nvme xfs rw 0 0\npool/l /local zfs rw 0"
        " 0\n10.0.0.1@o2ib:/l /lustre lustre rw 0 0\n/dev/sdb /export ext4 rw 0 0\npool/d /data zfs"
        " rw 0 0\n"
    )
    exports = "# folders for nodes\n\n/export/home 10.0.0.0/8(rw,sync)\n/data\t*(rw)\n"
    assert bool(local_folder(run_dir, mounts, exports)) == warned


@pytest.mark.parametrize("name", ["local", "kubernetes"])
def test_a_run_of_another_backend_cannot_be_waited_for(monkeypatch, tmp_path, capsys, name):
    """Said before Slurm is asked for anything, and nothing is written."""
    for variable, value in environment(tmp_path).items():
        monkeypatch.setenv(variable, value)
    restore(name, tmp_path)
    overrides = [
        "backend=slurm",
        "cluster=h100x64",
        "parallel=tp8",
        "--after",
        f"any:{name}",
        "--",
        "/bin/true",
    ]
    for verb in (["submit"], ["submit", "--dry-run"]):
        assert main([*verb, *overrides]) == Exit.USAGE
        stderr = capsys.readouterr().err
        assert (
            f"--after: run {name} is of the backend {name}, not slurm" in stderr
            and len(stderr.splitlines()) == 1
        )
    assert [run.name for run in (tmp_path / "orch" / "runs").iterdir()] == [name]
