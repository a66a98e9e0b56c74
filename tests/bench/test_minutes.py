"""A series of measured rows keeps what it has: through failures, at its limit, when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import msgspec
import pytest

from benchmarks import gpu_single, minutes
from benchmarks.gpu_node import __main__ as gpu_node
from benchmarks.gpu_node.__main__ import Node
from benchmarks.gpu_node.cases import FIRST, Where
from benchmarks.gpu_parity import __main__ as gpu_parity
from tests.bench.dry_runs import ROOT
from tests.patience import PATIENCE_S


def raising():
    raise MemoryError("out of memory\nand a trace")


def test_a_row_that_fails_is_a_row_with_its_error_and_the_next_ones_follow(tmp_path, capsys):
    out = tmp_path / "result.json"
    series = minutes.Series({"device": "x"}, minutes.Limit(0), out)
    series.measure("first", lambda: {"seconds": 1.5})
    series.measure("second", raising)
    series.measure("third", lambda: {"seconds": 2.5})
    record = json.loads(out.read_text())
    assert list(record["rows"]) == ["first", "second", "third"] and record["device"] == "x"
    assert record["rows"]["second"]["failed"] == "MemoryError: out of memory"
    assert record["rows"]["third"]["seconds"] == 2.5
    assert series.failed == ["second"] and series.late == []
    assert "second: FAILED MemoryError: out of memory" in capsys.readouterr().out


def test_numbers_of_an_earlier_run_stay_if_a_row_fails_or_is_not_reached():
    earlier = {"seconds": 1.5}
    record = {"rows": {"fails": dict(earlier), "late": dict(earlier)}}
    series = minutes.Series(record, minutes.Limit(0), None)
    series.measure("fails", raising)
    assert series.rows["fails"].items() > earlier.items() and series.failed == ["fails"]
    over = minutes.Limit(1.0)
    over._end = 0.0
    minutes.Series(record, over, None).measure("late", raising)
    assert record["rows"]["late"] == earlier


def test_rows_of_another_machine_are_not_added_to(tmp_path):
    out = tmp_path / "result.json"
    machine = {"card": "H100", "dry": False}
    minutes.Series(dict(machine), minutes.Limit(0), out).measure("first", lambda: {"seconds": 1.5})
    assert minutes.earlier(out, machine)["rows"]["first"]["seconds"] == 1.5
    with pytest.raises(SystemExit, match=r"rows are of \{'card': 'H100'\}; --out FILE"):
        minutes.earlier(out, machine | {"card": "H200"})
    assert minutes.earlier(out, machine | {"gpus": 8})["dry"] is False, "an older file"


class Held:
    """What a row holds on a device."""


def test_what_a_failed_row_held_is_free_when_memory_is_given_back():
    references = list[weakref.ref]()
    alive = list[bool]()

    def holding():
        tensor = Held()
        references.append(weakref.ref(tensor))
        raise RuntimeError("CUDA out of memory")

    def free():
        alive.append(references[0]() is not None)
        raise RuntimeError("the device is lost")

    series = minutes.Series({}, minutes.Limit(0), None, free=free)
    assert series.measure("row", holding)["failed"] == "RuntimeError: CUDA out of memory"
    assert alive == [False]


def test_the_limit_stops_the_row_that_runs_and_names_those_not_reached(tmp_path):
    out = tmp_path / "result.json"
    series = minutes.Series({}, minutes.Limit(0), out)

    def endless():
        while True:
            try:
                signal.pause()
            except Exception as error:  # as a measured program may do
                raise AssertionError("nothing measured takes the end of the time") from error

    before = signal.getsignal(signal.SIGALRM)
    series.expect(["first", "endless", "later"])
    series.measure("first", lambda: {"seconds": 1.5})
    series.limit = minutes.Limit(0.05)
    series.measure("endless", endless)
    assert json.loads(out.read_text())["rows"]["later"] == {"failed": minutes.AHEAD}
    series.measure("later", raising)
    assert signal.getsignal(signal.SIGALRM) is before
    rows = json.loads(out.read_text())["rows"]
    assert rows["first"]["seconds"] == 1.5
    assert rows["endless"]["failed"] == "not measured: stopped after 0.05 minutes"
    assert rows["later"]["failed"] == "not measured: 0.05 minutes are over"
    assert series.failed == [] and series.late == ["endless", "later"]
    assert series.summary().endswith("not measured in 0.05 minutes: endless, later")


class Absorbing:
    """Loses what the first signal of the limit raises, as callbacks of C do."""

    def __del__(self):
        try:
            signal.raise_signal(signal.SIGALRM)
        except minutes.OutOfTimeError:
            return


def test_an_error_of_the_limit_that_is_lost_is_raised_again():
    intervals = list[float]()

    def absorbing():
        Absorbing()
        intervals.append(signal.getitimer(signal.ITIMER_REAL)[1])
        try:
            signal.raise_signal(signal.SIGALRM)
        finally:
            signal.raise_signal(signal.SIGALRM)  # not again: this block is to end
            intervals.append(0.0)

    series = minutes.Series({}, minutes.Limit(600), None)
    assert series.measure("row", absorbing)["failed"].startswith("not measured: stopped")
    assert intervals == [minutes.REPEAT_S, 0.0]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_numbers_that_json_lacks_are_null(tmp_path):
    out = tmp_path / "result.json"
    series = minutes.Series({}, minutes.Limit(0), out)
    series.measure("row", lambda: {"loss": [float("nan"), 1.5], "mfu": {"ours": float("inf")}})
    row = msgspec.json.decode(out.read_bytes())["rows"]["row"]
    assert row["loss"] == [None, 1.5] and row["mfu"] == {"ours": None}


def test_what_a_row_has_so_far_stays_if_its_rest_fails(tmp_path):
    out = tmp_path / "result.json"
    series = minutes.Series({}, minutes.Limit(600), out)

    def stopped():
        series.note({"ours": {"step_s": 1.5}})
        noted = json.loads(out.read_text())["rows"]["row"]
        assert noted == {"ours": {"step_s": 1.5}, "failed": minutes.RUNNING}
        signal.raise_signal(signal.SIGALRM)

    row = series.measure("row", stopped)
    assert row["ours"] == {"step_s": 1.5} and series.late == ["row"]
    assert "ours" not in series.measure("next", raising)


def test_rows_after_one_that_lost_the_device_are_not_measured():
    def free():
        if series.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    series = minutes.Series({}, minutes.Limit(0), None, free=free)
    series.measure("first", lambda: {"seconds": 1.5})
    series.measure("second", raising)
    row = series.measure("third", lambda: {"seconds": 2.5})
    assert row == {"failed": "not measured: the device was lost in second"}
    assert series.failed == ["second"]
    assert series.summary().endswith("not measured since the device was lost in second: third")


def test_rows_that_may_hang_leave_time_for_others():
    assert minutes.Limit(0).share_s(1800.0) == 1800.0
    assert 1.0 <= minutes.Limit(2).share_s(1800.0) <= 60.0


def ended_in(body: str, out, *, limit: float = 0.0, free: str = "pass") -> int:
    """The exit code of a process whose second row does `body`, in so many minutes, then `free`."""
    lines = [
        "import os, signal, sys, time",
        "from pathlib import Path",
        "from benchmarks import minutes",
        "minutes.GRACE_S = 1.0",
        "def second():",
        f"    {body}",
        "def free():",
        "    if 'second' in series.rows:",
        f"        {free}",
        "series = minutes.Series({}, minutes.Limit(0), Path(sys.argv[1]), free=free)",
        "series.measure('first', lambda: {'seconds': 1.5})",
        f"series.limit = minutes.Limit({limit})",
        "series.measure('second', second)",
    ]
    argv = [sys.executable, "-c", "\n".join(lines), str(out)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=PATIENCE_S).returncode


def test_the_file_of_a_killed_process_is_whole(tmp_path):
    out = tmp_path / "result.json"
    assert ended_in("os.kill(os.getpid(), signal.SIGKILL)", out) == -signal.SIGKILL
    rows = json.loads(out.read_text())["rows"]
    assert rows["first"]["seconds"] == 1.5 and rows["second"] == {"failed": minutes.RUNNING}


def test_a_call_that_no_signal_interrupts_ends_the_process_after_the_limit(tmp_path):
    out = tmp_path / "result.json"
    masked = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(1e6)"
    assert ended_in(masked, out, limit=0.05) == 1
    assert json.loads(out.read_text())["rows"]["second"] == {"failed": minutes.RUNNING}


def test_memory_that_is_never_given_back_ends_the_process_and_its_row_stays(tmp_path):
    out = tmp_path / "result.json"
    assert ended_in("return {'seconds': 2.5}", out, limit=0.05, free="time.sleep(1e6)") == 1
    assert json.loads(out.read_text())["rows"]["second"]["seconds"] == 2.5


def hanging(rank, plan, dry):
    Path(os.environ["PIDS"], str(rank)).write_text(str(os.getpid()))
    signal.pause()


def raising_rank(rank, plan, dry):
    raise ValueError("this card lacks a kernel\nFor debugging, ask another one")


@pytest.mark.process
def test_ranks_that_hang_are_ended_and_the_next_row_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path))
    limit = minutes.Limit(600)
    monkeypatch.setattr(minutes.Limit, "share_s", lambda self, most_s: 5.0)
    series = minutes.Series({}, limit, tmp_path / "result.json")
    node = Node(2, Where(dry=True, cuda=False), limit, 1, {}, series.note)
    series.measure("hangs", lambda: node.of_node(hanging))
    series.measure("raises", lambda: node.of_node(raising_rank))
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert rows["hangs"]["failed"].startswith("RuntimeError: rank 0 did not finish in time: File")
    assert rows["hangs"]["failed"].endswith("in hanging")
    assert gpu_node.timed_out(rows["hangs"]) and not gpu_node.timed_out(rows["raises"])
    assert rows["raises"]["failed"] == "RuntimeError: ValueError: this card lacks a kernel"
    for rank in range(2):
        pid = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("program", "first"),
    [(gpu_single, "compiled"), (gpu_parity, "bf16"), (gpu_node, "ceilings")],
)
def test_each_program_stops_at_its_limit_and_names_its_rows_in_their_order(
    program, first, tmp_path, capsys
):
    out = tmp_path / "result.json"
    assert program.main(["--dry", "--minutes", "1e-6", "--out", str(out)]) == 1, "nothing measured"
    record = json.loads(out.read_text())
    rows = record["rows"]
    assert record["dry"] is True
    assert all(row["failed"].startswith("not measured: ") for row in rows.values())
    assert next(iter(rows)).startswith(first) and len(rows) >= 3
    assert f"not measured in 1e-06 minutes: {', '.join(rows)}" in capsys.readouterr().out
    if program is gpu_node:
        assert list(rows)[2:4] == list(FIRST[:2])
