"""The Python of a user's program: chosen on this machine, or that of an image or another host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.run.interpreter import (
    NAMES,
    VARIABLE,
    Files,
    Interpreter,
    choose_interpreter,
    interpreter_messages,
)

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.config.schema import Config

    from .submission import SubmitOptions


def program_interpreter(
    config: Config,
    backend: Backend,
    options: SubmitOptions,
) -> Interpreter | None:
    """Returns the interpreter of a user's program. None: the bundled trainer runs, or the program
    gets the Python of an image.

    Raises OrchError (65) if the user has chosen a file that cannot be executed.
    """
    if not options.command or backend.brings_python(config.backend.options):
        return None
    return choose_interpreter(options.environ, options.python, Files())


def python_messages(config: Config, backend: Backend, options: SubmitOptions) -> list[str]:
    """Returns a message that names the program's Python, where a user may expect another one."""
    if options.command[:1] not in [(name,) for name in NAMES]:
        return []
    interpreter = program_interpreter(config, backend, options)
    if interpreter is None:
        if VARIABLE not in options.environ:
            return []
        return [f"{VARIABLE} is a path of this machine: the program's python is that of the image"]
    is_over_ssh = options.code is not None
    remedy = f"{VARIABLE}=PATH selects another one"
    if is_over_ssh:
        remedy = "a full path in the command selects another one"
    return interpreter_messages(
        options.command,
        interpreter,
        orchs=options.python,
        path=options.environ.get("PATH", ""),
        remedy=remedy,
        lookup=Files(),
    )
