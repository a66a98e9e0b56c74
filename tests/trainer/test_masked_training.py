"""Workers train an encoder on masked tokens of real text: its loss falls, on every layout alike, and
a run that is resumed on another layout goes on with the same masks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from orchestrator.plan import Plan, seal
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import BERT, MHA
from tests.trainer.workers import Workers, running
from trainer.checkpoint.format import step_name

pytestmark = pytest.mark.process

TEXT = Path(json.__file__).parent  # some tens of KiB of Python
MODEL = tiny_model(**BERT, **MHA | {"vocab": 258})
STEPS = 10


def plan_for(cache: str, **layout: object) -> Plan:
    plan = make_plan(
        steps=STEPS,
        seq_len=32,
        checkpoint_every_steps=STEPS // 2,
        data_paths=[str(TEXT)],
        cache_dir=cache,
        model=MODEL,
        **layout,
    )
    optim = structs.replace(plan.job.optim, lr=2e-2, warmup_steps=3)
    return seal(structs.replace(plan, job=structs.replace(plan.job, optim=optim)))


def trained(plan: Plan, run_dir: Path, epoch: int = 0) -> Workers:
    with running(plan, run_dir, epoch) as workers:
        assert workers.wait() == [0] * plan.parallel.world_size, workers.log(0)
    return workers


def test_masked_loss_falls_and_a_run_goes_on_under_another_layout(tmp_path):
    cache = str(tmp_path / "cache")
    alone = plan_for(cache, micro_batches=2, micro_batch_size=4)
    losses = trained(alone, tmp_path / "alone").losses()
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[1] > 4.5 and min(losses[STEPS - 1], losses[STEPS]) < losses[1] - 1.0
    spread = plan_for(cache, tp=2, cp=2, cp_method="ring", micro_batches=4, micro_batch_size=2)
    assert trained(spread, tmp_path / "spread").losses() == pytest.approx(losses, rel=1e-4)
    shutil.rmtree(tmp_path / "alone" / "checkpoints" / step_name(STEPS))
    resumed = trained(spread, tmp_path / "alone", epoch=1)
    (event,) = resumed.events("resumed")
    assert event.step == STEPS // 2
    later = {step: losses[step] for step in range(STEPS // 2 + 1, STEPS + 1)}
    assert resumed.losses() == pytest.approx(later, rel=1e-4)
