"""Finds the model of a row: from its own cells, then from the published shape of its name, then
from the usual shape of its size."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from msgspec import structs

from orchestrator.cost.model.layers import parameter_count
from orchestrator.plan.document import Model, Moe

from .cells import MOST, Row, RowError, number_of
from .known_models import GATED, PLAIN, Shape, canonical, known_shape, size_in

#: (billions of parameters, layers, hidden size) of plain transformers, from GPT-3 (arXiv 2005.14165
#: table 2.1) and Narayanan et al. (arXiv 2104.04473 table 1).
LADDER = (
    (0.125, 12, 768),
    (0.35, 24, 1024),
    (0.76, 24, 1536),
    (1.3, 24, 2048),
    (2.7, 32, 2560),
    (6.7, 32, 4096),
    (13.0, 40, 5120),
    (18.4, 40, 6144),
    (30.0, 48, 7168),
    (39.1, 48, 8192),
    (76.1, 60, 10240),
    (145.6, 80, 12288),
    (310.1, 96, 16384),
    (529.6, 105, 20480),
    (1008.0, 128, 25600),
)
Position = Literal["rope", "learned", "none"]
LARGEST = 3000.0  # Billions of parameters; no published model has as many.
MOST_BILLIONS = 1e5
_GATED_LAYER: dict[str, Any] = {"norm": "rms", "mlp": "gated", "activation": "silu", "bias": False}
_PLAIN_LAYER: dict[str, Any] = {"norm": "layer", "mlp": "plain", "activation": "gelu", "bias": True}
#: A family's usual MLP is assumed if its number of parameters is this close to the stated one.
_CLOSE = 0.1


class Kind(NamedTuple):
    gated: bool  # True for a gated MLP with RMSNorm, False for a plain one with LayerNorm.
    tied: bool  # True if the head is the token table.
    position: Position


class Cells(NamedTuple):
    """The cells of a row that describe its model; None for those that are blank."""

    name: str
    billions: float | None
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    experts: int | None
    topk: int | None
    moe_ffn: int | None
    seq_len: int | None


def model_of(row: Row) -> Model:
    """Returns the model, with the row's sequence length as `max_seq_len`. Raises RowError if no
    cell implies a shape."""
    # Tables write 0 in these columns if there are none.
    least_values = {"kv_heads": 0, "experts": 0, "topk": 0, "moe_ffn": 0}
    shape = {name: row.whole(name, least_values.get(name, 1)) or None for name in Cells._fields[2:]}
    for name, mark in (("layers", "l"), ("hidden", "h")):  # Such as "GPT-h14400-L80".
        if shape[name] is None and (
            match := re.search(rf"-{mark}(\d{{1,5}})\b", canonical(row.text("model")[:120]))
        ):
            shape[name] = min(int(match[1]), MOST[name]) or None
    cells = Cells(row.text("model")[:120], _billions(row), **shape)
    model, assumed = _model(cells)
    row.assumed += assumed
    return model


def _billions(row: Row) -> float | None:
    """Returns the billions of parameters in `params_b`, which may also hold a count of parameters
    or millions of them if that is unmistakable."""
    cell = (row.cells.get("params_b") or "").strip()
    value = number_of("params_b", cell) if cell else None
    if value is None:
        return None
    if cell[-1:] in "bBtTmM" or value > MOST_BILLIONS:  # A suffix makes it a count.
        value /= 1e9
        if cell[-1:].isdigit():
            row.say(f"params_b={value:g}: read as a count of parameters")
    elif value > LARGEST:
        value /= 1e3
        row.say(f"params_b={value:g}: read as millions")
    if not 0 < value <= MOST_BILLIONS:
        raise RowError(
            f"params_b={cell[:40]!r}: want billions of parameters, above 0 and at most"
            f" {MOST_BILLIONS:,.0f}"
        )
    return value


@lru_cache(maxsize=2048)
def _model(cells: Cells) -> tuple[Model, tuple[str, ...]]:
    """Returns (model, the assumptions that were made)."""
    assumptions: list[str] = []
    published = _known(cells)
    billions = cells.billions or size_in(cells.name)
    values = _dimensions(cells, published, billions, assumptions)
    moe = _moe(cells, published, values["hidden"], assumptions)
    values["moe"] = moe
    if published:
        ffn = cells.ffn_hidden or published.ffn_hidden
        if published.moe and published.moe.first_dense_layers:
            ffn = published.ffn_hidden  # Tables write the width of an expert in this column.
        values["mla"] = published.mla
        kind = Kind(published.gated, published.tied, published.position)
        return _build(values, ffn, kind), tuple(assumptions)
    model = _nearest(values, cells, billions)
    if cells.ffn_hidden is None and moe is None:
        assumptions.append(f"ffn_hidden={model.ffn_hidden}")
    return model, tuple(assumptions)


def _dimensions(
    cells: Cells,
    published: Shape | None,
    billions: float | None,
    assumptions: list[str],
) -> dict[str, Any]:
    """Returns the fields of `Model` that every kind of layer has, except the width of its MLP."""
    layers, hidden = _depth_and_width(cells, published, billions, assumptions)

    def stated(column: str, default: int) -> int:
        """Returns the cell, or else the published value, or else `default`."""
        listed = getattr(published, column) if published else None
        return _given(
            getattr(cells, column),
            listed,
            default,
            column,
            assumptions,
        )

    heads = stated("heads", max(1, hidden // (128 if hidden >= 2048 else 64)))
    head_dim = published.head_dim if published else 0
    return {
        "name": cells.name or "model",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": min(heads, stated("kv_heads", heads)),
        "max_seq_len": stated("seq_len", 2048 if PLAIN.search(canonical(cells.name)) else 4096),
        "vocab": stated("vocab", _usual_vocab(cells.name)),
        "head_dim": head_dim or max(1, hidden // heads),
    }


def _known(cells: Cells) -> Shape | None:
    """Returns the published shape of the row's name, unless its cells belong to another model."""
    published = known_shape(cells.name)
    if published is None or cells.hidden not in (None, published.hidden):
        return None
    if cells.billions and cells.layers is None and not 0.5 < cells.billions / _size(published) < 2:
        return None  # The row has another size of the family.
    return published


@lru_cache(maxsize=256)
def _size(shape: Shape) -> float:
    """Returns the billions of parameters of a published shape."""
    values = {
        "name": "",
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "max_seq_len": shape.seq_len,
        "vocab": shape.vocab,
        "head_dim": shape.head_dim or shape.hidden // shape.heads,
        "moe": shape.moe,
        "mla": shape.mla,
    }
    kind = Kind(shape.gated, shape.tied, shape.position)
    return _build(values, shape.ffn_hidden, kind).parameters / 1e9


def _given(
    cell: int | None,
    published: int | None,
    default: int,
    name: str,
    assumptions: list[str],
) -> int:
    if cell is not None:
        return cell
    value = published or default
    assumptions.append(f"{name}={value}")
    return value


def _depth_and_width(
    cells: Cells,
    published: Shape | None,
    billions: float | None,
    assumptions: list[str],
) -> tuple[int, int]:
    """Returns (layers, hidden size). Raises RowError if nothing implies them."""
    layers = cells.layers or (published.layers if published else None)
    hidden = cells.hidden or (published.hidden if published else None)
    if layers is None or hidden is None:
        if billions is None:
            billions = _usual_size(layers, hidden)
        if billions is None:
            raise RowError(
                f"layers is blank, and neither model={cells.name[:40]!r} nor params_b says the"
                " shape"
            )
        _, usual_layers, width = min(LADDER, key=lambda rung: abs(math.log(rung[0] / billions)))
        table = (cells.vocab or _usual_vocab(cells.name)) * (hidden or width)
        # A model has about 12 layers hidden^2 parameters, and the token table.
        blocks = max(billions * 1e9 / 2, billions * 1e9 - table) / 12
        if hidden is None:
            hidden = _rounded_width(math.sqrt(blocks / (layers or usual_layers)))
        layers = layers or min(1024, max(1, round(blocks / hidden**2)))
    if cells.layers is None:
        assumptions.append(f"layers={layers}")
    if cells.hidden is None:
        assumptions.append(f"hidden={hidden}")
    return layers, hidden


def _rounded_width(exact: float) -> int:
    step = 1024
    if exact < 2560:
        step = 128
    elif exact < 8192:
        step = 512
    return step * max(1, round(exact / step))


def _usual_size(layers: int | None, hidden: int | None) -> float | None:
    """Returns the billions of parameters of a usual model that is as wide, or else as deep; None if
    neither is known."""
    if hidden:
        rung = min(LADDER, key=lambda rung: abs(math.log(rung[2] / hidden)))
        return rung[0] * (hidden / rung[2]) ** 2  # The same depth is assumed.
    return min(LADDER, key=lambda rung: abs(math.log(rung[1] / layers)))[0] if layers else None


def _usual_vocab(name: str) -> int:
    """Returns the vocabulary of Llama 1 and 2 for models like them, else Megatron's padded GPT-2
    vocabulary."""
    return 32000 if GATED.search(canonical(name)) else 51200


def _moe(
    cells: Cells,
    published: Shape | None,
    hidden: int,
    assumptions: list[str],
) -> Moe | None:
    listed = published.moe if published else None
    experts = cells.experts or (listed.experts if listed else 0)
    if experts <= 1:
        return None
    if cells.experts is None:
        assumptions.append(f"experts={experts}")
    listed_top_k = listed.top_k if listed else None
    usual_top_k = 2 if experts <= 16 else 8
    top_k = _given(cells.topk, listed_top_k, usual_top_k, "topk", assumptions)
    if top_k > experts:
        assumptions.append(f"topk={experts} of {top_k}: as many as experts")
        top_k = experts
    width = cells.moe_ffn or (listed.ffn_hidden if listed else None)
    if width is None:
        width = cells.ffn_hidden or 4 * hidden
        assumptions.append(f"moe_ffn={width}")
    dense_layers = listed.first_dense_layers if listed else 0
    if cells.layers is not None and dense_layers >= cells.layers:
        return None  # The model is cut down to its dense layers.
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn_hidden=width,
        shared_ffn_hidden=listed.shared_ffn_hidden if listed else 0,
        first_dense_layers=dense_layers,
    )


def _nearest(values: dict[str, Any], cells: Cells, billions: float | None) -> Model:
    """Returns the model with a gated or a plain MLP and a tied or an untied head: those that its
    name implies, or those whose size is nearest to the stated one."""
    hidden = values["hidden"]
    usual_ffn = {True: 256 * max(1, round(8 * hidden / 3 / 256)), False: 4 * hidden}
    likely = _is_probably_gated(values, cells)
    candidates = []
    for gated in (likely, not likely):
        for tied in (not gated, gated):
            kind = Kind(gated, tied, _usual_position(gated, values["max_seq_len"]))
            candidates.append(_build(values, cells.ffn_hidden or usual_ffn[gated], kind))
    if not billions:
        return candidates[0]
    usual_kind = min(candidates[:2], key=lambda model: abs(model.parameters / 1e9 - billions))
    if abs(usual_kind.parameters / 1e9 / billions - 1) < _CLOSE:
        return usual_kind
    return min(candidates, key=lambda model: abs(model.parameters / 1e9 - billions))


def _is_probably_gated(values: dict[str, Any], cells: Cells) -> bool:
    name = canonical(cells.name)
    if GATED.search(name):
        return True
    if PLAIN.search(name):
        return False
    # Shared keys and odd widths came with gated MLPs.
    has_shared_keys = values["kv_heads"] < values["heads"]
    has_odd_width = cells.ffn_hidden not in (None, 4 * values["hidden"])
    return values["moe"] is not None or has_shared_keys or has_odd_width


def _usual_position(gated: bool, seq_len: int) -> Position:
    if gated:
        return "rope"
    return "learned" if seq_len <= 1 << 17 else "none"


def _build(values: dict[str, Any], ffn: int, kind: Kind) -> Model:
    model = Model(
        **values,
        **(_GATED_LAYER if kind.gated else _PLAIN_LAYER),
        ffn_hidden=ffn,
        norm_eps=1e-5,
        position=kind.position,
        rope_theta=1e4,
        tied_embeddings=kind.tied,
        causal=not re.search(r"bert\b|bert-", canonical(values["name"])),
        parameters=0,
        source="table",
    )
    return structs.replace(model, parameters=parameter_count(model))
