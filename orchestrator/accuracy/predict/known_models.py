"""Knows the shapes of published models by name, for rows that name a `model` without its shape.

`known_models.csv` has one line per model. Its source is the model's paper or its published
configuration, named above the lines of its family. Cells of a row win over these shapes; a row
whose hidden size differs has another model. `conf/model` holds the shapes that plans use; these are
only for rows of tables.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from orchestrator.plan.document import Mla, Moe

from .data_files import records


class Shape(Struct, frozen=True):
    """The shape of a model. The defaults are those of a gated MLP with rotary positions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    seq_len: int  # The positions that the model was trained on.
    head_dim: int = 0  # 0 for hidden / heads.
    gated: bool = True  # False for a plain MLP with a GELU, LayerNorm and biases.
    tied: bool = False  # True if the head is the token table.
    position: Literal["rope", "learned", "none"] = "rope"
    moe: Moe | None = None
    mla: Mla | None = None


class ListedModel(NamedTuple):
    """A line of `known_models.csv`."""

    family: re.Pattern[str]  # Occurs in the model's name without its size.
    sizes: list[str]  # Billions of parameters; "?" stands for a name without a size.
    shape: Shape


#: Widths of the latent attention of every listed model that has one.
_MLA_WIDTHS = {
    "kv_lora_rank": "512",
    "qk_nope_head_dim": "128",
    "qk_rope_head_dim": "64",
    "v_head_dim": "128",
}
#: Words of a name that say the kind of MLP, where the model itself is not listed.
GATED = re.compile(
    r"llama|mi[sx]tral|qwen|gemma|deepseek|yi-|internlm|baichuan|olmo|glm|phi-?[34]|grok|dbrx|palm"
    r"|smollm"
)
PLAIN = re.compile(
    r"gpt|opt|bloom|mpt|megatron|nlg|falcon|pythia|neox|nemotron|starcoder|bert|gopher|chinchilla"
    r"|phi-?[12]"
)


#: Matches a size in a name: the 70b of llama-3-70b, but not the 22b of 8x22b, nor the 3b of
#: 30b-a3b, which are its active parameters.
_SIZE = re.compile(r"(?<![\dx.])(?<!-a)(\d+(?:\.\d+)?)(t|b|m)(?![a-z])")
_BILLIONS = {"t": 1e3, "b": 1.0, "m": 1e-3}
_NEAR = 0.03  # Sizes in names are rounded: 175B is 174.6B.


def size_in(name: str) -> float | None:
    """Returns the billions of parameters that a model's name states, or None."""
    match = _SIZE.search(canonical(name[:120]))
    return float(match[1]) * _BILLIONS[match[2]] if match else None


def canonical(name: str) -> str:
    """Returns a name in lower case, with "-" for spaces, colons and underscores, and without the
    publisher before a slash."""
    return re.sub(r"[\s_/:]+", "-", name.strip().lower().rsplit("/", 1)[-1])


@lru_cache(maxsize=1)
def listed_models() -> list[ListedModel]:
    """Returns the lines of `known_models.csv`, in order."""
    return [_listed_model(cells) for cells in records("known_models.csv")]


def _listed_model(cells: dict[str, str]) -> ListedModel:
    shape: dict[str, object] = dict(cells)
    moe = _columns_below("moe.", cells)
    if moe:
        shape["moe"] = moe
    mla = _columns_below("mla.", cells)
    if mla:
        shape["mla"] = _MLA_WIDTHS | mla
    return ListedModel(
        family=re.compile(cells["family"]),
        sizes=cells["sizes"].split(),
        shape=msgspec.convert(shape, Shape, strict=False),
    )


def _columns_below(prefix: str, cells: dict[str, str]) -> dict[str, str]:
    """Returns the cells of the columns whose names begin with `prefix`, by the rest of the name."""
    return {
        column.removeprefix(prefix): cell
        for column, cell in cells.items()
        if column.startswith(prefix)
    }


@lru_cache(maxsize=4096)
def known_shape(name: str) -> Shape | None:
    """Returns the published shape of a model's name, which is that of the first line that matches;
    None for a name that is not listed."""
    if not name:
        return None
    size = size_in(name)
    family = _SIZE.sub("", canonical(name[:120]))
    for pattern, sizes, shape in listed_models():
        if size is None:
            is_listed = "?" in sizes
        else:
            is_listed = any(
                abs(float(listed_size) / size - 1) < _NEAR
                for listed_size in sizes
                if listed_size != "?"
            )
        if is_listed and pattern.search(family):
            return shape
    return None
