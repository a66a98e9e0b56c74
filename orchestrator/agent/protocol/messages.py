"""The messages between agents and coordinator. docs/protocol.md says when each is sent.

Every message travels with its epoch in an envelope. Unknown kinds and fields are refused.
"""

from __future__ import annotations

from msgspec import Struct

from orchestrator.plan.document import Frozen


class _Message(Frozen, tag_field="kind"):
    pass


# ------------------------------------------------------------------------------------------ agent
#     -> coordinator


class Join(_Message, tag="join"):
    """The first message of an agent. `node`: the name that the launcher gave it, never one derived
    from a host name."""

    node: str
    host: str  # for people
    address: str  # where other nodes reach this one
    pid: int
    gpus: int
    nics: int
    plan_hash: str
    metrics: str | None  # host:port of the Prometheus endpoint
    warm: bool = True  # workers would start at once; else their program is still being imported
    addresses: list[
        str
    ] = []  # all of this node's interfaces: from any of them its workers may connect


class Warm(_Message, tag="warm"):
    """The program is imported: from now on workers start at once."""


class Ready(_Message, tag="ready"):
    """The agent follows this epoch, and nothing of an older one runs here. `port`: where the store
    of rank 0 would listen; the agent has it open."""

    port: int


class Started(_Message, tag="started"):
    """All workers of this node run, or have ended by now."""


class WorkerExit(_Message, tag="worker_exit"):
    rank: int
    code: int  # negative: killed by that signal
    asked: bool  # it had been told to stop before it ended
    step: int | None  # last step it reported
    tail: list[str]  # last lines of its log
    cause: str = ""  # of its failure, as it has reported it (`run.state.WORKER_CAUSES`)
    error: str = ""


class Stopped(_Message, tag="stopped"):
    """All workers of this epoch on this node have ended, with everything that they had started."""


class TerminationSignal(_Message, tag="termination_signal"):
    """The run should end: the scheduler has sent a signal, or the supervisor is gone. In an elastic
    run: this node."""

    reason: str
    signal: str  # name of the signal for the workers
    force: bool  # this agent was told before: do not wait for a save
    by_people: bool = False  # who want the run to end, which the disk did not take down


FROZEN_AFTER_S = 2.0  # a stop and continue by whoever looks into a process is none


class WorkerStatus(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The status of one worker. Seconds are counted by the agent's own ticks: no clock is compared
    with another."""

    rank: int
    step: int = 0  # under way; 0 before the first
    phase: str = ""
    waiting: str | None = None  # the collective that it waits in
    still_s: float = 0.0  # without progress
    step_s: float = 0.0  # in this step so far
    silent_s: float | None = None  # without a progress report; None: it has never sent one
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


# ------------------------------------------------------------------------------------------
#     coordinator -> agent


class Prepare(_Message, tag="prepare"):
    """A new epoch: drop what you do, answer with Ready."""


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
    # no training: one process a node, its rank the node's number, saves in-memory replicas
    final_checkpoint: bool = False
    peers: list[str] = []  # to rank 0's node: the addresses that its store answers


class Stop(_Message, tag="stop"):
    """Pass `signal` on to the workers; what still runs after `grace_s` is killed."""

    reason: str
    signal: str
    grace_s: float


class Examine(_Message, tag="examine"):
    """A fault was found: save the stacks of all workers, then kill those in `end`."""

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
