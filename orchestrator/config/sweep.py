"""`--multirun`: from `key=a,b` words to the command lines of every combination, in the order of a nested loop. Pure."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import NamedTuple

from orchestrator.errors import OrchError

MOST = 1000  # Slurm's MaxArraySize is 1001 where nobody has changed it
_OPENING, _CLOSING = "([{", ")]}"


class Member(NamedTuple):
    words: list[str]  # all overrides of one run
    varied: list[str]  # those of them that differ between the runs


def members(words: list[str]) -> list[Member]:
    """One entry a run. OrchError (64) when nothing varies, or far too much does."""
    choices = [
        [f"{key}={value}" for value in _values(key, text)] if equals else [key]
        for key, equals, text in (word.partition("=") for word in words)
    ]
    count = prod(map(len, choices))
    if count == 1:
        raise OrchError("--multirun: nothing varies; give a key several values, like parallel=tp2,tp4")
    if count > MOST:
        raise OrchError(f"--multirun: {count} runs; at most {MOST} at once")
    varied = [index for index, values in enumerate(choices) if len(values) > 1]
    return [Member(list(found), [found[index] for index in varied]) for found in product(*choices)]


def _values(key: str, text: str) -> list[str]:
    values = split(text)
    if len(values) > 1 and not all(values):
        raise OrchError(f"--multirun: {key}={text} lacks a value between two commas")
    doubled = next((value for value in values if values.count(value) > 1), None)
    if doubled is not None:
        raise OrchError(f"--multirun: {key}={text} holds {doubled} twice: two runs would be the same")
    return values


def split(text: str) -> list[str]:
    """Cut at commas that stand in no bracket and no quotes: `[1,2],[3]` is two values, `'a,b'` is one."""
    parts, depth, quoted = [""], 0, ""
    for char in text:
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "'\"":
            quoted = char
        elif char == "," and depth == 0:
            parts.append("")
            continue
        depth += (char in _OPENING) - (char in _CLOSING) if not quoted else 0
        parts[-1] += char
    return [part.strip() for part in parts] if len(parts) > 1 else parts
