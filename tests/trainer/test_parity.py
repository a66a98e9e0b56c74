"""The key proof: every layout computes what one process computes.

Loss, the gradient of every parameter, the norm before clipping, and the weights after each of two optimizer steps
equal those of tests/reference/single.py, which shares no code with the trainer but the initial weights. In float64
(<= 1e-10, where a real bug cannot hide) and fp32 (<= 1e-5); trainer/verify/compare.py says relative to what.
"""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch

from orchestrator.plan import Plan
from orchestrator.plan.document import Model
from tests.beds.plans import make_plan, tiny_model
from tests.reference import single
from tests.trainer import samples
from tests.trainer.together import run_together, told
from trainer.precision import FP64, Recipe, recipe
from trainer.verify.compare import LIMIT, STEPS, run_rank, with_eps

#: 257 tokens: no tp divides them. Every layer kind appears in some case.
GQA = tiny_model()
TIED = tiny_model(tied_embeddings=True)
GPT = tiny_model(**samples.GPT, **samples.MHA, tied_embeddings=True)
ONE_KV_HEAD = tiny_model(kv_heads=1)
THREE_LAYERS = tiny_model(layers=3, tied_embeddings=True)

CASES: dict[str, dict] = {
    "one process, accumulation 4": {"micro_batches": 4},
    "dp2": {"dp": 2},
    "dp4 accumulation 3": {"dp": 4, "micro_batches": 3},
    "dp2 many buckets": {"dp": 2, "bucket_bytes": 1 << 10},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp4 zero1 many buckets": {"dp": 4, "zero": 1, "bucket_bytes": 1 << 10, "micro_batches": 4},
    "dp2 zero1 tied": {"dp": 2, "zero": 1, "model": TIED},
    "tp2 sp": {"tp": 2},
    "tp2 without sp": {"tp": 2, "sp": False},
    "tp4 sp, fewer kv heads than tp": {"tp": 4, "model": ONE_KV_HEAD},
    "tp4 sp gpt": {"tp": 4, "model": GPT},
    "tp2 tied": {"tp": 2, "model": TIED},
    "pp2": {"pp": 2},
    "pp2 afab": {"pp": 2, "schedule": "afab", "micro_batches": 3},
    "pp4 fewer micro-batches than stages": {"pp": 4},
    "pp4 micro-batches not a multiple": {"pp": 4, "micro_batches": 7},
    "pp2 tied, uneven layers": {"pp": 2, "model": THREE_LAYERS, "stage_layers": [1, 2], "micro_batches": 3},
    "pp2 first stage without layers": {"pp": 2, "stage_layers": [0, 4]},
    "pp2 gpt": {"pp": 2, "model": GPT, "micro_batches": 4},
    "pp2 interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved", "micro_batches": 4},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 pp2 tied, uneven layers": {"tp": 2, "pp": 2, "model": THREE_LAYERS, "stage_layers": [2, 1]},
    "tp2 pp2 without sp, gpt": {"tp": 2, "pp": 2, "sp": False, "model": GPT, "micro_batches": 3},
    "tp2 dp2 zero1": {"tp": 2, "dp": 2, "zero": 1, "micro_batches": 3},
    "pp2 dp2 zero1 tied": {"pp": 2, "dp": 2, "zero": 1, "model": TIED, "micro_batches": 4},
    "tp2 pp2 dp2 zero0": {"tp": 2, "pp": 2, "dp": 2, "model": TIED},
    "tp2 pp2 dp2 zero1 accumulation 4, uneven, tied, gpt": {
        **{"tp": 2, "pp": 2, "dp": 2, "zero": 1, "micro_batches": 4, "micro_batch_size": 2},
        **{"model": GPT, "stage_layers": [3, 1], "bucket_bytes": 1 << 12},
    },
    "dp3 zero1 unequal, many buckets": {
        **{"dp": 3, "zero": 1, "replica_micro_batches": [2, 1, 1], "bucket_bytes": 1 << 10, "model": TIED},
    },
    "dp3 zero3 unequal": {"dp": 3, "zero": 3, "replica_micro_batches": [2, 1, 1]},
    "tp2 dp3 zero2 unequal, gpt": {
        **{"tp": 2, "dp": 3, "zero": 2, "replica_micro_batches": [2, 1, 1], "model": GPT, "micro_batch_size": 2},
    },
    "pp2 dp3 zero1 unequal, tied": {"pp": 2, "dp": 3, "zero": 1, "replica_micro_batches": [4, 3, 3], "model": TIED},
    "pp2 dp3 zero2 unequal, interleaved": {
        **{"pp": 2, "vpp": 2, "schedule": "interleaved", "dp": 3, "zero": 2, "bucket_bytes": 1 << 10},
        "replica_micro_batches": [2, 1, 1],
    },
    "pp2 dp3 zero1 unequal, split backward": {
        **{"pp": 2, "schedule": "zb_h1", "dp": 3, "zero": 1, "replica_micro_batches": [1, 3, 2]},
    },
    "tp2 pp2 dp2 zero1 uneven, tied, one kv head": {
        **{"tp": 2, "pp": 2, "dp": 2, "zero": 1, "micro_batches": 3, "bucket_bytes": 1 << 10},
        "model": tiny_model(layers=3, kv_heads=1, tied_embeddings=True),
        "stage_layers": [2, 1],
    },
}


@functools.cache
def reference(model: bytes, samples: int, dtype: torch.dtype, packed: bool = False) -> list[single.Outcome]:
    """One process on the same samples; the layout does not matter to it, so cases share it."""
    shapes = msgspec.json.decode(model, type=Model)
    return single.train(parity_plan(dtype, model=shapes, micro_batches=samples), STEPS, dtype, packed)


def parity_plan(dtype: torch.dtype, **options: object) -> Plan:
    return with_eps(make_plan(**options), "fp64" if dtype == torch.float64 else "fp32")


#: Those that are also compared in fp32, the precision of real runs; the others with `make verify`.
IN_FP32 = (
    "dp4 accumulation 3", "tp4 sp gpt", "tp2 dp3 zero2 unequal, gpt",
    "pp2 tied, uneven layers", "tp2 pp2 tied, uneven layers",
    "tp2 pp2 dp2 zero1 accumulation 4, uneven, tied, gpt", "tp2 pp2 dp2 zero1 uneven, tied, one kv head",
)  # fmt: skip


def case_of(name: str, dtype: torch.dtype) -> tuple[Plan, Recipe, list[single.Outcome]]:
    plan = parity_plan(dtype, **{"model": GQA, **CASES[name]})
    use = FP64 if dtype == torch.float64 else recipe(plan.job.train)
    return plan, use, reference(msgspec.json.encode(plan.model), plan.parallel.global_batch_samples, dtype)


def world_of(name: str) -> int:
    return make_plan(**CASES[name]).parallel.world_size


def launches() -> list:
    """Precision, ranks, and the cases that have so many of them."""
    kinds = {
        "fp64": (torch.float64, list(CASES), []),
        "fp32": (torch.float32, IN_FP32, []),
        "the others in fp32": (torch.float32, [name for name in CASES if name not in IN_FP32], [pytest.mark.full]),
    }
    return [
        pytest.param(
            dtype, world, [name for name in names if world_of(name) == world], id=f"{kind}-{world}", marks=marks
        )
        for kind, (dtype, names, marks) in kinds.items()
        for world in sorted({world_of(name) for name in names})
    ]


@pytest.mark.process
@pytest.mark.parametrize(("dtype", "world", "names"), launches())
def test_layouts_equal_one_process(dtype, world, names):
    cases = {name: case_of(name, dtype) for name in names}
    for case, answers in run_together(run_rank, world, cases).items():
        with told(case):
            found, expected = set().union(*answers), cases[case][2]
            for name in expected[0].grads:
                assert {f"grad {name}", f"weight {name}"} <= found, "some rank must hold every parameter"
            assert {"loss", "norm"} <= found
            bad = [(error, rank, what) for rank, worst in enumerate(answers) for what, error in worst.items()]
            bad = [entry for entry in bad if not entry[0] <= LIMIT[dtype]]
            assert bad == [], "\n".join(f"{e:.2e} rank {r} {w}" for e, r, w in sorted(bad, reverse=True)[:6])


def test_the_comparison_notices_a_gradient_that_is_wrong_by_a_millionth():
    """The proof itself is tested: one element of one gradient moved by 1e-6 of the largest is seen."""
    plan = parity_plan(torch.float64, model=GQA, micro_batches=2)
    expected = reference(msgspec.json.encode(plan.model), 2, torch.float64)
    name = "layers.2.mlp.down.weight"
    grads = dict(expected[0].grads)
    grads[name] = grads[name].clone(memory_format=torch.contiguous_format)
    grads[name].view(-1)[7] += 1e-6 * grads[name].abs().max()
    wrong = single.Outcome(expected[0].loss, expected[0].norm, grads, expected[0].weights)
    worst = run_rank(0, plan, FP64, [wrong])
    assert [what for what, error in worst.items() if error > LIMIT[torch.float64]] == [f"grad {name}"]
