"""Progress reports of a worker: from a thread, also while the loop hangs, and never delaying other reports."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest

from orchestrator.plan.worker import ProgressReport, Report
from trainer.worker.progress import Progress, ProgressReporter
from trainer.worker.reporter import Reporter


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def lines(fd: int, many: int) -> list:
    """The next `many` reports from a pipe."""
    raw = b""
    while raw.count(b"\n") < many:
        raw += os.read(fd, 1 << 16)
    return [msgspec.json.decode(line, type=Report) for line in raw.splitlines()[:many]]


def test_it_tells_what_the_source_says_until_it_is_stopped(pipe):
    reporter = Reporter(pipe[1], rank=3, epoch=2)
    progress = ProgressReporter(reporter, every_s=0.01)
    progress.start()
    assert lines(pipe[0], 1) == [ProgressReport(rank=3, epoch=2, step=0, phase="start")]
    progress.source = lambda: Progress(7, "forward", "all-reduce (tp)", 41)
    wanted = ProgressReport(rank=3, epoch=2, step=7, phase="forward", waiting="all-reduce (tp)", moves=41)
    assert wanted in [report for _ in range(200) for report in lines(pipe[0], 1)][-100:]
    progress.stop()
    thread = next((one for one in threading.enumerate() if one.name == "progress"), None)
    if thread:
        thread.join(10)
    assert not [one for one in threading.enumerate() if one.name == "progress"]


def test_a_progress_report_is_dropped_behind_others_and_tears_none(pipe):
    reporter = Reporter(pipe[1], rank=0, epoch=0)
    reporter.event("big", text="x" * 100_000)  # more than the pipe takes: the rest is in the backlog
    held = len(reporter._backlog)
    assert held
    reporter.progress(step=1, phase="data")
    assert len(reporter._backlog) == held, "dropped, not queued"
    raw = b""
    while not raw.endswith(b"\n"):
        raw += os.read(pipe[0], 1 << 16)
        reporter.progress(step=1, phase="data")
    first = raw.splitlines()[0]
    assert len(msgspec.json.decode(first, type=Report).fields["text"]) == 100_000
