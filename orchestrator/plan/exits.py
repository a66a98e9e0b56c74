"""Defines the exit codes that worker, agent, backend and scheduler agree on.

The agent reads a worker's code with this table, `orch --help` prints it, and the renderers turn it
into scheduler rules.
"""

import errno
from enum import IntEnum


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
