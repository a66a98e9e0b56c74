"""Reads `.orchignore`, the file with which users decide what a copy of their program's folder
leaves out. Its syntax is that of `.gitignore`.

The rules are those of gitignore(5) and of git's own matcher, which compares bytes: the last pattern
that matches decides, and nothing below a folder that is left out can be included again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from msgspec import Struct

NAME = ".orchignore"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: The classes that a set may name, as `[[:digit:]]`, as bytes of a regular expression's set.
_CLASSES = {
    b"alnum": rb"0-9A-Za-z",
    b"alpha": rb"A-Za-z",
    b"blank": rb" \t",
    b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9",
    b"graph": rb"\x21-\x7e",
    b"lower": rb"a-z",
    b"print": rb"\x20-\x7e",
    b"punct": rb"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    b"space": rb" \t\n\v\f\r",
    b"upper": rb"A-Z",
    b"xdigit": rb"0-9A-Fa-f",
}


class _Malformed(Exception):
    """A pattern that matches nothing, such as one whose set is not closed."""


class _Rule(Struct, frozen=True):
    expression: re.Pattern[bytes]
    includes: bool  # the pattern began with "!"
    folders_only: bool  # it ended with "/"
    by_name: bool  # it holds no other "/", so that it matches names at any depth


class IgnoreRules:
    """The patterns of one file."""

    def __init__(self, content: bytes):
        self._rules = list(_rules(content))

    def leaves_out(self, path: str, is_folder: bool) -> bool:
        """Tells whether the last pattern that matches this path excludes it. `path`: relative to
        the folder of the file; the folders above it are not left out."""
        raw = os.fsencode(path)
        name = raw.rpartition(b"/")[2]
        for rule in reversed(self._rules):
            if rule.folders_only and not is_folder:
                continue
            if rule.expression.fullmatch(name if rule.by_name else raw):
                return not rule.includes
        return False


def _rules(content: bytes) -> Iterable[_Rule]:
    for line in content.removeprefix(_BYTE_ORDER_MARK).split(b"\n"):
        if line.startswith(b"#"):
            continue
        pattern = _without_trailing_spaces(line.removesuffix(b"\r"))
        includes = pattern.startswith(b"!")
        pattern = pattern.removeprefix(b"!") if includes else pattern
        folders_only = pattern.endswith(b"/")
        pattern = pattern.removesuffix(b"/")
        by_name = b"/" not in pattern
        try:
            expression = _expression(pattern.removeprefix(b"/"))
        except _Malformed:
            continue
        yield _Rule(
            re.compile(expression, re.DOTALL),
            includes,
            folders_only,
            by_name,
        )


def _without_trailing_spaces(line: bytes) -> bytes:
    """Removes spaces at the end of a line, except those after a backslash."""
    match = re.fullmatch(rb"((?:\\.|[^\\])*?) *", line, re.DOTALL)
    return match[1] if match else line


def _expression(pattern: bytes) -> bytes:
    """Translates a pattern without its outer slashes into a regular expression. _Malformed for a
    set that is not closed, an unknown class, or a backslash at the end."""
    expression = b""
    position = 0
    while position < len(pattern):
        byte = pattern[position : position + 1]
        if byte == b"*":
            stars, position = _stars(pattern, position)
            expression += stars
        elif byte == b"[":
            allowed, position = _set(pattern, position + 1)
            expression += allowed
        elif byte == b"?":
            expression += b"[^/]"
            position += 1
        else:
            literal, position = _literal(pattern, position)
            expression += re.escape(literal)
    return expression


def _literal(pattern: bytes, position: int) -> tuple[bytes, int]:
    """Reads one byte, which a backslash may precede. Returns it with the position behind it."""
    if pattern[position : position + 1] == b"\\":
        position += 1
    if position >= len(pattern):
        raise _Malformed
    return pattern[position : position + 1], position + 1


def _stars(pattern: bytes, start: int) -> tuple[bytes, int]:
    """Reads stars. Two or more that stand alone between slashes match folders at any depth."""
    end = start
    while pattern[end : end + 1] == b"*":
        end += 1
    rest = pattern[end:]
    begins_a_name = start == 0 or pattern[start - 1 : start] == b"/"
    if end - start == 1 or not begins_a_name:
        return b"[^/]*", end
    if rest.startswith(b"/"):
        return b"(?:.*/)?", end + 1
    if not rest or rest.startswith(b"\\/"):
        return b".*", end
    return b"[^/]*", end


def _set(pattern: bytes, position: int) -> tuple[bytes, int]:
    """Reads a set behind its opening bracket. Returns an expression for one byte of it, which is
    never a slash, with the position behind the set."""
    negated = pattern[position : position + 1] in (b"!", b"^")
    position += negated
    members = b""
    previous = b""  # the byte with which a range may begin
    is_first = True
    while is_first or pattern[position : position + 1] != b"]":
        is_first = False
        is_range = pattern[position : position + 1] == b"-" and previous
        if is_range and pattern[position + 1 : position + 2] not in (b"", b"]"):
            last, position = _literal(pattern, position + 1)
            members += _range(previous, last)
            previous = b""
        elif (named := _class(pattern, position)) is not None:
            members += named
            position = pattern.index(b"]", position + 2) + 1
            previous = b""
        else:
            previous, position = _literal(pattern, position)
            members += re.escape(previous)
    if not members:
        return (b"[^/]" if negated else b"(?!)"), position + 1
    return (b"[^/" if negated else b"(?!/)[") + members + b"]", position + 1


def _range(first: bytes, last: bytes) -> bytes:
    return re.escape(first) + b"-" + re.escape(last) if first <= last else b""


def _class(pattern: bytes, position: int) -> bytes | None:
    """Returns the members of the class that begins here, as `[:digit:]`; None if none does.
    _Malformed for an unknown one."""
    if not pattern.startswith(b"[:", position):
        return None
    end = pattern.find(b"]", position + 2)
    if end < 0:
        raise _Malformed
    name = pattern[position + 2 : end]
    if not name.endswith(b":"):
        return None
    if name[:-1] not in _CLASSES:
        raise _Malformed
    return _CLASSES[name[:-1]]
