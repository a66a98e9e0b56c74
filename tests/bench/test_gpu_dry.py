"""The benchmarks of GPUs run dry here, on CPUs and on fake GPUs. Of `gpu_single.py` and of
`gpu_node` every line runs, without the compiler and but for those that `ELSEWHERE` names; what they
share with `gpu_parity` has tests of its own (test_minutes, test_card, test_parity)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict

import pytest

from benchmarks.gpu_node import page
from benchmarks.gpu_node.cases import FIRST, Where, cases, plan_of
from tests.beds import fakegpu
from tests.bench.dry_runs import CASES, NODE, ROOT, SINGLE, lines_of

pytestmark = [pytest.mark.process, pytest.mark.slow]


def run(kind, folder, fake):
    folder.mkdir()
    environment = fakegpu.environment() if fake else dict(os.environ)
    environment |= {"TORCH_COMPILE_DISABLE": "1"}  # minutes of a compiler, and no line of ours
    argv = [sys.executable, "-m", "tests.bench.dry_runs", kind, str(folder)]
    ended = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    executed_lines = defaultdict(set)
    for line in (folder / "lines").read_text().splitlines():
        file, _, number = line.partition(":")
        executed_lines[file].add(int(number))
    return executed_lines


def left(files, *runs):
    """Lines that no run has executed: "file:line text"."""
    missing = []
    for file in files:
        source_lines = (ROOT / file).read_text().splitlines()
        done = set().union(*(run[file] for run in runs))
        missing += [
            f"{file}:{line} {source_lines[line - 1].strip()}"
            for line in sorted(lines_of(file) - done)
        ]
    return missing


#: What the machine decides: one without GPUs, one with torchtitan. A rank that hangs is in
#: test_minutes, a wrong call and a page that is not written in test_node_rows, a step whose waits
#: are not known in test_card_rows.
ELSEWHERE = (
    "skipped: this machine has no CUDA device",
    "return 0",
    "RESULT.write_text",
    "record = {",
    '"device": name,',
    "**ceiling,",
    '"modes": results,',
    '"conditions": conditions(',
    "return RIVALS",
    "innermost",
    "fewer = ",
    "hint = ",
    'return f"gpu_node takes',
    'return f"--only',
    "print(problem",
    "return Exit.USAGE",
    "except Exception as error:",
    "is not written",
    "traceback.print_exc()",
    'return {"waits_failed"',
)


def test_what_matters_is_measured_first():
    names = [case.name for case in cases(8)]
    assert tuple(names[: len(FIRST)]) == FIRST and len(set(names)) == len(names) > len(FIRST)
    assert [case.name for case in cases(2)][:7] == list(FIRST[:7])


def test_every_case_has_a_plan_that_fits_eight_gpus():
    for case in cases(8):
        plan = plan_of(case.model, case.words, 8, Where(dry=False, cuda=True))
        assert plan.parallel.world_size == 8 and plan.memory.total < plan.memory.capacity, case.name


@pytest.mark.skipif(bool(fakegpu.missing()), reason=fakegpu.missing() or "there are fake GPUs")
@pytest.mark.parametrize(
    ("kind", "files"),
    [("single", SINGLE), pytest.param("node", NODE, marks=pytest.mark.full)],  # ten minutes
)
def test_a_dry_run_executes_every_line(kind, files, tmp_path):
    runs = run(kind, tmp_path / "cpu", False), run(kind, tmp_path / "gpu", True)
    missing = [line for line in left(files, *runs) if not any(mark in line for mark in ELSEWHERE)]
    if not os.environ.get("TORCHTITAN"):  # a folder that holds it: see benchmarks/kernels.py
        missing = [line for line in missing if not in_titan(line)]
    assert missing == []
    if kind == "node":
        rows = json.loads((tmp_path / "cpu" / "result.json").read_text())["rows"]
        assert set(rows) == {*page.CEILINGS, *CASES, "fails", "dies", "ours fails"}
        assert rows["NCCL"]["nccl"] and rows["ceilings"]["triad_bytes_per_s"] > 0
        assert (
            "rule 'gpus'" in rows["refused"]["failed"]
            and "a rival that fails" in rows["fails"]["failing"]["failed"]
        )
        assert "a rival that fails" in rows["ours fails"]["ours"]["failed"]
        assert "ended with code 3" in rows["dies"]["dying"]["failed"]
        assert rows["dies"]["ours"]["step_s"] > 0, "a rival takes nothing of ours along"
        for name in set(CASES) - {"refused"}:
            assert rows[name]["ours"]["step_s"] > 0 and rows[name]["ours"]["loss"] > 0
        assert rows["ZeRO-3"]["loop"]["loss"] == pytest.approx(
            rows["ZeRO-3"]["ours"]["loss"], rel=0.1
        )


@pytest.mark.full
def test_a_run_that_is_broken_dry_goes_on():
    """Its pieces are tested by those of `orch drill`; the numbers of a card need the whole program
    to run."""
    argv = [sys.executable, "-m", "benchmarks.gpu_run", "--dry", "--steps", "600"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("each sample once, and all faults got over\n")


def in_titan(line):
    number = int(line.partition(":")[2].partition(" ")[0])
    source_lines = (ROOT / "benchmarks/gpu_node/rivals.py").read_text().splitlines()
    begin, end = (
        next(at for at, source_line in enumerate(source_lines) if source_line.startswith(head))
        for head in ("def titan", "RIVALS =")
    )
    return line.startswith("benchmarks/gpu_node/rivals.py") and begin < number <= end
