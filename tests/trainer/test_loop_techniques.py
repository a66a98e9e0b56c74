"""Whole workers with each technique: the losses of one process, and a resumed run equal to an
undisturbed one."""

from __future__ import annotations

import shutil

import pytest
from msgspec import structs

from orchestrator.plan import seal
from orchestrator.plan.document import BatchRamp
from orchestrator.plan.learning_rate import learning_rate
from orchestrator.plan.model import Mla, Moe, Mtp
from orchestrator.plan.worker import MANIFEST
from orchestrator.submit.saved_rate import rate_jump
from tests.beds.plans import tiny_model
from tests.trainer.test_loop import assert_same_state, changed, finish, job, saved_state
from trainer.checkpoint.format import decode, step_name

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """Losses of one process on batches of 4 samples."""
    plan = job(cache, steps=4, micro_batches=4)
    _, workers = finish(plan, tmp_path_factory.mktemp("alone"))
    return list(workers.losses().values())


LAYOUTS = {
    "cp2 zero3": {"cp": 2, "zero": 3, "micro_batches": 4},
    "dp2 zero2 budget": {
        "dp": 2,
        "zero": 2,
        "recompute": "budget",
        "recompute_layers": ["full", "none"] * 2,
    },
    "cp2 ulysses selective": {
        "cp": 2,
        "cp_method": "ulysses",
        "recompute": "selective",
        "micro_batches": 4,
    },
    "dualpipe": {"pp": 2, "schedule": "dualpipe", "micro_batches": 4},
    "zbv": {"pp": 2, "vpp": 2, "schedule": "zbv", "micro_batches": 4},
}


#: Attention and recomputation are proven elsewhere; here it is the whole worker, with what else it
#: runs.
FULL = {"cp2 ulysses selective"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(layout_name, marks=[pytest.mark.full] if layout_name in FULL else [])
        for layout_name in LAYOUTS
    ],
)
def test_losses_are_those_of_one_process(cache, alone, tmp_path, name):
    codes, workers = finish(job(cache, steps=4, **LAYOUTS[name]), tmp_path)
    assert codes == [0, 0], workers.log(0)
    assert list(workers.losses().values()) == pytest.approx(alone, rel=1e-4)


#: DeepSeek-V3's block and its recipe, in small.
DEEPSEEK = tiny_model(
    vocab=257,
    kv_heads=4,
    mla=Mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
    moe=Moe(experts=4, top_k=2, ffn_hidden=12, shared_ffn_hidden=24, first_dense_layers=1),
    mtp=Mtp(depth=1, weight=0.3),
)
RESUMED = {
    "zero1 deepseek in blocks of 8 bits": {
        "model": DEEPSEEK,
        "ep": 2,
        "zero": 1,
        "precision": "bf16",
        "recompute": "selective",
        "matmul": "fp8_block",
    },
    "zero1 deepseek in 8 bits with scales of earlier steps": {
        "model": DEEPSEEK,
        "ep": 2,
        "zero": 1,
        "precision": "bf16",
        "matmul": "fp8_delayed",
    },
    "fp16 zero1": {"dp": 2, "zero": 1, "precision": "fp16"},
    "zero3 bf16": {"dp": 2, "zero": 3, "precision": "bf16"},
    "zero2 ramp": {
        "dp": 2,
        "zero": 2,
        "micro_batches": 4,
        "batch_ramp": BatchRamp(start_samples=2, over_samples=24),
    },
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_an_undisturbed_one_to_the_bit(cache, tmp_path, name):
    layout = dict(RESUMED[name])
    matmul = layout.pop("matmul", "")
    plan = changed(job(cache, steps=6, every=3, **layout), "optim", decay_steps=6)
    plan = seal(structs.replace(plan, job=structs.replace(plan.job, matmul=matmul)))
    _, undisturbed = finish(plan, tmp_path / "whole")
    finish(changed(plan, "train", steps=3), tmp_path / "cut")
    codes, resumed = finish(plan, tmp_path / "cut", epoch=1)
    assert codes == [0, 0], resumed.log(0)
    assert_same_state(
        saved_state(tmp_path / "whole", plan, 6), saved_state(tmp_path / "cut", plan, 6)
    )
    assert {step: undisturbed.losses()[step] for step in resumed.losses()} == resumed.losses()
    ends = [
        decode((tmp_path / run / "checkpoints" / step_name(6) / MANIFEST).read_bytes())
        for run in ("whole", "cut")
    ]
    assert ends[0].scalars == ends[1].scalars and ends[0].samples == ends[1].samples
    tokens = [report.tokens for report in undisturbed.steps(0)]
    if "batch_ramp" in RESUMED[name]:
        assert tokens == sorted(tokens) and tokens[0] == 2 * 16 and tokens[-1] > tokens[0]
        assert sum(tokens) == ends[0].samples * 16
    if "fp16" in name:
        scalar_names = {
            "loss_scale",
            "loss_scale_good_steps",
            "optimizer_steps",
            "learning_rate",
            "train_steps",
        }
        assert scalar_names == set(ends[0].scalars)


#: Another curve from the saved step on: (the schedule as saved, what the next run changes, its
#: steps).
def test_scales_of_earlier_steps_follow_a_run_to_another_layout(cache, tmp_path):
    """They are those of the whole batch, whose largest values may be two steps old."""

    def plan(steps, **layout):
        whole = job(cache, steps=steps, every=2, precision="fp64", **layout)
        whole = changed(whole, "train", grad_dtype="fp64")
        whole = changed(whole, "optim", decay_steps=4)
        return seal(structs.replace(whole, job=structs.replace(whole.job, matmul="fp8_delayed")))

    _, undisturbed = finish(plan(4, dp=2, zero=1), tmp_path / "whole")
    finish(plan(2, dp=2, zero=1), tmp_path / "cut")
    codes, resumed = finish(plan(4, tp=2, micro_batches=4), tmp_path / "cut", epoch=1)
    assert codes == [0, 0], resumed.log(0)
    expected = {step: undisturbed.losses()[step] for step in (3, 4)}
    assert resumed.losses() == pytest.approx(expected, rel=1e-9)


BREAKS = {
    "cosine to a later end": ({"schedule": "cosine"}, {}, 8),
    "cosine to an earlier end": ({"schedule": "cosine"}, {}, 5),
    "wsd": ({"schedule": "wsd", "decay_steps": 2}, {}, 8),
    "a higher rate": ({"schedule": "constant"}, {"lr": 2e-2}, 8),
}
GOES_ON = {
    "cosine with its end named": ({"schedule": "cosine", "decay_steps": 4}, {}, 8),
    "constant": ({"schedule": "constant"}, {}, 8),
    "its own plan": ({"schedule": "cosine"}, {}, 6),
}


@pytest.mark.parametrize("name", [*BREAKS, *GOES_ON])
def test_a_learning_rate_that_jumps_at_a_resume_is_said_before_the_first_step(
    cache, tmp_path, name
):
    before, after, steps = (BREAKS | GOES_ON)[name]
    curve = {"lr": 1e-2, "min_lr_ratio": 0.1, "warmup_steps": 0} | before
    first = changed(job(cache, steps=6 if name == "its own plan" else 4, every=4), "optim", **curve)
    finish(first, tmp_path)
    if name == "its own plan":  # from the save in its middle
        shutil.rmtree(tmp_path / "checkpoints" / step_name(6))
    at = 4
    second = changed(changed(first, "optim", **curve | after), "train", steps=steps)
    ahead = rate_jump(second, str(tmp_path))
    codes, resumed = finish(second, tmp_path, epoch=1)
    assert codes == [0], resumed.log(0)
    jump_lines = [line for line in resumed.log(0).splitlines() if "the learning rate jumps" in line]
    events = resumed.events("learning_rate_jumps")
    assert len(jump_lines) == len(events) == len(ahead) == (name in BREAKS)
    assert all(phrase in jump_lines[0] for phrase in ahead), "orch submit says the same"
    if not events:
        return
    saved = learning_rate(at, first.job.optim, 4)
    following = learning_rate(at + 1, second.job.optim, steps)
    assert events[0].step == at and events[0].fields == {"saved": saved, "following": following}
    assert f"from {saved:.3g} at saved step 4 to {following:.3g} at step 5" in jump_lines[0]
    assert ("optim.decay_steps=4 keeps the old curve" in jump_lines[0]) == name.startswith("cosine")
    if "cosine" in name:
        _, workers = finish(changed(second, "optim", decay_steps=4), tmp_path, epoch=2)
        assert not workers.events("learning_rate_jumps")


def test_an_fp16_step_that_overflows_is_skipped_and_said(cache, tmp_path):
    """The first step that is applied makes the weights explode, and all after it overflow: the
    scale is halved each time, the steps are counted, the run goes on."""
    plan = changed(job(cache, steps=6, precision="fp16"), "optim", lr=1e38, warmup_steps=0)
    codes, workers = finish(plan, tmp_path)
    skipped = workers.events("step_skipped")
    assert codes == [0] and len(skipped) == 5 and skipped[-1].step == 6
    assert [event.fields["loss_scale"] for event in skipped] == [
        2.0 ** (15 - index) for index in range(5)
    ]
    norms = {report.step: report.grad_norm for report in workers.steps(0)}
    assert {step for step, norm in norms.items() if norm is None} == {
        event.step for event in skipped
    }


def test_documents_are_kept_apart_when_the_plan_says_so(cache, tmp_path):
    """Alone and cut over context-parallel ranks, in whose shards the borders lie elsewhere."""
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(f"{index} " * 3)
    losses = {}
    for name, layout in {
        "apart": {},
        "apart cp2": {"cp": 2},
        "together": {"isolate_documents": False},
    }.items():
        options = {
            "data_paths": [str(tmp_path)],
            "isolate_documents": True,
            "steps": 2,
            "micro_batches": 4,
            **layout,
        }
        plan = changed(job(cache, **options), "data", extensions=[".txt"])
        codes, workers = finish(plan, tmp_path / name)
        assert set(codes) == {0}, workers.log(0)
        losses[name] = list(workers.losses().values())
    assert losses["apart cp2"] == pytest.approx(losses["apart"], rel=1e-5)
    assert losses["together"] != pytest.approx(losses["apart"], rel=1e-3)
