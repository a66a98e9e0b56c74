"""The messages between the agents and the coordinator. docs/protocol.md says when each is sent.

Every message travels with its epoch in an envelope. Unknown kinds and fields are refused.
"""

from __future__ import annotations

from msgspec import Struct

from orchestrator.plan.document import Frozen


class _Message(Frozen, tag_field="kind"):
    pass


# ---------------------------------------------------------------- from agent to coordinator


class Join(_Message, tag="join"):
    """The first message of an agent.

    `node` is the name that the launcher gave the node; it is never derived from a host name.
    """

    node: str
    host: str  # for people
    address: str  # where other nodes reach this one
    pid: int
    gpus: int
    nics: int
    plan_hash: str
    metrics: str | None  # host:port of the Prometheus endpoint
    warm: bool = True  # workers would start at once; else their program is still being imported
    #: Addresses of all of this node's interfaces: its workers may connect from any of them.
    addresses: list[str] = []


class Warm(_Message, tag="warm"):
    """The program has been imported: from now on workers start at once."""


class Ready(_Message, tag="ready"):
    """The agent follows this epoch, and nothing of an older one runs on its node.

    `port` is where rank 0's store would listen; the agent holds it open.
    """

    port: int


class Started(_Message, tag="started"):
    """All workers of this node have started."""


class WorkerExit(_Message, tag="worker_exit"):
    rank: int
    code: int  # negative: killed by that signal
    asked: bool  # it had been asked to stop before it ended
    step: int | None  # last step it reported
    tail: list[str]  # last lines of its log
    cause: str = ""  # kind of its failure, as the worker reported it (`run.state.WORKER_CAUSES`)
    error: str = ""


class Stopped(_Message, tag="stopped"):
    """All workers of this epoch on this node, and all processes they started, have ended."""


class TerminationSignal(_Message, tag="termination_signal"):
    """The run should end: the scheduler has sent a signal, or the supervisor is gone.

    In an elastic run only this node should leave.
    """

    reason: str
    signal: str  # name of the signal for the workers
    force: bool  # a second signal: do not wait for a save
    by_people: bool = False  # people request the end of the run, and the disk could not record it


FROZEN_AFTER_S = 2.0  # a debugger may stop and continue a process for less


class WorkerStatus(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The status of one worker. Seconds are counted in the agent's own ticks."""

    rank: int
    step: int = 0  # the current step; 0 before the first
    phase: str = ""
    limit_s: float | None = None  # seconds without progress that the phase may take
    waiting: str | None = None  # the collective that it waits in
    still_s: float = 0.0  # seconds without progress
    step_s: float = 0.0  # seconds in this step so far
    silent_s: float | None = None  # seconds without a progress report; None if it never sent one
    stopped_s: float = 0.0  # seconds for which a signal has stopped it
    state: str = "?"  # the kernel's letter
    busy: float = 0.0  # recent CPU seconds per second
    usual_step_s: float | None = None  # median of this epoch's last steps; None before the second
    usual_own_s: float | None = None  # median of its own compute time in them

    @property
    def is_frozen(self) -> bool:
        return self.stopped_s >= FROZEN_AFTER_S


class AgentAlive(_Message, tag="agent_alive"):
    step: int | None  # the furthest step that a worker of this node has reported
    seen: list[WorkerStatus] = []


# ---------------------------------------------------------------- from coordinator to agent


class Prepare(_Message, tag="prepare"):
    """A new epoch begins: kill the workers of the last one, and answer with Ready."""


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
    #: Instead of training, one process per node saves in-memory replicas; its rank is the node's
    #: number.
    final_checkpoint: bool = False
    peers: list[str] = []  # for rank 0's node: the addresses that its store answers


class Stop(_Message, tag="stop"):
    """Pass `signal` on to the workers, and kill those that still run after `grace_s`."""

    reason: str
    signal: str
    grace_s: float


class Examine(_Message, tag="examine"):
    """A fault was found: save the stacks of all workers, then kill those in `end`."""

    reason: str
    end: list[int] = []


class CoordinatorAlive(_Message, tag="coordinator_alive"):
    slowdown: float | None = None  # the node's own compute time over the median of its peers


class Done(_Message, tag="done"):
    """The run is over: exit with this code."""

    code: int
    reason: str


class Fenced(_Message, tag="fenced"):
    """A newer epoch exists without this agent: kill the workers and exit with 77."""

    reason: str


FromAgent = Join | Warm | Ready | Started | WorkerExit | Stopped | TerminationSignal | AgentAlive
FromCoordinator = Prepare | Assign | Stop | Examine | CoordinatorAlive | Done | Fenced
