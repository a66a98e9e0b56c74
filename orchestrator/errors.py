"""The one exception that a verb turns into one line on stderr and an exit code."""

from __future__ import annotations

from orchestrator.plan.exits import Exit


class OrchError(Exception):
    """Something the user can act on.

    `message` is one line: what is wrong, where, the legal choices, a nearest match. `exit` is the process exit code.
    """

    def __init__(self, message: str, exit: Exit = Exit.USAGE):
        super().__init__(message)
        self.message = message
        self.exit = exit
