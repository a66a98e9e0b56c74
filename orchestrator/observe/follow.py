"""Shows a run's progress until it ends: one changing line on a terminal, a line every few seconds
elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TextIO

from orchestrator.plan import PlanError, load_plan
from orchestrator.run.folder import RunFolder, insist
from orchestrator.run.state import RunState
from orchestrator.style import Style

from .live import read_live
from .logs import LogTail
from .pages.run_page import end_lines, progress_line

_POLL_S = 0.25
_PRINT_S = 5.0  # between lines where they cannot be overwritten

ReadState = Callable[[RunFolder], RunState]


def _retrying(read_state: ReadState) -> ReadState:
    """Returns `read_state` with retries, so that a state that cannot be read for a moment does not
    end the progress display."""
    return lambda folder: insist(lambda: read_state(folder), tells=False)


def follow_program(
    folder: RunFolder,
    read_state: ReadState,
    out: TextIO,
    style: Style,
) -> RunState:
    """Prints the workers' output with their ranks, and faults and restarts between the lines, until
    the run has ended. Returns its final state."""
    planned: set[int] = set()
    with contextlib.suppress(PlanError):  # without a plan, the state names the ranks
        planned = {rank.rank for rank in load_plan(folder.plan).ranks}
    width = len(str(max(planned, default=0)))
    tails: dict[int, LogTail] = {}
    reported_epoch = -1  # the newest epoch whose end was printed
    read_state = _retrying(read_state)
    while True:
        state = read_state(folder)  # before reading: what is written until then is read
        ranks = {rank for node in state.nodes.values() for rank in node.ranks} | planned
        for rank in sorted(ranks):
            tail = tails.setdefault(rank, LogTail(folder.rank_log(rank)))
            for line in tail.read(last=state.is_final):
                print(f"[rank {rank:>{width}}] {line}", file=out)
        for ended, successor in state.ended_epochs(reported_epoch):
            reported_epoch = ended.epoch
            if ended.cause:
                print(
                    f"orch: {ended.cause.text}; restarting as epoch {successor.epoch}",
                    file=out,
                )
        out.flush()
        if state.is_final:
            print("\n".join(end_lines(state, style)), file=out, flush=True)
            return state
        time.sleep(_POLL_S)


def follow(
    folder: RunFolder,
    read_state: ReadState,
    out: TextIO,
    style: Style,
) -> RunState:
    """Shows progress on `out` until the run has ended. Returns its final state. `read_state`: the
    backend's `state`."""
    terminal = out.isatty()
    printed_line = ""
    printed_at = 0.0
    printed_state = ""
    read_state = _retrying(read_state)
    while True:
        state = read_state(folder)
        line = progress_line(
            state,
            read_live(folder, state, time.time()),
            style,
        )
        now = time.monotonic()
        if terminal:
            out.write(f"\r\033[K{line}")
            out.flush()
        elif line != printed_line and (
            now - printed_at >= _PRINT_S or state.state != printed_state or state.is_final
        ):
            print(line, file=out, flush=True)
            printed_line = line
            printed_at = now
            printed_state = state.state
        if state.is_final:
            if terminal:
                out.write("\n")
            print("\n".join(end_lines(state, style)), file=out, flush=True)
            return state
        time.sleep(_POLL_S)
