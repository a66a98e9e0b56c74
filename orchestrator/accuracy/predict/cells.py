"""The cells of one row as numbers and words, and what was assumed where they say nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

#: What tables write where they have no number.
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
#: What tables write where they have no word; "none" is a word.
_NO_WORD = BLANK - {"none", "auto"}
MOST_GPUS = 1 << 20
#: Largest plausible value of a column; a larger one is an error in the row, not a model to predict.
MOST: dict[str, int] = {
    **dict.fromkeys(("pp", "vpp"), 256),
    **dict.fromkeys(("layers", "tp", "cp", "topk"), 1024),
    **dict.fromkeys(("heads", "kv_heads", "experts", "ep", "gpus_per_node"), 1 << 16),
    **dict.fromkeys(("hidden", "nodes", "num_gpus", "dp", "micro_batch"), MOST_GPUS),
    **dict.fromkeys(("ffn_hidden", "moe_ffn", "vocab"), 1 << 24),
    "seq_len": 1 << 28,
    "global_batch": 1 << 40,  # samples, or tokens
    "zero_stage": 3,
}
#: Columns of powers of two: 4k is 4096. Elsewhere k is 1000.
_BINARY = ("seq_len", "global_batch", "hidden", "ffn_hidden", "moe_ffn", "num_gpus", "micro_batch")
_SCALES = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}
#: Units of measured cells, in the column's own.
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
    """A row that cannot be predicted; the message names the column."""


@lru_cache(maxsize=8192)
def number_of(name: str, cell: str) -> float | None:
    """The number in a cell of column `name`: "1,024", "8x", "128k", "2x8". None where blank;
    RowError."""
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
    digits = re.sub(r",(?=\d{1,2}(?:e|$))", ".", match[1])  # a decimal comma: "6,7"
    value = float(re.sub("[,_' ]", "", digits)) * (factor or 1.0)
    return value * (1024.0 if name in _BINARY else 1000.0) ** _SCALES[match[2]]


class Row:
    """Typed access to one row; collects the assumptions."""

    __slots__ = ("assumed", "cells")

    def __init__(self, cells: Mapping[str, str]):
        self.cells = cells
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        """The words of a cell; empty where it says nothing."""
        cell = (self.cells.get(name) or "").strip()
        return "" if cell.lower() in _NO_WORD else cell

    def whole(self, name: str, least: int = 1) -> int | None:
        """A whole number of at least `least`, None where blank. RowError, also above what is
        plausible."""
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
        """A degree of parallelism; None where blank. Tables write 0 where an axis is not used."""
        value = self.whole(name, least=0)
        return 1 if value == 0 else value

    def say(self, assumption: str) -> None:
        self.assumed.append(assumption)

    def assume(self, name: str, value: int | None, default: int) -> int:
        """`value`, or where it is None `default`, which is said."""
        if value is not None:
            return value
        self.assumed.append(f"{name}={default}")
        return default
