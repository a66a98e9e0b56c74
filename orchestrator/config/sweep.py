"""`--multirun`: from `key=a,b` words to the command lines of every combination, in the order of a
nested loop. Pure.

One rule for every key: commas part values, but for those in brackets and in quotes; quotes around a
text are taken off.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import NamedTuple

from orchestrator.errors import OrchError

from .overrides import find
from .structured import is_text

MOST = 1000  # Slurm's MaxArraySize is 1001 where nobody has changed it
_OPENING = "([{"
_CLOSING = ")]}"


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
        raise OrchError(
            "--multirun: nothing varies; give a key several values, like parallel=tp2,tp4"
        )
    if count > MOST:
        raise OrchError(f"--multirun: {count} runs; at most {MOST} at once")
    varied = [index for index, values in enumerate(choices) if len(values) > 1]
    return [Member(list(found), [found[index] for index in varied]) for found in product(*choices)]


def _values(key: str, text: str) -> list[str]:
    values = split(text)
    if len(values) > 1 and any(value.endswith("\\") for value in values[:-1]):
        raise OrchError(f"--multirun: {key}={text}: a backslash holds no comma; {_rule(key)}")
    if _is_text(key):
        values = [_unquoted(value) for value in values]
    if len(values) > 1 and not all(values):
        raise OrchError(f"--multirun: {key}={text} lacks a value between two commas; {_rule(key)}")
    doubled = next((value for value in values if values.count(value) > 1), None)
    if doubled is not None:
        raise OrchError(
            f"--multirun: {key}={text} holds {doubled} twice: two runs would be the same"
        )
    return values


def hint(varied: list[str], message: str) -> str:
    """What to add to the refusal of one run, where a text that holds commas may have been parted by
    mistake."""
    keys = [word.partition("=")[0] for word in varied]
    return next(
        (f"; {_rule(key)}" for key in keys if key.lstrip("+") in message and _is_text(key)), ""
    )


def _rule(key: str) -> str:
    return f"commas part the values of a sweep; in quotes they are one value: {key}='a,b'"


def _is_text(key: str) -> bool:
    """Whether the values of a key are text, which is taken as it is."""
    try:
        return is_text(find(key.lstrip("+").strip(), key))
    except OrchError:  # a group, or no key: who reads the words says so
        return False


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def split(text: str) -> list[str]:
    """Cut at commas that stand in no bracket and no quotes: `[1,2],[3]` is two values, `'a,b'` is
    one. Outside brackets quotes begin with a value: `it's,b` is two."""
    parts = [""]
    depth = 0
    quoted = ""
    for char in text:
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "'\"" and (depth or not parts[-1].strip()):
            quoted = char
        elif char == "," and depth == 0:
            parts.append("")
            continue
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth = max(0, depth - 1)
        parts[-1] += char
    return [part.strip() for part in parts] if len(parts) > 1 else parts
