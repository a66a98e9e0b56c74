"""A learning rate that breaks where a job goes on from its checkpoints is said before the job is
sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.backends.local.backend import LocalBackend
from orchestrator.cli.main import main
from orchestrator.plan import load_plan
from orchestrator.plan.exits import Exit
from orchestrator.plan.learning_rate import remembered
from orchestrator.plan.worker import CHECKPOINT, MANIFEST
from orchestrator.run.create import create_run_folder
from orchestrator.run.state import finish, read_state, write_state
from tests.beds.bundles import make_bundle

CURVE = {
    "lr": "1e-3",
    "min_lr_ratio": "0.1",
    "warmup_steps": "5",
    "schedule": "cosine",
    "decay_steps": "0",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def words(folder: Path, steps: int, **changes: str) -> list[str]:
    optim = [f"optim.{name}={value}" for name, value in (CURVE | changes).items()]
    shape = ["cluster.nodes=1", "cluster.gpus_per_node=1", "parallel=tp1", "model=tiny"]
    return ["+cluster=local", *shape, *optim, f"train.steps={steps}", f"checkpoint.dir={folder}"]


def saved(capsys, folder: Path, step: int, argv: list[str], changes: dict | None = None) -> Path:
    """The manifest of the checkpoint that a job of these words would have made of a step; of it
    only what is looked at. Returns its file."""
    assert main(["plan", *argv, "--json"]) == Exit.DONE
    Path("plan.json").write_text(capsys.readouterr().out)
    job = load_plan(Path("plan.json")).job
    head = {
        "schema": CHECKPOINT,
        "step": step,
        "scalars": remembered(step, job.optim, job.train.steps),
        "files": [],
    }
    manifest = folder / f"step-{step:08d}" / MANIFEST
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps(head | (changes or {})))
    return manifest


def said(capsys, *job: str) -> list[str]:
    """What a dry run says of the learning rate; the same in both of its shapes."""
    assert main(["submit", *job, "--dry-run"]) == Exit.DONE
    page = " ".join(capsys.readouterr().out.split())
    assert main(["submit", *job, "--dry-run", "--json"]) == Exit.DONE
    unfolded = capsys.readouterr().err.replace("\n      ", " ")
    lines = [line for line in unfolded.splitlines() if "learning rate" in line]
    assert page.count("learning rate jumps") == len(lines)
    return lines


JUMP = "orch: the learning rate jumps from 0.0001 at saved step 20 to "
KEEPS = ": optim.decay_steps=20 keeps the old curve"
BREAKS = {
    "more steps of a cosine": ({}, {}, 40, f"{JUMP}0.00061 at step 21{KEEPS}"),
    "more steps of wsd": (
        {"schedule": "wsd", "decay_steps": "5"},
        {},
        40,
        f"{JUMP}0.001 at step 21",
    ),
    "another peak": ({}, {"lr": "2e-3", "decay_steps": "20"}, 40, f"{JUMP}0.0002 at step 21"),
    "another floor": (
        {},
        {"min_lr_ratio": "0.5", "decay_steps": "20"},
        40,
        f"{JUMP}0.0005 at step 21",
    ),
    "another schedule": ({}, {"schedule": "constant"}, 40, f"{JUMP}0.001 at step 21"),
    "a later end": (
        {"decay_steps": "20"},
        {"decay_steps": "40"},
        40,
        f"{JUMP}0.00061 at step 21{KEEPS}",
    ),
    "a longer warm-up": ({}, {"warmup_steps": "25"}, 40, f"{JUMP}0.00084 at step 21"),
}
GOES_ON = {
    "its end named": ({}, {"decay_steps": "20"}, 40),
    "a fixed end": ({"decay_steps": "20"}, {}, 40),
    "a constant rate": ({"schedule": "constant"}, {}, 40),
    "another warm-up, long past": ({"schedule": "constant"}, {"warmup_steps": "2"}, 40),
    "nothing left to train": ({}, {"lr": "2e-3"}, 20),
    "the same job": ({}, {}, 20),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_said_with_both_rates_and_the_key_that_keeps_the_curve(tmp_path, capsys, name):
    before, after, steps, line = BREAKS[name]
    saved(capsys, tmp_path / "kept", 20, words(tmp_path / "kept", 20, **before))
    assert said(capsys, *words(tmp_path / "kept", steps, **before | after)) == [line]


@pytest.mark.parametrize("name", GOES_ON)
def test_a_curve_that_goes_on_says_nothing(tmp_path, capsys, name):
    before, after, steps = GOES_ON[name]
    saved(capsys, tmp_path / "kept", 20, words(tmp_path / "kept", 20, **before))
    assert said(capsys, *words(tmp_path / "kept", steps, **before | after)) == []


def test_what_cannot_be_read_says_nothing(tmp_path, capsys):
    folder = tmp_path / "kept"
    job = words(tmp_path / "kept", 40)
    assert said(capsys, *job) == [], "no folder"
    folder.write_text("a file")
    assert said(capsys, *job) == []
    folder.unlink()
    good_manifest = saved(capsys, folder, 10, words(folder, 20))
    for damage in (b"{", b"[]", b"\xff", b"[" * 100_000):
        newest = saved(capsys, folder, 20, words(folder, 20))
        newest.write_bytes(damage)
        assert ["saved step 10" in line for line in said(capsys, *job)] == [True], "the one before"
    good_manifest.unlink()
    for head in ({"schema": "orch.checkpoint/99"}, {"scalars": {"loss_scale": 2.0}}, {"step": 10}):
        saved(capsys, folder, 20, words(folder, 20), head)
        assert said(capsys, *job) == []
    saved(capsys, folder, 20, words(folder, 20))
    assert len(said(capsys, *job)) == 1
    assert said(capsys, *job, "backend=kubernetes", "backend.options.image=orch:1") == [], (
        "its pods have other folders"
    )
    assert said(capsys, *job, "--", "true") == [], "a program has its own checkpoints"


def test_a_sweep_says_it_of_the_run_that_breaks(tmp_path, capsys):
    saved(capsys, tmp_path / "kept", 20, words(tmp_path / "kept", 20))
    job = [key for key in words(tmp_path / "kept", 40) if "decay_steps" not in key]
    assert main(["submit", "--multirun", *job, "optim.decay_steps=20,40", "--dry-run"]) == Exit.DONE
    smooth_run, broken = capsys.readouterr().out.split("==> ")[1:]
    assert "learning rate jumps" not in smooth_run and "learning rate jumps" in broken


def test_a_resume_says_it_where_others_have_gone_on_in_the_folder(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "kept"
    saved(capsys, folder, 20, words(folder, 20))
    assert main(["plan", *words(folder, 40), "--json"]) == Exit.DONE
    Path("plan.json").write_text(capsys.readouterr().out)
    plan = load_plan(Path("plan.json"))
    monkeypatch.setattr(LocalBackend, "resume", lambda *_: "local://again")
    for run_id, command, count in (("trainer", (), 1), ("program", ("true",), 0)):
        bundle = make_bundle(plan, tmp_path / "home" / "runs", run_id=run_id, command=command)
        with create_run_folder(bundle, "local") as run:
            write_state(run, finish(read_state(run), "failed", 70, "failed"))
        assert main(["resume", run_id]) == Exit.DONE
        assert (
            capsys.readouterr().err.count("the learning rate jumps from 0.0001 at saved step 20")
            == count
        )
