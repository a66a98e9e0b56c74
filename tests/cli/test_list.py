"""`orch list`: which runs are shown."""

from __future__ import annotations

import json
import time

import msgspec
import pytest

from orchestrator.cli.main import main
from orchestrator.plan.exits import Exit
from orchestrator.run.create import create_run_folder
from orchestrator.run.state import finish, read_state, write_state
from tests.beds.bundles import make_bundle
from tests.beds.plans import make_plan

DAY = 86400.0


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Four runs of other states and ages."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    for run_id, state, days in (
        ("tiny-1", "done", 9),
        ("tiny-2", "failed", 2),
        ("big-1", "done", 1),
        ("big-2", "", 0),
    ):
        with create_run_folder(
            make_bundle(make_plan(), tmp_path / "runs", run_id=run_id), "local"
        ) as folder:
            run_state = read_state(folder)
        if state:
            run_state = finish(run_state, state, int(state == "failed"), state)
        else:
            folder.take_lock()  # its processes live
        write_state(
            folder, msgspec.structs.replace(run_state, created_at=time.time() - days * DAY - 60)
        )


def shown(capsys, *filters: str) -> set[str]:
    assert main(["list", *filters, "--json"]) == Exit.DONE
    return {row["state"]["run_id"] for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("filters", "run_ids"),
    [
        ([], {"tiny-1", "tiny-2", "big-1", "big-2"}),
        (["--active"], {"big-2"}),
        (["--state", "done"], {"tiny-1", "big-1"}),
        (["--state", "failed,pending"], {"tiny-2", "big-2"}),
        (["--name", "iny"], {"tiny-1", "tiny-2"}),
        (["--name", "*-1"], {"tiny-1", "big-1"}),
        (["--newer-than", "3d"], {"tiny-2", "big-1", "big-2"}),
        (["--older-than", "1d", "--newer-than", "1w"], {"tiny-2", "big-1"}),
        (["--older-than", "12h", "--state", "done", "--name", "big"], {"big-1"}),
        (["--backend", "local"], {"tiny-1", "tiny-2", "big-1", "big-2"}),
        (["--backend", "slurm"], set()),
    ],
)
def test_what_is_asked_for_is_shown(runs, capsys, filters, run_ids):
    assert shown(capsys, *filters) == run_ids


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        (["--state", "don"], "unknown state 'don'; did you mean 'done'"),
        (["--backend", "slum"], "unknown backend 'slum'; did you mean 'slurm'"),
        (["--newer-than", "3"], "'3' is not an age"),
    ],
)
def test_what_cannot_be_is_one_line(runs, capsys, filters, says):
    assert main(["list", *filters]) == Exit.USAGE
    stderr = capsys.readouterr().err
    assert says in stderr and stderr.count("\n") == 1


def test_the_newest_are_shown_and_the_others_counted(runs, capsys, monkeypatch):
    monkeypatch.setattr("orchestrator.cli.verbs.list._SHOWN", 1)
    for filters in ([], ["--name", "tiny"]):
        assert main(["list", *filters]) == Exit.DONE
        listing = capsys.readouterr().out
        assert (
            len(listing.splitlines()) == 3
            and f"... {3 if not filters else 1} older: orch list --all" in listing
        )
    assert len(shown(capsys, "--all")) == 4
    assert main(["list", "--name", "none"]) == Exit.DONE
    assert capsys.readouterr().out == "no such runs\n"
