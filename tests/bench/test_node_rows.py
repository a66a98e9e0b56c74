"""The rows of a node: what a rival does takes nothing of ours along, and a wrong call is one line."""

from __future__ import annotations

import json
import os
import time
from threading import Thread

import pytest

from benchmarks import minutes
from benchmarks.gpu_node import __main__ as gpu_node
from benchmarks.gpu_node import page
from benchmarks.gpu_node.__main__ import Node, misuse, reason
from benchmarks.gpu_node.cases import SMALL, Case, Where
from orchestrator.plan import Exit
from trainer.verify.ranks import RankError, run_ranks


def dying(plan, device, batches):
    os._exit(3)


def failing_alone(plan, device, batches):
    """Out of memory on one rank, whose peers wait for it."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise MemoryError("out of memory")
    dist.barrier()


@pytest.mark.process
@pytest.mark.parametrize(
    ("rival", "problem"),
    [
        (dying, "ended with code 3 and no result"),
        (failing_alone, "MemoryError: out of memory"),
    ],
)
def test_a_rival_that_ends_on_a_rank_leaves_ours(rival, problem, tmp_path):
    out = tmp_path / "result.json"
    series = minutes.Series({}, minutes.Limit(0), out, show=page.line)
    node = Node(2, Where(dry=True, cuda=False), series.limit, 1, {"titan": rival}, series.note)
    case = Case("case", SMALL, ("parallel=dp2_zero1", "train.compile=false"), ("titan",))
    row = series.measure(case.name, lambda: node.case(case))
    assert series.failed == [] and "failed" not in row, row
    assert row["ours"]["step_s"] > 0 and row["bytes"] and row["planned_s"] > 0
    assert problem in row["titan"]["failed"]
    assert f"torchtitan failed: {row['titan']['failed']}" in page.line(row)
    assert "plan" not in json.loads(out.read_text())["rows"]["case"], "a dry run measures nothing"


def test_the_reason_is_the_error_and_not_the_advice_below_it():
    frame = '  File "measure.py", line 7, in timed\n    step()\n    ~~~~^^\n'
    advice = "CUDA kernel errors might be asynchronously reported\nCompile with TORCH_USE_CUDA_DSA"
    message = f"rank 1: Traceback (most recent call last):\n{frame}RuntimeError: lost\n{advice}\n"
    assert reason(RankError(1, message)) == "RuntimeError: lost"
    compiler = '\nfrom user code:\n   File "block.py", line 3, in forward\n    x @ y\n\nSet VERBOSE'
    message = f"rank 1: Traceback (most recent call last):\n{frame}Unsupported: a call{compiler}\n"
    assert reason(RankError(1, message)) == "Unsupported: a call"
    message = "rank 1: ended with code 3 and no result"
    assert reason(RankError(1, message)) == message


@pytest.mark.process
def test_the_reason_of_a_hang_is_where_the_main_thread_stands():
    def hang(rank):
        if rank == 0:
            Thread(target=time.sleep, args=(60,), daemon=True).start()
            wait_where_the_test_looks()

    def wait_where_the_test_looks():
        time.sleep(60)

    with pytest.raises(RankError) as error:
        run_ranks(hang, 2, timeout=0.5)
    line = reason(error.value)
    assert line.startswith("rank 0 did not finish in time: File") and "\n" not in line
    assert line.endswith("in wait_where_the_test_looks")


@pytest.mark.parametrize(
    ("gpus", "names", "line"),
    [
        (1, [], "a power of two of GPUs, from 2 on, not 1: make gpu-check is for one"),
        (6, [], "a power of two of GPUs, from 2 on, not 6: --gpus 4 takes some of them"),
        (2, ["NCCL", "zero-3"], "--only zero-3: no such case; did you mean 'ZeRO-3'? choices: "),
    ],
)
def test_cases_that_there_are_not_are_one_line(gpus, names, line):
    assert line in misuse(gpus, names)
    assert misuse(2, ["NCCL", "ZeRO-3"]) == "" and misuse(8, []) == ""


def test_a_wrong_call_is_refused_before_anything_is_measured(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert gpu_node.main(["--dry", "--out", str(out), "--gpus", "3"]) == Exit.USAGE
    assert "not 3: --gpus 2" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_run_without_a_measured_case_ends_with_1(is_ours, tmp_path, capsys):
    failure = {"failed": "rank 0 did not finish in time: File"}
    series = minutes.Series({}, minutes.Limit(0), None)
    for case in ("ZeRO-3", "TP + SP"):
        series.measure(case, lambda: {"ours": failure} if is_ours else failure)
    assert gpu_node.told(series, list(series.rows), tmp_path, dry=False) == 1
    others = "the others: make gpu-node ONLY=\"ZeRO-3 'TP + SP'\"\n"
    assert others in capsys.readouterr().out
    series.measure("ZeRO-3", lambda: {"ours": {"step_s": 1.5, "of_ceiling": 0.5, "peak_gib": 1.0}})
    assert gpu_node.told(series, list(series.rows), tmp_path, dry=False) == 0
    assert gpu_node.told(series, ["TP + SP"], tmp_path, dry=False) == 1
    assert "ONLY=\"'TP + SP'\"\n" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, capsys):
    names = (*page.CEILINGS, "ZeRO-3", "TP + SP")
    failure = {"ours": {"failed": "as it is here"}}
    monkeypatch.setattr(Node, "rows", lambda self: dict.fromkeys(names, lambda: failure))
    arguments = ["--dry", "--gpus", "2", "--out", str(tmp_path / "result.json")]
    assert gpu_node.main([*arguments, "--page", str(tmp_path / "none.md")]) == 1
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert list(rows) == list(names)
    assert "none.md is not written: FileNotFoundError" in capsys.readouterr().err
