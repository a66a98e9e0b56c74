"""Reads the cells of one row as numbers and words, and collects what was assumed for blank ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

#: Words that tables write if they have no number.
BLANK = frozenset(
    (
        "",
        "-",
        "--",
        "—",
        "?",
        "n/a",
        "na",
        "nan",
        "null",
        "none",
        "unknown",
        "not stated",
        "tbd",
        "auto",
    )
)
#: Words that tables write if they have no word; "none" and "auto" are words there.
_NO_WORD = BLANK - {"none", "auto"}
MOST_GPUS = 1 << 20
#: Largest plausible number of a column. A larger one is an error in the row, not a job to predict.
MOST: dict[str, int] = {
    **dict.fromkeys(("pp", "vpp"), 256),
    **dict.fromkeys(("layers", "tp", "cp", "topk"), 1024),
    **dict.fromkeys(("heads", "kv_heads", "experts", "ep", "gpus_per_node"), 1 << 16),
    **dict.fromkeys(("hidden", "nodes", "num_gpus", "dp", "micro_batch"), MOST_GPUS),
    **dict.fromkeys(("ffn_hidden", "moe_ffn", "vocab"), 1 << 24),
    "seq_len": 1 << 28,
    "global_batch": 1 << 40,  # Samples or tokens.
    "zero_stage": 3,
}
#: Columns whose "k" is 1024, so that 4k is 4096. In the other columns k is 1000.
_BINARY = ("seq_len", "global_batch", "hidden", "ffn_hidden", "moe_ffn", "num_gpus", "micro_batch")
_SCALES = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}
#: Measured column -> unit in a cell -> factor to the column's own unit.
_MEASURED: dict[str, dict[str, float]] = {
    "step_time_s": {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0},
    "peak_mem_gib": {
        "gib": 1.0,
        "gb": 1.0,
        "g": 1.0,
        "mib": 2.0**-10,
        "mb": 2.0**-10,
        "bytes": 2.0**-30,
    },
}
_UNITS = (
    "x|×|gpus?|gpu|layers?|heads?|tokens?|tok|samples?|sequences?|seqs?|ranks?|experts?|stages?"
    "|gb|gib|devices?"
)
_NUMBER = re.compile(
    r"[~≈]?([+-]?(?:\d{1,3}(?:[,_' ]\d{3})+|\d+)(?:\.\d+|,\d{1,2})?(?:e[+-]?\d+)?|[+-]?\.\d+)"
    rf"\s*([kmbt]?)\s*(?:{_UNITS})?(?:\s*\([^()]*\))?"
)
_PRODUCT = re.compile(r"(\d{1,7})\s*[x×*]\s*(\d{1,7})(?:\s*(?:gpus?|=.*|\([^()]*\)))?")


class RowError(ValueError):
    """The error of a row that cannot be predicted; its message names the column."""


@lru_cache(maxsize=8192)
def number_of(name: str, cell: str) -> float | None:
    """Returns the number in a cell of column `name`, such as "1,024", "8x", "128k" or "2x8"; None
    if it is blank. Raises RowError if it is not a number."""
    shown = cell[:40]
    lower = cell.strip().lower()
    if lower in BLANK:
        return None
    if len(lower) > 60:
        raise RowError(f"{name}={shown!r}... is not a number: {len(cell)} characters")
    if product := _PRODUCT.fullmatch(lower):
        return float(int(product[1]) * int(product[2]))
    factor = 1.0
    if name in _MEASURED and (unit := re.search(r"(?<=[\d. ])([a-z]+)$", lower)):
        factor = _MEASURED[name].get(unit[1], 0.0)
        lower = lower[: unit.start()].strip() if factor else lower
    match = _NUMBER.fullmatch(lower)
    if match is None:
        raise RowError(f"{name}={shown!r} is not a number")
    digits = re.sub(r",(?=\d{1,2}(?:e|$))", ".", match[1])  # The decimal comma of "6,7".
    value = float(re.sub("[,_' ]", "", digits)) * (factor or 1.0)
    return value * (1024.0 if name in _BINARY else 1000.0) ** _SCALES[match[2]]


class Row:
    """Gives typed access to the cells of one row and collects the assumptions."""

    __slots__ = ("assumed", "cells")

    def __init__(self, cells: Mapping[str, str]):
        self.cells = cells
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        """Returns the words of a cell; an empty string if it says nothing."""
        cell = (self.cells.get(name) or "").strip()
        return "" if cell.lower() in _NO_WORD else cell

    def whole(self, name: str, least: int = 1) -> int | None:
        """Returns a whole number of at least `least`, or None if the cell is blank. Raises RowError
        for anything else, including numbers above what is plausible."""
        cell = self.cells.get(name) or ""
        if not cell:
            return None
        value = number_of(name, cell)
        if value is None:
            return None
        if value < least:
            raise RowError(f"{name}={cell[:40]!r} must be at least {least}")
        if value > MOST[name]:
            raise RowError(
                f"{name}={cell[:40]!r} is above {MOST[name]:,}, the most that is plausible"
            )
        if value != int(value):
            raise RowError(f"{name}={cell[:40]!r} is not a whole number")
        return int(value)

    def degree(self, name: str) -> int | None:
        """Returns a degree of parallelism, or None if the cell is blank. Tables write 0 for an axis
        that is not used, which is degree 1."""
        value = self.whole(name, least=0)
        return 1 if value == 0 else value

    def say(self, assumption: str) -> None:
        self.assumed.append(assumption)
