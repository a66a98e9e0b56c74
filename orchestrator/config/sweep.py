"""Expands `--multirun`: from `key=a,b` words to the overrides of every combination, in the order of
a nested loop. Pure.

One rule holds for every key: commas separate values, except in brackets and in quotes; quotes
around a text are removed.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import NamedTuple

from orchestrator.errors import OrchError

from .overrides import find
from .structured import is_text

MOST = 1000  # runs of one sweep; Slurm's MaxArraySize is 1001 by default
_OPENING = "([{"
_CLOSING = ")]}"


class Member(NamedTuple):
    """One run of a sweep."""

    words: list[str]  # all overrides of the run
    varied: list[str]  # its overrides that differ between the runs


def members(overrides: list[str]) -> list[Member]:
    """Lists the runs of a sweep. OrchError (64) if nothing varies, or there are too many runs."""
    choices = [
        [f"{key}={value}" for value in _values(key, typed)] if equals else [key]
        for key, equals, typed in (override.partition("=") for override in overrides)
    ]
    count = prod(map(len, choices))
    if count == 1:
        raise OrchError(
            "--multirun: nothing varies; give a key several values, like parallel=tp2,tp4"
        )
    if count > MOST:
        raise OrchError(f"--multirun: {count} runs; at most {MOST} at once")
    varied = [index for index, values in enumerate(choices) if len(values) > 1]
    return [
        Member(list(combination), [combination[index] for index in varied])
        for combination in product(*choices)
    ]


def _values(key: str, typed: str) -> list[str]:
    values = split(typed)
    if len(values) > 1 and any(value.endswith("\\") for value in values[:-1]):
        problem = "a backslash does not escape a comma"
        raise OrchError(f"--multirun: {key}={typed}: {problem}; {_rule(key)}")
    if _is_text(key):
        values = [_unquoted(value) for value in values]
    if len(values) > 1 and not all(values):
        raise OrchError(f"--multirun: {key}={typed} lacks a value between two commas; {_rule(key)}")
    doubled = next((value for value in values if values.count(value) > 1), None)
    if doubled is not None:
        raise OrchError(
            f"--multirun: {key}={typed} holds {doubled} twice: two runs would be the same"
        )
    return values


def hint(varied: list[str], message: str) -> str:
    """Returns what to add to the refusal of one run if a text that holds commas may have been
    split by mistake."""
    keys = [override.partition("=")[0] for override in varied]
    for key in keys:
        if key.lstrip("+") in message and _is_text(key):
            return f"; {_rule(key)}"
    return ""


def _rule(key: str) -> str:
    return f"commas separate the values of a sweep; in quotes they are one value: {key}='a,b'"


def _is_text(key: str) -> bool:
    """Tells whether the values of a key are text, which is taken as it is."""
    try:
        return is_text(find(key.lstrip("+").strip(), key))
    except OrchError:  # a group, or an unknown key, which `overrides.read` refuses
        return False


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def split(typed: str) -> list[str]:
    """Splits at commas that are in no bracket and no quotes: `[1,2],[3]` is two values, `'a,b'`
    is one. Outside brackets quotes begin with a value: `it's,b` is two."""
    values = [""]
    depth = 0
    quoted = ""
    for char in typed:
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "'\"" and (depth or not values[-1].strip()):
            quoted = char
        elif char == "," and depth == 0:
            values.append("")
            continue
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth = max(0, depth - 1)
        values[-1] += char
    return [value.strip() for value in values] if len(values) > 1 else values
