"""Every Slurm job state, what it means for a run, in one table. Pure.

Sources: squeue(1) and sacct(1), "JOB STATE CODES"; `src/common/slurm_protocol_defs.c` of 22.05 to 25.11 for the words
that the manuals leave out.
"""

from __future__ import annotations

from msgspec import Struct

from orchestrator.plan.exits import Exit
from orchestrator.run.state import Phase


class Meaning(Struct, frozen=True):
    phase: Phase
    text: str  # one phrase for people
    exit: Exit | None = None  # of the run when this is its end; None: Slurm alone does not say
    over: bool = False  # no process of the job is left, and none will come back by itself


#: state -> meaning. "stopped" may be started again (`orch resume`); "failed" is the program's own failure.
TABLE: dict[str, Meaning] = {
    # waiting
    "PENDING": Meaning("pending", "waiting in the queue"),
    "CONFIGURING": Meaning("starting", "nodes are being made ready"),
    "REQUEUED": Meaning("pending", "requeued, waiting to start again"),
    "REQUEUE_FED": Meaning("pending", "requeued in the federation"),
    "REQUEUE_HOLD": Meaning("pending", "requeued and held: `scontrol release` lets it start"),
    "SPECIAL_EXIT": Meaning("pending", "requeued and held for its exit code: `scontrol release` lets it start"),
    "RESV_DEL_HOLD": Meaning("pending", "held: its reservation was deleted"),
    "EXPEDITING": Meaning("pending", "requeued with priority"),
    "POWER_UP_NODE": Meaning("starting", "nodes are being switched on"),
    # living
    "RUNNING": Meaning("running", "running"),
    "RESIZING": Meaning("running", "about to change its size"),
    "SIGNALING": Meaning("running", "being signalled"),
    "SUSPENDED": Meaning("running", "suspended by the scheduler"),
    "STOPPED": Meaning("running", "stopped with SIGSTOP, keeps its nodes"),
    "COMPLETING": Meaning("stopping", "ending, some processes are left"),
    "STAGE_OUT": Meaning("stopping", "its burst buffer is being written out"),
    "UPDATE_DB": Meaning("stopping", "being accounted"),
    # over
    "COMPLETED": Meaning("done", "done", Exit.DONE, over=True),
    "FAILED": Meaning("failed", "failed", None, over=True),
    "CANCELLED": Meaning("cancelled", "cancelled", Exit.RESTART, over=True),
    "TIMEOUT": Meaning("stopped", "reached its time limit", Exit.RESTART, over=True),
    "PREEMPTED": Meaning("stopped", "preempted by a job of higher priority", Exit.RESTART, over=True),
    "NODE_FAIL": Meaning("stopped", "lost a node", Exit.NODE, over=True),
    "BOOT_FAIL": Meaning("stopped", "a node did not boot", Exit.NODE, over=True),
    "LAUNCH_FAILED": Meaning("stopped", "a node could not launch it (prolog or slurmd)", Exit.NODE, over=True),
    "OUT_OF_MEMORY": Meaning("failed", "used more memory than it had asked for", Exit.USER, over=True),
    "DEADLINE": Meaning("stopped", "could not end before its deadline", Exit.CAPACITY, over=True),
    "REVOKED": Meaning("stopped", "started on a sibling cluster of the federation", None, over=True),
    "RECONFIG_FAIL": Meaning("stopped", "a node failed to be reconfigured", Exit.NODE, over=True),
}

#: squeue's two-letter forms (`%t`) and spellings of older or newer versions.
_ALIASES = {
    **{"PD": "PENDING", "CF": "CONFIGURING", "RQ": "REQUEUED", "RF": "REQUEUE_FED", "RH": "REQUEUE_HOLD"},
    **{"SE": "SPECIAL_EXIT", "RD": "RESV_DEL_HOLD", "R": "RUNNING", "RS": "RESIZING", "SI": "SIGNALING"},
    **{"S": "SUSPENDED", "ST": "STOPPED", "CG": "COMPLETING", "SO": "STAGE_OUT", "CD": "COMPLETED", "F": "FAILED"},
    **{"CA": "CANCELLED", "TO": "TIMEOUT", "PR": "PREEMPTED", "NF": "NODE_FAIL", "BF": "BOOT_FAIL"},
    **{"OOM": "OUT_OF_MEMORY", "DL": "DEADLINE", "RV": "REVOKED", "EX": "EXPEDITING", "LF": "LAUNCH_FAILED"},
    **{"REQUEUE": "REQUEUED", "CANCELED": "CANCELLED", "OUT_OF_ME": "OUT_OF_MEMORY", "OUT_OF_ME+": "OUT_OF_MEMORY"},
}


def meaning(state: str) -> Meaning:
    """What a state word means: `RUNNING`, `CANCELLED by 1000`, `PD`, `COMPLETING+CANCELLED`.

    Of several words joined by + the first one known decides. An unknown word (a newer Slurm) is a living job of which
    nothing more is said: it is never taken for an end.
    """
    words = [word for word in state.split(" by ")[0].strip().upper().split("+") if word]
    for word in words:
        found = TABLE.get(_ALIASES.get(word, word))
        if found:
            return found
    return Meaning("running", f"in the Slurm state {state.strip() or 'unknown'}")


#: Why a job is not running (squeue's reason), for people. Not in the table: the word itself is shown.
REASONS: dict[str, str] = {
    "None": "",
    "Priority": "jobs of higher priority are before it",
    "Resources": "waiting for nodes to become free",
    "BeginTime": "its begin time has not come (a requeued job waits about two minutes)",
    "Dependency": "waiting for another job to end",
    "DependencyNeverSatisfied": "the job that it waits for ended differently: it will never start",
    "JobHeldUser": "held by its user",
    "JobHeldAdmin": "held by an administrator",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "PartitionNodeLimit": "asks for more nodes than the partition allows",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "ReqNodeNotAvail": "nodes that it needs are not available",
    "Reservation": "waiting for its reservation",
    "Licenses": "waiting for licences",
    "QOSMaxJobsPerUserLimit": "the QOS allows this user no more jobs at once",
    "AssocMaxJobsLimit": "the account allows no more jobs at once",
    "MaxGRESPerAccount": "the account has its share of GPUs in use",
    "QOSMaxGRESPerUser": "the user has the QOS's share of GPUs in use",
    "BadConstraints": "no node of the cluster can satisfy it",
    "Cleaning": "its previous life is being cleaned up",
    "launch failed requeued held": "could not be launched, requeued and held",
}


def explain(reason: str) -> str:
    """squeue's reason with a phrase for people: `Resources: waiting for nodes to become free`."""
    word = reason.strip().strip("()")
    if word == "null":
        return ""
    text = REASONS.get(word.split(",")[0])
    if text is None:
        return word
    return f"{word}: {text}" if text else ""
