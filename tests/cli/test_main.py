"""The front door: help, exit codes, what happens to bugs, signals and closed pipes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from orchestrator.cli import main as front
from orchestrator.cli import verbs
from orchestrator.cli.verbs import VERBS, version
from orchestrator.config.compose import load
from orchestrator.plan import from_json, load_plan
from orchestrator.plan.exits import MEANING, Exit
from orchestrator.run.request import config_tree

main = front.main
ORCH = [sys.executable, "-m", "orchestrator.cli.main"]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb_and_exit_code(capsys, arguments):
    assert main(arguments) == Exit.DONE
    page = capsys.readouterr().out
    for name, verb in VERBS.items():
        assert f"  {name} " in page and verb.help in " ".join(page.split())
    for code, meaning in MEANING.items():
        assert f"{int(code)} {meaning}" in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= 80


def test_nothing_is_a_wrong_command_line(capsys):
    assert main([]) == Exit.USAGE
    assert "usage: orch" in capsys.readouterr().err


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_keeps_the_contract_and_has_help(capsys, name):
    module = import_module(f"orchestrator.cli.verbs.{name}")
    assert callable(module.add_arguments) and callable(module.run)
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: orch {name}") and "--json" in page
    assert ("key=value" in page) == VERBS[name].overrides


LIGHT = "torch kubernetes submitit rich"


@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        ("--help", f"{LIGHT} hydra omegaconf msgspec numpy yaml argparse asyncio json"),
        ("completion --line orch\\ plan\\ cluster=", "hydra omegaconf msgspec numpy"),
        ("config", f"{LIGHT} numpy requests"),
        ("plan", f"{LIGHT} matplotlib prometheus_client"),
    ],
)
def test_what_a_verb_does_not_import(line, heavy):
    code = (
        "import sys; from orchestrator.cli.main import main; code = main(sys.argv[2:]);"
        "print(code, [m for m in sys.argv[1].split() if m in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, heavy, *shlex.split(line)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.stderr == "0 []\n"


def test_a_bug_is_one_line_and_a_kept_traceback(capsys, monkeypatch, tmp_path):
    def broken(args, overrides):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(version, "run", broken)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("ORCH_DEBUG", raising=False)
    assert main(["version"]) == Exit.INTERNAL
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "RuntimeError: two lines" in err
    (traceback_file,) = tmp_path.iterdir()
    assert str(traceback_file) in err and "in broken" in traceback_file.read_text()
    assert traceback_file.stat().st_mode & 0o077 == 0
    assert main(["version", "--debug"]) == Exit.INTERNAL
    assert "in broken" in capsys.readouterr().err


def test_interrupts_and_closed_pipes_are_quiet(capsys, monkeypatch):
    def interrupted(args, overrides):
        raise KeyboardInterrupt

    monkeypatch.setattr(version, "run", interrupted)
    assert main(["version"]) == front.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_error():
    command = f"{' '.join(ORCH)} config --choices | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", str(front.PIPE_CLOSED))


def test_words_after_the_dashes_are_not_read(monkeypatch):
    seen = {}
    monkeypatch.setitem(verbs.VERBS, "version", verbs.Verb("x", overrides=True, command=True))
    monkeypatch.setattr(
        version, "run", lambda args, overrides: seen.update(vars(args), overrides=overrides)
    )
    assert (
        main(
            [
                "version",
                "a=1",
                "--json",
                "b=2",
                "--",
                "python",
                "t.py",
                "--json",
                "--",
                "x=1",
                "$(y)",
            ]
        )
        == 0
    )
    assert seen["command"] == ["python", "t.py", "--json", "--", "x=1", "$(y)"]
    assert seen["overrides"] == ["a=1", "b=2"] and seen["json"] is True
    assert main(["version", "--"]) == Exit.USAGE


def test_output_survives_an_ascii_terminal():
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([*ORCH, "plan"], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


# ------------------------------------------------------------------------------------------- plan
#     and config


def test_plan_out_writes_what_the_trainer_reads(capsys, tmp_path: Path):
    assert main(["plan", "--out", str(tmp_path / "plan.json"), "--json"]) == 0
    plan = load_plan(tmp_path / "plan.json")
    assert plan == from_json(capsys.readouterr().out) and plan.model.name == "tiny"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_config_prints_what_it_loads(capsys, tmp_path: Path):
    overrides = ["cluster=h100x64", "model=deepseek_v3", "run.name=x1"]
    assert main(["config", *overrides]) == 0
    as_yaml = yaml.safe_load(capsys.readouterr().out)
    assert main(["config", *overrides, "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_yaml == as_json == config_tree(load(overrides))


def test_every_choice_says_what_it_is(capsys):
    assert main(["config", "--choices", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert "llama3_70b" in groups["model"] and all(
        about for files in groups.values() for about in files.values()
    )
