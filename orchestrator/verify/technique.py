"""A technique of the matrix."""

from __future__ import annotations

from typing import Any, NamedTuple


class Technique(NamedTuple):
    """The keys of a configuration that a technique sets, and its partners in the matrix."""

    name: str
    parallel: dict[str, Any]  # keys of `parallel`
    recompute: str = "none"
    even: bool = False  # needs an even number of micro-batches
    deep: bool = False  # is combined in triples, too
    pairs: str = "all"  # its partners on other axes: "all", "deep" ones, or "none"
    compile: bool = False
    dropout: float = 0.0
    model: dict[str, Any] = {}  # fields of the model that it needs
    train: dict[str, Any] = {}  # further keys of `train`
    optim: dict[str, Any] = {}  # further keys of `optim`
    nodes: int = 1  # nodes of its ranks
