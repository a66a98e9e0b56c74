"""An unchanged DDP program on two nodes: a worker killed, a node lost, ended and resumed, and it
computes what torchrun's does. Beside torchrun under the same faults: `python -m
benchmarks.programs`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.programs import PROGRAM, STEPS, Orch, measure
from orchestrator.plan.exits import Exit
from tests.backends.test_verbs import home, orch
from tests.patience import PATIENCE_S

__all__ = ["home"]  # the fixture


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [1, pytest.param(2, marks=pytest.mark.full)])
def test_it_goes_on_after_each_and_computes_what_it_does_under_torchrun(tmp_path, ranks_per_node):
    """Each rank imports torch in each attempt: with one rank a node every fault is met at half of
    the cost."""
    score = measure(Orch(tmp_path / "orch", ranks_per_node))
    assert "problem" not in score and (score["ended_code"], score["done_code"]) == (Exit.RESTART, 0)
    folder = tmp_path / "torchrun"
    folder.mkdir()
    (folder / "hurry").touch()
    flags = [
        "--standalone",
        "--max-restarts",
        "5",
        "--nproc-per-node",
        str(2 * ranks_per_node),
        str(PROGRAM),
    ]
    argv = [sys.executable, "-m", "torch.distributed.run", *flags, str(STEPS), str(folder), "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(argv, env=env, check=True, capture_output=True, timeout=PATIENCE_S)
    theirs = {
        int(row[1]): float(row[3])
        for row in map(str.split, (folder / "steps.txt").read_text().splitlines())
    }
    assert score["losses"].keys() == theirs.keys() == set(range(1, STEPS + 1))
    assert score["losses"] == pytest.approx(
        theirs, abs=1e-4
    )  # sums in another order; some steps on one node


@pytest.mark.process
def test_a_program_that_fails_ends_with_1_as_under_torchrun_and_its_own_code_is_told(home, capsys):
    with open("train.py", "w") as file:
        file.write("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    assert subprocess.run(argv, capture_output=True, timeout=PATIENCE_S).returncode == 1
    code, out, _ = orch(capsys, "run", "--nproc-per-node", "2", "train.py")
    assert code == Exit.USER and "exit code 3" in out
