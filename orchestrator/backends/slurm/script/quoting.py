"""Quotes text for the job script; no other module does.

There are two languages: shell words, and `#SBATCH` lines, which sbatch parses by its own rules
(blanks end a word, quotes join words, `#` starts a comment, a line break ends the directive). Text
that cannot be written exactly is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_PLAIN = re.compile(r"[A-Za-z0-9_./:,=@%+\[\]&|*()!^~-]+\Z")


def check_text(string: str, label: str) -> str:
    """Returns `string` unchanged.

    OrchError (78) for a control character: line breaks of any kind, NUL, escape. `label` names the
    string in the message.
    """
    for char in string:
        if (
            ord(char) < 32
            or 127 <= ord(char) < 160
            or char in "\u2028\u2029"
            or 0xD800 <= ord(char) < 0xE000
        ):
            raise OrchError(
                f"{label}: {string[:60]!r} holds the control character U+{ord(char):04X}",
                Exit.SECURITY,
            )
    return string


def directive(flag: str, value: str | int | bool) -> str | None:
    """Returns `#SBATCH --flag=value`, `#SBATCH --flag` for True, None for False.

    OrchError (65, 78) for a value that such a line cannot hold.
    """
    if value is False:
        return None
    if value is True:
        return f"#SBATCH --{flag}"
    string = check_text(str(value), f"sbatch --{flag}")
    if not string:
        raise OrchError(f"sbatch --{flag}: the value is empty", Exit.CONFIG)
    if _PLAIN.match(string):
        return f"#SBATCH --{flag}={string}"
    if '"' in string or "\\" in string:
        raise OrchError(
            f"sbatch --{flag}: {string[:60]!r} holds a double quote or a backslash", Exit.CONFIG
        )
    return f'#SBATCH --{flag}="{string}"'


def file_pattern(path: str) -> str:
    """Escapes `%`, which begins a placeholder of sbatch and srun."""
    return path.replace("%", "%%")


def command(argv: Sequence[str]) -> str:
    """The shell command line of exactly these arguments. OrchError (78) for a NUL byte."""
    for argument in argv:
        if "\0" in argument:
            raise OrchError(f"argument {argument[:60]!r} holds a NUL byte", Exit.SECURITY)
    return shlex.join(argv)


def assignment(name: str, value: str) -> str:
    """The shell assignment `name=value`. OrchError (65) for an invalid variable name."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise OrchError(f"{name!r} is not the name of a variable", Exit.CONFIG)
    return f"{name}={command([value])}"
