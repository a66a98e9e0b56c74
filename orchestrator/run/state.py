"""The recorded state of a run: `state.json`.

There is one writer at a time: the backend before the agents start, the coordinator while it
runs, the backend again after the last agent has ended. The epoch in it is the fencing token: it
is written and synced before anybody hears of it.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit

from .folder import RunFolder, read_json, write_private
from .intent import ask, due, wants_end

SCHEMA = "orch.state/1"

Phase = Literal[
    "pending",
    "starting",
    "running",
    "restarting",
    "stopping",
    "done",
    "failed",
    "cancelled",
    "stopped",
]
PHASES: dict[Phase, str] = {
    "pending": "accepted, nothing started",
    "starting": "agents are starting and joining",
    "running": "workers run",
    "restarting": "workers of the last epoch are gone, those of the next not started yet",
    "stopping": "a request to end was received: workers save",
    "done": "every worker ended with 0",
    "failed": "ended by a failure; `orch resume` continues it from its last save",
    "cancelled": "ended by request; saved if the program can save",
    "stopped": "ended by its scheduler or its machine; may be started again",
}
FinalPhase = Literal["done", "failed", "cancelled", "stopped"]
End = Literal["done", "failed", "cancelled", "stopped"]
FINAL: frozenset[str] = frozenset(get_args(FinalPhase))

#: The kinds of causes. The first group are faults of workers, each of which may have a restart
#: budget of its own.
WORKER_CAUSES: dict[str, str] = {
    "worker_exit": "a worker ended by a signal or with an error",
    "worker_frozen": "a worker was stopped by a signal and did not go on",
    "worker_spinning": "a worker computed, and its step did not move",
    "worker_stuck": (
        "a worker lived, and neither moved nor computed: a lock, a file or a system call held it"
    ),
    "collective_hung": "all waited for each other in an exchange that did not end",
    "non_finite": "the loss or the gradient became inf or nan",
    "disk_full": "there was no room to save",
    "straggler": "a node was slower than the others, and left for a spare",
}
CAUSES: dict[str, str] = WORKER_CAUSES | {
    "node_lost": "the agent of a node went away, and its node with it",
    "node_unfit": "a node of the plan came and could not be used",
    "coordinator_lost": "the agent that coordinated went away",
    "join_timeout": "not all nodes came",
    "agent_exit": "an agent left by itself",
    "supervisor_lost": "every process of the run was gone",
    "scheduler": "the scheduler ended the run",
    "disk_failed": "the disk took no record of the run for a minute",
    "internal": "a bug of orch",
}


class Cause(Frozen):
    """The first thing that went wrong, which caused everything after it."""

    kind: str  # a key of CAUSES
    text: str  # one line
    epoch: int
    node: str | None = None
    rank: int | None = None
    code: int | None = None  # exit code, negative: the signal that killed it
    step: int | None = None  # last step that the rank had reported
    log: str | None = None  # file inside the run folder
    tail: list[str] = []  # its last lines
    #: file inside the run folder: the rank's stack, and its state as the kernel reported it
    stack: str | None = None


class NodeState(Frozen):
    state: Literal["expected", "joined", "running", "ended", "lost"]
    host: str | None = None
    pid: int | None = None
    metrics: str | None = None  # host:port of its Prometheus endpoint
    ranks: list[int] = []


class EpochState(Frozen):
    """One start of the workers, until they end. Times are Unix seconds of the coordinator's
    clock."""

    epoch: int
    started_at: float
    running_at: float | None = None
    ended_at: float | None = None
    #: done, restart, stopped, cancelled, failed; for a final checkpoint: saved, not saved, nothing
    #: to save
    outcome: str | None = None
    counted: bool = False  # its end used up one of max_restarts
    cause: Cause | None = None


class RunState(Frozen):
    schema: str
    run_id: str
    state: Phase
    created_at: float
    updated_at: float
    writer: str  # "backend", or the node whose agent holds the coordinator
    backend: str
    plan_hash: str
    summary: dict[str, str | int] = {}  # for lists: cluster, model, parallel, steps, world_size
    epoch: int = -1  # the newest one that was started
    intent: int = 0  # number of the newest request when this attempt began (`run.intent`)
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None  # set together with a final state
    reason: str | None = None  # one line
    restarts: int = 0  # restarts that count against the budget, for all causes together
    max_restarts: int = 0
    restarts_by_cause: dict[str, int] = {}  # the same restarts by kind of cause
    #: first epoch of this attempt; `orch resume` begins another attempt, with new budgets
    first_epoch: int = 0
    excluded: dict[str, str] = {}  # node -> why this attempt continues without it
    #: straggling node -> its own compute time over the median of its peers
    slow: dict[str, float] = {}
    nodes: dict[str, NodeState] = {}
    epochs: list[EpochState] = []
    cause: Cause | None = None  # why the run ended; earlier causes are in `epochs`
    #: (ended, resumed): no process of the run existed in between
    pauses: list[tuple[float, float]] = []

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    def ended_epochs(self, after: int) -> list[tuple[EpochState, EpochState]]:
        """Returns the epochs of this attempt after that one which have ended, each with the one
        that followed it."""
        first = max(self.first_epoch, after + 1)
        return [
            (ended, successor) for ended, successor in pairwise(self.epochs) if ended.epoch >= first
        ]


def paused(state: RunState, now: float) -> list[tuple[float, float]]:
    """Returns the run's pauses, with the one that ends now if an ended run starts again."""
    ended = state.ended_at
    if ended is None and state.epoch >= 0:
        ended = state.updated_at
    if ended is None or state.state == "pending":
        return state.pauses
    return [*state.pauses, (ended, max(ended, now))]


def write_state(folder: RunFolder, state: RunState) -> None:
    raw = msgspec.json.format(msgspec.json.encode(state), indent=1)
    write_private(folder.state, raw + b"\n")


def read_state(folder: RunFolder) -> RunState:
    """Reads the state. OrchError (65) with one line if the file is missing, damaged or of
    another version."""
    state = read_json(folder.state, RunState)
    if state is None:
        raise OrchError(
            f"run {folder.run_id} has no readable state: there is no {folder.state.name}",
            Exit.CONFIG,
        )
    if state.schema != SCHEMA:
        raise OrchError(
            f"{folder.state} is of schema {state.schema!r}, this version reads {SCHEMA!r}",
            Exit.CONFIG,
        )
    return state


def true_state(folder: RunFolder, alive: bool) -> RunState:
    """Returns the present state, which may differ from the recorded one: a run without processes
    has failed, whatever its record says.

    `alive` must have been determined before this call: in the other order a run that ends in
    between would seem lost.
    """
    state = read_state(folder)
    if alive and state.is_final and state.state != "done" and (intent := due(folder, state.intent)):
        phase: Phase = "stopping" if intent.want == "end" else "restarting"
        return replace(
            state,
            state=phase,
            exit_code=None,
            ended_at=None,
            reason=intent.text,
        )
    if alive or state.is_final:
        return state
    if intent := wants_end(folder):
        reason = f"cancelled; every process of the run ended while it was {state.state}"
        return finish(
            state,
            "cancelled",
            Exit.RESTART,
            intent.text if intent.force else reason,
        )
    event = "every process of the run is gone (killed, or the machine went down)"
    reason = f"{event} while it was {state.state}"
    cause = Cause(kind="supervisor_lost", text=reason, epoch=state.epoch)
    return finish(state, "failed", Exit.CAPACITY, reason, cause)


def finish(
    state: RunState,
    phase: FinalPhase,
    code: int,
    reason: str,
    cause: Cause | None = None,
    *,
    at: float | None = None,
    writer: str | None = None,
) -> RunState:
    """Returns the final state of a run: how it ended, with which exit code, and why. Every writer
    of an end calls this.

    `at`: Unix seconds of the end, None if only a scheduler knows it. `writer`: who reports it,
    None: as before.
    """
    changes: dict[str, Any] = {}
    if at is not None:
        changes |= {"ended_at": at, "updated_at": at}
    if writer is not None:
        changes["writer"] = writer
    return replace(
        state,
        state=phase,
        exit_code=int(code),
        reason=reason,
        cause=cause,
        **changes,
    )


def pending_again(state: RunState, **changes: object) -> RunState:
    """Returns the state from which an ended run starts another attempt: `pending`, with its
    epochs and history."""
    now = time.time()
    clear: dict[str, object] = {
        "exit_code": None,
        "reason": None,
        "cause": None,
        "ended_at": None,
        "nodes": {},
    }
    fixed = {
        "state": "pending",
        "updated_at": now,
        "writer": "backend",
        "pauses": paused(state, now),
    }
    return replace(state, **fixed, **(clear | changes))


def prepare_resume(
    folder: RunFolder,
    plan: Plan | None = None,
    intent: int | None = None,
) -> None:
    """Sets the run back to `pending` with new budgets, keeping epochs and history. The caller knows
    that nobody else writes.

    `plan`: the plan to continue with, if it is not the one in force. `intent`: number of the
    request that the attempt obeys; None: one is written here.
    """
    state = read_state(folder)
    if intent is None:
        intent = ask(folder, "run", began_with=state.intent).number
    changes: dict[str, object] = {
        "restarts": 0,
        "restarts_by_cause": {},
        "excluded": {},
        "slow": {},
        "intent": intent,
    }
    changes["first_epoch"] = state.epoch + 1
    if plan is not None:
        summary = state.summary | {"world_size": plan.parallel.world_size}
        changes |= {"plan_hash": plan.hash, "summary": summary}
    write_state(folder, pending_again(state, **changes))
