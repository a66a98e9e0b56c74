"""Defines the faults, what each does, and what a run must be able to spare for it. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

Position = Literal["rank0", "coordinator", "other", "any"]
POSITIONS: tuple[str, ...] = get_args(Position)


class Kind(NamedTuple):
    """A fault and its effect on a run."""

    help: str
    #: what the fault may cost the run: one of its restarts, a node, or time only
    takes: Literal["restart", "node", "nothing"]
    lasts: bool = False  # it lasts for some seconds and is then undone
    restarts: bool = True  # steps continue in another attempt; false: also in the same one
    slows: bool = False  # detected by slow steps, so usual steps must have been measured before


KINDS: dict[str, Kind] = {
    "kill_worker": Kind("SIGKILL to one worker", "restart"),
    "stop_worker": Kind("SIGSTOP to one worker: it exists and does nothing", "restart"),
    "slow_worker": Kind(
        "one worker runs half of the time",
        "nothing",
        lasts=True,
        restarts=False,
        slows=True,
    ),
    "kill_agent": Kind("SIGKILL to the agent of a node", "node"),
    "stop_agent": Kind("SIGSTOP to the agent of a node, SIGCONT later", "node", lasts=True),
    "kill_node": Kind("SIGKILL to everything of the run on a node", "node"),
    "stop_node": Kind(
        "SIGSTOP to everything of the run on a node, SIGCONT later",
        "node",
        lasts=True,
    ),
    "notice": Kind(
        "SIGTERM to the agent of a node, and SIGKILL to what is left of it later",
        "node",
        lasts=True,
    ),
    "partition": Kind(
        "a node's link is down, and up later (network=namespaces)",
        "node",
        lasts=True,
    ),
    "disk_full": Kind(
        "checkpoints cannot be written: their filesystem is full",
        "nothing",
        lasts=True,
        restarts=False,
    ),
    "bit_flip": Kind("one bit of the newest checkpoint, then SIGKILL to one worker", "restart"),
}


def check_kinds(names: Sequence[str]) -> list[str]:
    """Returns the names. OrchError (64) for a name that is not a fault."""
    for name in names:
        if name not in KINDS:
            raise OrchError(f"no fault {name!r}; {did_you_mean(name, KINDS)}", Exit.USAGE)
    return list(names)


class Injection(NamedTuple):
    """A planned injection. `pick` (0 to 1) chooses among the eligible victims when its time has
    come."""

    fault: str
    position: str
    pick: float


def plan_injections(
    faults: Sequence[str],
    position: str,
    trials: int,
    seed: int,
    at_random: bool,
) -> list[Injection]:
    """Plans `trials` of each fault in turn; at random: `trials` altogether, drawn by the seed."""
    draw = random.Random(seed)
    if at_random:
        return [
            Injection(
                draw.choice(list(faults)),
                position,
                draw.random(),
            )
            for _ in range(trials)
        ]
    return [Injection(fault, position, draw.random()) for _ in range(trials) for fault in faults]


def victim(
    injection: Injection,
    ranks: Mapping[str, Sequence[int]],
    coordinator: str,
) -> tuple[str, int] | None:
    """Chooses the (node, rank) to be hit among nodes with the ranks they hold; None if no node
    fits the position."""
    with_ranks = {node: sorted(held) for node, held in sorted(ranks.items()) if held}
    nodes_by_position = {
        "rank0": [node for node, held in with_ranks.items() if held[0] == 0],
        "coordinator": [node for node in with_ranks if node == coordinator],
        "other": [
            node for node, held in with_ranks.items() if node != coordinator and held[0] != 0
        ],
        "any": list(with_ranks),
    }.get(injection.position, [node for node in with_ranks if node == injection.position])
    candidates = [(node, rank) for node in nodes_by_position for rank in with_ranks[node]]
    if injection.position == "rank0":
        candidates = [(node, rank) for node, rank in candidates if rank == 0]
    if not candidates:
        return None
    return candidates[min(int(injection.pick * len(candidates)), len(candidates) - 1)]


def refusal(fault: str, *, restarts_left: int, elastic: bool, spare_nodes: int) -> str:
    """Returns why the fault would end this run, "" if the run can survive it."""
    takes = KINDS[fault].takes
    if takes == "restart" and restarts_left < 1:
        return f"{fault} takes a restart, and backend.max_restarts is used up"
    if takes == "node" and not elastic:
        return f"{fault} takes a node, and this run is not elastic (nodes=A..B): it would end"
    if takes == "node" and spare_nodes < 1:
        return f"{fault} takes a node, and this run is at its smallest size"
    return ""


def restarts_left(
    fault: str,
    max_restarts: int,
    limits: Mapping[str, int],
    used: int,
    by_cause: Mapping[str, int],
) -> int:
    """Returns what is left of the budget that the fault is charged to: its cause's own, else the
    shared one (docs/protocol.md)."""
    cause = "worker_frozen" if fault == "stop_worker" else "worker_exit"
    if cause in limits:
        return limits[cause] - by_cause.get(cause, 0)
    return max_restarts - (used - sum(by_cause.get(kind, 0) for kind in limits))
