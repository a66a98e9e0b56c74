"""Programs of users on two nodes: a worker killed, a node lost, ended and resumed, and they compute
what they do under torchrun. Beside torchrun under the same faults: `python -m
benchmarks.programs`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.programs import PROGRAMS, Orch, Program, measure
from orchestrator.plan.exits import Exit
from tests.backends.test_verbs import home, orch
from tests.patience import PATIENCE_S

__all__ = ["home"]  # the fixture
FULL = pytest.mark.full
CASES = [
    pytest.param("ddp", 1),
    *(pytest.param(name, 2, marks=FULL) for name in PROGRAMS),
]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks_per_node"), CASES)
def test_it_goes_on_after_each_and_computes_what_it_does_under_torchrun(
    tmp_path, name, ranks_per_node
):
    """Each rank imports torch in each attempt: with one rank a node every fault is met at half of
    the cost."""
    program = PROGRAMS[name]
    for package in program.packages:
        pytest.importorskip(package, reason=f"{package} is not installed: .ci/setup installs it")
    score = measure(Orch(program, tmp_path / "orch", ranks_per_node))
    assert "problem" not in score and (score["ended_code"], score["done_code"]) == (Exit.RESTART, 0)
    if "orch_report" in program.path.read_text():  # it saves when it is ended
        assert score["resumed_at"] == score["steps_at_end"] + 1
    theirs = losses_under_torchrun(program, tmp_path / "torchrun", 2 * ranks_per_node)
    assert score["losses"].keys() == theirs.keys() == set(range(1, program.steps + 1))
    # The sums have another order, and some steps ran on one node.
    assert score["losses"] == pytest.approx(theirs, rel=program.tolerance, abs=1e-4)


def losses_under_torchrun(program: Program, folder: Path, ranks: int) -> dict[int, float]:
    """The loss of each step of an undisturbed run."""
    folder.mkdir()
    (folder / "hurry").touch()
    flags = ["--standalone", "--max-restarts", "5", "--nproc-per-node", str(ranks)]
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *flags,
        str(program.path),
        str(program.steps),
        str(folder),
        "0",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(argv, env=env, check=True, capture_output=True, timeout=PATIENCE_S)
    rows = map(str.split, (folder / "steps.txt").read_text().splitlines())
    return {int(row[1]): float(row[3]) for row in rows}


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
