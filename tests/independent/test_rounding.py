"""The oracle passes what differs by rounding alone, however small its own rounding happens to be,
and nothing that is larger: it judges a step that it has computed itself in another order of sums,
with and without an error of a billionth."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.independent import cases, runner
from tests.independent.oracle import optimizer
from tests.independent.oracle.choices import Choices
from tests.independent.oracle.findings import ALLOWED, Findings, rounding
from tests.independent.oracle.judge import RunJudge
from tests.independent.oracle.state import KINDS, State, initial

QUANTITIES = {"loss", "gradient", "norm", "clipping", "second moment", "weight"}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
#: Numbers that a processor adds at once, by ATEN_CPU_CAPABILITY, dtype and unrolling of the loop.
LANES = (1, 2, 4, 8, 16, 64)


def added(terms: np.ndarray, lanes: int) -> float:
    """The sum of a register's lanes, in each of which every so many terms are added in turn."""
    rows = np.zeros((-(-len(terms) // lanes), lanes), terms.dtype)
    rows.flat[: len(terms)] = terms
    return float(np.add.accumulate(np.add.accumulate(rows)[-1])[-1])


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("count", [3, 100, 10_000, 200_000])
def test_a_sum_in_any_order_is_exact_but_for_rounding(precision, count):
    draw = np.random.default_rng(count)
    dtype = np.dtype(f"f{DTYPES[precision].itemsize}")
    allowed = ALLOWED * rounding(count, DTYPES[precision])
    for terms in (draw.random(count), draw.standard_normal(count)):
        terms = terms.astype(dtype)
        exact = math.fsum(terms)
        size = math.fsum(abs(terms))
        for lanes in LANES:
            for ordered_terms in (terms, terms[::-1], draw.permutation(terms)):
                assert abs(added(ordered_terms, lanes) - exact) <= allowed * size
    assert precision == "fp32" or allowed < 1e-12


class Step:
    """The first step of a run that the oracle itself has trained, micro-batches last to first."""

    def __init__(self, precision: str, home: Path):
        cases.write_corpus(home / "text")
        case = cases.make("one", ("dp1", "dp1"), precision, 0, home)
        folder, _ = runner.write_runs(case, home / precision)
        self.judge = RunJudge(folder, True, Findings())
        self.before = initial(self.judge.model, 3, DTYPES[precision])
        self.before.scale = 1.0
        recomputation = self.judge.recomputation
        exact = recomputation.exact(self.before, Choices({}, {}, {}))
        rounded = recomputation.rounded(self.before, Choices({}, {}, {}), 1.0)
        recomputation.exact = lambda *args: exact
        recomputation.rounded = lambda *args: rounded
        self.grads = rounded.grads
        valid = self.judge.reader.batch(0).valid
        self.loss = float(rounded.losses.sum()) / valid
        flat = torch.cat([grad.flatten() for grad in self.grads.values()])
        self.norm = float(flat.double().norm())

    def after(self, wrong: dict[tuple[str, str], float]) -> State:
        """The state that AdamW leaves. `wrong` has factors on gradients, second moments and
        weights, by quantity and parameter."""
        optim = self.judge.optim
        beta1 = optim["beta1"]
        beta2 = optim["beta2"]
        clip = optimizer.clipping(self.norm, self.judge.train["clip_grad_norm"])
        tensors = {kind: {} for kind in (*KINDS, "state")}
        state = State(1, self.judge.reader.size(0), 1, tensors=tensors)
        for name, weight in self.before.tensors["master"].items():
            grad = self.grads[name] * wrong.get(("gradient", name), 1.0) * clip
            first = beta1 * self.before.tensors["exp_avg"][name] + (1 - beta1) * grad
            second = beta2 * self.before.tensors["exp_avg_sq"][name] + (1 - beta2) * grad.square()
            second = second * wrong.get(("second moment", name), 1.0)
            new = optimizer.updated(weight, first, second, updates=1, lr=self.rate, optim=optim)
            new = new * wrong.get(("weight", name), 1.0)
            tensors["exp_avg"][name] = first
            tensors["exp_avg_sq"][name] = second
            tensors["master"][name] = new.to(weight.dtype)
        return state

    @property
    def rate(self) -> float:
        return optimizer.learning_rate(1, self.judge.optim, self.judge.train["steps"])

    def found(self, wrong: dict[tuple[str, str], float] | None = None, **report) -> set[str]:
        """Quantities beyond their bounds."""
        line = {"kind": "step", "step": 1, "rank": 0, "loss": self.loss, "grad_norm": self.norm}
        line |= {"samples": self.judge.reader.size(0), "lr": self.rate}
        self.judge.reports = [line | report]
        findings = self.judge.findings
        findings.worst.clear()
        self.judge.step(self.before, self.after(wrong or {}))
        assert findings.problems == []
        assert findings.worst.keys() == QUANTITIES
        return {quantity for quantity, (error, bound, _) in findings.worst.items() if error > bound}


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[str, Step]:
    return {precision: Step(precision, tmp_path_factory.mktemp(precision)) for precision in DTYPES}


@pytest.mark.parametrize("precision", DTYPES)
def test_another_order_of_micro_batches_passes(precision, steps):
    assert steps[precision].found() == set()


@pytest.mark.parametrize("lanes", [8, 16, 64])
def test_a_norm_that_a_register_has_added_in_fp32_passes(lanes, steps):
    step = steps["fp32"]
    squares = torch.cat([grad.flatten() for grad in step.grads.values()]).square().numpy()
    norm = math.sqrt(added(squares, lanes))
    assert norm != step.norm
    assert step.found(grad_norm=norm) == set()


def test_a_moment_below_the_smallest_normal_number_passes(steps):
    """An embedding that is not seen any more: its second moment goes to zero."""
    step = steps["fp32"]
    unseen = int(step.grads["embed.weight"].abs().sum(1).argmin())
    assert not step.grads["embed.weight"][unseen].any()
    moments = step.before.tensors["exp_avg_sq"]["embed.weight"]
    moments[unseen] = torch.linspace(1e-44, 1e-38, moments.shape[1])
    try:
        assert step.found() == set()
    finally:
        moments.zero_()


@pytest.mark.parametrize("quantity", ["gradient", "second moment", "weight"])
def test_a_billionth_on_any_parameter_is_found(quantity, steps):
    """The parameters are those of one layer, for all are alike, and those outside of layers."""
    step = steps["fp64"]
    names = [name for name in step.grads if name.startswith("layers.0") or "layers" not in name]
    assert len(names) == 12
    for name in names:
        assert quantity in step.found({(quantity, name): 1 + 1e-9}), name


@pytest.mark.parametrize("quantity", ["loss", "norm"])
def test_a_billionth_on_what_is_reported_is_found(quantity, steps):
    step = steps["fp64"]
    key = {"loss": "loss", "norm": "grad_norm"}[quantity]
    right = {"loss": step.loss, "norm": step.norm}[quantity]
    report = {key: right * (1 + 1e-9)}
    assert quantity in step.found(**report)
