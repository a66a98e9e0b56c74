"""What routers chose, as reported by each layout, against a count in one process; and that sampling
reads nothing."""

from __future__ import annotations

import pytest
import torch
from msgspec import to_builtins

from orchestrator.plan.document import Moe
from orchestrator.plan.expert_load import ExpertLoad
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import NoGroups, engine_of, mixture_on_meta
from tests.trainer.together import run_together, told, world
from trainer.comm.collectives import CommCounter
from trainer.metrics.step_result import StepResult
from trainer.model.experts import MixtureOfExperts
from trainer.parallel.expert.load import ExpertMeter
from trainer.precision import FP64
from trainer.verify import alone
from trainer.verify.samples import step_batches

MODEL = tiny_model(layers=4, moe=Moe(experts=4, top_k=2, ffn_hidden=8, first_dense_layers=1))
CASES = {
    "ep2 dp2": dict(ep=2, dp=2),
    "tp2 sp ep2": dict(tp=2, ep=2),
    "tp2 ep2 without sp": dict(tp=2, ep=2, sp=False),
    "tp2 sp pp2": dict(tp=2, pp=2, micro_batches=3),
    "cp2 pp2, full": dict(cp=2, pp=2, recompute="full", micro_batches=3),
    "tp2 cp2, folded": dict(tp=2, cp=2, etp=1, fold_cp=True),
    "ep2 pp2 dualpipe, full": dict(
        ep=2, pp=2, schedule="dualpipe", micro_batches=4, recompute="full"
    ),
    "pp2 dp2 interleaved zero3": dict(
        pp=2, vpp=2, dp=2, schedule="interleaved", micro_batches=4, zero=3
    ),
}


def told_by(rank, plan):
    """What this rank reports of a sampled step, after one that is not."""
    engine = engine_of(plan, rank, FP64)
    meter = engine.part.expert_meter
    step_loads = []
    for on in (False, True):
        meter.start(on)
        loss, _ = engine.gradients(*step_batches(plan, engine.mesh.coord, 0))
        result = StepResult(engine, [loss], True, engine.expert_loads())
        result.wait()
        step_loads.append(
            meter.loads(result.table()) if result.table() and engine.reports_expert_loads else {}
        )
    assert step_loads[0] == {}
    return to_builtins(step_loads[1])


def counted(plan) -> dict[str, ExpertLoad]:
    """The loads of one process, counted from what its routers return: one choice after
    another."""
    engine = engine_of(alone.one_process(plan), 0, FP64)
    seen: dict[str, list] = {}
    for name, block in engine.part.stages[0].blocks.items():
        if isinstance(block.mlp, MixtureOfExperts):
            block.mlp.router.register_forward_hook(
                lambda module, args, out, name=name: seen.setdefault(str(name), []).append(out)
            )
    engine.gradients(*step_batches(engine.plan, engine.mesh.coord, 0))
    loads = {}
    for name, outs in seen.items():
        chosen = [expert for out in outs for row in out.experts.tolist() for expert in row]
        shares = [
            torch.distributions.Categorical(probs=row).entropy()
            for out in outs
            for row in out.scores.detach()
        ]
        entropy = float(torch.stack(shares).mean() / torch.tensor(4.0).log())
        loads[name] = ExpertLoad([chosen.count(expert) for expert in range(4)], entropy)
    return loads


@pytest.mark.process
def test_every_layout_reports_the_load_that_one_process_counts():
    assert {world(case) for case in CASES.values()} == {4}
    plans = {name: make_plan(model=MODEL, **case) for name, case in CASES.items()}
    for name, answers in run_together(
        told_by, 4, {name: (plan,) for name, plan in plans.items()}
    ).items():
        with told(name):
            expected = counted(plans[name])
            assert list(expected) == ["1", "2", "3"]
            layers = [layer for answer in answers for layer in answer]
            assert sorted(layers) == ["1", "2", "3"], "one rank tells of each layer"
            for answer in answers:
                for layer, load in answer.items():
                    assert load["tokens"] == expected[layer].tokens and "bias" not in load
                    assert load["entropy"] == pytest.approx(expected[layer].entropy, rel=1e-6)


def test_a_sampled_step_reads_nothing_from_the_device():
    stage, terms, enter = mixture_on_meta(MODEL)
    meter = ExpertMeter(terms)
    meter.watch(stage)
    for on in (False, True):
        meter.start(on)
        enter()
        table = meter.totals(NoGroups(), False, CommCounter())
        assert (None if table is None else table.shape) == ((1, 9) if on else None)


def test_ratios_of_a_load():
    load = ExpertLoad([6, 2, 0, 0], 1.0)
    assert load.ratio == 3.0 and load.rank_ratio(2) == 2.0 and load.rank_ratio(1) == 1.0
    assert ExpertLoad([0, 0], 0.0).ratio == 1.0 and ExpertLoad([0, 0], 0.0).balance(1) == 1.0
    assert ExpertLoad([5, 5, 5, 5], 1.0).balance(2) == pytest.approx(1.0)
    assert ExpertLoad([5, 5, 0, 0], 1.0).balance(2) == pytest.approx(0.0)
    assert ExpertLoad([9, 0, 0, 0], 1.0).balance(1) == 0.0
