"""The linears that stay wide while `train.matmul` computes the others in few bits.

`train.matmul_wide` lists parts of the model:

    wo, experts.down    the end of the name of a linear inside its layer: in every layer that has it
    first, last         all linears of the first or of the last decoder layer
    3.down, first.wo    such a name in one layer; layers count from 0

Blocks that predict further tokens have the numbers behind the last layer, and a linear of their
own, `project`. Embedding, head and routers stay wide in any case, so they have no name here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from ..document import Model, Train
from ..flops import prediction_blocks
from ..layer import layer_moe, layer_operations

FIRST = "first"
LAST = "last"
#: The linear that joins a state with the next token, in blocks that predict further tokens.
PROJECT = "project"


def wide_patterns(train: Train) -> tuple[str, ...]:
    """The parts that a plan keeps wide; empty if it names none."""
    return tuple(train.matmul_wide) if isinstance(train.matmul_wide, list) else ()


@lru_cache(maxsize=1 << 14)
def is_wide(patterns: tuple[str, ...], layer: int, name: str, layers: int) -> bool:
    """Whether the linear `name` of a block, as `attn.wo`, stays wide. `layer` is the block's
    number, `layers` the number of the model's decoder layers."""
    return any(_names(pattern, layer, name, layers) for pattern in patterns)


def _names(pattern: str, layer: int, name: str, layers: int) -> bool:
    """Whether a part of the model contains this linear."""
    if pattern in (FIRST, LAST):
        return layer == _number(pattern, layers)
    where, _, linear = pattern.partition(".")
    number = _number(where, layers)
    if number is None:
        return _ends_with(name, pattern)
    return layer == number and _ends_with(name, linear)


def _number(where: str, layers: int) -> int | None:
    """The layer that the beginning of a part names; None: it is the name of a linear."""
    if where in (FIRST, LAST):
        return 0 if where == FIRST else layers - 1
    return int(where) if where.isascii() and where.isdigit() else None


def _ends_with(path: str, name: str) -> bool:
    """Whether `name` is the whole path of a module or its last words."""
    return f".{path}".endswith(f".{name}") and bool(name)


def block_linears(model: Model, layer: int) -> list[str]:
    """The names of the linears of a block that can compute in few bits, in the order in which a
    token passes them. `layer`: its number; those behind the last layer predict further tokens."""
    ahead = [PROJECT] if layer >= model.layers else []
    operations = layer_operations(model, min(layer, model.layers - 1))
    return ahead + [operation.name for operation in operations if operation.kind == "product"]


def linears(model: Model) -> Iterator[tuple[int, str]]:
    """Yields the block's number and the name of every linear that can compute in few bits."""
    for layer in range(model.layers + prediction_blocks(model)):
        for name in block_linears(model, layer):
            yield layer, name


def legal_patterns(model: Model) -> list[str]:
    """The parts that every layer's linears have in common: names, and the ends of the model."""
    names = [name for layer in _kinds(model) for name in block_linears(model, layer)]
    short_names = dict.fromkeys(name.rpartition(".")[2] for name in names)
    # Where layers have several linears of a name, further words tell them apart.
    longer = dict.fromkeys(name.partition(".")[2] for name in names if name.count(".") > 1)
    return [*short_names, *longer, FIRST, LAST]


def _kinds(model: Model) -> Iterable[int]:
    """A block of each kind: the first layer, the last one, one that predicts further tokens."""
    return dict.fromkeys((0, model.layers - 1, model.layers - 1 + prediction_blocks(model)))


def unknown_patterns(patterns: Iterable[str], model: Model) -> list[str]:
    """The parts that contain no linear of the model."""
    return [
        pattern
        for pattern in patterns
        if not any(_names(pattern, layer, name, model.layers) for layer, name in linears(model))
    ]


def in_fewer_layers(patterns: Iterable[str], layers: int, before: int) -> list[str]:
    """The patterns for a model of `layers` decoder layers that stands for one of `before`: numbers
    that it does not have become that of its last layer, and blocks that predict further tokens
    follow it."""
    smaller = []
    for pattern in patterns:
        where, _, name = pattern.partition(".")
        number = _number(where, before)
        if number is None or where in (FIRST, LAST) or number < min(layers, before):
            smaller.append(pattern)
        elif number >= before:
            smaller.append(f"{layers + number - before}.{name}")
        else:
            smaller.append(f"{layers - 1}.{name}")
    return smaller


@lru_cache(maxsize=4096)
def _share(patterns: tuple[str, ...], name: str, numbers: range, layers: int) -> float:
    wide = sum(is_wide(patterns, layer, name, layers) for layer in numbers)
    return wide / len(numbers)


def wide_share(train: Train, model: Model, layer: int, name: str) -> float:
    """The share of the decoder layers of one kind, dense or with experts, in which a linear stays
    wide. `layer`: a layer of that kind."""
    patterns = wide_patterns(train)
    return _share(patterns, name, _of_kind(model, layer), model.layers) if patterns else 0.0


def _of_kind(model: Model, layer: int) -> range:
    """The decoder layers of the kind of `layer`; dense ones come first."""
    if model.moe is None or layer_moe(model, layer) is None:
        stop = model.layers if model.moe is None else model.moe.first_dense_layers
        return range(min(stop, model.layers))
    return range(model.moe.first_dense_layers, model.layers)
