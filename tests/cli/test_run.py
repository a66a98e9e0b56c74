"""`orch run` takes torchrun's command line: what it means here, what is not needed, what is
refused."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from orchestrator.backends.local import gpus as machine
from orchestrator.cli.main import main
from orchestrator.cli.parser import make_parser
from orchestrator.cli.verbs import VERBS
from orchestrator.cli.verbs import run as verb
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = "cluster=local_nodes"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "a=b.py"):
        (tmp_path / name).touch()


def request(capsys, *arguments: str) -> dict:
    assert main(["run", "--dry-run", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments: str) -> str:
    assert main(["run", *arguments]) == 64
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


@pytest.mark.parametrize(
    "flags", [["--nnodes", "2", "--nproc-per-node", "3"], ["--nnodes=2", "--nproc_per_node=3"]]
)
def test_nodes_and_workers_on_each(capsys, flags):
    parsed = request(capsys, SIMULATED, *flags, "train.py", "--nnodes", "9", "x=1")
    assert (parsed["nodes"], parsed["gpus_per_node"], parsed["summary"]["world_size"]) == (2, 3, 6)
    assert parsed["worker"]["argv"][1:] == [
        "-u",
        "train.py",
        "--nnodes",
        "9",
        "x=1",
    ]  # all after the script is its own
    assert parsed["code"]["kind"] == "none" and parsed["policy"]["max_restarts"] == 0


@pytest.mark.parametrize(
    ("fed", "notice_count"), [("pipe", 1), ("file", 1), ("empty", 0), ("null", 0), ("closed", 0)]
)
def test_what_is_piped_in_and_not_passed_on_is_said(tmp_path, fed, notice_count):
    input_file = tmp_path / "text"
    input_file.write_text("hello" if fed == "file" else "")
    argv = [sys.executable, "-m", "orchestrator.cli.main", "run", "--dry-run", "--json", "train.py"]
    closed = ["bash", "-c", 'exec "$@" <&-', "bash"] if fed == "closed" else []
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with input_file.open() as file:
        stdin = (
            {"input": "hello"}
            if fed == "pipe"
            else {"stdin": subprocess.DEVNULL if fed == "null" else file}
        )
        done = subprocess.run(
            [*closed, *argv], env=env, capture_output=True, text=True, timeout=PATIENCE_S, **stdin
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("standard input is not passed on") == notice_count


@pytest.fixture
def gpus(monkeypatch):
    """Makes orch see so many GPUs in this machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda count: monkeypatch.setattr(machine, "gpus_here", lambda: count)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 8),
        ("", 0),
        ("-1", 0),
        ("3", 1),
        ("0,1, 5", 3),
        ("0,-1,2", 1),
        ("GPU-a1,GPU-b2", 2),
        ("9", 0),
    ],
)
def test_as_many_workers_as_the_program_sees_gpus(capsys, monkeypatch, gpus, visible, count):
    gpus(8)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if count:
        assert request(capsys, "--nproc-per-node", "gpu", "train.py")["gpus_per_node"] == count
    else:
        assert "--nproc-per-node gpu: this machine has no GPU" in refused(
            capsys, "--nproc-per-node", "gpu", "train.py"
        )


@pytest.mark.parametrize("flags", [["--nnodes", "2"], ["--nnodes", "1:2"]])
@pytest.mark.parametrize("as_json", [True, False])
def test_nodes_that_are_simulated_are_said(capsys, flags, as_json):
    shown = ["--json"] if as_json else []
    argv = ["run", "--dry-run", *shown, SIMULATED, *flags, "--nproc-per-node", "3", "train.py"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "2 nodes of 3 workers are simulated on this machine" in (
        captured.err if as_json else captured.out
    )
    assert main(["run", "--dry-run", *shown, "--nproc-per-node", "3", "train.py"]) == 0
    captured = capsys.readouterr()
    assert "simulated on this machine" not in captured.out + captured.err


def refusal_of(capsys, *arguments: str) -> str:
    assert main([*arguments, "train.py"]) == 65
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_no_two_workers_are_put_on_one_gpu(capsys, monkeypatch, gpus):
    """Simulated nodes number their workers from 0 each. Where the GPUs are not enough for all, they
    are refused."""
    gpus(4)
    for nodes, node_count in (("2", 2), ("1:2", 2), ("3", 3)):
        stderr = refusal_of(capsys, "run", SIMULATED, "--nnodes", nodes, "--nproc-per-node", "4")
        assert (
            f"{node_count} simulated nodes of 4 workers on 4 GPUs would put two workers on one GPU"
            in stderr
        )
    argv = ("submit", "--in-place", SIMULATED, "cluster.gpus_per_node=2", "nodes=1..2")
    stderr = refusal_of(capsys, *argv, "backend.options.spare_nodes=1", "--", "python")
    assert "3 simulated nodes of 2 workers on 4 GPUs" in stderr
    for flags in (
        [SIMULATED, "--nnodes", "2", "--nproc-per-node", "2"],
        ["--nproc-per-node", "4"],
        ["--nproc-per-node", "6"],
    ):
        assert main(["run", "--dry-run", *flags, "train.py"]) == 0
        assert "would be refused" not in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    argv = ["run", "--dry-run", SIMULATED, "--nnodes", "2", "--nproc-per-node", "4", "train.py"]
    assert main(argv) == 0
    assert "would be refused" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "overrides", "size", "ranks"),
    [
        (8, ["nproc=8"], 8, 8),
        (8, ["nproc=5"], 8, 5),
        (4, ["parallel=tp2"], 4, 4),
        (8, ["nodes=1"], 8, 8),
        (4, ["nproc=6", "cluster.gpus_per_node=6"], 6, 6),
        (8, ["backend.env.CUDA_VISIBLE_DEVICES=2,3"], 2, 2),
        (8, ["model=tiny", "parallel=tp2"], 8, 8),
        (0, ["nproc=16"], 16, 16),
        (0, ["parallel=tp4_pp4"], 16, 16),
        (0, ["parallel=tp4_ep4"], 16, 16),
        (0, ["parallel=tp2"], 8, 8),
    ],
)
def test_a_program_gets_this_machine_as_one_node(capsys, gpus, count, overrides, size, ranks):
    """The node has the GPUs that the program sees. Without GPUs it has as many processes as the
    program asks for."""
    gpus(count)
    code = main(["submit", "--dry-run", "--json", *overrides, "--", "python", "train.py"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    parsed = json.loads(captured.out)
    assert (parsed["nodes"], parsed["gpus_per_node"]) == (1, size)
    assert parsed["summary"]["world_size"] == ranks
    assert "are simulated" not in captured.err


@pytest.mark.parametrize(
    ("argv", "nodes"),
    [
        (["run", "--nnodes", "2"], 2),
        (["run", "--nnodes", "1:2"], 2),
        (["run", "nodes=3"], 3),
        (["submit", "nodes=2", "--", "python"], 2),
        (["submit", "nodes=1:4", "--", "python"], 4),
        (["submit", "cluster.nodes=2", "nproc=4", "--", "python"], 2),
        (["submit", "model=tiny", "cluster.nodes=2", "--", "python"], 2),
    ],
)
def test_a_program_on_several_nodes_of_one_machine_is_refused(capsys, gpus, argv, nodes):
    gpus(4)
    assert refusal_of(capsys, *argv) == (
        f"orch: error: a program on {nodes} nodes, but this machine is one: cluster=local_nodes"
        " simulates several nodes on it; for one node leave the number out\n"
    )


def test_more_workers_than_gpus_are_refused(capsys, gpus):
    gpus(4)
    for overrides in (["nproc=6"], ["parallel=tp3_pp2"]):
        assert refusal_of(capsys, "submit", *overrides, "--", "python") == (
            "orch: error: 6 workers, but this machine has 4 GPUs for the program:"
            " cluster.gpus_per_node=6 lets workers share them, and CUDA_VISIBLE_DEVICES= is for a"
            " program that uses none\n"
        )


def test_gpu_means_the_node_of_another_machine_s_description(capsys, gpus):
    """Only the described cluster counts there, not the GPUs of this machine."""
    gpus(2)
    flags = ["--nnodes", "2", "cluster=h100x64", "backend=slurm", "backend.options.topology=none"]
    for count in ("gpu", "auto"):
        parsed = request(capsys, "--nproc-per-node", count, *flags, "parallel=tp8", "train.py")
        assert (parsed["nodes"], parsed["gpus_per_node"]) == (2, 8)
        assert parsed["summary"]["world_size"] == 16
    alone = request(capsys, "--nproc-per-node", "gpu", *flags[2:], "--nnodes", "1:2", "train.py")
    assert (alone["gpus_per_node"], alone["sizes"]) == (8, [2, 1]), "its layout is for a model"
    refusal = refused(capsys, "--nproc-per-node", "cpu", *flags, "train.py")
    assert "would count the cores of this machine, not those of cluster h100x64" in refusal


@pytest.mark.parametrize("typed", ["2:4", "2..4"])
def test_a_range_of_nodes_is_elastic(capsys, typed):
    module = ("-m", "pkg.train", "--lr", "1")
    parsed = request(capsys, SIMULATED, "--nnodes", typed, "--nproc-per-node", "2", *module)
    in_words = request(capsys, SIMULATED, f"nodes={typed}", "--nproc-per-node", "2", *module)
    assert in_words["plan_hash"] == parsed["plan_hash"] and in_words["sizes"] == parsed["sizes"]
    assert parsed["sizes"] == [4, 3, 2]
    assert parsed["policy"]["max_restarts"] == in_words["policy"]["max_restarts"] == 3
    submission = ["submit", SIMULATED, f"nodes={typed}", "--dry-run", "--json", "--", "python"]
    assert main(submission) == 0
    assert json.loads(capsys.readouterr().out)["sizes"] == [4, 3, 2]
    assert parsed["worker"]["argv"][1:] == ["-u", "-m", "pkg.train", "--lr", "1"]
    assert (
        request(capsys, SIMULATED, "--nnodes", "1:2", "--max-restarts", "7", "train.py")["policy"][
            "max_restarts"
        ]
        == 7
    )


def test_overrides_come_before_the_script_and_a_script_may_hold_an_equals_sign(capsys):
    for overrides in (
        ["run.name=mine", "--nproc-per-node", "2"],
        ["--nproc-per-node", "2", "run.name=mine"],
    ):
        parsed = request(capsys, *overrides, "a=b.py", "c=d")
        assert parsed["run_id"].startswith("mine-") and parsed["worker"]["argv"][2:] == [
            "a=b.py",
            "c=d",
        ]
    assert request(capsys, "--no-python", "/bin/echo", "hi")["worker"]["argv"] == [
        "/bin/echo",
        "hi",
    ]


def test_pet_variables_are_torchrun_s_defaults(capsys, monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert request(capsys, "train.py")["summary"]["world_size"] == 4
    assert request(capsys, "--nproc-per-node", "2", "train.py")["summary"]["world_size"] == 2
    for value, words in (("1", ["-m", "pkg.train"]), ("0", ["pkg.train"])):
        monkeypatch.setenv("PET_MODULE", value)
        monkeypatch.setenv("PET_VIRTUAL_LOCAL_RANK", "0")
        assert request(capsys, "pkg.train")["worker"]["argv"][2:] == words


@pytest.mark.parametrize(
    ("argv", "started"),
    [
        (["--no-python", "--", "./prog", "--", "x"], ["./prog", "--", "x"]),
        (["-m", "--", "pkg.train"], ["-m", "pkg.train"]),
        (["run.name=mine", "--", "train.py"], ["train.py"]),
    ],
)
def test_two_dashes_end_the_flags(capsys, argv, started):
    command = request(capsys, *argv)["worker"]["argv"]
    assert command[-len(started) :] == started and command.count("--") == started.count("--")


def test_what_is_not_needed_is_said(capsys):
    flags = ["--standalone", "--rdzv-backend", "c10d", "-t", "3", "--numa-binding=node"]
    assert main(["run", *flags, "--dry-run", "--json", "train.py"]) == 0
    lines = capsys.readouterr().err.splitlines()
    notices = [line for line in lines if line.startswith("orch: --")]
    assert [line.split(" is not needed")[0] for line in notices] == [
        "orch: --rdzv-backend",
        "orch: --tee",
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "needs a script"),
        (["--nnodes", "4:2", "train.py"], "--nnodes 4..2 is empty: the smaller number comes first"),
        (["nodes=4:2", "train.py"], "nodes=4..2 is empty: the smaller number comes first"),
        (["--nnodes", "two", "train.py"], "'--nnodes two': must be a number of nodes like 4, or a"),
        (["nodes=two", "train.py"], "'nodes=two': must be a number of nodes like 4, or a range"),
        (["--nnodes", "1:999", "train.py"], "--nnodes 1..999 holds 999 sizes, at most 256"),
        (
            ["--nproc-per-node", "0", "train.py"],
            "--nproc-per-node '0': must be a whole number, at least 1",
        ),
        (["--node-rank", "1", "train.py"], "orch run does not support torchrun's --node-rank"),
        (
            ["--log-dir", "x", "train.py"],
            "orch run does not support torchrun's --log-dir: logs are in the folder of the run",
        ),
        (
            ["--numa-binding", "socket", "train.py"],
            "orch run does not support --numa-binding 'socket'; legal: node",
        ),
        (
            ["--virtual-local-rank", "train.py"],
            "orch run does not support torchrun's --virtual-local-rank",
        ),
        (["--module", "--no-python", "train.py"], "exclude each other"),
    ],
)
def test_what_is_not_there_is_refused_by_name(capsys, arguments, line):
    assert line in refused(capsys, *arguments)
