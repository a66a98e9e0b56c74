"""Whether two names mean the same GPU model: the entry's display name and the word that a site or a driver uses. Pure.

`RTX-3090`, `3090` and `NVIDIA GeForce RTX 3090` are one model; `3090`, `3090 Ti` and `4090d` are three.
"""

from __future__ import annotations

import re

#: Words before the model's number, which some sites write and others leave out.
_BRAND = re.compile(r"^(?:nvidia|geforce|tesla|quadro|rtx|gtx|amd|instinct|[dh]gx\d*)+")
#: Form factors and memory sizes, which are no model.
_FORM = re.compile(r"(?:(?:sxm|pcie|hbm|nvl|oam)\d*[a-z]?|\d+gi?b?)$")
#: Words behind the number that make another model of it.
_VARIANTS = frozenset({"ti", "super", "d", "ada", "blackwell", "laptop"})


def gpu_model(name: str) -> str:
    """The model in small letters without brand, form factor and memory: `NVIDIA H100 80GB HBM3` -> `h100`.

    "" where no word of the name has a number.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    for word, following in zip(words, [*words[1:], ""], strict=True):
        bare = _FORM.sub("", _BRAND.sub("", word))
        if re.search(r"\d", bare):
            return bare + (following if following in _VARIANTS else "")
    return ""


def same_model(wanted: str, found: str) -> bool:
    """Whether a GPU that a node calls `found` is the entry's `wanted`; by its first word where that has no number."""
    model = gpu_model(wanted)
    return model == gpu_model(found) if model else wanted.split("-")[0].lower() in found.lower()
