"""`orch report`: a run's numbers against its plan, and the memory of the first steps."""

from __future__ import annotations

import json

import pytest

from orchestrator.cli.main import main
from orchestrator.errors import OrchError
from orchestrator.observe.pages.report_page import binary, formulas, render
from orchestrator.observe.rank_trace import Span, read_timeline, recorded_ranks
from orchestrator.observe.report import StepLine, make_report, write_report
from orchestrator.plan import Exit, to_json
from orchestrator.plan.worker import trace_file
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import SCHEMA, RunState, write_state
from orchestrator.style import Style
from tests.beds.plans import make_plan

MIB = 1 << 20
HELD = {"params": 2 * MIB, "grads": MIB, "optimizer": 4 * MIB}


def trace(folder, rank: int = 0) -> None:
    """Two steps: activations of 1, 3, 0 MiB in the first, 5 MiB in the second."""
    points = [(0.0, 1, 0), (1e3, 3, 1), (2e3, 0, 0), (4e3, 5, 0), (5e3, 0, 0)]
    events = [{"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": "rank"}}]
    for at, activations, buffers in points:
        held = HELD | {"activations": activations * MIB, "buffers": buffers * MIB}
        events.append({"ph": "C", "name": "memory", "pid": rank, "tid": 0, "ts": at, "args": held})
    for number, start in ((1, 0.0), (2, 3e3)):
        events.append(
            {"ph": "X", "name": f"step {number}", "pid": rank, "tid": 2, "ts": start, "dur": 3e3}
        )
        events.append(
            {
                "ph": "X",
                "name": "F",
                "pid": rank,
                "tid": 0,
                "ts": start,
                "dur": 5e2,
                "args": {"stage": 0},
            }
        )
        events.append(
            {"ph": "X", "name": "B", "pid": rank, "tid": 0, "ts": start + 6e2, "dur": 9e2}
        )
    path = trace_file(folder, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"rank": rank}}))


def steps(count: int = 6) -> list[StepLine]:
    values = {"tokens": 64, "samples": 0, "mfu": 0.2, "hfu": 0.3, "step_s": 2.0}
    values |= {"comm_bytes": {"dp": 100}, "phase_s": {"forward": 0.5}}
    return [
        StepLine(
            rank=0, epoch=0, step=i + 1, loss=5.0 - i, memory_bytes={"total": MIB * i}, **values
        )
        for i in range(count)
    ]


def state(**values) -> RunState:
    base = {
        "run_id": "r",
        "state": "done",
        "exit_code": 0,
        "backend": "local",
        "created_at": 0.0,
        "updated_at": 0.0,
    }
    return RunState(
        **(base | {"schema": SCHEMA, "plan_hash": "", "writer": "w", "epoch": 0} | values)
    )


def test_the_page_has_planned_and_measured_side_by_side(tmp_path):
    plan = make_plan(dp=2, recompute="full")
    trace(tmp_path)
    page = render(
        make_report(plan, state(), steps()),
        plan,
        Style(),
        read_timeline(trace_file(tmp_path, 0), 0),
    )
    assert max(map(len, page.splitlines())) <= 80
    row = next(line for line in page.splitlines() if line.startswith("step  ")).split()
    assert row[1:3] == ["100", "ms"] and "2.00" in row and "+1900%" in row
    assert "5.0000 at first, 0.0000 at last" in page
    assert "step 2" in page and "12.0 MiB" in page, "the second step's peak"


def test_formulas_say_the_numbers_that_they_use():
    plan = make_plan(recompute="full")
    mfu, _, hfu = formulas({}, plan)
    assert "tokens/s per GPU x" in mfu and "fp32" in mfu
    assert "recompute full repeats" in hfu and " 0.00 " not in hfu


def test_a_timeline_reads_back_as_it_was_written(tmp_path):
    trace(tmp_path, 3)
    timeline = read_timeline(trace_file(tmp_path, 3), 3)
    assert timeline.steps == [Span("step 1", 0.0, 3e-3), Span("step 2", 3e-3, 6e-3)]
    assert timeline.peak(timeline.steps[0]) == HELD | {"activations": 3 * MIB, "buffers": MIB}
    assert [span.name for span in timeline.actions] == ["F", "B"] * 2
    assert recorded_ranks(trace_file(tmp_path, 0).parent) == [3]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"traceEvents": [{"ph": 3}]}', b"\xff"])
def test_a_damaged_timeline_is_told_in_one_line(tmp_path, content):
    trace(tmp_path)
    trace_file(tmp_path, 0).write_bytes(content)
    with pytest.raises(OrchError) as caught:
        read_timeline(trace_file(tmp_path, 0), 0)
    assert caught.value.exit == Exit.CONFIG


@pytest.mark.parametrize(
    ("size", "size_text"),
    [(0, "0 B"), (1536, "1.50 KiB"), (3 * MIB, "3.00 MiB"), (1 << 31, "2.00 GiB")],
)
def test_bytes(size, size_text):
    assert binary(size) == size_text


# ------------------------------------------------------------------------------------------- the
#     verb


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run of two ranks in a home of its own."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    plan = make_plan(dp=2)
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.create()
    folder.plan.write_bytes(to_json(plan))
    folder.request.write_text("{}")
    final = state(plan_hash=plan.hash)
    write_state(folder, final)
    write_report(folder, plan, final)
    trace(folder.path, 1)
    return folder


def test_report_draws_the_memory_of_the_rank_that_is_asked_for(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for kind in ("png", "svg", "html"):
        assert main(["report", "r", "--rank", "1", "--plot", str(tmp_path / f"memory.{kind}")]) == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "memory.html").read_text()
    assert "First steps of rank 1" in capsys.readouterr().out


def test_report_as_json(run, capsys):
    assert main(["report", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["timeline"]["rank"] == 1 and len(report["timeline"]["memory"]) == 5
    assert report["timeline"]["steps"][1]["peak"]["activations"] == 5 * MIB
    assert report["schema"] == "orch.report/1" and len(report["formulas"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "0"], "rank 0 recorded no timeline"),
        (["--rank", "7"], "has no rank 7: 0 to 1"),
        (["--plot", "memory.gif"], "must end in .png"),
    ],
)
def test_report_refuses_in_one_line(run, capsys, arguments, message):
    assert main(["report", *arguments]) == Exit.USAGE
    assert message in capsys.readouterr().err
