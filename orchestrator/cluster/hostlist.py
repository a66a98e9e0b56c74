"""Slurm's host lists: `n[0-3,7],gpu-[001-002]` <-> names. Pure; a job learns its nodes without
calling scontrol."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby, product

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

#: More names than this is a typing mistake (`n[0-99999999]`), not a cluster.
MAX_NAMES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_TOKEN = re.compile(r"\[([0-9,-]*)\]|([A-Za-z0-9._-]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?\Z")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)\Z")
_NUMBERS = re.compile(r"([0-9]+)")


def expand(hosts: str) -> list[str]:
    """Returns the names in the order written. Empty, `(null)` and `None` are no nodes. Anything
    else that is malformed raises OrchError (65)."""
    hosts = hosts.strip()
    if hosts in ("", "(null)", "None", "None assigned"):
        return []
    names: list[str] = []
    for element in _split(hosts):
        names.extend(_expand_one(element, hosts, MAX_NAMES - len(names)))
    for name in names:
        if not _NAME.match(name):
            raise _bad(hosts, f"{name!r} is not a node name")
    return names


def compress(names: Iterable[str]) -> str:
    """Returns the shortest-in-practice host list of a set of names: runs of the last number are
    folded, width kept.

    For people and orch's own files; lists for Slurm are written by `slurm_list`. Each name
    appears once, in natural order (n2 before n10).
    """
    families: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
    elements: list[str] = []
    for name in set(names):
        if not _NAME.match(name):
            raise _bad(name, "not a node name")
        match = _LAST_NUMBER.match(name)
        if match is None:
            elements.append(name)
        else:
            # The width belongs to the key only if the number is padded: n9 and n10 fold together,
            # n09 and n9 do not.
            prefix, digits, suffix = match.groups()
            padding = len(digits) if digits[0] == "0" and len(digits) > 1 else 0
            families.setdefault((prefix, suffix, padding), []).append((int(digits), len(digits)))
    _adopt_full_width(families)
    elements += [
        _fold(key, sorted(number for number, _ in numbers)) for key, numbers in families.items()
    ]
    return ",".join(sorted(elements, key=natural_key))


def slurm_list(names: Iterable[str]) -> str:
    """Returns a host list that Slurm itself reads, which allows nothing after a bracket: names
    such as n03d are listed one by one."""
    distinct = set(names)
    alone = {name for name in distinct if not name[-1:].isdigit()}
    lists = [
        compress(distinct - alone),
        *(compress([name]) for name in sorted(alone, key=natural_key)),
    ]
    return ",".join(filter(None, lists))


@lru_cache(maxsize=1 << 15)  # a cluster is sorted by each of its tiers
def natural_key(name: str) -> tuple[tuple[tuple[int, int | str], ...], int]:
    """Returns a sort key under which n2 comes before n10, and n9 before n09."""
    pieces = _NUMBERS.split(name)
    keys = [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in pieces if piece]
    return tuple(keys), len(name)


def _adopt_full_width(families: dict[tuple[str, str, int], list[tuple[int, int]]]) -> None:
    """Moves an unpadded number that is as wide as a padded family into that family: n[001-099]
    and n100 are one run."""
    for prefix, suffix, padding in [key for key in families if key[2]]:
        unpadded = families.pop((prefix, suffix, 0), [])
        families[prefix, suffix, padding] += [item for item in unpadded if item[1] == padding]
        if rest := [item for item in unpadded if item[1] != padding]:
            families[prefix, suffix, 0] = rest


def _fold(key: tuple[str, str, int], numbers: list[int]) -> str:
    prefix, suffix, padding = key
    ranges = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first, last = (f"{n:0{padding}d}" for n in (members[0], members[-1]))
        ranges.append(first if first == last else f"{first}-{last}")
    alone = len(numbers) == 1
    return f"{prefix}{ranges[0]}{suffix}" if alone else f"{prefix}[{','.join(ranges)}]{suffix}"


def _split(hosts: str) -> Iterator[str]:
    """Splits at commas outside brackets."""
    depth = 0
    start = 0
    for index, char in enumerate(hosts):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _bad(hosts, "brackets do not pair up")
        if char == "," and not depth:
            yield hosts[start:index]
            start = index + 1
    if depth:
        raise _bad(hosts, "a bracket is not closed")
    yield hosts[start:]


def _expand_one(element: str, hosts: str, room: int) -> Iterator[str]:
    pieces: list[list[str]] = []
    position = 0
    count = 1
    while position < len(element):
        token = _TOKEN.match(element, position)
        if token is None:
            raise _bad(hosts, f"unexpected {element[position]!r}")
        pieces.append([token[2]] if token[2] else _numbers(token[1], hosts, room))
        count *= len(pieces[-1])
        if count > room:
            raise _bad(hosts, f"more than {MAX_NAMES} names")
        position = token.end()
    if not pieces:
        raise _bad(hosts, "an empty name")
    return map("".join, product(*pieces))


def _numbers(ranges: str, hosts: str, room: int) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.match(piece)
        if not match:
            raise _bad(hosts, f"{piece!r} is not a range of numbers")
        first = match[1]
        last = match[2] or match[1]
        if int(last) < int(first):
            raise _bad(hosts, f"the range {piece} runs backwards")
        if int(last) - int(first) >= room:
            raise _bad(hosts, f"more than {MAX_NAMES} names")
        numbers.extend(f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return numbers


def _bad(hosts: str, reason: str) -> OrchError:
    shown = hosts if len(hosts) <= 80 else hosts[:77] + "..."
    return OrchError(f"host list {shown!r}: {reason}", Exit.CONFIG)
