"""The techniques of the axis "data" of the matrix whose states are outside the device's memory, or
pass through buffers of a constant size."""

from __future__ import annotations

from typing import Any

from .data_techniques import CONSTANT_BUFFERS, HOST
from .expert_models import MIXTURE
from .technique import Technique

#: The same, updated while the next step computes with the weights before the update.
_DELAYED = {"offload": "host", "offload_delayed": True}
#: The same on a disk, with so small a buffer that every bucket takes several chunks.
DISK = {"offload": "disk", "offload_buffer_mib": 0.1}
#: The same with the shards of weights and gradients, which ZeRO-3 gathers from there.
_SHARDS_ON_HOST = HOST | {"offload_weights": True}
_SHARDS_ON_DISK = DISK | {"offload_weights": True}
_SHARDED: dict[str, dict[str, Any]] = {
    "zero3": {"dp": 2},
    "zero3 hybrid": {"dp": 4, "zero_group": 2},
    "zero3 tp2": {"dp": 2, "tp": 2},
    "zero3 pp2": {"dp": 2, "pp": 2},
    "zero3 ep2": {"dp": 2, "ep": 2},
}


def _sharded(name: str, storage: str, train: dict[str, Any]) -> Technique:
    """Returns ZeRO-3 with its shards in a storage outside the device's memory."""
    return Technique(
        f"{name}, weights on {storage}",
        {"zero": 3, **_SHARDED[name]},
        model=MIXTURE if "ep" in _SHARDED[name] else {},
        pairs="none",
        train=train,
    )


OFFLOADED = (
    Technique("zero1 on the host", {"zero": 1}, pairs="deep", train=HOST),
    *(
        Technique(
            f"zero{zero} on the host",
            {"zero": zero, "dp": 2},
            pairs="none",
            train=HOST,
        )
        for zero in (0, 2, 3)
    ),
    Technique(
        "zero3 pp2 zb_h1 on the host",
        {"zero": 3, "dp": 2, "pp": 2, "schedule": "zb_h1"},
        pairs="none",
        train=HOST,
    ),
    *(
        Technique(
            f"zero{zero} on the host, delayed",
            {"zero": zero, "dp": 2},
            pairs="none",
            train=_DELAYED,
        )
        for zero in range(4)
    ),
    Technique(
        "zero1 tp2 pp2, delayed",
        {"zero": 1, "dp": 2, "tp": 2, "pp": 2},
        pairs="none",
        train=_DELAYED,
    ),
    *(
        Technique(
            f"zero{zero} on a disk",
            {"zero": zero, "dp": 2},
            pairs="none",
            train=DISK,
        )
        for zero in (1, 2, 3)
    ),
    *(
        Technique(
            f"{name}, constant buffers",
            parallel,
            pairs="none",
            train=CONSTANT_BUFFERS,
        )
        for name, parallel in (
            ("dp2", {"dp": 2}),
            ("zero1", {"zero": 1, "dp": 2}),
            ("zero2", {"zero": 2, "dp": 2}),
            ("zero2 hybrid", {"zero": 2, "dp": 4, "zero_group": 2}),
            ("zero1 tp2", {"zero": 1, "dp": 2, "tp": 2}),
            ("zero2 pp2", {"zero": 2, "dp": 2, "pp": 2}),
        )
    ),
    Technique(
        "zero2 hybrid on the host",
        {"zero": 2, "dp": 4, "zero_group": 2},
        pairs="none",
        train=HOST,
    ),
    *(_sharded(name, "the host", _SHARDS_ON_HOST) for name in _SHARDED),
    *(_sharded(name, "a disk", _SHARDS_ON_DISK) for name in _SHARDED),
    Technique(
        "zero3, weights on the host, muon",
        {"zero": 3, "dp": 2},
        pairs="none",
        train=_SHARDS_ON_HOST,
        optim={"kind": "muon"},
    ),
    Technique(
        "zero3, weights on the host, delayed",
        {"zero": 3, "dp": 2},
        pairs="none",
        train=_DELAYED | {"offload_weights": True},
    ),
)
