"""The techniques of data parallelism in the matrix that concern what ranks send and keep: gradients
on the wire, and the state of optimizers on the host."""

from __future__ import annotations

from typing import Any

from .technique import Technique

#: Gradients, master weights and moments in the memory of the host.
HOST = {"offload": "host"}
#: Buckets so small that matrices are cut over several.
CONSTANT_BUFFERS = {"comm_buffer_mib": 0.005}
#: A model in which the slices of two ranks have whole blocks of 128.
BLOCKS = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn_hidden": 256}
#: Gradients that travel in 16 bits and are summed in fp32.
NARROW_WIRE = tuple(
    Technique(f"{name}, 16-bit wire", parallel, pairs="none", train={"grad_wire": "bf16"} | train)
    for name, parallel, train in (
        ("dp4 zero1", {"zero": 1, "dp": 4}, {}),
        ("dp4 zero2", {"zero": 2, "dp": 4}, {}),
        ("zero1 hybrid", {"zero": 1, "dp": 4, "zero_group": 2}, {}),
        ("zero2 hybrid", {"zero": 2, "dp": 4, "zero_group": 2}, {}),
        ("zero1 tp2 cp2", {"zero": 1, "tp": 2, "cp": 2, "dp": 2}, {}),
        ("zero1 pp2", {"zero": 1, "dp": 2, "pp": 2, "schedule": "zb_h1"}, {}),
        ("zero2 on the host", {"zero": 2, "dp": 2}, HOST),
        ("zero2, constant buffers", {"zero": 2, "dp": 2}, CONSTANT_BUFFERS),
    )
)
#: Keys of `optim` whose state differs from that of AdamW.
_OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"kind": "muon"},
    {"kind": "sgd"},
    {"state": "bf16"},
    {"state": "8bit"},
)
#: Their state on the host.
HOST_OPTIMIZERS = tuple(
    Technique(
        f"{layout} on the host, {keys.get('kind', keys.get('state'))}",
        parallel,
        model=BLOCKS if keys.get("state") == "8bit" else {},
        pairs="none",
        train=HOST,
        optim=keys,
    )
    for layout, parallel in (
        ("zero1", {"zero": 1, "dp": 2}),
        ("zero2", {"zero": 2, "dp": 2}),
        ("zero3 tp2", {"zero": 3, "dp": 2, "tp": 2}),
    )
    for keys in _OPTIMIZERS
)
