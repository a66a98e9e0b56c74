"""The model of a GPU by any of its names: a data sheet's, a Kubernetes label's, a Slurm type's. Pure."""

from __future__ import annotations

import re
from functools import cache

_MODEL = re.compile(r"[a-z]{0,5}[0-9]{1,4}[a-z]{0,2}")  # h100, gb200, l40s, mi300x, gaudi3, 4090
#: What else has digits: sizes of memory, its kind, form factors, systems, sizes of NVLink domains.
_OTHER = re.compile(r"[0-9]{1,3}|[0-9]+g(i?b)?|g?ddr[0-9]\w?|hbm[0-9]\w?|(sxm|oam|nvl|pcie|gen|dgx|hgx|gpu)[0-9]*")
_JOINED = re.compile(r"^[0-9]+x(?=[a-z])|^(rtx|gtx)(?=[a-z0-9])|(?<=[0-9])(sxm[0-9]?|pcie|nvl|oam)$")


@cache
def gpu_model(name: str) -> str:
    """h100 of H100-SXM5-80GB, "NVIDIA H100 80GB" and nvidia_h100_pcie; "" of a name that has none.

    Memory and form factor do not matter: one model is sold with several.
    """
    for word in re.split(r"[^a-z0-9]+", name.lower()):
        part = _JOINED.sub("", word)
        if _MODEL.fullmatch(part) and not _OTHER.fullmatch(part):
            return part
    return ""


def is_other_model(one: str, other: str) -> bool:
    """Whether both names have a model, and not the same one."""
    models = {gpu_model(one), gpu_model(other)}
    return "" not in models and len(models) == 2
