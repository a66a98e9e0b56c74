"""Compares a measured step with a plan's prediction: whether it is inside the interval, and which
parameters explain the difference."""

from __future__ import annotations

from math import log
from typing import NamedTuple

from orchestrator.cost.of_plan import step_of
from orchestrator.cost.parameters import INDEX, PRIOR
from orchestrator.cost.profile import Profile, relative_sd, with_values
from orchestrator.plan import Plan
from orchestrator.plan.interval import SIGMAS
from orchestrator.style import seconds, three

from .update import attribution, update_with_step

#: Prefix of a parameter's name -> subject of the sentence about it. The longest prefix counts; `{}`
#: is replaced by the rest of the name.
SUBJECTS = {
    "gemm.": "matrix products ({}) reach",
    "gemm_bytes": "bytes of matrix products take",
    "gemm_wave": "the end of a matrix product loses",
    "gemm_wave.old": "the end of a matrix product on a GPU before Hopper loses",
    "attention.": "attention ({}) reaches",
    "attention.packed": "attention over packed samples takes",
    "attention.scores": "unfused attention moves",
    "attention.cp": "attention cut by context parallelism takes",
    "hbm": "memory-bound kernels reach",
    "elementwise.": "memory-bound kernels ({}) move",
    "cast": "casts to fp8 move",
    "accumulate": "the sum of weight gradients moves",
    "head": "the output projection takes",
    "logits": "the loss moves",
    "lora": "backward of frozen weights takes",
    "recompute.": "recomputation ({}) takes",
    "moe.permute": "permuting routed tokens moves",
    "moe.spread.": "loads of experts (balanced by: {}) differ by",
    "host.": "the CPU needs for launches ({})",
    "host.dense": "the CPU needs for a layer",
    "host.step": "the CPU needs for an optimizer step",
    "host.cpu": "an operator on the CPU needs",
    "optimizer": "the optimizer moves",
    "nvlink": "collectives over NVLink reach",
    "nic": "collectives over the network reach",
    "nic.tp": "tensor parallelism across nodes reaches",
    "link.cpu": "collectives between processes reach",
    "latency": "latencies of collectives are",
    "latency.slow": "the network adds to a step",
    "tp.launch": "a collective of tensor parallelism starts after",
    "tp.exposed": "tensor-parallel communication shows",
    "pp.exposed": "transfers between stages show",
    "cp.exposed": "context-parallel communication shows",
    "ep.exposed": "expert all-to-all shows",
    "dp.": "communication of gradients and weights ({}) shows",
    "nodes": "jitter of each doubling of the nodes adds",
    "family.": "the whole step with this software ({}) takes",
}
#: Unit of a parameter -> the words after its value.
UNITS = {
    "of peak": "of the peak",
    "of HBM": "of HBM's rate",
    "of memory": "of the memory's rate",
    "of bytes": "times their bytes",
    "of attention": "times attention's time",
    "of the step": "times the rest",
    "of forward": "of forward's time",
    "of the product": "times its product",
    "s/byte over HBM's": "times HBM's",
}


class Attribution(NamedTuple):
    """A parameter that explains a part of the difference."""

    parameter: str
    assumed: float
    found: float  # The most probable value after this measurement.
    unit: str
    share: float  # Share of the change of ln t that all parameters explain together.
    text: str


class Drift(NamedTuple):
    z: float  # ln(measured / predicted) in standard deviations of the prediction.
    inside: bool  # True if the measurement is inside the 95 % interval.
    attribution: list[Attribution]  # The causes of the difference, the largest first.


def drift(plan: Plan, measured_s: float, limit: int = 3) -> Drift:
    """Compares a run's median step with its plan. The plan's own parameters with the shipped
    uncertainty are the prior."""
    profile = with_values(plan.time.parameters)
    change, jacobian = update_with_step(profile, step_of(plan), measured_s)
    values = change.values(profile)
    total_change = float(change.log_change @ jacobian) or 1.0
    attributions = [
        attribution_of(name, profile.values[name], values[name], contribution / total_change)
        for name, contribution in attribution(change, jacobian, limit)
    ]
    z = log(measured_s / plan.time.step_s) / (plan.time.sd or relative_sd(jacobian, profile))
    return Drift(z, abs(z) <= SIGMAS, attributions)


def changed(base: Profile, updated: Profile) -> list[Attribution]:
    """Returns the parameters that an update moved by more than 2 %, the one that moved most first.
    Their `share` is relative to the largest change."""
    moves = {name: abs(log(updated.values[name] / base.values[name])) for name in INDEX}
    largest_move = max(moves.values()) or 1.0
    names = sorted((name for name in INDEX if moves[name] > 0.02), key=lambda name: -moves[name])
    return [
        attribution_of(
            name,
            base.values[name],
            updated.values[name],
            moves[name] / largest_move,
        )
        for name in names
    ]


def attribution_of(
    name: str,
    assumed_value: float,
    updated_value: float,
    share: float,
) -> Attribution:
    """Returns the sentence about a parameter whose value was updated."""
    unit = PRIOR[INDEX[name]].unit
    stem = max(
        (stem for stem in SUBJECTS if f"{name}.".startswith((stem.rstrip(".") + ".", f"{stem}_"))),
        key=len,
    )
    subject = SUBJECTS[stem].format(name.removeprefix(stem).replace("_", " ").replace(".", ", "))
    if unit == "s":
        sentence = f"{subject} {seconds(updated_value)}, {seconds(assumed_value)} was assumed"
    else:
        sentence = (
            f"{subject} {_short(updated_value)} {UNITS.get(unit, unit)},"
            f" {_short(assumed_value)} was assumed"
        )
    return Attribution(
        parameter=name,
        assumed=assumed_value,
        found=updated_value,
        unit=unit,
        share=share,
        text=sentence,
    )


def _short(value: float) -> str:
    return three(value) if value >= 0.1 else f"{value:.2g}"
