"""`orch rm`, `orch gc` and `orch paths` on folders of runs: ended ones go, whole, and no other."""

from __future__ import annotations

import json

import msgspec
import pytest

from orchestrator.cli.main import main
from orchestrator.plan import seal
from orchestrator.plan.exits import Exit
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder
from orchestrator.run.registry import register
from orchestrator.run.removal import byte_count, seconds
from orchestrator.run.state import finish, read_state, write_state
from tests.beds.bundles import make_bundle
from tests.beds.plans import make_plan


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Makes a run that ended so many seconds before now; None: that has not ended, and whose
    processes live."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    locks = []

    def make(
        run_id: str,
        ended_at: float | None,
        size: int = 0,
        runs=None,
        plan=None,
    ) -> RunFolder:
        with create_run_folder(
            make_bundle(plan or make_plan(), runs or tmp_path / "runs", run_id=run_id), "local"
        ) as folder:
            (folder.checkpoints / "weights").write_bytes(b"x" * size)
        if ended_at is None:
            locks.append(folder.take_lock())
        else:
            state = finish(read_state(folder), "done", 0, "done")
            write_state(folder, msgspec.structs.replace(state, ended_at=ended_at))
        return folder

    return make


def test_ended_runs_go_whole_also_those_in_other_folders(make_run, tmp_path, capsys):
    home_run = make_run("here-1", 1.0)
    outside_run = make_run("other-1", 1.0, runs=tmp_path / "elsewhere")
    register(tmp_path, outside_run)
    assert main(["rm", "here-1", "other", "--dry-run"]) == Exit.DONE
    assert (
        home_run.path.exists()
        and outside_run.path.exists()
        and "would remove  here-1" in capsys.readouterr().out
    )
    assert main(["rm", "here-1", "other-1", "--json"]) == Exit.DONE
    assert [row["run_id"] for row in json.loads(capsys.readouterr().out)] == ["here-1", "other-1"]
    assert not list((tmp_path / "runs").iterdir()) and not list((tmp_path / "elsewhere").iterdir())


def test_of_several_runs_none_goes_where_one_lives(make_run, capsys):
    ended = make_run("ended-1", 1.0)
    alive = make_run("alive-1", None)
    assert main(["rm", "ended-1", "alive-1"]) == Exit.USAGE
    assert "run alive-1 is pending: cancel it first" in capsys.readouterr().err
    assert ended.path.exists() and alive.path.exists()


def test_the_oldest_go_until_the_rest_fits_and_the_newest_stay(make_run, tmp_path, capsys):
    now = 1e9
    runs = [make_run(f"run-{index}", now + index, size=1 << 20) for index in range(5)]
    alive = make_run("alive-1", None, size=1 << 20)
    (tmp_path / "runs" / ".removed-broken-off").mkdir()
    assert main(["gc", "--size", "4M", "--keep", "2", "--json"]) == Exit.DONE
    removed_ids = [row["run_id"] for row in json.loads(capsys.readouterr().out)]
    assert removed_ids == ["run-0", "run-1", "run-2"]
    assert [run.path.exists() for run in runs] == [False] * 3 + [True] * 2 and alive.path.exists()
    assert not (tmp_path / "runs" / ".removed-broken-off").exists()


def test_the_young_stay(make_run, capsys):
    old = make_run("old-1", 1.0)
    young = make_run("young-1", 4e9)
    assert main(["gc", "--keep", "0"]) == Exit.DONE
    assert not old.path.exists() and young.path.exists()
    assert "1 run, " in capsys.readouterr().out


def test_the_best_of_each_model_stay(make_run, capsys):
    losses = {"a-1": 2.0, "a-2": 1.0, "a-3": 3.0, "a-4": None, "b-1": 9.0, "b-2": 8.0}
    runs = {name: make_run(name, 1.0) for name in losses}
    for name, loss in losses.items():
        runs[name].report.write_text(json.dumps({"loss": {"first": 0.0, "last": loss}}))
        if name.startswith("b"):
            request = json.loads(runs[name].request.read_text())
            request["summary"] |= {"model": "another"}
            runs[name].request.write_text(json.dumps(request))
    runs["a-3"].report.write_text("torn {")
    assert main(["gc", "--keep", "0", "--keep-best", "1"]) == Exit.DONE
    assert [name for name, run in runs.items() if run.path.exists()] == ["a-2", "b-2"]
    assert main(["gc", "--keep", "0"]) == Exit.DONE
    assert not runs["a-2"].path.exists()


def test_a_run_in_whose_folder_another_saves_stays_as_long_as_that_one(make_run, capsys):
    plan = make_plan()
    owner = make_run("owner-1", 1.0)
    checkpoint = msgspec.structs.replace(plan.job.checkpoint, dir=str(owner.checkpoints))
    job = msgspec.structs.replace(plan.job, checkpoint=checkpoint)
    guest = make_run("guest-1", 2.0, plan=seal(msgspec.structs.replace(plan, job=job)))
    assert main(["gc", "--keep", "1"]) == Exit.DONE and owner.path.exists()
    assert main(["rm", "owner-1"]) == Exit.USAGE and owner.path.exists()
    assert "run guest-1 saves in the folder of run owner-1" in capsys.readouterr().err
    assert main(["rm", "owner-1", "guest-1"]) == Exit.DONE
    assert not owner.path.exists() and not guest.path.exists()


@pytest.mark.parametrize(
    "options", [["--older-than", "3"], ["--size", "lots"], ["--keep", "-1"], ["--keep-best", "-1"]]
)
def test_what_is_no_age_size_or_number_removes_nothing(make_run, options, capsys):
    old = make_run("old-1", 1.0)
    assert main(["gc", *options]) == Exit.USAGE and old.path.exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_ages_and_sizes():
    assert [seconds("90m"), seconds("12h"), seconds("4w")] == [5400, 43200, 2419200]
    assert [byte_count("500M"), byte_count("20GiB"), byte_count("7")] == [500 << 20, 20 << 30, 7]


def test_paths_of_the_user_and_of_a_run(make_run, tmp_path, capsys):
    folder = make_run("here-1", 1.0)
    assert main(["paths", "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["runs"] == str(tmp_path / "runs")
    assert main(["paths", "here"]) == Exit.DONE
    assert ["checkpoints", str(folder.checkpoints)] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
