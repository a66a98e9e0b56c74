"""What agents and coordinator say to each other. docs/protocol.md tells when.

Every message travels in an envelope with its epoch, so none of them repeats it. Unknown kinds and fields are refused.
"""

from __future__ import annotations

from msgspec import Struct


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", kw_only=True):
    pass


# ------------------------------------------------------------------------------------------ agent -> coordinator


class Join(_Message, tag="join"):
    """Who I am. The identity is the name that the launcher gave, never one derived from a host name."""

    node: str
    host: str  # for people
    address: str  # where other nodes reach this one
    pid: int
    gpus: int
    nics: int
    plan_hash: str
    metrics: str | None  # host:port of the Prometheus endpoint
    warm: bool = True  # workers would start at once; else their program is still being imported


class Warm(_Message, tag="warm"):
    """The program is imported: from now on workers start at once."""


class Ready(_Message, tag="ready"):
    """I follow this epoch, and nothing of an older one runs here. `port` is free on this node now."""

    port: int


class Started(_Message, tag="started"):
    """All workers of this node have been started."""


class WorkerExit(_Message, tag="worker_exit"):
    rank: int
    code: int  # negative: killed by that signal
    asked: bool  # it had been told to stop before it ended
    step: int | None  # last step it reported
    tail: list[str]  # last lines of its log
    cause: str = ""  # what it said of its failure (`launch.state.WORKER_CAUSES`)
    error: str = ""


class Stopped(_Message, tag="stopped"):
    """All workers of this epoch on this node have ended, with everything that they had started."""


class TerminationSignal(_Message, tag="termination_signal"):
    """The run should end: the scheduler has sent a signal, or the supervisor is gone. In an elastic run: this node."""

    reason: str
    signal: str  # name of the signal for the workers
    force: bool  # this agent was told before: do not wait for a save


FROZEN_AFTER_S = 2.0  # a stop and continue by whoever looks into a process is none


class WorkerStatus(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker, as its agent sees it. Seconds are the agent's own heartbeats: no clock is compared with another."""

    rank: int
    step: int = 0  # that it makes; 0 before the first
    phase: str = ""
    waiting: str | None = None  # the exchange that it stands still in
    still_s: float = 0.0  # without a move
    step_s: float = 0.0  # in this step so far
    silent_s: float | None = None  # without a pulse; None: it never had one
    stopped_s: float = 0.0  # stopped by a signal
    state: str = "?"  # the kernel's letter
    busy: float = 0.0  # CPU seconds a second, lately
    usual_step_s: float | None = None  # median of this epoch's last steps; None before the second
    usual_own_s: float | None = None  # of its own part of them

    @property
    def is_frozen(self) -> bool:
        return self.stopped_s >= FROZEN_AFTER_S


class AgentAlive(_Message, tag="agent_alive"):
    step: int | None  # furthest step any worker of this node has reported
    seen: list[WorkerStatus] = []


# ------------------------------------------------------------------------------------------ coordinator -> agent


class Prepare(_Message, tag="prepare"):
    """Leave what you do and follow this epoch; answer with Ready."""


class RankAssignment(Struct, frozen=True, forbid_unknown_fields=True):
    rank: int
    gpu: int


class Assign(_Message, tag="assign"):
    """This node's share of the ranks."""

    plan_hash: str
    ranks: list[RankAssignment]
    node_rank: int
    world_size: int
    master_address: str
    master_port: int
    final_checkpoint: bool = (
        False  # no training: one process a node, its rank the node's number, saves in-memory replicas
    )


class Stop(_Message, tag="stop"):
    """Pass `signal` on to the workers; what still runs after `grace_s` is killed."""

    reason: str
    signal: str
    grace_s: float


class Examine(_Message, tag="examine"):
    """Something is wrong: save where your workers are, then kill those in `end`."""

    reason: str
    end: list[int] = []


class CoordinatorAlive(_Message, tag="coordinator_alive"):
    slowdown: float | None = None  # of that node: its own compute time over the median of its peers


class Done(_Message, tag="done"):
    """The run is over: exit with this code."""

    code: int
    reason: str


class Fenced(_Message, tag="fenced"):
    """A newer epoch exists and you are not in it: kill your workers and exit with 77."""

    reason: str


FromAgent = Join | Warm | Ready | Started | WorkerExit | Stopped | TerminationSignal | AgentAlive
FromCoordinator = Prepare | Assign | Stop | Examine | CoordinatorAlive | Done | Fenced
