"""Bytes that ranks send in a step, as the trainer counts them, against the plan's, by axis, in
layouts with experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from msgspec import structs

from orchestrator.cost.context import CostContext
from orchestrator.cost.nesting import axis_placement, candidates
from orchestrator.cost.time.traffic import step_traffic
from orchestrator.cost.workload import Workload
from orchestrator.plan import Plan
from orchestrator.plan.document import Mla, Moe, Mtp
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.pairs import covering, launches
from tests.trainer.samples import engine_of
from tests.trainer.together import run_together, told, world
from trainer.model.experts import MixtureOfExperts
from trainer.model.router import Routing
from trainer.verify.samples import step_batches

#: Parameters of 64 numbers and more, which no bucket pads.
SHAPE = dict(hidden=64, kv_heads=4, head_dim=16, ffn_hidden=64, vocab=256)
PLAIN = tiny_model(**SHAPE, moe=Moe(experts=4, top_k=2, ffn_hidden=16))
SHARED = tiny_model(
    **SHAPE, moe=Moe(experts=4, top_k=2, ffn_hidden=16, shared_ffn_hidden=16, first_dense_layers=1)
)
LATENT = Mla(
    q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16
)
MODELS = {
    "plain": PLAIN,
    "shared": SHARED,
    "latent": tiny_model(**SHAPE, mla=LATENT, moe=SHARED.moe),
}
CAPPED = tiny_model(**SHAPE, moe=structs.replace(SHARED.moe, capacity_factor=0.5))
MODELS["further"] = tiny_model(**SHAPE, moe=PLAIN.moe, mtp=Mtp(depth=1, weight=0.3))
DOMAINS = dict(nodes=2, expert_all_to_all="hierarchical")

CASES = {
    "tp2": dict(tp=2),
    "tp2, full": dict(tp=2, recompute="full"),
    "tp2, selective": dict(tp=2, recompute="selective"),
    "tp2 in pieces": dict(tp=2, tp_pieces=2),
    "tp2 in pieces, full": dict(tp=2, tp_pieces=4, recompute="full"),
    "tp2 in pieces, selective": dict(tp=2, tp_pieces=4, recompute="selective"),
    "tp2 in pieces without sp, full": dict(tp=2, tp_pieces=4, sp=False, recompute="full"),
    "tp2 without sp": dict(tp=2, sp=False),
    "tp2 without sp, full, shares of inputs": dict(
        tp=2, sp=False, recompute="full", partition_activations=True
    ),
    "tp2 without sp, selective, shares": dict(
        tp=2, sp=False, recompute="selective", partition_activations=True
    ),
    "ep2": dict(ep=2),
    "ep2, full": dict(ep=2, recompute="full"),
    "ep2 tp2": dict(ep=2, tp=2),
    "ep2 tp2, full": dict(ep=2, tp=2, recompute="full"),
    "ep2 tp2, selective": dict(ep=2, tp=2, recompute="selective"),
    "ep2 tp2 without sp": dict(ep=2, tp=2, sp=False),
    "ep2 tp2 without sp, full": dict(ep=2, tp=2, sp=False, recompute="full"),
    "tp2 etp1": dict(tp=2, etp=1),
    "tp4 etp2": dict(tp=4, etp=2),
    "tp2 ep2 etp1": dict(tp=2, ep=2, etp=1),
    "tp2 cp2 folded, etp1": dict(tp=2, cp=2, etp=1, fold_cp=True),
    "tp2 cp2 folded, etp2": dict(tp=2, cp=2, etp=2, fold_cp=True),
    "cp2 ep2": dict(cp=2, ep=2),
    "cp2 ep2 ulysses": dict(cp=2, ep=2, cp_method="ulysses"),
    "ep2 pp2": dict(ep=2, pp=2),
    "tp2 pp2": dict(tp=2, pp=2),
    "ep2 pp2 zb_h1": dict(ep=2, pp=2, schedule="zb_h1", micro_batches=4),
    "ep2 pp2 dualpipe, zero1": dict(ep=2, pp=2, schedule="dualpipe", micro_batches=4, zero=1),
    "ep2 dp2 zero1": dict(ep=2, dp=2, zero=1),
    "ep2 dp2 zero2": dict(ep=2, dp=2, zero=2),
    "ep2 dp2 zero3": dict(ep=2, dp=2, zero=3),
    "pp2 dp2 zb_h1, zero3": dict(pp=2, dp=2, schedule="zb_h1", micro_batches=4, zero=3),
    "ep2 dp2 zero1, 16-bit wire": dict(ep=2, dp=2, zero=1, grad_wire="bf16"),
    "ep2 dp2 zero2, 16-bit wire": dict(ep=2, dp=2, zero=2, grad_wire="bf16"),
    "tp2 dp2 zero1": dict(tp=2, dp=2, zero=1),
    "cp2 dp2 folded, zero2 hybrid": dict(cp=2, dp=2, fold_cp=True, zero=2, zero_group=2),
    "ep4 by domain": dict(ep=4, **DOMAINS),
    "ep4 by domain, full": dict(ep=4, recompute="full", **DOMAINS),
    "ep2 tp2 by domain": dict(ep=2, tp=2, order=("tp", "ep", "cp", "pp", "dp"), **DOMAINS),
}
#: These take 8 processes.
WIDE = {"ep2 tp2 pp2 zb_h1": dict(ep=2, tp=2, pp=2, schedule="zb_h1", micro_batches=4)}


def evenly(module, args, out: Routing) -> Routing:
    """Every pair of experts as often, as the plan takes it."""
    pairs = torch.tensor(list(itertools.combinations(range(4), 2)))
    return out._replace(
        experts=pairs.repeat(-(-len(out.experts) // len(pairs)), 1)[: len(out.experts)]
    )


def sent_by(rank: int, plan: Plan) -> dict:
    """Bytes of a rank in the second step, before which weights have been gathered once."""
    engine = engine_of(plan, rank)
    for stage in engine.part.stages:
        for block in stage.blocks.values():
            if isinstance(block.mlp, MixtureOfExperts):
                block.mlp.router.register_forward_hook(evenly)
    for _ in range(2):
        engine.counter.close()
        engine.update(engine.gradients(*step_batches(plan, engine.mesh.coord, 0))[1], 1e-3)
    account = engine.counter.close()
    return {"axes": account.bytes, "levels": account.levels}


def planned(plan: Plan, rank: int) -> dict[str, float]:
    """Bytes by axis of a rank, by level where its tokens go to experts."""
    context = CostContext(plan.cluster, plan.model, plan.job.train)
    par = plan.parallel
    train = plan.job.train
    traffic = step_traffic(Workload(plan.model, par, train, context.software))
    (candidate,) = candidates(context.path_cache, par, traffic, context.work(par, train), par.order)
    placed = axis_placement(candidate, [traffic[plan.ranks[rank].coord.pp]])
    return {
        axis: sum(placement.bytes_per_step_by_level.values()) for axis, placement in placed.items()
    } | {
        "nvlink": placed["ep"].bytes_per_step_by_level.get("nvlink", 0.0),
        "network": sum(
            size
            for level, size in placed["ep"].bytes_per_step_by_level.items()
            if level != "nvlink"
        ),
    }


#: How many rows will come: a few numbers of 8 bytes a layer and micro-batch.
COUNTED = {"tp": 8 * 4 * 4 * 8 * 2, "ep": 8 * 4 * 4 * 8 * 2}


def assert_sent_as_planned(cases: dict[str, dict]) -> None:
    for name, plan, answers in sent(cases):
        with told(name):
            for rank, answer in enumerate(answers):
                expected = planned(plan, rank)
                for axis in ("tp", "cp", "ep", "pp", "dp"):
                    sent_bytes = answer["axes"].get(axis, 0)
                    assert sent_bytes == pytest.approx(
                        expected[axis], abs=COUNTED.get(axis, 0) + 0.5
                    ), axis
                for level in ("nvlink", "network"):
                    assert answer["levels"].get(level, 0) == pytest.approx(expected[level]), level


def sent(cases: dict[str, dict]) -> Iterator[tuple[str, Plan, list[dict]]]:
    """Each case, all for equally many ranks, with its plan and what each rank has sent."""
    (ranks,) = {world(case) for case in cases.values()}
    plans = {name: make_plan(seq_len=48, **case) for name, case in cases.items()}
    answers = run_together(sent_by, ranks, {name: (plan,) for name, plan in plans.items()})
    yield from ((name, plan, answers[name]) for name, plan in plans.items())


OF_MODELS = {
    (kind, name): {"model": model, **case}
    for kind, model in MODELS.items()
    for name, case in CASES.items()
}


@pytest.mark.process
@pytest.mark.parametrize("cases", launches(OF_MODELS))
def test_ranks_send_what_is_planned(cases):
    assert_sent_as_planned(cases)


@pytest.mark.process
def test_ranks_of_four_axes_send_what_is_planned():
    assert_sent_as_planned({name: {"model": SHARED, **case} for name, case in WIDE.items()})


@pytest.mark.process
@pytest.mark.parametrize("zero", [1, 2])
def test_a_narrow_wire_halves_what_gradients_send(zero):
    layout = dict(dp=2, zero=zero, model=tiny_model(**SHAPE))
    cases = {"wide": layout, "narrow": layout | {"grad_wire": "bf16"}}
    assert_sent_as_planned(cases)
    wide, narrow = (planned(make_plan(seq_len=48, **case), 0)["dp"] for case in cases.values())
    numbers = tiny_model(**SHAPE).parameters
    passes = 1 if zero == 1 else 2
    assert wide - narrow == pytest.approx(passes * numbers * 2 / 2)  # n-1 of n bytes leave a rank


DROPPING = {(name,): {"model": CAPPED, **case} for name, case in (CASES | WIDE).items()}
#: Of layouts that spread experts, and one that does not, those of new pairs.
SPREAD = {key: case for key, case in DROPPING.items() if "ep" in case or key == ("tp2",)}


@pytest.mark.process
@pytest.mark.parametrize("cases", launches(DROPPING, covering(SPREAD)))
def test_ranks_together_send_what_is_planned_where_experts_drop_tokens(cases):
    """Ranks with the first tokens of a sequence send all of them, the others none: their sum is the
    planned one."""
    for name, plan, answers in sent(cases):
        with told(name):
            expected = [planned(plan, rank) for rank in range(len(answers))]
            for axis in ("tp", "cp", "ep", "pp", "dp"):
                sent_bytes = sum(answer["axes"].get(axis, 0) for answer in answers)
                slack = len(answers) * (COUNTED.get(axis, 0) + 0.5)
                assert sent_bytes == pytest.approx(
                    sum(rank_bytes[axis] for rank_bytes in expected), abs=slack
                ), axis
            expert_bytes = sum(sum(answer["levels"].values()) for answer in answers)
            assert expert_bytes == pytest.approx(
                sum(rank_bytes["nvlink"] + rank_bytes["network"] for rank_bytes in expected)
            )
