"""What is read back of a run: its state, its numbers, its logs, its report, and the pages made of
them."""

from __future__ import annotations

import json
import os
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.errors import OrchError
from orchestrator.observe import logs
from orchestrator.observe.live import read_live
from orchestrator.observe.logs import LogTail
from orchestrator.observe.pages.request_page import request_page
from orchestrator.observe.pages.run_page import (
    end_lines,
    list_page,
    list_row,
    progress_line,
    run_page,
)
from orchestrator.observe.report import make_report, read_steps
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import (
    SCHEMA,
    Cause,
    EpochState,
    NodeState,
    RunState,
    paused,
    read_state,
    true_state,
    write_state,
)
from orchestrator.style import Style
from tests.beds.bundles import make_bundle
from tests.beds.plans import make_plan

PLAN = make_plan(dp=4, nodes=2, steps=10)


def state(**changes) -> RunState:
    base = {
        "schema": SCHEMA,
        "run_id": "run-1",
        "state": "running",
        "created_at": 0.0,
        "updated_at": 0.0,
        "epoch": 1,
    }
    nodes = {
        "node0": NodeState(state="running", ranks=[0, 1]),
        "node1": NodeState(state="running", ranks=[2, 3]),
    }
    summary = {"steps": 10, "world_size": 4, "model": "tiny", "cluster": "local", "parallel": "dp4"}
    record_fields = {
        "writer": "node0",
        "backend": "local",
        "plan_hash": PLAN.hash,
        "nodes": nodes,
        "summary": summary,
    }
    fields = base | record_fields | changes
    return RunState(**fields)


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "runs" / "run-1")
    run.create()
    return run


def write_steps(folder: RunFolder, node: str, *steps: dict) -> None:
    with folder.metrics(node).open("a") as file:
        for step in steps:
            base = {
                "at": 100.0 + step["step"],
                "kind": "step",
                "samples": 0,
                "tokens": 400,
                "step_s": 0.2,
            }
            print(json.dumps({**base, **step}), file=file)


def test_state_survives_the_file(folder):
    cause = Cause(kind="worker_exit", text="x", epoch=0, rank=3, tail=["a", "ü"])
    written = state(cause=cause, epochs=[EpochState(epoch=0, started_at=1.0, cause=cause)])
    write_state(folder, written)
    assert read_state(folder) == written


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"null", b'{"schema":"orch.state/9"}', b'{"\xed":1}', b"\x00"]
)
def test_a_damaged_state_is_one_line(folder, raw):
    folder.state.write_bytes(raw)
    with pytest.raises(OrchError) as refused:
        read_state(folder)
    assert refused.value.exit == 65 and "\n" not in refused.value.message


def test_the_truth_about_a_run_that_nobody_keeps(folder):
    write_state(folder, state())
    assert true_state(folder, alive=True).state == "running"
    lost = true_state(folder, alive=False)
    assert (lost.state, lost.exit_code, lost.cause.kind) == ("failed", 76, "supervisor_lost")
    assert "while it was running" in lost.reason
    write_state(folder, state(state="done", exit_code=0))
    assert true_state(folder, alive=False).state == "done"


def test_live_numbers_are_of_this_epoch_and_of_the_last_steps(folder):
    old = [{"rank": 0, "epoch": 0, "step": step, "loss": 9.0} for step in range(1, 9)]
    new = [
        {"rank": 0, "epoch": 1, "step": step, "loss": 3.0 - step / 10, "mfu": step / 10}
        for step in (4, 5)
    ]
    memory = [
        {"rank": rank, "epoch": 1, "step": 5, "memory_bytes": {"total": 100 + rank}}
        for rank in (2, 3)
    ]
    write_steps(folder, "node0", *old, *new)
    write_steps(folder, "node1", *memory)
    folder.metrics("node1").open("a").write('{"torn')
    event = {
        "kind": "event",
        "rank": 0,
        "epoch": 0,
        "name": "checkpoint_saved",
        "step": 3,
        "at": 90.0,
    }
    folder.events("node0").write_text(json.dumps(event) + "\nnoise\n")
    live = read_live(folder, state(), now=110.0)
    assert (live.step, live.steps, live.loss, live.mfu) == (5, 10, 2.5, 0.45)
    assert (live.tokens_per_s, live.tokens_per_s_per_gpu) == (2000.0, 500.0)
    assert live.left_s == pytest.approx(1.0)
    assert (live.saved.step, live.saved.age_s) == (3, 20.0)
    assert live.nodes["node1"].memory_bytes == {"total": 103} and live.nodes["node0"].seen_s == 5.0


def test_before_the_first_step_the_last_word_of_a_worker_is_shown(folder):
    fields = {"phase": "tokenise", "done": 1, "total": 4}
    event = {
        "kind": "event",
        "rank": 0,
        "epoch": 1,
        "name": "data_progress",
        "fields": fields,
        "at": 1.0,
    }
    folder.events("node0").write_text(json.dumps(event) + "\n")
    live = read_live(folder, state(), now=2.0)
    assert live.step is None and live.doing == "data progress (tokenise 25%)"
    assert "tokenise 25%" in progress_line(state(), live, Style())


def test_nothing_at_all_is_still_a_page(folder):
    live = read_live(folder, state(nodes={}), now=0.0)
    assert "running" in run_page(state(nodes={}), live, Style())
    assert "run-1" in list_page([list_row(state(), live, 5.0)], Style())


def test_a_failure_is_told_with_its_first_cause(folder):
    where = {"epoch": 1, "log": "logs/rank-00003.log", "tail": ["boom"]}
    cause = Cause(kind="worker_exit", text="rank 3 on node1: killed by SIGKILL", **where)
    failed = state(state="failed", exit_code=1, reason=cause.text, cause=cause)
    page = run_page(failed, read_live(folder, failed, 0.0), Style())
    lived = (
        EpochState(epoch=0, started_at=1.0, outcome="restart", cause=cause),
        EpochState(epoch=1, started_at=2.0),
    )
    live = {
        "slow": {"node1": 2.5},
        "excluded": {"node2": "it fell over"},
        "epochs": list(lived),
        "reason": None,
    }
    again = msgspec.structs.replace(failed, state="running", exit_code=None, cause=None, **live)
    status_page = run_page(again, read_live(folder, again, 0.0), Style())
    assert (
        f"last fault  {cause.text[:40]}" in status_page
        and "node1 (2.5x its peers)" in status_page
        and "node2: it fell" in status_page
    )
    for phrase in (
        "failed",
        "1 (user code failed)",
        "First cause",
        "killed by SIGKILL",
        "logs/rank-00003.log",
        "  boom",
    ):
        assert phrase in page
    assert "boom" in "\n".join(end_lines(failed, Style()))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_progress_fits_the_terminal(folder, width):
    write_steps(folder, "node0", {"rank": 0, "epoch": 1, "step": 9, "loss": 3.25, "mfu": 0.123})
    live = read_live(folder, state(), 0.0)
    assert len(progress_line(state(), live, Style(width=width))) < width


def test_a_request_is_shown_whole_but_for_contents(tmp_path):
    request = make_bundle(PLAN, tmp_path / "runs").request
    page = request_page(request, Style())
    for phrase in (
        request.handle,
        request.run_dir,
        "node0 to node1",
        "HOME, PATH",
        "OMP_NUM_THREADS=1",
        "secret.key",
    ):
        assert phrase in page


def test_a_replayed_step_counts_once_in_the_report(folder):
    old = [
        {"rank": 0, "epoch": 0, "step": step, "loss": 9.0, "step_s": 9.0} for step in range(1, 7)
    ]
    write_steps(
        folder,
        "node0",
        *old,
        *({"rank": 0, "epoch": 1, "step": n, "loss": 10.0 - n} for n in range(4, 11)),
    )
    last = {
        "rank": 3,
        "epoch": 1,
        "step": 10,
        "memory_bytes": {"total": 7},
        "comm_bytes": {"dp": 5},
    }
    write_steps(folder, "node1", last)
    done = state(state="done", exit_code=0, started_at=1.0, ended_at=3.5)
    report = make_report(PLAN, done, read_steps(folder, PLAN.cluster.node_names))
    assert report["steps"] == {"planned": 10, "completed": 10, "replayed": 3, "tokens": 4000}
    assert report["loss"] == {"first": 9.0, "last": 0.0}
    assert report["step_s"]["measured"] == 0.2  # the warm-up of each epoch left out
    assert report["tokens_per_s_per_gpu"]["measured"] == pytest.approx(500.0)
    assert report["memory"]["total"].items() >= {"planned": 5, "measured": 7}.items()
    assert report["comm_bytes_per_step"]["dp"]["measured"] == 5
    assert report["wall_s"] == 2.5
    msgspec.json.encode(report)


def test_tensors_are_compared_with_tensors(folder):
    """A GPU's context is planned, and nothing that a worker measures. An older plan had 2 GiB."""
    write_steps(
        folder, "node0", {"rank": 0, "epoch": 1, "step": 1, "memory_bytes": {"total": 3 << 30}}
    )
    for context, planned in ((1 << 29, 1 << 29), (0, 2 << 30)):
        memory = structs.replace(
            PLAN.memory, buffers=(1 << 30) + planned, total=(3 << 30) + planned, context=context
        )
        plan = structs.replace(
            PLAN, cluster=structs.replace(PLAN.cluster, device="cuda"), memory=memory
        )
        usage = make_report(plan, state(), read_steps(folder, plan.cluster.node_names))["memory"]
        assert usage["total"]["planned"] == usage["total"]["measured"] == 3 << 30
        assert usage["buffers"]["planned"] == 1 << 30
        assert usage["device context"]["planned"] == planned


def test_a_report_of_a_run_that_never_stepped():
    report = make_report(PLAN, state(state="failed"), [])
    assert report["steps"]["completed"] == 0 and report["step_s"]["measured"] is None


@given(
    st.lists(
        st.binary(max_size=12).filter(lambda b: b"\n" not in b and b"\r" not in b), max_size=30
    ),
    st.integers(0, 40),
    st.booleans(),
)
def test_the_last_lines_of_a_log(tmp_path_factory, lines, count, ends):
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(b"\n".join(lines) + (b"\n" if lines and ends else b""))
    content = path.read_bytes()
    expected = [line.decode(errors="backslashreplace") for line in content.split(b"\n")]
    expected = expected[:-1] if expected[-1] == "" else expected
    assert LogTail(path).read(last=True) == expected
    assert LogTail(path, count).read(last=True) == (expected[-count:] if count else [])


def test_a_log_is_followed_by_whole_lines(tmp_path):
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.read() == ["one"]
        file.write(b"o\r\n\xff\n")
        assert tail.read() == ["two", "\\xff"]
        file.write(b"end")
        assert tail.read() == [] and tail.read(last=True) == ["end"]


def test_a_log_of_a_million_lines_is_tailed_without_reading_it(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # 8 GiB of holes
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast but one\nlast\n")
    assert LogTail(path, 2).read(last=True) == ["last but one", "last"]


@pytest.mark.parametrize("last_lines", [None, 1, 3])
def test_a_line_without_an_end_is_read_once(tmp_path, monkeypatch, last_lines):
    """16 MiB in 4,096 pieces: joined anew with each piece they would be copied two thousand times,
    a minute's work."""
    monkeypatch.setattr(logs, "_AT_ONCE", 1 << 12)
    path = tmp_path / "log"
    began = time.process_time()
    tail = LogTail(path)
    with path.open("ab", buffering=0) as file:
        for _ in range(16):
            file.write(b"x" * (1 << 20))
            assert tail.read() == []
        file.write(b"\nlast")
    lines = LogTail(path, last_lines).read(last=True) if last_lines else tail.read(last=True)
    assert [len(line) for line in lines] == [1 << 24, 4][-(last_lines or 2) :]
    assert time.process_time() - began < 5.0, "of this process alone; it takes a tenth of a second"


def test_a_progress_bar_is_one_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"first\n10%\r20%\r30%\nlast\n")
    assert LogTail(path, 2).read(last=True) == ["10%\r20%\r30%", "last"]


def test_a_pause_is_from_the_end_to_the_new_start_and_nothing_of_a_run_that_never_lived():
    fresh = msgspec.structs.replace(state(), state="pending", epoch=-1, ended_at=None, pauses=[])
    assert paused(fresh, 9.0) == []
    ended = msgspec.structs.replace(fresh, state="stopped", epoch=0, ended_at=5.0)
    assert paused(ended, 9.0) == [(5.0, 9.0)]
    killed = msgspec.structs.replace(
        fresh, state="running", epoch=0, updated_at=4.0, pauses=[(1.0, 2.0)]
    )
    assert paused(killed, 9.0) == [(1.0, 2.0), (4.0, 9.0)]
    resumed = msgspec.structs.replace(killed, state="pending", pauses=[(4.0, 9.0)])
    assert paused(resumed, 20.0) == [(4.0, 9.0)], "whoever resumed it has written this one down"
