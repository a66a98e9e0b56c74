"""The report pipe: nothing is torn, nothing blocks, what is lost is counted; progress is told while
the loop hangs."""

import os
import threading
import time

import msgspec
import pytest

from orchestrator.plan.worker import EventReport, ProgressReport, Report, StepReport
from trainer.worker import reporter as module
from trainer.worker.progress import Progress, ProgressReporter
from trainer.worker.reporter import Reporter


def step(reporter: Reporter, number: int, **values: object) -> None:
    reporter.step(step=number, samples=number, tokens=10, step_s=0.1, **values)


def decode(raw: bytes) -> list[Report]:
    return [msgspec.json.decode(line, type=Report) for line in raw.splitlines()]


def read_reports(fd: int) -> list[Report]:
    raw = b""
    while not raw.endswith(b"\n"):
        raw += os.read(fd, 1 << 16)
    return decode(raw)


@pytest.fixture
def pipe():
    """[read end, write end]; a test that closes one takes it out of the list, since its number may
    be used again."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def test_reports_arrive_as_typed_lines(pipe):
    reporter = Reporter(pipe[1], rank=3, epoch=2)
    step(reporter, 1, loss=2.5, phase_s={"forward": 0.25})
    reporter.event("checkpoint_saved", 1, path="päth\n$(x)", seconds=0.5)
    first, second = decode(os.read(pipe[0], 65536))
    assert first == StepReport(
        rank=3,
        epoch=2,
        step=1,
        samples=1,
        tokens=10,
        step_s=0.1,
        loss=2.5,
        phase_s={"forward": 0.25},
    )
    assert second == EventReport(
        rank=3,
        epoch=2,
        name="checkpoint_saved",
        step=1,
        fields={"path": "päth\n$(x)", "seconds": 0.5},
    )


def test_a_reader_that_never_reads_costs_reports_not_steps(pipe, monkeypatch):
    monkeypatch.setattr(module, "BACKLOG_BYTES", 10_000)
    reporter = Reporter(pipe[1], rank=0, epoch=0)
    for number in range(3000):
        step(reporter, number)
    assert reporter.dropped > 100


def test_a_slow_reader_gets_whole_lines_and_the_count_of_the_lost(pipe, monkeypatch):
    monkeypatch.setattr(module, "BACKLOG_BYTES", 20_000)
    reporter = Reporter(pipe[1], rank=0, epoch=0)
    received = bytearray()

    def read() -> None:
        while chunk := os.read(pipe[0], 777):
            received.extend(chunk)
            time.sleep(0.0005)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(5000):
        step(reporter, number)
    reporter.event("done")
    reporter.close(wait_s=20)
    os.close(pipe.pop(1))
    reader.join(timeout=300)
    reports = decode(bytes(received))
    steps = [report.step for report in reports if isinstance(report, StepReport)]
    assert steps == sorted(set(steps))
    assert len(reports) + reporter.dropped == 5001


def test_an_agent_that_is_gone_does_not_hurt(pipe):
    reporter = Reporter(pipe[1], rank=0, epoch=0)
    os.close(pipe.pop(0))
    step(reporter, 1)
    reporter.event("done")
    reporter.close()


def test_without_an_agent_rank_zero_prints(capsys):
    step(Reporter(None, rank=0, epoch=0), 7, loss=1.25)
    step(Reporter(None, rank=1, epoch=0), 7, loss=1.25)
    assert capsys.readouterr().err == "step 7  loss 1.2500  100 tokens/s\n"


def test_it_tells_what_the_source_says_until_it_is_stopped(pipe):
    reporter = Reporter(pipe[1], rank=3, epoch=2)
    progress = ProgressReporter(reporter, every_s=0.01)
    progress.start()
    assert read_reports(pipe[0])[0] == ProgressReport(rank=3, epoch=2, step=0, phase="start")
    progress.source = lambda: Progress(7, "forward", "all-reduce (tp)", 41)
    expected_report = ProgressReport(
        rank=3, epoch=2, step=7, phase="forward", waiting="all-reduce (tp)", moves=41
    )
    assert (
        expected_report in [report for _ in range(200) for report in read_reports(pipe[0])][-100:]
    )
    progress.stop()
    for thread in [
        candidate for candidate in threading.enumerate() if candidate.name == "progress"
    ]:
        thread.join(10)
    assert not [candidate for candidate in threading.enumerate() if candidate.name == "progress"]


def test_a_progress_report_is_dropped_behind_others_and_tears_none(pipe):
    reporter = Reporter(pipe[1], rank=0, epoch=0)
    reporter.event(
        "big", text="x" * 100_000
    )  # more than the pipe takes: the rest is in the backlog
    held = len(reporter._backlog)
    assert held
    reporter.progress(step=1, phase="data")
    assert len(reporter._backlog) == held, "dropped, not queued"
    raw = b""
    while not raw.endswith(b"\n"):
        raw += os.read(pipe[0], 1 << 16)
        reporter.progress(step=1, phase="data")
    assert len(decode(raw)[0].fields["text"]) == 100_000
