"""Defines the exit codes that worker, agent, backend and scheduler agree on.

The agent reads a worker's code with this table, `orch --help` prints it, and the renderers turn it
into scheduler rules.
"""

import errno
from enum import IntEnum
from typing import NamedTuple


class Exit(IntEnum):
    """Process exit codes. Each comment says how the next layer reacts."""

    DONE = 0  # finished
    USER = 1  # the user's code failed: retried within the restart budget, counted
    USAGE = 64  # wrong command line: never retried
    CONFIG = 65  # config, plan or checkpoint refused: never retried
    INTERNAL = 70  # a bug in orch itself
    NODE = 74  # this node is unhealthy: exclude it
    RESTART = 75  # saved, wants a restart: retried, not counted
    CAPACITY = 76  # not enough healthy nodes
    FENCED = 77  # a newer plan epoch exists: this process must stop writing
    SECURITY = 78  # refused for security reasons: never retried


MEANING: dict[Exit, str] = {
    Exit.DONE: "done",
    Exit.USER: "user code failed",
    Exit.USAGE: "wrong command line",
    Exit.CONFIG: "bad config, plan or checkpoint",
    Exit.INTERNAL: "internal error in orch",
    Exit.NODE: "node unhealthy",
    Exit.RESTART: "saved, wants restart",
    Exit.CAPACITY: "no capacity",
    Exit.FENCED: "fenced by a newer plan epoch",
    Exit.SECURITY: "refused for security",
}


class Reaction(NamedTuple):
    """What the layers above do about an exit code."""

    run: str  # after a worker has ended with it
    slurm: str  # after a job has ended with it
    kubernetes: str  # after a pod has ended with it


_ENDS_JOB = "the job ends and is not requeued"
_FAILS_JOB = "the Job fails at once"
_ENDS_RUN = "the run ends with this code"

REACTIONS: dict[Exit, Reaction] = {
    Exit.DONE: Reaction(
        run="the run is done once every worker has ended so",
        slurm=_ENDS_JOB,
        kubernetes="the pod is complete, and the Job once all pods are",
    ),
    Exit.USER: Reaction(
        run="all workers restart while the budget lasts (`backend.max_restarts`)",
        slurm=_ENDS_JOB,
        kubernetes=_FAILS_JOB,
    ),
    Exit.USAGE: Reaction(run=_ENDS_RUN, slurm=_ENDS_JOB, kubernetes=_FAILS_JOB),
    Exit.CONFIG: Reaction(run=_ENDS_RUN, slurm=_ENDS_JOB, kubernetes=_FAILS_JOB),
    Exit.INTERNAL: Reaction(
        run="all workers restart while the budget lasts (`backend.max_restarts`)",
        slurm=_ENDS_JOB,
        kubernetes=_FAILS_JOB,
    ),
    Exit.NODE: Reaction(
        run="an elastic run continues without the node; any other run ends with this code",
        slurm="the job is requeued without the node, at most `max_node_faults` times",
        kubernetes="the pod comes back; this counts against `max_pod_failures`",
    ),
    Exit.RESTART: Reaction(
        run="all workers restart, which no budget counts",
        slurm="the job is requeued, at most `max_requeues` times",
        kubernetes="the pod comes back; this is not counted",
    ),
    Exit.CAPACITY: Reaction(
        run=_ENDS_RUN,
        slurm="the job is requeued, at most `max_node_faults` times",
        kubernetes=_FAILS_JOB,
    ),
    Exit.FENCED: Reaction(
        run=_ENDS_RUN,
        slurm=_ENDS_JOB,
        kubernetes="the pod comes back; this is not counted",
    ),
    Exit.SECURITY: Reaction(run=_ENDS_RUN, slurm=_ENDS_JOB, kubernetes=_FAILS_JOB),
}

#: Codes after which a restart cannot help.
FATAL = frozenset({Exit.USAGE, Exit.CONFIG, Exit.SECURITY})

#: errno values of a machine or disk that fails, possibly for a moment. Other values are errors of
#: whoever named the file.
OF_THE_MACHINE = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.EIO,
        errno.ESTALE,
        errno.ENOMEM,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
    }
)


def is_of_the_machine(error: BaseException | None) -> bool:
    """Checks whether the error, or an error that caused it, is a fault of the machine or a disk."""
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        return True
    return error is not None and is_of_the_machine(error.__cause__)


def meaning(code: int) -> str:
    """Describes any process exit code in one phrase. A negative code is a signal, as in
    `subprocess`."""
    if code < 0:
        import signal

        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    try:
        return MEANING[Exit(code)]
    except ValueError:
        return f"exit code {code}"
