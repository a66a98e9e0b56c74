"""Recognises the model of a GPU by any of its names: a data sheet's, a Kubernetes label's, a Slurm
type's. Pure.

`RTX-3090`, `3090` and `NVIDIA GeForce RTX 3090` are one model; `3090`, `3090 Ti` and `4090d` are
three, and so are `Quadro RTX 6000` (Turing), `RTX 6000` (Ada) and `RTX PRO 6000` (Blackwell).
"""

from __future__ import annotations

import re
from functools import cache
from itertools import takewhile

#: Words before the model's number, which some sites write and others leave out: brands, systems,
#: "8x".
_BRAND = re.compile(
    r"^(?:nvidia|geforce|tesla|quadro|rtx|gtx|amd|instinct|[dh]gx\d*|\d+x(?=[a-z]))+"
)
#: Form factors and kinds of memory, which do not name a model.
_FORM = re.compile(r"(?:sxm|pcie|hbm|nvl|oam)\d*[a-z]?$")
#: Models such as h100, gb200, l40s, mi300x, gaudi3, 4090.
_MODEL = re.compile(r"[a-z]{0,5}[0-9]{1,4}[a-z]{0,9}")
#: Numbers of workstation GPUs that three generations share.
_SHARED = re.compile(r"(?:pro)?([2-6][05]00)(?:ada|blackwell)?")
#: Other words with digits: small numbers, sizes and kinds of memory, generations of the bus.
_OTHER = re.compile(r"[0-9]{1,3}|[0-9]+gi?b?|g?ddr[0-9]\w?|(?:gen|gpu)[0-9]*")
#: Words after the number that name another model.
_VARIANTS = frozenset({"ti", "super", "d", "laptop"})


@cache
def gpu_model(name: str) -> str:
    """Returns h100 for H100-SXM5-80GB, "NVIDIA H100 80GB HBM3" and nvidia_h100_pcie; "" for a name
    without a model.

    Memory and form factor do not matter: one model is sold with several.
    """
    tokens = re.findall(r"[a-z0-9]+", name.lower())
    for index, token in enumerate(tokens):
        bare = _FORM.sub("", _BRAND.sub("", token))
        if shared := _SHARED.fullmatch(bare):
            return _generation(name.lower()) + shared[1]
        if _MODEL.fullmatch(bare) and not _OTHER.fullmatch(bare):
            return bare + "".join(takewhile(_VARIANTS.__contains__, tokens[index + 1 :]))
    return ""


def _generation(name: str) -> str:
    """Returns the prefix of a workstation GPU's generation: its maker writes it before a number
    that several generations share."""
    if "quadro" in name:
        return "quadro"
    if "blackwell" in name or re.search(r"(?<![a-z])(?:rtx)?pro(?![a-z])", name):
        return "pro"
    return "ada"


def same_model(required: str, actual: str) -> bool:
    """Tells whether a GPU that a node calls `actual` is the entry's `required`; an entry without
    a number is compared by its first word."""
    model = gpu_model(required)
    return model == gpu_model(actual) if model else required.split("-")[0].lower() in actual.lower()
