"""`orch run` takes torchrun's command line: what it means here, what is not needed, what is refused."""

from __future__ import annotations

import argparse
import json

import pytest
from torch.distributed.run import get_args_parser

from orchestrator.cli.main import main
from orchestrator.cli.parser import make_parser
from orchestrator.cli.verbs import VERBS
from orchestrator.cli.verbs import run as verb


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "a=b.py"):
        (tmp_path / name).touch()


def request(capsys, *words: str) -> dict:
    assert main(["run", "--dry-run", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words: str) -> str:
    assert main(["run", *words]) == 64
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_every_flag_of_torchrun_is_known_or_refused_by_name():
    """Against the installed torch's own parser: a flag that it gains is to be decided on here."""
    parser = make_parser("run", VERBS["run"])
    verb.add_arguments(parser)
    ours = set(parser._option_string_actions)
    theirs = {
        option
        for action in get_args_parser()._actions
        for option in action.option_strings
        if not isinstance(action, argparse._HelpAction) and "completion" not in option
    }
    assert theirs - ours == set()


@pytest.mark.parametrize("flags", [["--nnodes", "2", "--nproc-per-node", "3"], ["--nnodes=2", "--nproc_per_node=3"]])
def test_nodes_and_workers_on_each(capsys, flags):
    found = request(capsys, *flags, "train.py", "--nnodes", "9", "x=1")
    assert (found["nodes"], found["gpus_per_node"], found["summary"]["world_size"]) == (2, 3, 6)
    assert found["worker"]["argv"][1:] == ["-u", "train.py", "--nnodes", "9", "x=1"]  # all after the script is its own
    assert found["code"]["kind"] == "none" and found["policy"]["max_restarts"] == 0


def test_a_range_of_nodes_is_elastic(capsys):
    found = request(capsys, "--nnodes", "2:4", "--nproc-per-node", "2", "-m", "pkg.train", "--lr", "1")
    assert found["sizes"] == [4, 3, 2] and found["policy"]["max_restarts"] == 3
    assert found["worker"]["argv"][1:] == ["-u", "-m", "pkg.train", "--lr", "1"]
    assert request(capsys, "--nnodes", "1:2", "--max-restarts", "7", "train.py")["policy"]["max_restarts"] == 7


def test_overrides_come_before_the_script_and_a_script_may_hold_an_equals_sign(capsys):
    for words in (["run.name=mine", "--nproc-per-node", "2"], ["--nproc-per-node", "2", "run.name=mine"]):
        found = request(capsys, *words, "a=b.py", "c=d")
        assert found["run_id"].startswith("mine-") and found["worker"]["argv"][2:] == ["a=b.py", "c=d"]
    assert request(capsys, "--no-python", "/bin/echo", "hi")["worker"]["argv"] == ["/bin/echo", "hi"]


def test_pet_variables_are_torchrun_s_defaults(capsys, monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert request(capsys, "train.py")["summary"]["world_size"] == 4
    assert request(capsys, "--nproc-per-node", "2", "train.py")["summary"]["world_size"] == 2


def test_what_is_not_needed_is_said(capsys):
    assert main(["run", "--standalone", "--rdzv-backend", "c10d", "-t", "3", "--dry-run", "--json", "train.py"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" is not needed")[0] for line in said] == ["orch: --rdzv-backend", "orch: --tee"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "needs a script"),
        (["--nnodes", "4:2", "train.py"], "--nnodes 4:2: the smaller number comes first"),
        (["--nnodes", "two", "train.py"], "--nnodes 'two' is not a number"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node '0' is not a number of at least 1"),
        (["--node-rank", "1", "train.py"], "--node-rank is not for orch run"),
        (["--log-dir", "x", "train.py"], "--log-dir is not for orch run: logs are in the run's folder"),
        (["--virtual-local-rank", "train.py"], "--virtual-local-rank is not for orch run"),
        (["--module", "--no-python", "train.py"], "exclude each other"),
    ],
)
def test_what_is_not_there_is_refused_by_name(capsys, words, line):
    assert line in refused(capsys, *words)
