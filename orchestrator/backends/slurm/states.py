"""The meaning of Slurm's job states and reasons for a run. Pure.

Sources: squeue(1) and sacct(1), "JOB STATE CODES"; `src/common/slurm_protocol_defs.c` of 22.05 to
25.11 for the states that the manuals leave out.
"""

from __future__ import annotations

import re

from msgspec import Struct

from orchestrator.plan.exits import Exit
from orchestrator.run.state import Phase


class JobState(Struct, frozen=True):
    """The meaning of a job's state for its run."""

    phase: Phase
    phrase: str  # for people
    #: The run's exit code if the job ends so; None: the state alone does not determine it.
    exit: Exit | None = None
    ended: bool = False  # no process is left, and Slurm will not start the job again


#: Slurm's name of a state -> meaning. A "stopped" run may be started again (`orch resume`); a
#: "failed" run failed through its program.
JOB_STATES: dict[str, JobState] = {
    # waiting
    "PENDING": JobState("pending", "waiting in the queue"),
    "CONFIGURING": JobState("starting", "nodes are being made ready"),
    "REQUEUED": JobState("pending", "requeued, waiting to start again"),
    "REQUEUE_FED": JobState("pending", "requeued in the federation"),
    "REQUEUE_HOLD": JobState("pending", "requeued and held: `scontrol release` lets it start"),
    "SPECIAL_EXIT": JobState(
        "pending", "requeued and held for its exit code: `scontrol release` lets it start"
    ),
    "RESV_DEL_HOLD": JobState("pending", "held: its reservation was deleted"),
    "EXPEDITING": JobState("pending", "requeued with priority"),
    "POWER_UP_NODE": JobState("starting", "nodes are being switched on"),
    # active
    "RUNNING": JobState("running", "running"),
    "RESIZING": JobState("running", "about to change its size"),
    "SIGNALING": JobState("running", "being signalled"),
    "SUSPENDED": JobState("running", "suspended by the scheduler"),
    "STOPPED": JobState("running", "stopped with SIGSTOP, keeps its nodes"),
    "COMPLETING": JobState("stopping", "ending, some processes are left"),
    "STAGE_OUT": JobState("stopping", "its burst buffer is being written out"),
    "UPDATE_DB": JobState("stopping", "being accounted"),
    # ended
    "COMPLETED": JobState("done", "done", Exit.DONE, ended=True),
    "FAILED": JobState("failed", "failed", None, ended=True),
    "CANCELLED": JobState("cancelled", "cancelled", Exit.RESTART, ended=True),
    "TIMEOUT": JobState("stopped", "reached its time limit", Exit.RESTART, ended=True),
    "PREEMPTED": JobState(
        "stopped",
        "preempted by a job of higher priority",
        Exit.RESTART,
        ended=True,
    ),
    "NODE_FAIL": JobState("stopped", "lost a node", Exit.NODE, ended=True),
    "BOOT_FAIL": JobState("stopped", "a node did not boot", Exit.NODE, ended=True),
    "LAUNCH_FAILED": JobState(
        "stopped",
        "a node could not launch it (prolog or slurmd)",
        Exit.NODE,
        ended=True,
    ),
    "OUT_OF_MEMORY": JobState(
        "failed",
        "used more memory than it had asked for",
        Exit.USER,
        ended=True,
    ),
    "DEADLINE": JobState("stopped", "could not end before its deadline", Exit.CAPACITY, ended=True),
    "REVOKED": JobState(
        "stopped",
        "started on a sibling cluster of the federation",
        None,
        ended=True,
    ),
    "RECONFIG_FAIL": JobState("stopped", "a node failed to be reconfigured", Exit.NODE, ended=True),
}

#: squeue's two-letter forms (`%t`) and spellings of older or newer versions.
_ALIASES = {
    "PD": "PENDING",
    "CF": "CONFIGURING",
    "RQ": "REQUEUED",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "SE": "SPECIAL_EXIT",
    "RD": "RESV_DEL_HOLD",
    "R": "RUNNING",
    "RS": "RESIZING",
    "SI": "SIGNALING",
    "S": "SUSPENDED",
    "ST": "STOPPED",
    "CG": "COMPLETING",
    "SO": "STAGE_OUT",
    "CD": "COMPLETED",
    "F": "FAILED",
    "CA": "CANCELLED",
    "TO": "TIMEOUT",
    "PR": "PREEMPTED",
    "NF": "NODE_FAIL",
    "BF": "BOOT_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "DL": "DEADLINE",
    "RV": "REVOKED",
    "EX": "EXPEDITING",
    "LF": "LAUNCH_FAILED",
    "REQUEUE": "REQUEUED",
    "CANCELED": "CANCELLED",
    "OUT_OF_ME": "OUT_OF_MEMORY",
    "OUT_OF_ME+": "OUT_OF_MEMORY",
}


def job_state(state: str) -> JobState:
    """The meaning of a state as Slurm writes it: `RUNNING`, `CANCELLED by 1000`, `PD`,
    `COMPLETING+CANCELLED`.

    Of several names joined by + the first known one decides. An unknown state (of a newer Slurm)
    counts as running, never as ended.
    """
    names = [name for name in state.split(" by ")[0].strip().upper().split("+") if name]
    for name in names:
        meaning = JOB_STATES.get(_ALIASES.get(name, name))
        if meaning:
            return meaning
    return JobState("running", f"in the Slurm state {state.strip() or 'unknown'}")


#: Reasons of a job that its first node could not start: slurmd did not find the folder of the log,
#: or ended the job with 53.
NOT_LAUNCHED = ("JobLaunchFailure", "RaisedSignal:53")

#: squeue's reason why a job does not run -> a phrase for people. Other reasons are shown
#: unchanged.
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
    "Cleaning": "its previous attempt is being cleaned up",
    "launch failed requeued held": (
        "could not be launched (prolog, slurmd), requeued and held: `scontrol release`"
    ),
    "NonZeroExitCode": "",  # the job's state says so
    **dict.fromkeys(
        NOT_LAUNCHED,
        "its first node could not start it: does it see the run folder? a failed prolog?",
    ),
}


def explain_reason(reason: str) -> str:
    """squeue's reason with its phrase, e.g. `Resources: waiting for nodes to become free`.

    Returns "" if there is none.
    """
    code = reason.strip().strip("()")
    if code == "null":
        return ""
    phrase = REASONS.get(re.split(r"[,(]", code)[0])
    if phrase is None:
        return code
    return f"{code}: {phrase}" if phrase else ""
