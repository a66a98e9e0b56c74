"""Watching a run until it ends: one line that changes on a terminal, a line now and then
elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TextIO

from orchestrator.plan import PlanError, load_plan
from orchestrator.run.folder import RunFolder, insist
from orchestrator.run.state import RunState
from orchestrator.style import Style

from .live import read_live
from .logs import LogTail
from .pages.run_page import end_lines, progress_line

_LOOK_S = 0.25
_SAY_S = 5.0  # between lines where they cannot be overwritten


def _patient(look: Callable[[RunFolder], RunState]) -> Callable[[RunFolder], RunState]:
    """`look`, called until it finds a state: one that cannot be read for a moment ends no watching,
    and no run."""
    return lambda folder: insist(lambda: look(folder), tells=False)


def follow_program(
    folder: RunFolder, look: Callable[[RunFolder], RunState], out: TextIO, style: Style
) -> RunState:
    """What the workers print, line by line with their ranks, until the run has ended; its final
    state. Faults and restarts are told between the lines."""
    planned: set[int] = set()
    with contextlib.suppress(PlanError):  # else the ranks are those that the state names
        planned = {rank.rank for rank in load_plan(folder.plan).ranks}
    width = len(str(max(planned, default=0)))
    tails: dict[int, LogTail] = {}
    reported_epoch = -1  # the newest epoch whose end was told
    look = _patient(look)
    while True:
        state = look(folder)  # before reading: what is written until then is read
        ranks = {rank for node in state.nodes.values() for rank in node.ranks} | planned
        for rank in sorted(ranks):
            tail = tails.setdefault(rank, LogTail(folder.rank_log(rank)))
            for line in tail.read(last=state.is_final):
                print(f"[rank {rank:>{width}}] {line}", file=out)
        for ended, successor in pairwise(state.epochs):
            if ended.epoch > reported_epoch and ended.epoch >= state.first_epoch:
                reported_epoch = ended.epoch
                if ended.cause:
                    print(
                        f"orch: {ended.cause.text}; starting again as epoch {successor.epoch}",
                        file=out,
                    )
        out.flush()
        if state.is_final:
            print("\n".join(end_lines(state, style)), file=out, flush=True)
            return state
        time.sleep(_LOOK_S)


def follow(
    folder: RunFolder, look: Callable[[RunFolder], RunState], out: TextIO, style: Style
) -> RunState:
    """Show progress on `out` until the run has ended; its final state. `look`: the backend's
    `state`."""
    terminal = out.isatty()
    printed_line = ""
    printed_at = 0.0
    printed_state = ""
    look = _patient(look)
    while True:
        state = look(folder)
        line = progress_line(state, read_live(folder, state, time.time()), style)
        now = time.monotonic()
        if terminal:
            out.write(f"\r\033[K{line}")
            out.flush()
        elif line != printed_line and (
            now - printed_at >= _SAY_S or state.state != printed_state or state.is_final
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
        time.sleep(_LOOK_S)
