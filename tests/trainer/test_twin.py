"""The digital twin of a layout against its real ranks: the same collectives and the same bytes of
memory, exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec import structs, to_builtins

from orchestrator.plan import Plan
from orchestrator.plan.hierarchy import landings
from orchestrator.plan.model import Moe
from orchestrator.plan.twin import RankRun
from tests.patience import PATIENCE_S
from tests.trainer import test_planned_memory as planned
from tests.trainer.pairs import launches
from tests.trainer.samples import engine_of
from tests.trainer.test_planned_memory import GPT, LLAMA, PIPE, plan_of
from tests.trainer.together import told, world
from trainer.data.order import samples_of_step
from trainer.metrics.memory import StepMemory
from trainer.twin.choices import choose_evenly, even_choices
from trainer.twin.run import run_rank, run_step
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

#: Steps of a real rank after the first: at least, and at most while none of them is like its
#: twin's.
LEAST = 8
MOST = 200
LAYOUTS = planned.QUICK | planned.MORE | planned.SPECIAL | planned.MORE_SPECIAL
DROPPING = Moe(
    experts=8, top_k=2, ffn_hidden=48, capacity_factor=0.75, groups=4, top_groups=2, score="sigmoid"
)
#: Two stages, four micro-batches: forwards two at a time
ORDER = ("F0", "F1", "B0", "B1", "F2", "F3", "B2", "B3")
ROWS = [[f"{stage}{action}" for action in ORDER] for stage in range(2)]


def real(rank: int, plan: Plan, twin: dict | None) -> dict:
    """What the rank of a gloo run measures of its steps after the first. gloo's threads may hold a
    tensor for a moment after it has arrived, so memory is the least of these steps, and all their
    peaks are given. On a busy machine that moment is long: then there are more steps, until every
    rank has had one without it."""
    engine = engine_of(plan, rank)
    for stage in engine.part.stages:
        choose_evenly(stage)
    memory = StepMemory.of_engine(engine)
    many = samples_of_step(plan.parallel, engine.mesh.coord, 0)
    serial = plan.model.dropout > 0  # as the loader has it
    batches = [micro_batch(plan, indices, plan.job.data.isolate_documents) for indices in many]
    batches = batches if serial else [dataclasses.replace(batch, serial=None) for batch in batches]
    run_step(engine, memory, batches)
    steps = []
    waiting = torch.ones(())
    while len(steps) < LEAST or (waiting and len(steps) < MOST):
        steps.append(facts(run_step(engine, memory, batches)))
        least = {name: min(step["memory"][name] for step in steps) for name in steps[0]["memory"]}
        peaks = [step["peak"] for step in steps]
        equal = twin is None or (least == twin["memory"] and twin["peak"] in peaks)
        waiting = torch.tensor(float(not equal))
        dist.all_reduce(waiting)
    assert all(step["sequence"] == steps[0]["sequence"] for step in steps)
    return steps[0] | {"memory": least, "peak": peaks}


def facts(run: RankRun) -> dict:
    """All that does not depend on the clock; transfers one by one."""
    record = to_builtins(run)
    sequence = [record["transfers"][at] for at in record["sequence"]]
    return {
        "sequence": sequence,
        **{name: record[name] for name in ("rank", "micro_batches", "memory", "peak")},
    }


def both(
    layouts: dict[str, Plan], store: Path, ranks: Collection[int]
) -> dict[str, list[tuple[dict, dict]]]:
    """Pairs (real, twin) of each of `ranks`, by layout, all for equally many ranks.

    A twin costs ten times its real rank, so the others of the real ranks have none: they only take
    part.
    """
    (world,) = {plan.parallel.world_size for plan in layouts.values()}

    def work(rank: int) -> list:
        dist.destroy_process_group()  # a twin has one of its own
        twins = [
            facts(run_rank(plan, rank)) if rank in ranks else None for plan in layouts.values()
        ]
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        return [
            (real(rank, plan, twin), twin)
            for plan, twin in zip(layouts.values(), twins, strict=True)
        ]

    answers = run_ranks(work, world, timeout=PATIENCE_S * len(layouts))
    return {name: [answers[rank][at] for rank in ranks] for at, name in enumerate(layouts)}


QUICK = {
    "bf16, dropout": {"precision": "bf16", "model": GPT | {"dropout": 0.1}},
    "fp16, packed documents": {"precision": "fp16", "isolate_documents": True},
    "tp2 selective": {"tp": 2, "recompute": "selective"},
    "cp2": {"cp": 2},
    "dp2 zero1 bf16": {"dp": 2, "zero": 1, "precision": "bf16"},
    "dp2 zero3 bf16": {"dp": 2, "zero": 3, "precision": "bf16"},
    "pp2 zb_h1": PIPE | {"schedule": "zb_h1"},
    "pp2 interleaved": PIPE | {"vpp": 2, "schedule": "interleaved"},
}
MORE = {name: layout for name, layout in LAYOUTS.items() if name not in QUICK} | {
    "cp2 dropout": {"cp": 2, "model": GPT | {"dropout": 0.1}},
    "cp2 packed documents": {"cp": 2, "isolate_documents": True},
    "pp2 dualpipev": PIPE | {"vpp": 2, "schedule": "dualpipev"},
    "pp2 of a table": PIPE | {"schedule": "table", "schedule_rows": ROWS},
    "dp2, unequal": {"dp": 2, "replica_micro_batches": [2, 1]},
    "dp2 zero2, unequal": {"dp": 2, "zero": 2, "replica_micro_batches": [2, 1]},
    "pp2, budget": (
        PIPE | {"recompute": "budget", "recompute_layers": ["full", "selective", "none", "none"]}
    ),
    "tp4, no sp": {"tp": 4, "sp": False},
    "cp4 ring": {"cp": 4, "cp_method": "ring"},
    "pp4": {"pp": 4, "micro_batches": 8},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "tp2 pp2 dualpipe": PIPE | {"tp": 2, "schedule": "dualpipe"},
    "experts that drop, tp2": {"model": LLAMA | {"layers": 2, "moe": DROPPING}, "tp": 2},
    "experts that drop, ep2 cp2": {"model": LLAMA | {"moe": DROPPING}, "ep": 2, "cp": 2},
    **{f"dp4 zero{zero} in pairs": {"dp": 4, "zero": zero, "zero_group": 2} for zero in (1, 2, 3)},
}

EVERY = {(name,): layout for name, layout in (QUICK | MORE).items()}
#: Of MORE, one of each kind. `covering` would choose what takes twice as long.
KINDS = (
    "8 bits", "two samples", "full", "tp2 without sp, selective", "cp2 ulysses", "cp2 all-gather", "pp2 zbv",
    "dp2 zero2, on the host", "dp2 zero2, unequal", "pp2 dualpipev", "pp2, budget", "GPT, tied",
    "cp2 packed documents", "cp4 ring", "tp2 pp2 dualpipe", "dp4 zero3 in pairs", "pp2 dp2 zero3 zb_h1 bf16",
    "deepseek, tp2 etp1", "many choices, by domain", "experts that drop, tp2",
)  # fmt: skip


def short(layout: dict) -> dict:
    """The layout with two layers where stages need no more: the others add little but time."""
    if "pp" in layout or "model" in layout:
        return layout
    return layout | {"model": LLAMA | {"layers": 2}}


SHORT = {(name,): short(EVERY[name,]) for name in (*QUICK, *KINDS)}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("layouts", launches(SHORT, chosen=SHORT))
def test_a_twin_is_its_real_rank(layouts, tmp_path):
    """The first and the last rank, which differ in all that ranks differ in."""
    (ranks,) = {world(layout) for layout in layouts.values()}
    assert_twins(layouts, sorted({0, ranks - 1}), tmp_path / "store")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("layouts", launches(EVERY, chosen=()))
def test_every_twin_is_its_real_rank(layouts, tmp_path):
    (ranks,) = {world(layout) for layout in layouts.values()}
    assert_twins(layouts, range(ranks), tmp_path / "store")


def assert_twins(layouts: dict[str, dict], ranks: Collection[int], store: Path) -> None:
    plans = {name: plan_of(layout) for name, layout in layouts.items()}
    for name, pairs in both(plans, store, ranks).items():
        for measured, twin in pairs:
            with told(name):
                peaks = measured.pop("peak")
                assert twin["peak"] in peaks and twin["peak"]["total"] == min(
                    peak["total"] for peak in peaks
                )
                assert {name: twin[name] for name in measured} == measured


@pytest.mark.parametrize(
    "moe",
    [
        Moe(experts=8, top_k=2, ffn_hidden=1),
        Moe(experts=64, top_k=6, ffn_hidden=1),
        Moe(experts=4, top_k=4, ffn_hidden=1),
        Moe(experts=256, top_k=8, ffn_hidden=1, groups=8, top_groups=4),
        Moe(experts=12, top_k=4, ffn_hidden=1, groups=6, top_groups=5),
    ],
    ids=str,
)
def test_a_twin_chooses_all_experts_equally_often_and_tokens_as_many_domains_as_planned(moe):
    tokens = 16 * moe.experts
    chosen = even_choices(moe, tokens)
    assert chosen.shape == (tokens, moe.top_k)
    assert all(len(set(row)) == moe.top_k for row in chosen.tolist())
    counts = chosen.flatten().bincount(minlength=moe.experts)
    assert counts.max() - counts.min() <= 1
    groups = chosen // (moe.experts // moe.groups)
    assert all(len(set(row)) <= moe.top_groups for row in groups.tolist())
    domains = chosen // (moe.experts // 2)
    domains_per_token = sum(len(set(row)) for row in domains.tolist()) / tokens
    assert domains_per_token == pytest.approx(landings(moe, 2), rel=0.05)
    partly = even_choices(moe, moe.experts // 2 + 1).flatten().bincount(minlength=moe.experts)
    assert partly.max() - partly.min() <= 2


@pytest.mark.process
def test_the_twin_of_a_gpu_keeps_what_a_cpu_keeps():
    plan = plan_of({"tp": 4, "dp": 4, "zero": 1, "precision": "bf16"})
    (cpu_record,) = run_ranks(alone, 1, plan)
    gpu = structs.replace(plan, cluster=structs.replace(plan.cluster, device="cuda"))
    (gpu_record,) = run_ranks(alone, 1, gpu)
    assert gpu_record["sequence"] == cpu_record["sequence"]
    assert gpu_record["memory"] == cpu_record["memory"]


def alone(rank: int, plan: Plan) -> dict:
    dist.destroy_process_group()
    record = facts(run_rank(plan, rank))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return record
