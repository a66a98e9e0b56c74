"""The errors of a worker and the exit code that each has.

Every error that a user can meet is a class here with a documented exit code
(`orchestrator.plan.Exit`), and its message is one line: what is wrong, where, and what would be
right. `trainer.__main__` is the only place that turns errors into exit codes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys

from orchestrator.plan import Exit, Plan, PlanError
from orchestrator.plan.exits import OF_THE_MACHINE, is_of_the_machine
from orchestrator.plan.trained import problems

#: errno values that mean a full disk or an exhausted quota.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
#: Errors of a disk that are faults of its node: it fails, or is stuck.
NODE_FAULTS = frozenset(
    {
        errno.EIO,
        errno.ETIMEDOUT,
    }
)


class TrainerError(Exception):
    """Base of the trainer's own errors. `exit` is the process exit code that `python -m trainer`
    ends with."""

    exit: Exit = Exit.USER
    #: one of `orchestrator.run.state.WORKER_CAUSES`, if that says more than the exit code
    cause: str = ""


class LayoutError(TrainerError):
    """A combination of model, degrees and options that this trainer does not support."""

    exit = Exit.CONFIG


def check_supported(plan: Plan) -> None:
    """Raises LayoutError with the first rule of `orchestrator.plan.trained` that the plan
    breaks."""
    for problem in problems(plan):
        raise LayoutError(problem)


class PlanMismatch(TrainerError):
    """A worker or one of its peers runs on another node than planned, or has loaded another
    plan."""

    exit = Exit.CONFIG


class DataError(TrainerError):
    """The input text cannot be read, decoded or tokenised, or is too small for the plan."""

    exit = Exit.CONFIG


class UnreadableData(DataError):
    """A disk that fails while token files are read from it: a fault of the node's."""

    exit = Exit.NODE


class CheckpointError(TrainerError):
    """A checkpoint that cannot be trusted or does not fit this plan."""

    exit = Exit.CONFIG


class SaveError(TrainerError):
    """A checkpoint that could not be written (disk full, permissions); the previous one is
    intact."""

    exit = Exit.USER

    def __init__(self, message: str):
        super().__init__(message)
        if any(
            os.strerror(number) in message for number in NO_ROOM
        ):  # it may come from another rank as text
            self.cause = "disk_full"


class DiskError(TrainerError):
    """The disk that holds offloaded state is missing, full, stuck or fails; checkpoints are
    elsewhere and intact."""

    exit = Exit.CONFIG

    def __init__(self, message: str, number: int | None = None):
        super().__init__(message)
        if number in NO_ROOM:
            self.exit = Exit.USER
            self.cause = "disk_full"
        elif number in NODE_FAULTS:
            self.exit = Exit.NODE


class DeviceError(TrainerError):
    """The plan needs a device that this node does not have: a fault of the node, not of the job."""

    exit = Exit.NODE


class NonFinite(TrainerError):
    """The loss or the gradient norm became inf or nan."""

    exit = Exit.USER
    cause = "non_finite"


class Fenced(TrainerError):
    """A newer plan epoch owns the run: this process must stop writing."""

    exit = Exit.FENCED


class Stopped(TrainerError):
    """A termination signal arrived: everything is saved and the run can be restarted."""

    exit = Exit.RESTART


class PeerLost(TrainerError):
    """A collective failed because another worker is gone or silent."""

    exit = Exit.RESTART


#: Fragments of the messages with which torch reports a dead or silent peer. gloo and c10d raise
#: plain RuntimeErrors, so only the message tells them apart. Sources: gloo `transport/tcp/pair.cc`
#: and `unbound_buffer.cc`, torch `ProcessGroupGloo.cpp`, `ProcessGroupNCCL.cpp`, `TCPStore.cpp`;
#: each gloo line was seen in a killed-peer test.
PEER_LOST_TEXTS: tuple[str, ...] = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection timed out",
    "broken pipe",
    "pair closure",
    "timed out waiting",
    "application timeout",
    "connectfullmesh",
    "socket is not connected",
    "network is unreachable",
    "no route to host",
    "remote process exited",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "nccl error",
    "recvvalue failed",
    "failed to recv",
    "sendbytes failed",
    "recvbytes failed",
)


def is_peer_loss(error: BaseException) -> bool:
    """Whether a collective or the store failed because a peer is gone, as opposed to a bug in this
    process."""
    if isinstance(error, ConnectionError | PeerLost):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"DistNetworkError", "DistStoreError", "DistBackendError", "QueueEmptyError"}:
        return True
    message = str(error).lower()
    names_lost_peer = any(fragment in message for fragment in PEER_LOST_TEXTS)
    return isinstance(error, RuntimeError) and names_lost_peer


def cause_of(error: BaseException) -> str:
    """Returns one of `orchestrator.run.state.WORKER_CAUSES`, or "" if the exit code is enough."""
    if isinstance(error, TrainerError):
        return error.cause
    return "disk_full" if isinstance(error, OSError) and error.errno in NO_ROOM else ""


def exit_code(error: BaseException) -> Exit:
    """Returns the exit code of `python -m trainer` for an error that nothing has caught."""
    if isinstance(error, TrainerError):
        return error.exit
    if isinstance(error, PlanError):
        return Exit.USER if is_of_the_machine(error) else Exit.CONFIG
    if is_peer_loss(error):
        return Exit.RESTART
    # Errors of libraries that cannot be opened, and of torch's own code, carry the system's
    # message.
    if isinstance(error, ImportError | RuntimeError) and any(
        os.strerror(n) in str(error) for n in OF_THE_MACHINE
    ):
        return Exit.USER
    # torch.OutOfMemoryError is a RuntimeError: the plan did not fit, and the user must change it.
    if isinstance(error, OSError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Exit.USER
    return Exit.INTERNAL


def warn(message: str) -> None:
    """Prints one line on standard error. A full disk behind it does not end a worker."""
    with contextlib.suppress(OSError):
        print(f"trainer: warning: {message}", file=sys.stderr, flush=True)
