"""Compares one rank of a layout with one process, element by element of everything that the rank
holds.

Every rank compares all its tensors, so diverging replicas are found too. Errors are relative to the
largest element of each tensor (in bf16 and fp16 both are root mean squares: single elements are
noise there), with two exceptions. A tensor that is small because its terms cancel has their
rounding, not its own: `scale_of`. And AdamW divides by sqrt(v) + eps, which multiplies the rounding
of a gradient g by up to (g + eps) / eps: with eps = 1e-8 two correct fp32 programs differ by 1e-4
after two steps. In float64 that is 1e-13 (4e-11 in the worst cell of docs/parity.md), and the
plan's own eps is used where it is not below `EPS_FP64`; elsewhere eps is 1e-2, about the largest
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from orchestrator.plan import Plan, seal
from orchestrator.plan.learning_rate import learning_rate
from orchestrator.plan.parity import ALONE, LIMITS
from trainer.comm.mesh import Mesh
from trainer.engine import Engine
from trainer.precision import DTYPES, FP64, Recipe

from .oracle import Outcome
from .samples import step_batches

STEPS = 2
FP32 = Recipe(torch.float32, torch.float32, torch.float32)
#: Of the model's largest tensor, what the error of one is relative to at least. In float64 the
#: limit on that is 900 units in the last place; six times the rounding of a sum of 3,000 terms, as
#: many as there are behind a value of the small models, is 330
#: (`tests.independent.oracle.findings.rounding`).
LEAST = 1e-3
#: AdamW's eps in float64, at least. A gradient that is nothing but rounding moves a weight by up to
#: lr * rounding / eps. Six times the rounding of a sum of 3,000 terms is 4e-14 of the largest
#: gradient, 1e-2; with lr = 1e-3 that moves a weight by 4e-11, which is within the limit.
EPS_FP64 = 1e-8
LIMIT = {FP64.param: LIMITS["fp64"]} | {DTYPES[name]: LIMITS[name] for name in DTYPES}


def recipe_for(precision: str, plan: Plan) -> Recipe:
    """Of a key of LIMITS; in bf16 and fp16 gradients are summed in the plan's `grad_dtype`."""
    precision = precision.removesuffix(ALONE)
    if precision in ("fp64", "fp32"):
        return FP64 if precision == "fp64" else FP32
    return Recipe(DTYPES[precision], DTYPES[plan.job.train.grad_dtype], torch.float32)


def with_eps(plan: Plan, precision: str) -> Plan:
    """The plan with the eps that is used to verify `precision` (a key of LIMITS); the single
    process uses it too."""
    eps = max(plan.job.optim.eps, EPS_FP64) if precision == "fp64" else 1e-2
    optim = msgspec.structs.replace(plan.job.optim, eps=eps)
    return seal(msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, optim=optim)))


def run_rank(
    rank: int,
    plan: Plan,
    use: Recipe,
    expected: Sequence[Outcome],
    packed: bool = False,
    prepare: Callable[[Engine], None] = lambda engine: None,
    empty: bool = False,
) -> dict[str, float]:
    """Run a step for each of `expected`; the worst relative error of "loss", "norm", "term <name>",
    "grad <parameter>", "weight <parameter>" and "state <name>" over all that this rank holds and
    `expected` has. Nan counts as infinite. `prepare` may change the engine before the first step.
    Collective over the plan's ranks."""
    mesh = Mesh.from_plan(plan, rank)
    engine = Engine(plan, mesh, torch.device("cpu"), use)
    prepare(engine)
    worst: dict[str, float] = {}
    size = rms if use.param in (torch.bfloat16, torch.float16) else largest

    def compare(what: str, found: Tensor, wanted: Tensor, model: float = 0.0) -> None:
        """`model`: the largest size of all such tensors."""
        scale = scale_of(size(wanted), model, LIMIT[use.param])
        error = size(found.to(wanted.dtype) - wanted) / scale if wanted.numel() else 0.0
        worst[what] = max(worst.get(what, 0.0), error if error == error else float("inf"))

    for step, outcome in enumerate(expected, start=1):
        consumed = (step - 1) * plan.parallel.global_batch_samples
        batches, valid_tokens = step_batches(plan, mesh.coord, consumed, packed, empty)
        loss_sum, norm = engine.gradients(batches, valid_tokens)
        loss = engine.mean_loss(loss_sum, valid_tokens)
        if loss is not None:
            compare(
                "loss",
                torch.tensor(loss, dtype=torch.float64),
                torch.tensor(outcome.loss, dtype=torch.float64),
            )
        for name, value in engine.loss_terms().items():
            wanted = torch.tensor(outcome.terms[name], dtype=torch.float64)
            compare(f"term {name}", torch.tensor(value, dtype=torch.float64), wanted)
        compare("norm", norm, torch.tensor(outcome.norm, dtype=torch.float64))
        grads, weights = (
            max(map(size, model.values())) for model in (outcome.grads, outcome.weights)
        )
        for name, grad in engine.buckets.full_grads().items():
            if name not in outcome.grads:
                continue
            info = engine.part.table[name]
            found = info.valid(grad).to(norm.dtype) / engine.loss_scale
            compare(f"grad {name}", found, outcome.grads[name][info.global_slices], grads)
        engine.update(norm, learning_rate(step, plan.job.optim, plan.job.train.steps))
        engine.buckets.wait_params()
        for info, param in engine.buckets.full_params():
            if info.name not in outcome.weights:
                continue
            compare(
                f"weight {info.name}",
                info.valid(param),
                outcome.weights[info.name][info.global_slices],
                weights,
            )
        for info, state in engine.part.states():
            if info.name in outcome.states:
                wanted = outcome.states[info.name][info.global_slices]
                compare(
                    f"state {info.name}", info.valid(state), wanted, 1.0
                )  # it may be zero as a whole
    return worst


def scale_of(own: float, model: float, limit: float) -> float:
    """What the error of a tensor is relative to: its own size, where it is not much smaller than
    that of the `model`'s largest. A tensor that is zero within the limit is nothing but rounding (a
    key bias, which softmax ignores): it is measured by the largest."""
    if own < limit * model:
        return model
    return max(own, LEAST * model, torch.finfo(torch.float64).tiny)


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
