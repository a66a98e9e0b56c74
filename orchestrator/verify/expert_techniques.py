"""The techniques of the axis "experts" of the matrix."""

from __future__ import annotations

from typing import Any

from .expert_models import (
    ALL_CHOSEN,
    CAPPED,
    CAPPED_DEEPSEEK,
    DEEPSEEK,
    FEW_TOKENS,
    IDLE,
    MIXTURE,
    ONE_TAKES_ALL,
    with_mixture,
)
from .technique import Technique


def _folded(name: str, model: dict[str, Any] = MIXTURE, **parallel: Any) -> Technique:
    recompute = parallel.pop("recompute", "none")
    return Technique(
        name,
        parallel,
        recompute,
        even=parallel.get("schedule") == "dualpipe",
        model=model,
        pairs="none",
    )


_EVERY_AXIS: dict[str, Any] = {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "etp": 1, "fold_cp": True}
_FIVE: dict[str, Any] = {"tp": 2, "cp": 2, "ep": 2, "pp": 2, "dp": 2}
_VIRTUAL: dict[str, Any] = {"vpp": 2, "schedule": "interleaved"}
#: Experts on their own mesh, folded over tp and cp.
FOLDED = (
    _folded("tp2 etp1 ep2", tp=2, etp=1),
    _folded("tp2 etp1 ep4 deepseek", DEEPSEEK, tp=2, etp=1, ep=2),
    _folded("tp4 etp2 ep2", tp=4, etp=2),
    _folded("tp4 etp2 ep2 zero1", tp=4, etp=2, zero=1, dp=2),
    *(
        _folded(f"cp2 {method}, ep2 over it", cp=2, cp_method=method, fold_cp=True)
        for method in ("zigzag", "ring", "allgather", "ulysses")
    ),
    *(
        _folded(
            f"tp2 cp2 etp1 ep4 zero{zero}",
            DEEPSEEK,
            tp=2,
            cp=2,
            dp=2,
            etp=1,
            fold_cp=True,
            zero=zero,
        )
        for zero in range(4)
    ),
    _folded("cp2 ep2 over it, zero2 hybrid", cp=2, dp=4, fold_cp=True, zero=2, zero_group=4),
    _folded("tp2 pp2 etp1 ep4, zb_h1", DEEPSEEK, tp=2, pp=2, ep=2, etp=1, schedule="zb_h1"),
    _folded(
        "tp2 cp2 pp2 etp1 ep4, dualpipe",
        tp=2,
        cp=2,
        pp=2,
        etp=1,
        fold_cp=True,
        schedule="dualpipe",
    ),
)

#: All five axes at once: on sixteen processes, with expert parallelism on its own axis or folded,
#: and on thirty-two, where each is an axis of its own.
FIVE_AXES = (
    _folded("tp2 cp2 ep2 pp2 dp2, 1f1b, zero1", **_FIVE, schedule="1f1b", zero=1),
    _folded(
        "tp2 cp2 ep2 pp2 dp2 deepseek, zb_h1, zero2",
        DEEPSEEK,
        **_FIVE,
        schedule="zb_h1",
        zero=2,
    ),
    _folded(
        "tp2 cp2 ep2 pp2 dp2 deepseek, dualpipe",
        DEEPSEEK,
        **_FIVE,
        schedule="dualpipe",
    ),
    _folded("tp2 cp2 ep2 pp2, 1f1b, zero1", tp=2, cp=2, ep=2, pp=2, schedule="1f1b", zero=1),
    _folded(
        "tp2 cp2 ep2 pp2 deepseek, zb_h1, zero2",
        DEEPSEEK,
        tp=2,
        cp=2,
        ep=2,
        pp=2,
        schedule="zb_h1",
        zero=2,
    ),
    _folded(
        "tp2 cp2 pp2 dp2 etp1 ep4 deepseek, 1f1b, zero1",
        DEEPSEEK,
        **_EVERY_AXIS,
        schedule="1f1b",
        zero=1,
    ),
    _folded(
        "tp2 cp2 pp2 dp2 etp1 ep4, interleaved, zero3, full",
        recompute="full",
        **_EVERY_AXIS,
        **_VIRTUAL,
        zero=3,
    ),
    _folded(
        "tp2 cp2 pp2 dp2 etp1 ep4 capacity, dualpipe",
        CAPPED_DEEPSEEK,
        **_EVERY_AXIS,
        schedule="dualpipe",
    ),
)

#: Experts with a capacity, on ranks that hold parts of sequences or exchange tokens in other ways.
CAPPED_LAYOUTS = (
    _folded("cp2 ring, ep2 capacity", CAPPED, cp=2, cp_method="ring", ep=2),
    *(
        _folded(
            f"cp4 {method}, ep2 over it, capacity",
            CAPPED_DEEPSEEK,
            cp=4,
            cp_method=method,
            fold_cp=True,
        )
        for method in ("zigzag", "ulysses")
    ),
    _folded("tp2 etp1 ep4 capacity", CAPPED_DEEPSEEK, tp=2, etp=1, ep=2),
    _folded("tp4 etp2 ep2 capacity", CAPPED, tp=4, etp=2),
    _folded(
        "tp2 cp2 etp1 ep4 zero2 capacity",
        CAPPED,
        tp=2,
        cp=2,
        dp=2,
        etp=1,
        fold_cp=True,
        zero=2,
    ),
    _folded("tp2 sp capacity", CAPPED, tp=2, sp=True),
    _folded("tp2 capacity", CAPPED, tp=2, sp=False),
    _folded("dp2 zero3 capacity, deepseek", CAPPED_DEEPSEEK, dp=2, zero=3),
)

#: Routers whose input is multiplied by noise.
_NOISY = with_mixture(MIXTURE, jitter=0.3)
_NOISY_DEEPSEEK = with_mixture(DEEPSEEK, jitter=0.3)
JITTER = (
    _folded("ep2 jitter", _NOISY, ep=2),
    _folded("ep2 tp2 sp jitter, deepseek", _NOISY_DEEPSEEK, ep=2, tp=2),
    _folded("ep2 tp2 jitter", _NOISY, ep=2, tp=2, sp=False),
    _folded("ep2 cp2 zigzag jitter", _NOISY, ep=2, cp=2, cp_method="zigzag"),
    Technique(
        "ep2 pp2 full, jitter",
        {"ep": 2, "pp": 2},
        "full",
        model=_NOISY,
        pairs="none",
    ),
    _folded("ep2 pp2 dualpipe jitter", _NOISY, ep=2, pp=2, schedule="dualpipe"),
)

#: Load balancing over the whole batch: by a loss term, and by a loss term and biases.
_BATCH = with_mixture(MIXTURE, balance_over="batch")
_BATCH_DEEPSEEK = with_mixture(DEEPSEEK, balance_over="batch")
BALANCED = (
    _folded("ep2, balance of the batch", _BATCH, ep=2),
    _folded("tp2 sp cp2 dp2 zero1, balance of the batch", _BATCH, tp=2, cp=2, dp=2, zero=1),
    _folded(
        "tp2 etp1 ep4 full, balance of the batch",
        _BATCH_DEEPSEEK,
        tp=2,
        etp=1,
        ep=2,
        recompute="full",
    ),
    _folded(
        "ep2 tp2 pp2 dualpipe, balance of the batch",
        _BATCH,
        ep=2,
        tp=2,
        sp=False,
        pp=2,
        schedule="dualpipe",
    ),
)

#: Extreme numbers of tokens per expert.
CORNERS = (
    *(
        _folded(f"{layout}, {load}", model, **parallel)
        for load, model in (
            ("all tokens to one expert", ONE_TAKES_ALL),
            ("experts without a token", IDLE),
            ("fewer tokens than experts", FEW_TOKENS),
            ("all experts chosen", ALL_CHOSEN),
        )
        for layout, parallel in (
            ("ep2", {"ep": 2}),
            ("ep2 tp2", {"ep": 2, "tp": 2}),
            ("tp2 etp1 ep2 pp2 zb_h1", {"tp": 2, "etp": 1, "pp": 2, "schedule": "zb_h1"}),
            (
                "ep2 cp2 dp2 zero2, full",
                {"ep": 2, "cp": 2, "dp": 2, "zero": 2, "recompute": "full"},
            ),
        )
    ),
    _folded(
        "ep2, one takes all and drops most",
        with_mixture(ONE_TAKES_ALL, capacity_factor=0.5),
        ep=2,
    ),
    _folded(
        "ep2 tp2, one takes all and drops most",
        with_mixture(ONE_TAKES_ALL, capacity_factor=0.5),
        ep=2,
        tp=2,
    ),
)


def _by_domain(
    name: str,
    model: dict[str, Any] = MIXTURE,
    nodes: int = 2,
    **parallel: Any,
) -> Technique:
    recompute = parallel.pop("recompute", "none")
    parallel |= {"expert_all_to_all": "hierarchical", "allow_tp_across_nvlink": True}
    return Technique(
        name,
        parallel,
        recompute,
        model=model,
        pairs="none",
        nodes=nodes,
    )


#: Hierarchical all-to-alls: a token is sent once to each NVLink domain.
BY_DOMAIN = (
    _by_domain("ep4 hierarchical", ep=4),
    _by_domain("ep2 hierarchical, full", recompute="full", ep=2),
    _by_domain("ep4 hierarchical deepseek, dp2 zero2", DEEPSEEK, nodes=4, ep=4, dp=2, zero=2),
    _by_domain("tp2 ep4 hierarchical", DEEPSEEK, tp=2, ep=4),
    _by_domain("tp2 etp1 ep8 hierarchical", DEEPSEEK, tp=2, etp=1, ep=4),
    _by_domain("cp4 ep4 over it, hierarchical", cp=4, fold_cp=True),
    _by_domain("ep4 pp2 hierarchical, zb_h1", nodes=4, ep=4, pp=2, schedule="zb_h1"),
    _by_domain("ep4 hierarchical capacity", CAPPED, ep=4),
    _by_domain("tp2 ep4 hierarchical capacity", CAPPED_DEEPSEEK, tp=2, ep=4),
    _by_domain("ep2 hierarchical, experts without a token", IDLE, ep=2),
)
