"""The techniques of the matrix by axis (AXES), and those that the trainer refuses.

A new technique is added here and verified as soon as the trainer runs it; until then its cells show
the reason of the refusal.
"""

from __future__ import annotations

from typing import Any

from orchestrator.plan.document import Mtp

from .data_techniques import (
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
from .narrow_techniques import NARROW_PRODUCTS
from .offload_techniques import DISK, OFFLOADED
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
        *OFFLOADED,
        *HOST_OPTIMIZERS,
        *NARROW_WIRE,
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
        _offloaded_inputs("selective", "disk", "pp2 zb_h1 ", **DISK),
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
    "products": NARROW_PRODUCTS,
    "dropout": (Technique("dropout", {}, dropout=0.1, pairs="deep"),),
    "objective": (
        Technique("masked", {}, model=_BERT, pairs="deep"),
        Technique("masked cp2 ring", {"cp": 2, "cp_method": "ring"}, model=_BERT, pairs="none"),
        Technique("masked, norms first", {"tp": 2}, model={"causal": False}, pairs="none"),
    ),
}

#: Pairs that the trainer refuses. Each is a cell with the reason; products avoid them.
REFUSED = {("zero2", "pp2 dualpipe"), ("zero3", "pp2 dualpipe")}
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
