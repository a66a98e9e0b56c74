"""The events of a run: the lines of `events/<node>.jsonl`.

`docs/reference/events.md` is written from this list. A test compares it with the places in the code
that write events.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Writer = Literal["agent", "coordinator", "worker"]


class EventKind(NamedTuple):
    """One kind of event."""

    writer: Writer
    fields: str  # names of the fields that it has beside those of every event
    meaning: str


EVENTS: dict[str, EventKind] = {
    # agents
    "agent_started": EventKind("agent", "pid", "the agent of a node has started"),
    "refused": EventKind("agent", "reason", "the coordinator did not let the agent join"),
    "coordinates": EventKind(
        "agent",
        "epoch_claimed",
        "this agent coordinates the run from now on",
    ),
    "workers_bound": EventKind(
        "agent",
        "cores reason",
        "ranks by the cores that they run on, or why they run on all",
    ),
    "workers_started": EventKind("agent", "ranks", "the ranks of this node have been started"),
    "flush_started": EventKind(
        "agent",
        "ranks",
        "processes that save the final checkpoint have been started",
    ),
    "workers_warm": EventKind("agent", "", "every worker of this node has imported its program"),
    "worker_ended": EventKind(
        "agent",
        "rank code asked step on",
        "a worker ended; asked: it had been asked to stop; the coordinator writes it, too",
    ),
    "worker_supervisor_stopped": EventKind(
        "agent",
        "reason",
        "the process between agent and workers did not answer",
    ),
    "stack_not_saved": EventKind("agent", "rank", "the stack of a hung worker could not be saved"),
    "notice": EventKind(
        "agent",
        "reason force",
        "the node got a termination signal or a request to end",
    ),
    "leaving": EventKind("agent", "code reason", "the agent ends, with this exit code"),
    "coordinator_lost": EventKind("agent", "reason", "the coordinator does not answer any more"),
    "stale_message": EventKind(
        "agent",
        "message of_epoch",
        "a message of an older epoch came and was refused",
    ),
    "report_unreadable": EventKind(
        "agent",
        "rank line",
        "a worker wrote a line into its report pipe that is no report",
    ),
    "metrics_not_served": EventKind(
        "agent",
        "host reason",
        "the page of metrics could not be opened; the run continues without it",
    ),
    # the coordinator: epochs
    "nodes_joined": EventKind(
        "coordinator",
        "nodes coordinator_moved",
        "the nodes with which the next epoch begins are present",
    ),
    "epoch_began": EventKind("coordinator", "", "an epoch began: nodes get their ranks"),
    "epoch_runs": EventKind("coordinator", "workers", "all workers of the epoch have started"),
    "epoch_stops": EventKind("coordinator", "reason", "the workers are asked to stop"),
    "epoch_ended": EventKind(
        "coordinator",
        "reason again counted fault on rank code",
        "an epoch ended; again: another follows; fault: the kind of its first cause",
    ),
    "run_ended": EventKind("coordinator", "state code reason", "the run ended"),
    "flush_began": EventKind("coordinator", "nodes", "nodes begin to save the final checkpoint"),
    "flush_ended": EventKind(
        "coordinator",
        "step reason again",
        "the final checkpoint was saved, or why not",
    ),
    "deposed": EventKind("coordinator", "reason", "another process coordinates a newer epoch"),
    "was_away": EventKind(
        "coordinator",
        "seconds",
        "the coordinator itself stood still for this time, so nobody counts as silent",
    ),
    # the coordinator: nodes
    "node_joined": EventKind("coordinator", "on", "a node joined while an epoch runs"),
    "node_left": EventKind("coordinator", "on reason", "a node left by itself"),
    "node_lost": EventKind("coordinator", "on reason", "a node was lost"),
    "node_excluded": EventKind("coordinator", "on reason", "the run continues without this node"),
    "node_left_out": EventKind(
        "coordinator",
        "on reason",
        "a node that earlier runs found bad is sent away",
    ),
    "bad_nodes_used": EventKind(
        "coordinator",
        "nodes reason",
        "nodes that should be avoided are used, because too few are left",
    ),
    "not_awaited": EventKind("coordinator", "on reason", "an expected node is no longer awaited"),
    "awaits_nodes": EventKind(
        "coordinator",
        "nodes least seconds",
        "too few nodes are present; the run waits this long for more",
    ),
    "stepped_back": EventKind(
        "coordinator",
        "nodes",
        "nodes beyond a network partition may be alive, so they may take the lease",
    ),
    "growing": EventKind(
        "coordinator",
        "nodes horizon_s cost_s",
        "the run stops to continue on more nodes, because that pays",
    ),
    "replanned": EventKind(
        "coordinator",
        "how nodes plan pp dp micro_batch_size micro_batches replica_micro_batches reason",
        "another plan is in force; how: grow, shrink or swap",
    ),
    "join_refused": EventKind("coordinator", "on reason", "a node may not join"),
    "join_fenced": EventKind(
        "coordinator",
        "on epoch_of_agent",
        "an agent of another epoch asked to join and must start anew",
    ),
    "connection_refused": EventKind(
        "coordinator",
        "peer reason count",
        "somebody connected without the run's key",
    ),
    # the coordinator: faults
    "fault_detected": EventKind(
        "coordinator",
        "cause reason on rank",
        "a worker is frozen, spins or is stuck, or all hang",
    ),
    "straggler": EventKind("coordinator", "on ratio", "a node is slower than its peers"),
    # workers
    "failed": EventKind("worker", "error exit cause", "the bundled trainer ends with an error"),
    "stopped": EventKind("worker", "error exit cause", "the bundled trainer ends to be restarted"),
    "stopping": EventKind("worker", "reason", "a worker was asked to save and ends"),
    "done": EventKind("worker", "", "training is complete"),
    "ranks_checked": EventKind(
        "worker",
        "plan world_size",
        "every rank is where the plan has placed it",
    ),
    "data_progress": EventKind("worker", "phase done total", "token files are being made"),
    "data_ready": EventKind("worker", "tokens documents key", "the token files are complete"),
    "resumed": EventKind(
        "worker",
        "path source samples seconds same_plan same_layout layout same_data",
        "training continues from a checkpoint or from copies in memory",
    ),
    "learning_rate_jumps": EventKind(
        "worker",
        "saved following",
        "the plan's learning rate differs from that of the checkpoint",
    ),
    "step_skipped": EventKind(
        "worker",
        "grad_norm loss_scale",
        "a gradient was not finite and was not applied",
    ),
    "checkpoint_saved": EventKind(
        "worker",
        "bytes seconds stall_s verified folder source",
        "a checkpoint is durable; seconds: start to durable; stall_s: that training waited",
    ),
    "checkpoint_failed": EventKind("worker", "error", "a checkpoint could not be saved"),
    "checkpoint_rejected": EventKind("worker", "path problem", "a checkpoint did not verify"),
    "checkpoint_folder_removed": EventKind(
        "worker",
        "folder",
        "somebody removed the folder of checkpoints; the save makes it again",
    ),
    "pin_failed": EventKind("worker", "error", "a fact for later starts could not be recorded"),
    "replica_failed": EventKind("worker", "error", "no copy of the state in memory was made"),
    "replicas_deleted": EventKind("worker", "folder", "somebody deleted the copies in memory"),
    "record_failed": EventKind("worker", "error", "a record of experts' choices was not written"),
    "trace_failed": EventKind("worker", "error", "a timeline could not be written"),
}

#: Events of `orch bench`, whose run folder is temporary.
BENCH_EVENTS = frozenset(
    {"bench_total", "bench_compute", "bench_host", "bench_link", "bench_skipped"}
)
