"""What a fault says beside those before it: whether it is the data's or the code's, or a node's. Pure.

The same step failing on different nodes does not depend on where it runs; one node failing at different steps, while
the others do not, does not depend on what runs. A gradient that is not finite is everybody's at once: when it comes
again after a restart at the same step it was no passing error of a machine.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from orchestrator.plan.exits import Exit
from orchestrator.run.state import Cause

#: Ends that somebody outside may have brought about, which say nothing of data, code and node.
_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, int(Exit.RESTART))
_OF_CODE = ("worker_exit", "worker_spinning", "worker_stuck", "non_finite")
_OF_NODE = ("worker_exit", "worker_spinning", "worker_stuck")


@dataclass(frozen=True)
class Past:
    """What went wrong before in this attempt, oldest first; `nodes` of this epoch; when a node counts as bad."""

    causes: tuple[Cause, ...] = ()
    nodes: int = 1
    bad_node_after: int = 0  # failures in a row; 0: never


NOTHING = Past()


@dataclass(frozen=True)
class Blame:
    guilty: Literal["data", "node", ""] = ""
    text: str = ""


def blame(cause: Cause, past: Past) -> Blame:
    """`guilty` "data" stands for data or code."""
    if _of_code(cause):
        same = [one for one in past.causes if _of_code(one) and (one.kind, one.step) == (cause.kind, cause.step)]
        if cause.kind == "non_finite" and same:
            return Blame("data", f"{cause.text}; so it was after the last restart: the data or the code")
        other = next((one for one in same if one.node != cause.node), None)
        if other:
            return Blame("data", f"{cause.text}; the same step failed on {other.node} before: the data or the code")
    if past.bad_node_after and past.nodes > 1 and _of_node(cause):
        row = [cause]
        for one in reversed([one for one in past.causes if _of_node(one)]):
            if one.node != cause.node:
                break
            row.append(one)
        steps = {one.step for one in row}
        if len(row) >= past.bad_node_after and len(steps) >= min(len(row), past.bad_node_after):
            return Blame("node", f"{cause.text}; {len(row)} failures in a row on {cause.node}, at different steps")
    return Blame()


def _of_code(cause: Cause) -> bool:
    return cause.kind in _OF_CODE and cause.step is not None and not _from_outside(cause)


def _of_node(cause: Cause) -> bool:
    return cause.kind in _OF_NODE and cause.node is not None and not _from_outside(cause)


def _from_outside(cause: Cause) -> bool:
    """A worker that hung was killed by its own agent: there the signal says nothing."""
    return cause.kind == "worker_exit" and cause.code in _OUTSIDE
