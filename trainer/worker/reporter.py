"""Reports from a worker to its agent: JSON lines on an inherited pipe, written without ever
blocking training.

The agent reads `orchestrator.plan.worker.Report` from the file descriptor that it passed in
`ORCH_REPORT_FD`. A slow reader costs reports, not steps: lines that do not fit the pipe wait in a
bounded backlog, lines that do not fit the backlog are dropped and counted
(`StepReport.dropped_reports`).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from typing import Any

import msgspec

from orchestrator.plan.worker import EventReport, ProgressReport, Report, StepReport

#: Bytes that may wait for the agent: some hundred step reports.
BACKLOG_BYTES = 256 * 1024

Scalar = str | int | float | bool | None


class Reporter:
    """Writes reports to `fd` without blocking. Without an agent (`fd` None), rank 0 prints a short
    line instead."""

    def __init__(self, fd: int | None, rank: int, epoch: int):
        self.fd = fd
        self.rank = rank
        self.epoch = epoch
        self.dropped = 0
        self._backlog = bytearray()
        self._lock = threading.Lock()  # progress reports come from their own thread
        self._encode = msgspec.json.Encoder().encode
        if fd is not None:
            os.set_blocking(fd, False)

    def event(self, name: str, step: int | None = None, /, **fields: Scalar) -> None:
        """Reports an event."""
        self._send(
            EventReport(
                rank=self.rank,
                epoch=self.epoch,
                name=name,
                step=step,
                fields=fields,
            )
        )

    def step(self, **values: Any) -> None:
        """Reports one optimizer step with the fields of `StepReport` but `rank`, `epoch` and
        `dropped_reports`."""
        self._send(
            StepReport(
                rank=self.rank,
                epoch=self.epoch,
                dropped_reports=self.dropped,
                **values,
            )
        )

    def progress(self, **values: Any) -> None:
        """Reports progress with the fields of `ProgressReport`, unless it would have to wait behind
        other reports."""
        with self._lock:
            if self.fd is None or self._backlog:
                self._flush()
            else:
                report = ProgressReport(rank=self.rank, epoch=self.epoch, **values)
                self._backlog += self._line(report)
                self._flush()

    def close(self, wait_s: float = 2.0) -> None:
        """Waits up to `wait_s` seconds for the agent to read the backlog: the last reports tell how
        the run ended."""
        deadline = time.monotonic() + wait_s
        while self.fd is not None and self._backlog:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            select.select([], [self.fd], [], remaining_s)
            with self._lock:
                self._flush()

    def _send(self, report: Report) -> None:
        if self.fd is None:
            self._print(report)
            return
        line = self._line(report)
        with self._lock:
            if len(self._backlog) + len(line) > BACKLOG_BYTES:
                self._flush()
            if len(self._backlog) + len(line) > BACKLOG_BYTES:
                self.dropped += 1
                return
            self._backlog += line
            self._flush()

    def _line(self, report: Report) -> bytes:
        return self._encode(report) + b"\n"

    def _flush(self) -> None:
        # A pipe may take part of a line; the rest stays first in the backlog, so lines are never
        # interleaved.
        while self.fd is not None and self._backlog:
            try:
                written = os.write(self.fd, self._backlog)
            except BlockingIOError:
                return
            except OSError:  # the agent is gone: that must not end the worker with another error
                self.fd = None
                self._backlog.clear()
                return
            del self._backlog[:written]

    def _print(self, report: Report) -> None:
        if self.rank:
            return
        if isinstance(report, StepReport):
            loss = "" if report.loss is None else f"  loss {report.loss:.4f}"
            norm = "" if report.grad_norm is None else f"  grad norm {report.grad_norm:.3f}"
            line = f"step {report.step}{loss}{norm}  {report.tokens / report.step_s:,.0f} tokens/s"
        elif isinstance(report, EventReport):
            at_step = "" if report.step is None else f" (step {report.step})"
            fields = [f"{key}={value}" for key, value in report.fields.items()]
            line = f"{report.name}{at_step} {' '.join(fields)}"
        else:
            return
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
