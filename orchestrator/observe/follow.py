"""Watching a run until it ends: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from orchestrator.plan import load_plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import RunState
from orchestrator.style import Style

from .live import read_live
from .logs import LogTail
from .pages.run_page import end_lines, progress_line

_LOOK_S = 0.25
_SAY_S = 5.0  # between lines where they cannot be overwritten


def follow_program(folder: RunFolder, look: Callable[[RunFolder], RunState], out: TextIO, style: Style) -> RunState:
    """What the workers print, line by line with their ranks, until the run has ended; its final state. Faults and
    restarts are told between the lines."""
    plan = load_plan(folder.plan)
    width = len(str(plan.parallel.world_size - 1))
    tails: dict[int, LogTail] = {}
    told = ""
    while True:
        state = look(folder)  # before reading: what is written until then is read
        ranks = {rank for node in state.nodes.values() for rank in node.ranks} | {rank.rank for rank in plan.ranks}
        for rank in sorted(ranks):
            tail = tails.setdefault(rank, LogTail(folder.rank_log(rank)))
            for line in tail.read(last=state.is_final):
                print(f"[rank {rank:>{width}}] {line}", file=out)
        fault = state.epochs[-2].cause if len(state.epochs) > 1 else None
        if fault and fault.text != told:
            told = fault.text
            print(f"orch: {fault.text}; starting again as epoch {state.epoch}", file=out)
        out.flush()
        if state.is_final:
            print("\n".join(end_lines(state, style)), file=out, flush=True)
            return state
        time.sleep(_LOOK_S)


def follow(folder: RunFolder, look: Callable[[RunFolder], RunState], out: TextIO, style: Style) -> RunState:
    """Show progress on `out` until the run has ended; its final state. `look`: the backend's `state`."""
    terminal = out.isatty()
    said, said_at, known = "", 0.0, ""
    while True:
        state = look(folder)
        line = progress_line(state, read_live(folder, state, time.time()), style)
        now = time.monotonic()
        if terminal:
            out.write(f"\r\033[K{line}")
            out.flush()
        elif line != said and (now - said_at >= _SAY_S or state.state != known or state.is_final):
            print(line, file=out, flush=True)
            said, said_at, known = line, now, state.state
        if state.is_final:
            if terminal:
                out.write("\n")
            print("\n".join(end_lines(state, style)), file=out, flush=True)
            return state
        time.sleep(_LOOK_S)
