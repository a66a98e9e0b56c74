"""Report lines: cut right however they come, and never trusted."""

from __future__ import annotations

import asyncio
import itertools
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent.node.recorder import Recorder
from orchestrator.agent.node.worker_reports import (
    LONGEST_LINE,
    JsonLines,
    ReportPipe,
    parse,
    stamped,
)
from orchestrator.run.folder import RunFolder
from tests.beds.plans import make_plan

STEP = b'{"kind":"step","rank":1,"epoch":0,"step":5,"samples":8,"tokens":64,"step_s":0.1}'


def cut(chunks: list[bytes]) -> list[bytes]:
    async def main():
        read, write = os.pipe()
        payloads: list[bytes] = []
        pipe = ReportPipe(read, payloads.append)
        for chunk in chunks:
            pipe.feed(chunk)
        pipe.close()
        os.close(write)
        return payloads

    return asyncio.run(main())


@given(
    st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b)),
    st.lists(st.integers(0, 400), max_size=10),
)
def test_lines_do_not_depend_on_how_they_are_cut(lines, cuts):
    raw = b"".join(line + b"\n" for line in lines)
    edges = [0, *sorted(min(c, len(raw)) for c in cuts), len(raw)]
    chunks = [raw[a:b] for a, b in itertools.pairwise(edges)]
    assert cut(chunks) == [line for line in lines if line]


@pytest.mark.parametrize("size", [LONGEST_LINE + 1, 3 * LONGEST_LINE])
@pytest.mark.parametrize("chunk", [1 << 16, 1000, 1 << 20])
def test_a_line_without_measure_is_dropped_whole_and_the_next_one_lives(size, chunk):
    raw = b"x" * size + b"\n" + STEP + b"\n"
    assert cut([raw[i : i + chunk] for i in range(0, len(raw), chunk)]) == [b"", STEP]


@given(st.binary(max_size=200))
def test_noise_is_no_report(noise):
    assert parse(noise, 1, 0) is None


@pytest.mark.parametrize(
    "deep",
    [
        b"[" * 60_000,
        b'{"kind":' + b"[" * 60_000,
        b'{"\xed":1}',
        b'{"kind":"step","x":' + b"[" * 9999,
    ],
)
def test_hostile_json_is_no_report(deep):
    assert parse(deep, 1, 0) is None


def test_nobody_speaks_for_another_rank_or_epoch():
    assert parse(STEP, 1, 0).step == 5
    assert parse(STEP, 2, 0) is None
    assert parse(STEP, 1, 1) is None


def test_a_stamp_keeps_the_line():
    assert json.loads(stamped(STEP, 12.5)) == {"at": 12.5, **json.loads(STEP)}


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path):
    lines = JsonLines("/dev/full")
    lines.write(b"{}")
    assert lines.lost == 1
    lines.close()


def test_a_file_that_cannot_be_opened_costs_the_lines_until_it_can(tmp_path):
    path = tmp_path / "away" / "lines"
    lines = JsonLines(path)
    lines.write(b"{}")
    path.parent.mkdir()
    lines.write(b"[]")
    assert (lines.lost, path.read_bytes()) == (1, b"[]\n")
    lines.close()


def test_the_recorder_keeps_what_it_can_read_and_samples_what_it_cannot(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.create()
    recorder = Recorder(folder, "node0", make_plan(dp=2), clock=lambda: 1.0)
    recorder.begin_epoch(0)
    recorder.on_line(1, STEP)
    recorder.on_line(1, b'{"kind":"event","rank":1,"epoch":0,"name":"resumed","step":4}')
    for _ in range(50):
        recorder.on_line(1, b"\xff garbage")
    recorder.close()
    assert recorder.last_step == {1: 5} and recorder.furthest_step == 5
    assert [
        json.loads(line)["step"] for line in folder.metrics("node0").read_text().splitlines()
    ] == [5]
    events = [json.loads(line) for line in folder.events("node0").read_text().splitlines()]
    assert [e["name"] for e in events] == ["resumed"] + ["report_unreadable"] * 5
