"""The key proof (test_parity.py) for the techniques beyond DP, TP and plain PP, alone and together, in float64.

Cases of one technique and one number of ranks run one after the other in one launch of ranks. A case is what the plan
says; a name says what it is for.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.beds.plans import tiny_model
from tests.trainer.test_parity import GPT, GQA, ONE_KV_HEAD, TIED, parity_plan, reference
from trainer.precision import FP64
from trainer.verify.compare import LIMIT, STEPS, run_rank
from trainer.verify.ranks import run_ranks

EIGHT = tiny_model(layers=8)
EIGHT_TIED = tiny_model(layers=8, tied_embeddings=True)
MODES = ["full", "none", "selective", "full"]

RECOMPUTE = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "by layer": {"recompute": "budget", "recompute_layers": MODES, "model": GPT},
    "full, tp2 sp": {"recompute": "full", "tp": 2},
    "selective, tp2 sp gpt": {"recompute": "selective", "tp": 2, "model": GPT},
    "full, tp2 without sp": {"recompute": "full", "tp": 2, "sp": False},
    "selective, tp2 without sp": {"recompute": "selective", "tp": 2, "sp": False},
    "full, dp2 zero1": {"recompute": "full", "dp": 2, "zero": 1},
    "full, 1f1b tied": {"recompute": "full", "pp": 2, "model": TIED, "micro_batches": 3},
    "full, zb_h1": {"recompute": "full", "pp": 2, "schedule": "zb_h1", "micro_batches": 4},
    "selective, zb_h2": {"recompute": "selective", "pp": 2, "schedule": "zb_h2", "micro_batches": 5},
    "by layer, zbv": {
        **{"recompute": "budget", "recompute_layers": MODES, "pp": 2, "vpp": 2, "schedule": "zbv"},
        "micro_batches": 4,
    },
    "full, dualpipe": {"recompute": "full", "pp": 2, "schedule": "dualpipe", "micro_batches": 4},
    "selective, tp2 pp2 interleaved": {
        **{"recompute": "selective", "tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved"},
        "micro_batches": 4,
    },
}

CONTEXT = {
    **{f"cp2 {method}": {"cp": 2, "cp_method": method} for method in ("zigzag", "ring", "allgather", "ulysses")},
    **{
        f"cp2 {method} packed gpt": {"cp": 2, "cp_method": method, "model": GPT, "packed": True}
        for method in ("zigzag", "ring", "allgather", "ulysses")
    },
    "cp4 zigzag": {"cp": 4, "model": ONE_KV_HEAD},
    "cp4 ulysses packed": {"cp": 4, "cp_method": "ulysses", "packed": True},
    "cp2 tp2 sp": {"cp": 2, "tp": 2},
    "cp2 tp2 without sp, ulysses": {"cp": 2, "tp": 2, "sp": False, "cp_method": "ulysses", "model": GPT},
    "cp2 dp2 zero1": {"cp": 2, "dp": 2, "zero": 1, "bucket_bytes": 1 << 10},
    "cp2 pp2 tied": {"cp": 2, "pp": 2, "model": TIED, "micro_batches": 3},
    "cp2 pp2 zb_h1 full recompute, allgather": {
        **{"cp": 2, "pp": 2, "schedule": "zb_h1", "recompute": "full", "cp_method": "allgather"},
        "micro_batches": 4,
    },
    "cp2 selective recompute, ulysses": {"cp": 2, "recompute": "selective", "cp_method": "ulysses"},
    "cp2 selective recompute, ring, packed": {
        **{"cp": 2, "recompute": "selective", "cp_method": "ring", "packed": True}
    },
    "tp2 cp2 pp2 zero1": {"tp": 2, "cp": 2, "pp": 2, "zero": 1, "model": TIED, "micro_batches": 3},
    "cp2 pp2 dp2 zero1 interleaved": {
        **{"cp": 2, "pp": 2, "dp": 2, "zero": 1, "vpp": 2, "schedule": "interleaved"},
        "micro_batches": 2,
    },
}

TABLE = [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]

SCHEDULES = {
    **{
        f"{name} pp{pp} vpp{vpp} m{m} {label}": {"schedule": name, "pp": pp, "vpp": vpp, "micro_batches": m, **more}
        for name, pp, vpp, m in [
            *[("afab", 2, 2, 3), ("interleaved", 2, 2, 3), ("zb_h1", 2, 1, 5), ("zb_h2", 2, 1, 3)],
            *[("zbv", 2, 2, 4), ("dualpipe", 2, 1, 4), ("dualpipev", 2, 2, 3)],
        ]
        for label, more in {"tied": {"model": TIED}, "gpt, uneven": {"model": GPT}}.items()
    },
    "table": {"schedule": "table", "schedule_rows": TABLE, "pp": 2, "micro_batches": 3, "model": TIED},
    "interleaved pp4 vpp2": {"schedule": "interleaved", "pp": 4, "vpp": 2, "micro_batches": 5, "model": EIGHT_TIED},
    "zb_h2 pp4": {"schedule": "zb_h2", "pp": 4, "micro_batches": 7, "model": EIGHT},
    "zbv pp4": {"schedule": "zbv", "pp": 4, "vpp": 2, "micro_batches": 6, "model": EIGHT_TIED},
    "dualpipe pp4": {"schedule": "dualpipe", "pp": 4, "micro_batches": 10, "model": EIGHT_TIED},
    "dualpipe pp4 zero1": {
        **{"schedule": "dualpipe", "pp": 4, "micro_batches": 4, "model": EIGHT_TIED, "zero": 1},
        "bucket_bytes": 1 << 11,
    },
    "dualpipe pp2 dp2 zero1": {"schedule": "dualpipe", "pp": 2, "dp": 2, "micro_batches": 4, "zero": 1, "model": TIED},
    "dualpipe pp2 tp2": {"schedule": "dualpipe", "pp": 2, "tp": 2, "micro_batches": 2, "model": TIED},
    "dualpipev pp4": {"schedule": "dualpipev", "pp": 4, "vpp": 2, "micro_batches": 9, "model": EIGHT},
    "interleaved pp2 dp2 zero1": {
        **{"schedule": "interleaved", "pp": 2, "vpp": 2, "dp": 2, "zero": 1, "micro_batches": 3, "model": TIED},
        "bucket_bytes": 1 << 10,
    },
    "zbv pp2 dp2 zero1": {
        **{"schedule": "zbv", "pp": 2, "vpp": 2, "dp": 2, "zero": 1, "micro_batches": 4, "model": TIED},
        "bucket_bytes": 1 << 10,
    },
    "dualpipev pp2 tp2": {"schedule": "dualpipev", "pp": 2, "vpp": 2, "tp": 2, "micro_batches": 4, "model": GPT},
    "zb_h1 pp2 dp2 zero1 tp2": {
        **{"schedule": "zb_h1", "pp": 2, "dp": 2, "tp": 2, "zero": 1, "micro_batches": 3, "model": TIED},
    },
}

SHARDING = {
    "zero2": {"dp": 2, "zero": 2},
    "zero2 accumulation 4, many buckets, tied": {
        **{"dp": 2, "zero": 2, "micro_batches": 4, "bucket_bytes": 1 << 10, "model": TIED},
    },
    "zero2 dp4": {"dp": 4, "zero": 2, "micro_batches": 3, "bucket_bytes": 1 << 12},
    "zero2 tp2 sp": {"dp": 2, "tp": 2, "zero": 2, "model": ONE_KV_HEAD},
    "zero2 cp2": {"dp": 2, "cp": 2, "zero": 2},
    "zero2 pp2 tied": {"dp": 2, "pp": 2, "zero": 2, "model": TIED, "micro_batches": 3, "bucket_bytes": 1 << 10},
    "zero2 pp2 interleaved": {
        **{"dp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved", "zero": 2, "model": TIED, "micro_batches": 4},
    },
    "zero2 pp2 zb_h1 full recompute": {
        **{"dp": 2, "pp": 2, "schedule": "zb_h1", "zero": 2, "micro_batches": 4, "recompute": "full"},
        "bucket_bytes": 1 << 11,
    },
    "zero2 pp2 zbv tied": {
        **{"dp": 2, "pp": 2, "vpp": 2, "schedule": "zbv", "zero": 2, "model": TIED, "micro_batches": 3},
    },
    "hybrid zero1": {"dp": 4, "zero": 1, "zero_group": 2, "bucket_bytes": 1 << 12, "micro_batches": 3},
    "hybrid zero2": {"dp": 4, "zero": 2, "zero_group": 2, "bucket_bytes": 1 << 12, "model": TIED},
    "hybrid zero1 over cp": {"dp": 2, "cp": 2, "zero": 1, "zero_group": 2},
    "zero1, dp nested inside cp": {"dp": 2, "cp": 2, "zero": 1, "order": ("tp", "dp", "cp", "ep", "pp")},
    "hybrid zero1, dp nested inside cp": {
        **{"dp": 2, "cp": 2, "zero": 1, "zero_group": 2, "order": ("tp", "dp", "cp", "ep", "pp")},
    },
    "zero1, pp innermost": {"dp": 2, "pp": 2, "zero": 1, "order": ("pp", "dp", "tp", "cp", "ep"), "model": TIED},
    "hybrid of one": {"dp": 2, "zero": 1, "zero_group": 1},
    "zero3": {"dp": 2, "zero": 3},
    "zero3 accumulation 4, tied": {"dp": 2, "zero": 3, "micro_batches": 4, "model": TIED},
    "zero3 dp4 gpt": {"dp": 4, "zero": 3, "micro_batches": 3, "model": GPT},
    "zero3 full recompute": {"dp": 2, "zero": 3, "recompute": "full"},
    "zero3 selective recompute": {"dp": 2, "zero": 3, "recompute": "selective", "model": GPT},
    "zero3 cp2": {"cp": 2, "zero": 3, "model": TIED},
    "zero3 tp2 sp": {"dp": 2, "tp": 2, "zero": 3, "model": ONE_KV_HEAD},
    "zero3 tp2 without sp": {"dp": 2, "tp": 2, "zero": 3, "sp": False, "model": GPT},
    "zero3 pp2 tied": {"dp": 2, "pp": 2, "zero": 3, "model": TIED, "micro_batches": 4},
    "zero3 pp2 interleaved": {
        **{"dp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved", "zero": 3, "model": TIED, "micro_batches": 4},
    },
    "zero3 pp2 afab": {"dp": 2, "pp": 2, "schedule": "afab", "zero": 3, "model": GPT, "micro_batches": 3},
    "hybrid zero3": {"dp": 4, "zero": 3, "zero_group": 2, "model": TIED},
    "zero3 tp2 pp2": {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "model": GPT, "micro_batches": 3},
    "zero2 tp2 pp2": {"dp": 2, "tp": 2, "pp": 2, "zero": 2, "model": GPT, "micro_batches": 3},
}

#: Every token, head and feature draws what one process draws for it, however they are spread.
DROPPED = tiny_model(dropout=0.1)
DROPPED_GPT = msgspec.structs.replace(GPT, dropout=0.3)

DROPOUT = {
    "alone, gpt": {"model": DROPPED_GPT, "micro_batches": 4},
    "alone, packed": {"packed": True},
    "full": {"recompute": "full"},
    "selective, gpt": {"recompute": "selective", "model": DROPPED_GPT},
    "dp2 zero1": {"dp": 2, "zero": 1, "micro_batches": 3},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "tp2 sp": {"tp": 2, "micro_batch_size": 2},
    "tp2 sp, gpt, full": {"tp": 2, "model": DROPPED_GPT, "recompute": "full"},
    "tp2 without sp": {"tp": 2, "sp": False, "model": DROPPED_GPT},
    **{f"cp2 {method}": {"cp": 2, "cp_method": method} for method in ("zigzag", "ring", "allgather", "ulysses")},
    "cp2 zigzag packed, full": {"cp": 2, "packed": True, "recompute": "full"},
    "cp2 allgather packed": {"cp": 2, "packed": True, "cp_method": "allgather", "model": DROPPED_GPT},
    "pp2 interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved", "micro_batches": 4},
    "pp2 zb_h1 full": {"pp": 2, "schedule": "zb_h1", "micro_batches": 3, "recompute": "full"},
    "pp2 dualpipe": {"pp": 2, "schedule": "dualpipe", "micro_batches": 4},
    "tp2 cp2 ulysses pp2": {"tp": 2, "cp": 2, "pp": 2, "cp_method": "ulysses", "micro_batches": 2},
    "tp2 pp2 dp2 zero1": {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "model": DROPPED_GPT, "micro_batches": 3},
}
DROPOUT = {name: {"model": DROPPED, **case} for name, case in DROPOUT.items()}

TECHNIQUES = {
    **{"sharding": SHARDING, "recompute": RECOMPUTE, "context": CONTEXT, "schedules": SCHEDULES},
    "dropout": DROPOUT,
}


#: Each is close to two others here: `make verify` runs them.
REPEATS = {
    *("zero3 tp2 without sp", "zero3 pp2 afab", "zero3 pp2 interleaved", "hybrid zero1 over cp", "zero2 pp2 zbv tied"),
    *("zero3 full recompute", "zero2 tp2 pp2", "hybrid zero1, dp nested inside cp", "zero1, pp innermost"),
    *("selective, tp2 without sp", "full, dp2 zero1", "selective, zb_h2", "full, 1f1b tied"),
    *("cp2 ring packed gpt", "cp2 allgather packed gpt", "cp2 tp2 without sp, ulysses", "cp2 dp2 zero1"),
    *("afab pp2 vpp2 m3 tied", "zb_h1 pp2 vpp1 m5 gpt, uneven", "zbv pp2 vpp2 m4 gpt, uneven", "zb_h2 pp4"),
    *("dualpipe pp4 zero1", "dualpipe pp2 tp2", "interleaved pp2 dp2 zero1", "dualpipev pp2 vpp2 m3 tied"),
    *("tp2 without sp", "cp2 ring", "cp2 allgather packed", "selective, gpt", "pp2 interleaved"),
}


def world_of(case: dict) -> int:
    result = 1
    for axis in ("tp", "cp", "pp", "dp"):
        result *= case.get(axis, 1)
    return result


def launches() -> list:
    """Technique, ranks, and whether these are the repeats."""
    found = {
        (technique, world_of(case), name in REPEATS)
        for technique, cases in TECHNIQUES.items()
        for name, case in cases.items()
    }
    return [pytest.param(*one, marks=[pytest.mark.full] if one[-1] else []) for one in sorted(found)]


def run_cases(rank: int, cases: list[tuple]) -> list[dict[str, float]]:
    return [run_rank(rank, plan, FP64, expected, packed) for plan, expected, packed in cases]


@pytest.mark.process
@pytest.mark.parametrize(("technique", "world", "repeats"), launches())
def test_technique_equals_one_process(technique, world, repeats):
    names = [
        name for name, case in TECHNIQUES[technique].items() if world_of(case) == world and (name in REPEATS) == repeats
    ]
    cases = []
    for name in names:
        options = {"model": GQA, **TECHNIQUES[technique][name]}
        packed = options.pop("packed", False)
        plan = parity_plan(torch.float64, **options)
        samples = plan.parallel.global_batch_samples
        cases.append((plan, reference(msgspec.json.encode(plan.model), samples, torch.float64, packed), packed))
    bad = []
    for rank, answers in enumerate(run_ranks(run_cases, world, cases, timeout=300.0)):
        for name, (_, expected, _), worst in zip(names, cases, answers, strict=True):
            bad += [f"{name}: {e:.1e} rank {rank} {what}" for what, e in worst.items() if not e <= LIMIT[torch.float64]]
            if len(expected) != STEPS:
                bad.append(f"{name}: {len(expected)} steps")
    assert bad == [], "\n".join(sorted(bad)[:12])
