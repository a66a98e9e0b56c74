"""Fault attribution: decides whether a failure is due to the data or the code, or to a node. Pure.

A step that fails on different nodes does not depend on the node. A node that fails at different
steps, while the others do not, does not depend on the step. A gradient that is not finite is the
same on all ranks: if it recurs at the same step after a restart, it was not a transient error of a
machine.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from orchestrator.plan.exits import Exit
from orchestrator.run.state import Cause

#: Exit codes that may be due to someone outside the run; they blame neither data, code nor node.
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
    """The failures of this attempt, oldest first, and the nodes of the epoch that ended."""

    causes: tuple[Cause, ...] = ()
    nodes: int = 1
    bad_node_after: int = 0  # failures in a row; 0: never


NO_FAULTS = FaultHistory()


@dataclass(frozen=True)
class Attribution:
    """The attribution of a failure. "data" stands for the data or the code, "" for unknown."""

    at_fault: Literal["data", "node", ""] = ""
    reason: str = ""


def attribute(cause: Cause, history: FaultHistory) -> Attribution:
    """Attributes a failure by comparing it with earlier failures of this attempt."""
    if _may_be_code(cause):
        suspects = [failure for failure in history.causes if _may_be_code(failure)]
        key = (cause.kind, cause.step)
        repeats = [failure for failure in suspects if (failure.kind, failure.step) == key]
        if cause.kind == "non_finite" and repeats:
            reason = "so it was after the last restart: the data or the code"
            return Attribution("data", f"{cause.text}; {reason}")
        elsewhere = [failure.node for failure in repeats if failure.node != cause.node]
        if elsewhere:
            reason = f"the same step failed on {elsewhere[0]} before: the data or the code"
            return Attribution("data", f"{cause.text}; {reason}")
    if history.bad_node_after and history.nodes > 1 and _may_be_node(cause):
        streak = [cause]
        suspects = [failure for failure in history.causes if _may_be_node(failure)]
        for failure in reversed(suspects):
            if failure.node != cause.node:
                break
            streak.append(failure)
        steps = {failure.step for failure in streak}
        if len(steps) >= history.bad_node_after:
            reason = f"{len(streak)} failures in a row on {cause.node}, at different steps"
            return Attribution("node", f"{cause.text}; {reason}")
    return Attribution()


def _may_be_code(cause: Cause) -> bool:
    return cause.kind in _CODE_CAUSES and cause.step is not None and not _from_outside(cause)


def _may_be_node(cause: Cause) -> bool:
    return cause.kind in _NODE_CAUSES and cause.node is not None and not _from_outside(cause)


def _from_outside(cause: Cause) -> bool:
    """Returns whether the exit code of a worker may be due to someone outside the run.

    A hung worker is killed by its own agent, so its exit code does not count.
    """
    return cause.kind == "worker_exit" and cause.code in EXTERNAL_CODES
