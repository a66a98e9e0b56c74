"""Compares one rank of a layout with one process, element by element of everything that the rank
holds.

Every rank compares all its tensors, so diverging replicas are found, too. Errors are relative to
the largest element of each tensor (in bf16 and fp16 both are root mean squares, since single
elements are noise), with two exceptions. First, a tensor that is small because its terms cancel has
the rounding of its terms, not its own: `scale_of`. Second, AdamW divides by sqrt(v) + eps, which
multiplies the rounding of a gradient g by up to (g + eps) / eps: with eps = 1e-8 two correct fp32
programs differ by 1e-4 after two steps. In float64 that is 1e-13 (4e-11 in the worst cell of
docs/parity.md), so the plan's own eps is used if it is not below `EPS_FP64`; in other precisions
eps is 1e-2, about the largest gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

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
#: The smallest scale of a tensor's error, as a share of the model's largest tensor. In float64 the
#: limit on that is 900 units in the last place; six times the rounding of a sum of 3,000 terms,
#: which is the number behind an element of the small models, is 330
#: (`tests.independent.oracle.findings.rounding`).
LEAST = 1e-3
#: The smallest eps of AdamW in float64. A gradient that consists of rounding alone moves a weight
#: by up to lr * rounding / eps. Six times the rounding of a sum of 3,000 terms is 4e-14 of the
#: largest gradient, 1e-2; with lr = 1e-3 that moves a weight by 4e-11, which is within the limit.
EPS_FP64 = 1e-8
LIMIT = {FP64.param: LIMITS["fp64"]} | {DTYPES[name]: LIMITS[name] for name in DTYPES}


def recipe_for(precision: str, plan: Plan) -> Recipe:
    """Returns the recipe of a key of LIMITS; in bf16 and fp16 gradients are summed in the plan's
    `grad_dtype`, and travel as in the plan. In fp64 and fp32 they travel on the same way without
    being rounded, so the layout is exact."""
    precision = precision.removesuffix(ALONE)
    train = plan.job.train
    if precision in ("fp64", "fp32"):
        exact = FP64 if precision == "fp64" else FP32
        return replace(exact, wire=exact.reduce) if train.grad_wire else exact
    wire = DTYPES.get(train.grad_wire or "")
    return Recipe(DTYPES[precision], DTYPES[train.grad_dtype], torch.float32, wire)


def with_eps(plan: Plan, precision: str) -> Plan:
    """Returns the plan with the eps that verifies `precision` (a key of LIMITS); the single process
    uses it, too."""
    eps = max(plan.job.optim.eps, EPS_FP64) if precision == "fp64" else 1e-2
    optim = msgspec.structs.replace(plan.job.optim, eps=eps)
    return seal(
        msgspec.structs.replace(
            plan,
            job=msgspec.structs.replace(plan.job, optim=optim),
        )
    )


def run_rank(
    rank: int,
    plan: Plan,
    use: Recipe,
    expected: Sequence[Outcome],
    packed: bool = False,
    prepare: Callable[[Engine], None] = lambda engine: None,
    empty: bool = False,
) -> dict[str, float]:
    """Runs a step for each of `expected`. Returns the worst relative error of "loss", "norm", "term
    <name>", "grad <parameter>", "weight <parameter>" and "state <name>", of those that this rank
    holds and `expected` has. Nan counts as infinite. `prepare` may change the engine before the
    first step. Collective over the plan's ranks."""
    mesh = Mesh.from_plan(plan, rank)
    engine = Engine(plan, mesh, torch.device("cpu"), use)
    prepare(engine)
    comparison = _Comparison(engine, use.param)
    for step, outcome in enumerate(expected, start=1):
        consumed = (step - 1) * plan.parallel.global_batch_samples
        batches, valid_tokens = step_batches(plan, mesh.coord, consumed, packed, empty)
        loss_sum, norm = engine.gradients(batches, valid_tokens)
        loss = engine.mean_loss(loss_sum, valid_tokens)
        if loss is not None:
            comparison.numbers("loss", loss, outcome.loss)
        for name, term in engine.loss_terms().items():
            comparison.numbers(f"term {name}", term, outcome.terms[name])
        comparison.tensors(
            "norm",
            norm,
            torch.tensor(outcome.norm, dtype=torch.float64),
        )
        comparison.gradients(outcome, norm.dtype)
        engine.update(
            norm,
            learning_rate(step, plan.job.optim, plan.job.train.steps),
        )
        engine.buckets.wait_params()
        comparison.weights(outcome)
        comparison.states(outcome)
    return comparison.worst


class _Comparison:
    """Compares the state of an engine with the outcomes of one process."""

    def __init__(self, engine: Engine, dtype: torch.dtype):
        self.engine = engine
        self.worst: dict[str, float] = {}  # quantity -> relative error
        self._size = rms if dtype in (torch.bfloat16, torch.float16) else largest
        self._limit = LIMIT[dtype]

    def tensors(
        self,
        quantity: str,
        actual: Tensor,
        expected: Tensor,
        model_size: float = 0.0,
    ) -> None:
        """Compares two tensors. `model_size` is the largest size of all such tensors."""
        scale = scale_of(self._size(expected), model_size, self._limit)
        difference = actual.to(expected.dtype) - expected
        error = self._size(difference) / scale if expected.numel() else 0.0
        if math.isnan(error):
            error = math.inf
        self.worst[quantity] = max(self.worst.get(quantity, 0.0), error)

    def numbers(self, quantity: str, actual: float, expected: float) -> None:
        """Compares two numbers in float64."""
        actual_tensor = torch.tensor(actual, dtype=torch.float64)
        self.tensors(
            quantity,
            actual_tensor,
            torch.tensor(expected, dtype=torch.float64),
        )

    def gradients(self, outcome: Outcome, dtype: torch.dtype) -> None:
        """Compares this rank's gradients, before the update."""
        model_size = max(map(self._size, outcome.grads.values()))
        for name, grad in self.engine.buckets.full_grads().items():
            if name not in outcome.grads:
                continue
            info = self.engine.part.table[name]
            actual = info.valid(grad).to(dtype) / self.engine.loss_scale
            expected = outcome.grads[name][info.global_slices]
            self.tensors(f"grad {name}", actual, expected, model_size)

    def weights(self, outcome: Outcome) -> None:
        """Compares this rank's weights, after the update."""
        model_size = max(map(self._size, outcome.weights.values()))
        for info, param in self.engine.buckets.full_params():
            if info.name not in outcome.weights:
                continue
            expected = outcome.weights[info.name][info.global_slices]
            self.tensors(f"weight {info.name}", info.valid(param), expected, model_size)

    def states(self, outcome: Outcome) -> None:
        """Compares this rank's state without gradient, after the update."""
        for info, state in self.engine.part.states():
            if info.name in outcome.states:
                expected = outcome.states[info.name][info.global_slices]
                # A state may be zero as a whole: its error is relative to 1.
                self.tensors(f"state {info.name}", info.valid(state), expected, model_size=1.0)


def scale_of(size: float, model_size: float, limit: float) -> float:
    """Returns the scale of a tensor's relative error: its own `size`, unless it is much smaller
    than `model_size`, that of the model's largest tensor. A tensor that is zero within the limit
    consists of rounding alone (a key bias, which softmax ignores): its scale is `model_size`."""
    if size < limit * model_size:
        return model_size
    return max(size, LEAST * model_size, torch.finfo(torch.float64).tiny)


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
