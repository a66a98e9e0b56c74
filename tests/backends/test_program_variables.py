"""Which variables of the shell a program gets: all on this machine, elsewhere those of a list; which not, is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.run.folder import RunFolder
from orchestrator.run.variables import all_names, dropped_names, matching
from tests.beds.bundles import wait_end

from .test_verbs import home, orch, program

__all__ = ["home"]  # the fixture

SLURM = ("backend=slurm", "backend.options.topology=none", "cluster=h100x64", "parallel=tp8")
SHELL = ["WANDB_MODE", "WANDB_API_KEY", "DATA", "HF_TOKEN", "BASH_FUNC_module%%", "PWD", "RANK", "ORCH_HOME", "A\nB"]


@pytest.mark.process
def test_on_this_machine_a_program_has_every_variable_and_no_value_is_written_down(home, capsys, monkeypatch):
    monkeypatch.setenv("MY_DATA", "/data/of-mine")
    monkeypatch.setenv("HF_TOKEN", "hf_never-in-a-file")
    monkeypatch.setenv("RANK", "99")
    program("import os; print(os.environ['MY_DATA'], len(os.environ['HF_TOKEN']), os.environ['RANK'])")
    code, out, err = orch(capsys, "submit", "nproc=1", "--json", "--", "python", "my_train.py")
    assert code == 0, err
    assert "not passed on" not in err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done"
    assert folder.rank_log(0).read_text().split("\n")[-2] == "/data/of-mine 18 0"
    kept = [path for path in Path(home).rglob("*") if path.is_file()]
    assert len(kept) > 5 and not [path for path in kept if b"hf_never-in-a-file" in path.read_bytes()]


def test_elsewhere_those_that_are_not_passed_on_are_said(home, capsys, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MY_DATA"):
        monkeypatch.setenv(name, "x")
    program("")
    words = ("--dry-run", *SLURM)
    _, out, _ = orch(capsys, "submit", *words, "--", "python", "my_train.py")
    said = next(line for line in out.splitlines() if line.startswith("variables not passed on: "))
    assert "--env NAME" in said and "backend.pass_env" in said
    script = ("--dry-run", "--json", *SLURM, "backend.pass_env=[WANDB_*,MY_DATA]")
    _, out, _ = orch(capsys, "submit", *script, "--", "python", "my_train.py")
    names = json.loads(out)["environment"]["names"]
    assert {"WANDB_MODE", "MY_DATA"} <= set(names) and "WANDB_API_KEY" not in names


def test_a_pattern_that_is_none_is_refused(home, capsys):
    program("")
    code, _, err = orch(
        capsys, "submit", "--dry-run", *SLURM, "backend.pass_env=['A B']", "--", "python", "my_train.py"
    )
    assert code == 64 and "backend.pass_env" in err and "* for any" in err


def test_patterns_mean_no_secret_and_names_do():
    assert matching(SHELL, ["*"]) == ["DATA", "WANDB_MODE"]
    assert matching(SHELL, ["WANDB_*", "HF_TOKEN"]) == ["HF_TOKEN", "WANDB_MODE"]
    assert matching(SHELL, []) == []


def test_what_belongs_to_a_shell_or_another_launch_is_nobodys():
    assert all_names(SHELL) == ["DATA", "HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE"]
    assert dropped_names([*SHELL, "SSH_TTY", "XDG_RUNTIME_DIR"], ["DATA"]) == [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "WANDB_MODE",
    ]
