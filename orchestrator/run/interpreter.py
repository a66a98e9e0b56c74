"""Chooses the Python that starts a user's program.

That is `PYTHON_EXEC`, if it is set. Else it is the Python of the activated environment
(`VIRTUAL_ENV` or `CONDA_PREFIX`), if the shell would start it too. Else it is the one that runs
orch, as under torchrun. The search path of a run begins with its folder, so that `python` and
`python3` mean it. Agents run in orch's own Python in any case. The rule is pure: `Lookup` has what
it asks the file system.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

#: First words of a command that mean the chosen interpreter.
NAMES = ("python", "python3")
VARIABLE = "PYTHON_EXEC"
_ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")


class Lookup(Protocol):
    """What the rule asks the file system."""

    def find(self, command: str, path: str) -> str | None:
        """Returns the absolute path of the executable that a shell with this search path starts."""

    def identity(self, path: str) -> tuple[str, str]:
        """Returns the same pair for two spellings of one interpreter: its folder, because that
        decides which packages it has, and its file, both without symbolic links."""


class Files:
    """The file system of this machine."""

    def find(self, command: str, path: str) -> str | None:
        executable = shutil.which(command, path=path)
        return executable and os.path.abspath(executable)

    def identity(self, path: str) -> tuple[str, str]:
        return os.path.realpath(os.path.dirname(path)), os.path.realpath(path)


class Interpreter(NamedTuple):
    path: str  # absolute
    variable: str  # the variable that chose it; "": none, it runs orch

    @property
    def folder(self) -> str:
        return str(PurePosixPath(self.path).parent)


def choose_interpreter(environ: Mapping[str, str], orchs: str, lookup: Lookup) -> Interpreter:
    """Returns the interpreter for the programs of a shell with these variables.

    `orchs`: the interpreter that runs orch. Raises OrchError (65) if `PYTHON_EXEC` names no
    executable file.
    """
    search_path = environ.get("PATH", "")
    if requested := environ.get(VARIABLE):
        executable = lookup.find(requested, search_path)
        if executable is None:
            raise OrchError(f"{VARIABLE}={requested} is not an executable file", Exit.CONFIG)
        return Interpreter(executable, VARIABLE)
    first = lookup.find("python", search_path)
    if first is not None:
        identity = lookup.identity(first)
        for variable in _ENVIRONMENTS:
            prefix = environ.get(variable)
            is_active = prefix and lookup.identity(f"{prefix}/bin/python")[0] == identity[0]
            if is_active and identity != lookup.identity(orchs):
                return Interpreter(first, variable)
    return Interpreter(orchs, "")


def started_command(
    command: Sequence[str], interpreter: Interpreter, lookup: Lookup
) -> tuple[str, ...]:
    """Returns the command of a worker. A first word `python` or `python3` becomes a path where the
    folder of the interpreter has another Python under that name, or none."""
    if not command or command[0] not in NAMES:
        return tuple(command)
    neighbour = lookup.find(command[0], interpreter.folder)
    if neighbour and lookup.identity(neighbour) == lookup.identity(interpreter.path):
        return tuple(command)
    return (interpreter.path, *command[1:])


def interpreter_messages(
    command: Sequence[str],
    interpreter: Interpreter,
    orchs: str,
    path: str,
    remedy: str,
    lookup: Lookup,
) -> list[str]:
    """Returns a line that names the interpreter of a Python command, if it is not the one that runs
    orch, or not the one that a shell with this search path would start. `remedy`: how to select
    another one."""
    if not command or command[0] not in NAMES:
        return []
    chosen = lookup.identity(interpreter.path)
    if chosen != lookup.identity(orchs):
        return [f"the program's python is {interpreter.path} ({interpreter.variable})"]
    of_shell = lookup.find(command[0], path)
    if of_shell is None or lookup.identity(of_shell) == chosen:
        return []
    return [
        f"the program's python is {interpreter.path}, which runs orch, not {of_shell} of this"
        f" shell; {remedy}"
    ]
