"""Reads the command lines of Python: which script or module they start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


class Started(NamedTuple):
    """What Python starts: a script or a module and its arguments; nothing for `-c` and for standard
    input."""

    arguments: list[str]
    is_module: bool = False


def is_python(program: str) -> bool:
    """Tells whether a program is called as Python is: `python`, `/usr/bin/python3.12` ..."""
    return _PYTHON.fullmatch(PurePath(program).name) is not None


def started_by_python(arguments: Sequence[str]) -> Started:
    """Returns what Python starts with these arguments. Its flags may be joined, as in `-um MODULE`;
    flags after the script are the script's."""
    remaining = list(arguments)
    while remaining and remaining[0].startswith("-") and remaining[0] != "-":
        flag = remaining.pop(0)
        if flag == "--":
            break
        if flag.startswith("--"):
            del remaining[: flag == "--check-hash-based-pycs"]
            continue
        match = re.fullmatch(r"-[^cmWX]*(?:([cmWX])(.*))?", flag, re.DOTALL)
        option, value = match.groups() if match else (None, "")
        if option == "c":
            return Started([])
        if option == "m":
            return Started([value, *remaining] if value else remaining, is_module=True)
        if option and not value:
            del remaining[:1]
    return Started([] if remaining[:1] == ["-"] else remaining)
