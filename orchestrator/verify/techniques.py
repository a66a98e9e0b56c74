"""The techniques of the matrix by axis (AXES), and those that the trainer refuses.

A new technique is added here and verified as soon as the trainer runs it; until then its cells show
the reason of the refusal.
"""

from __future__ import annotations

from typing import Any

from orchestrator.plan.document import Mtp

from .data_techniques import (
    BLOCKS,
    CONSTANT_BUFFERS,
    HOST,
    HOST_OPTIMIZERS,
    NARROW_WIRE,
)
from .expert_models import CAPPED, DEEPSEEK, MIXTURE
from .expert_techniques import (
    BALANCED,
    BY_DOMAIN,
    CAPPED_LAYOUTS,
    CORNERS,
    FIVE_AXES,
    FOLDED,
    JITTER,
)
from .technique import Technique


def _pipeline(schedule: str, vpp: int = 1, **settings: Any) -> Technique:
    return Technique(
        f"pp2 {schedule}",
        {"pp": 2, "vpp": vpp, "schedule": schedule},
        **settings,
    )


#: Queries, keys and values are recomputed from the latents.
_RECOMPUTED_LATENTS = {"recompute_latents": True}
_LATENTS = tuple(
    Technique(
        f"{name}, latents".strip(", "),
        parallel,
        "selective",
        model=DEEPSEEK,
        pairs="none",
        train=_RECOMPUTED_LATENTS,
    )
    for name, parallel in (
        ("selective", {}),
        ("ep2 tp2 sp selective", {"ep": 2, "tp": 2, "sp": True}),
        (
            "ep2 tp2 pp2 zb_h1 selective",
            {"ep": 2, "tp": 2, "sp": False, "pp": 2, "schedule": "zb_h1"},
        ),
        ("cp2 zigzag selective", {"cp": 2, "cp_method": "zigzag"}),
    )
)

#: Optimizer state in the memory of the host, updated while the next step computes with the weights
#: before the update.
_DELAYED = {"offload": "host", "offload_delayed": True}
#: Optimizer state on a disk, with so small a buffer that every bucket takes several chunks.
_DISK = {"offload": "disk", "offload_buffer_mib": 0.1}
#: Inputs of recomputed layers in the memory of the host.
_INPUTS = {"offload_activations": "host"}
#: Inputs of recomputed layers that tensor-parallel ranks share.
_SHARED_INPUTS = {"partition_activations": True}
#: Inputs of recomputed layers in a buffer that was reserved at the start.
_RESERVED_INPUTS = {"contiguous_activations": True}
_SHARED_LAYOUT = {"tp": 2, "sp": False, "pp": 2, "vpp": 2, "schedule": "interleaved"}


def _offloaded_inputs(
    mode: str,
    storage: str,
    name: str = "",
    **train: Any,
) -> Technique:
    parallel = {"pp": 2, "schedule": "zb_h1"} if name else {}
    train = {"offload_activations": storage, **train}
    return Technique(
        f"{name}{mode}, inputs on the {storage}",
        parallel,
        mode,
        pairs="none",
        train=train,
    )


def _fp8(name: str, matmul: str = "fp8_tensor", **parallel: Any) -> Technique:
    recompute = parallel.pop("recompute", "none")
    model = parallel.pop("model", {})
    even = parallel.get("schedule") == "dualpipe"
    train = {"matmul": matmul}
    return Technique(
        f"{matmul} {name}".strip(),
        parallel,
        recompute,
        even,
        model=model,
        pairs="none",
        train=train,
    )


#: DeepSeek-V3's block, whose model predicts one more token.
_AHEAD = {**DEEPSEEK, "mtp": Mtp(depth=1, weight=0.3)}
_DEEPSEEK_LAYOUTS: dict[str, dict[str, Any]] = {
    "": {},
    "tp2 sp selective": {
        "tp": 2,
        "sp": True,
        "recompute": "selective",
    },
    "tp2": {"tp": 2, "sp": False},
    "ep2 tp2 sp": {
        "ep": 2,
        "tp": 2,
        "sp": True,
    },
    "tp2 etp1 ep2": {
        "tp": 2,
        "etp": 1,
        "sp": True,
    },
    "ep2 cp2 zigzag full": {
        "ep": 2,
        "cp": 2,
        "cp_method": "zigzag",
        "recompute": "full",
    },
    "ep2 pp2 dualpipe": {
        "ep": 2,
        "pp": 2,
        "schedule": "dualpipe",
    },
    "ep2 dp2 zero2": {
        "ep": 2,
        "dp": 2,
        "zero": 2,
    },
}
_FP8 = (
    _fp8(""),
    *(_fp8(f"{mode}", recompute=mode) for mode in ("selective", "full", "budget")),
    *(_fp8(f"dp2 zero{zero}", dp=2, zero=zero) for zero in (0, 1, 2, 3)),
    _fp8("tp2", tp=2, sp=False),
    _fp8("tp4 sp", tp=4, sp=True, model={"kv_heads": 4}),
    _fp8("tp4, shared key-value heads", tp=4),
    _fp8("tp2 sp selective", tp=2, sp=True, recompute="selective"),
    *(
        _fp8(f"cp2 {method}", cp=2, cp_method=method)
        for method in ("zigzag", "ring", "allgather", "ulysses")
    ),
    *(
        _fp8(f"pp2 {schedule}", pp=2, schedule=schedule)
        for schedule in ("1f1b", "zb_h1", "zb_h2", "dualpipe")
    ),
    *(
        _fp8(f"pp2 {schedule}", pp=2, vpp=2, schedule=schedule)
        for schedule in ("interleaved", "zbv", "dualpipev")
    ),
    _fp8("tp2 sp cp2 dp2 zero1", tp=2, cp=2, dp=2, zero=1),
    _fp8("tp2 sp cp2 pp2, zb_h1, full", tp=2, cp=2, pp=2, schedule="zb_h1", recompute="full"),
    _fp8("", "fp8_delayed"),
    *(_fp8(mode, "fp8_delayed", recompute=mode) for mode in ("selective", "full")),
    *(_fp8(f"dp2 zero{zero}", "fp8_delayed", dp=2, zero=zero) for zero in (1, 2, 3)),
    _fp8("tp2", "fp8_delayed", tp=2, sp=False),
    _fp8("tp2 sp selective", "fp8_delayed", tp=2, sp=True, recompute="selective"),
    _fp8("tp4, shared key-value heads", "fp8_delayed", tp=4),
    _fp8("cp2 zigzag", "fp8_delayed", cp=2, cp_method="zigzag"),
    *(
        _fp8(f"pp2 {schedule}", "fp8_delayed", pp=2, schedule=schedule)
        for schedule in ("1f1b", "zb_h1", "dualpipe")
    ),
    _fp8("tp2 sp cp2 dp2 zero1", "fp8_delayed", tp=2, cp=2, dp=2, zero=1),
    _fp8("", "fp8_block"),
    _fp8("selective", "fp8_block", recompute="selective"),
    _fp8("pp2 zb_h1, full", "fp8_block", pp=2, schedule="zb_h1", recompute="full"),
    *(_fp8(f"dp2 zero{zero}", "fp8_block", dp=2, zero=zero) for zero in (1, 2, 3)),
    _fp8("tp2 sp, blocks in slices", "fp8_block", tp=2, sp=True, model=BLOCKS),
    _fp8("tp2, blocks in slices", "fp8_block", tp=2, sp=False, model=BLOCKS),
    _fp8("tp2, blocks cut", "fp8_block", tp=2),
    _fp8(
        "tp2 sp cp2 zigzag, blocks cut",
        "fp8_block",
        tp=2,
        sp=True,
        cp=2,
        cp_method="zigzag",
    ),
    *(
        _fp8(f"{name} deepseek, mtp".strip(), matmul, model=_AHEAD, **parallel)
        for matmul in ("fp8_tensor", "fp8_delayed", "fp8_block")
        for name, parallel in _DEEPSEEK_LAYOUTS.items()
    ),
)

#: BERT's model (arXiv 1810.04805), which predicts masked tokens.
_BERT = {
    "kv_heads": 4,
    "norm": "layer",
    "position": "learned",
    "mlp": "plain",
    "activation": "gelu_erf",
    "bias": True,
    "causal": False,
    "block": "post_norm",
    "head_transform": True,
}

#: Techniques of one axis exclude each other. ZeRO shards over cp if there is cp, else over its own
#: dp.
AXES: dict[str, tuple[Technique, ...]] = {
    "data": (
        Technique("dp2", {"dp": 2}, deep=True),
        Technique("zero1", {"zero": 1}, deep=True),
        Technique("zero2", {"zero": 2}, deep=True),
        Technique("zero3", {"zero": 3}, deep=True),
        Technique("zero1 hybrid", {"zero": 1, "dp": 4, "zero_group": 2}),
        Technique("zero2 hybrid", {"zero": 2, "dp": 4, "zero_group": 2}),
        Technique("zero3 hybrid", {"zero": 3, "dp": 4, "zero_group": 2}),
        Technique("dp4 zero1", {"zero": 1, "dp": 4}, pairs="none"),
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
        *HOST_OPTIMIZERS,
        *(
            Technique(
                f"zero{zero} on a disk",
                {"zero": zero, "dp": 2},
                pairs="none",
                train=_DISK,
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
        *NARROW_WIRE,
        Technique(
            "zero2 hybrid on the host",
            {"zero": 2, "dp": 4, "zero_group": 2},
            pairs="none",
            train=HOST,
        ),
    ),
    "tensor": (
        Technique("tp2 sp", {"tp": 2, "sp": True}, deep=True),
        Technique("tp2", {"tp": 2, "sp": False}, deep=True),
        *(
            Technique(
                f"tp2 sp{recompute}, {pieces} pieces",
                {"tp": 2, "sp": True, "tp_pieces": pieces},
                recompute.strip() or "none",
                pairs="none",
            )
            for recompute, pieces in (("", 2), (" full", 4), (" selective", 4))
        ),
        Technique("tp2, 4 pieces", {"tp": 2, "sp": False, "tp_pieces": 4}, pairs="none"),
        Technique("tp4 sp", {"tp": 4, "sp": True}, pairs="none"),
        Technique("tp4", {"tp": 4, "sp": False}, pairs="none"),
    ),
    "context": (
        Technique("cp2 zigzag", {"cp": 2, "cp_method": "zigzag"}, deep=True),
        Technique("cp2 ring", {"cp": 2, "cp_method": "ring"}),
        Technique("cp2 allgather", {"cp": 2, "cp_method": "allgather"}, deep=True),
        Technique("cp2 ulysses", {"cp": 2, "cp_method": "ulysses"}, deep=True),
        *(
            Technique(f"cp4 {method}", {"cp": 4, "cp_method": method}, pairs="none")
            for method in ("zigzag", "ring", "allgather", "ulysses")
        ),
    ),
    "pipeline": (
        _pipeline("afab"),
        _pipeline("1f1b", deep=True),
        _pipeline("interleaved", vpp=2, deep=True),
        _pipeline("zb_h1", deep=True),
        _pipeline("zb_h2"),
        _pipeline("zbv", vpp=2),
        _pipeline("dualpipe", even=True, deep=True),
        _pipeline("dualpipev", vpp=2),
        *(
            Technique(
                f"pp4 {schedule}",
                {"pp": 4, "schedule": schedule},
                pairs="none",
                even=schedule == "dualpipe",
            )
            for schedule in ("1f1b", "zb_h1", "zb_h2", "dualpipe")
        ),
    ),
    "recompute": (
        Technique("selective", {}, recompute="selective", deep=True),
        Technique("full", {}, recompute="full", deep=True),
        Technique("budget", {}, recompute="budget", pairs="deep"),
        *_LATENTS,
        *(
            Technique(
                f"tp2 pp2 {mode}, inputs shared",
                _SHARED_LAYOUT,
                recompute=mode,
                pairs="none",
                train=_SHARED_INPUTS,
            )
            for mode in ("selective", "full")
        ),
        *(
            _offloaded_inputs(mode, storage)
            for mode, storage in (("selective", "host"), ("full", "disk"))
        ),
        Technique(
            "tp2 pp2 full, inputs shared and on the host",
            _SHARED_LAYOUT,
            "full",
            pairs="none",
            train=_SHARED_INPUTS | _INPUTS,
        ),
        _offloaded_inputs("selective", "disk", "pp2 zb_h1 ", **_DISK),
        *(
            Technique(
                f"{name}{mode}, inputs in a buffer",
                parallel,
                mode,
                pairs="none",
                train=_RESERVED_INPUTS,
            )
            for name, parallel, mode in (
                ("", {}, "selective"),
                ("pp2 zb_h1 ", {"pp": 2, "schedule": "zb_h1"}, "full"),
                ("pp2 dualpipev ", {"pp": 2, "vpp": 2, "schedule": "dualpipev"}, "selective"),
            )
        ),
        Technique(
            "tp2 pp2 full, inputs shared and in a buffer",
            _SHARED_LAYOUT,
            "full",
            pairs="none",
            train=_SHARED_INPUTS | _RESERVED_INPUTS,
        ),
    ),
    # Compiling a block takes half a minute; tests/trainer/test_compile.py combines it with others.
    "compile": (Technique("compile", {}, compile=True, pairs="none"),),
    "experts": (
        Technique("ep2", {"ep": 2}, model=MIXTURE, deep=True),
        Technique("ep2 deepseek", {"ep": 2}, model=DEEPSEEK, deep=True),
        Technique("ep4", {"ep": 4}, model=MIXTURE, pairs="deep"),
        Technique("ep2 capacity", {"ep": 2}, model=CAPPED, pairs="deep"),
        Technique(
            "ep2 cp2 folded zero3, one holder of each expert",
            {"zero": 3, "ep": 2, "cp": 2, "fold_cp": True},
            model=MIXTURE,
            pairs="none",
        ),
        *FOLDED,
        *FIVE_AXES,
        *BY_DOMAIN,
        *CAPPED_LAYOUTS,
        *JITTER,
        *BALANCED,
        *CORNERS,
        Technique("experts on every rank", {}, model=DEEPSEEK, pairs="deep"),
    ),
    "prediction": (
        Technique(
            "mtp",
            {},
            model={"mtp": Mtp(depth=2, weight=0.4)},
            deep=True,
        ),
    ),
    "products": _FP8,
    "dropout": (Technique("dropout", {}, dropout=0.1, pairs="deep"),),
    "objective": (
        Technique("masked", {}, model=_BERT, pairs="deep"),
        Technique("masked cp2 ring", {"cp": 2, "cp_method": "ring"}, model=_BERT, pairs="none"),
        Technique("masked, norms first", {"tp": 2}, model={"causal": False}, pairs="none"),
    ),
}

#: Pairs that the trainer refuses. Each is a cell with the reason; products avoid them.
REFUSED = {
    ("zero3", f"pp2 {schedule}") for schedule in ("zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipev")
}
REFUSED |= {("zero2", "pp2 dualpipe")}
REFUSED |= {("ep2", "masked"), ("ep2 deepseek", "masked"), ("mtp", "masked")}
#: Hybrid groups do not fit the ranks with the same experts.
REFUSED |= {(f"zero{zero} hybrid", "ep4") for zero in (1, 2, 3)}

#: Replicas that take unequal numbers of micro-batches, and their partners.
UNEQUAL = tuple(
    Technique(
        f"dp3 zero{zero} unequal",
        {"dp": 3, "zero": zero, "uneven": True},
        pairs="none",
    )
    for zero in range(4)
)
UNEQUAL_PARTNERS = (
    "tp2 sp",
    "cp2 zigzag",
    "pp2 1f1b",
    "pp2 interleaved",
    "pp2 zb_h1",
    "pp2 zbv",
    "full",
    "dropout",
)
