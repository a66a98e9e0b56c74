"""Fault attribution: whether a failure is due to the data or the code, or to a node. Pure.

A step that fails on different nodes does not depend on where it runs. A node that fails at
different steps, while the others do not, does not depend on what runs. A gradient that is not
finite is the same on all ranks: if it comes again at the same step after a restart, it was no
transient error of a machine.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from orchestrator.plan.exits import Exit
from orchestrator.run.state import Cause

#: Ends that somebody outside may have brought about, which say nothing of data, code and node.
EXTERNAL_CODES = (
    -signal.SIGKILL,
    -signal.SIGTERM,
    -signal.SIGINT,
    -signal.SIGHUP,
    int(Exit.RESTART),
)
_CODE_CAUSES = ("worker_exit", "worker_spinning", "worker_stuck", "non_finite")
_NODE_CAUSES = ("worker_exit", "worker_spinning", "worker_stuck")


@dataclass(frozen=True)
class FaultHistory:
    """`causes`: of the failures of this attempt so far, oldest first. `nodes`: of the epoch that
    has ended."""

    causes: tuple[Cause, ...] = ()
    nodes: int = 1
    bad_node_after: int = 0  # failures in a row; 0: never


NO_FAULTS = FaultHistory()


@dataclass(frozen=True)
class Attribution:
    """`at_fault`: "data" stands for the data or the code; "" where nothing can be said."""

    at_fault: Literal["data", "node", ""] = ""
    text: str = ""


def attribute(cause: Cause, history: FaultHistory) -> Attribution:
    """What a failure is due to, by the failures before it in this attempt."""
    text = cause.text
    if _may_be_code(cause):
        repeats = [
            failure
            for failure in history.causes
            if _may_be_code(failure) and (failure.kind, failure.step) == (cause.kind, cause.step)
        ]
        if cause.kind == "non_finite" and repeats:
            return Attribution(
                "data", f"{text}; so it was after the last restart: the data or the code"
            )
        elsewhere = next((failure for failure in repeats if failure.node != cause.node), None)
        if elsewhere:
            return Attribution(
                "data",
                f"{text}; the same step failed on {elsewhere.node} before: the data or the code",
            )
    if history.bad_node_after and history.nodes > 1 and _may_be_node(cause):
        streak = [cause]
        for failure in reversed([failure for failure in history.causes if _may_be_node(failure)]):
            if failure.node != cause.node:
                break
            streak.append(failure)
        steps = {failure.step for failure in streak}
        if len(streak) >= history.bad_node_after and len(steps) >= min(
            len(streak), history.bad_node_after
        ):
            return Attribution(
                "node",
                f"{text}; {len(streak)} failures in a row on {cause.node}, at different steps",
            )
    return Attribution()


def _may_be_code(cause: Cause) -> bool:
    return cause.kind in _CODE_CAUSES and cause.step is not None and not _from_outside(cause)


def _may_be_node(cause: Cause) -> bool:
    return cause.kind in _NODE_CAUSES and cause.node is not None and not _from_outside(cause)


def _from_outside(cause: Cause) -> bool:
    """A worker that hung was killed by its own agent: there the signal says nothing."""
    return cause.kind == "worker_exit" and cause.code in EXTERNAL_CODES
