"""The techniques of the matrix that compute matrix products in 8 bits."""

from __future__ import annotations

from typing import Any

from orchestrator.plan.document import Mtp

from .data_techniques import BLOCKS
from .expert_models import DEEPSEEK
from .technique import Technique


def _fp8(name: str, matmul: str = "fp8_tensor", **parallel: Any) -> Technique:
    recompute = parallel.pop("recompute", "none")
    model = parallel.pop("model", {})
    wide = parallel.pop("wide", "")
    even = parallel.get("schedule") == "dualpipe"
    train: dict[str, Any] = {"matmul": matmul}
    label = f"{matmul} {name}".strip()
    if wide:
        train["matmul_wide"] = wide.split()
        label = f"{label}, wide {wide.replace(' ', ' and ')}"
    return Technique(
        label,
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
#: Layouts with linears that stay wide (`train.matmul_wide`): name, those linears, keys.
_WIDE_LAYOUTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("dp2 zero2", "wk first", {"dp": 2, "zero": 2}),
    ("dp2 zero3", "down last", {"dp": 2, "zero": 3}),
    ("tp2", "wo first", {"tp": 2, "sp": False}),
    ("tp2 sp selective", "wo up", {"tp": 2, "sp": True, "recompute": "selective"}),
    ("tp4, shared key-value heads", "wk 2.wv", {"tp": 4}),
    ("cp2 zigzag", "1.wq", {"cp": 2, "cp_method": "zigzag"}),
    ("pp2 zb_h1", "last 1.down", {"pp": 2, "schedule": "zb_h1"}),
    (
        "ep2 tp2 sp deepseek, mtp",
        "experts.down wkv project",
        {"ep": 2, "tp": 2, "sp": True, "model": _AHEAD},
    ),
    (
        "ep2 cp2 zigzag full deepseek, mtp",
        "last shared.down",
        {"ep": 2, "cp": 2, "cp_method": "zigzag", "recompute": "full", "model": _AHEAD},
    ),
)
NARROW_PRODUCTS = (
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
        _fp8(name, matmul, wide=wide, **parallel)
        for matmul in ("fp8_tensor", "fp8_delayed", "fp8_block")
        for name, wide, parallel in _WIDE_LAYOUTS
    ),
    *(
        _fp8(f"{name} deepseek, mtp".strip(), matmul, model=_AHEAD, **parallel)
        for matmul in ("fp8_tensor", "fp8_delayed", "fp8_block")
        for name, parallel in _DEEPSEEK_LAYOUTS.items()
    ),
)
