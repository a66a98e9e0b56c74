"""Three steps of a case on the card and on the host, and what of them is compared."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.card import waits_of_the_host
from benchmarks.gpu_parity.cases import CASES, activations_margin, may_wait, plan_of
from benchmarks.gpu_parity.memory import differences, memory_of
from orchestrator.plan import Plan
from trainer.comm.mesh import Mesh
from trainer.comm.settings import apply_settings
from trainer.data.batch import MicroBatch
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.precision import FP64, Recipe, recipe
from trainer.verify.samples import micro_batch

STEPS = 3
LR = 1e-3
#: How much farther from float64 than the host's own rounding the card may be: its sums run in
#: another order, and its compiler keeps some intermediate results in fp32.
MARGIN = 3.0
#: Relative errors that rounding alone explains, per precision: a few units in the last place of
#: what is stored.
FLOORS = {"fp32": 2e-5, "bf16": 8e-3, "fp16": 2e-3}
HOST = torch.device("cpu")
State = dict[str, dict[str, Tensor]]


class Trained(NamedTuple):
    """What a case's steps have given. `waits`: places where the host waits in the last step."""

    loss: list[float]
    norm: list[float]
    state: State
    waits: list[str]
    seconds: float
    memory: dict[str, dict[str, int]]


class Reference(NamedTuple):
    """A case on the host: the weights it begins with, float64, and its own precision's distance
    from that."""

    weights: dict[str, Tensor]
    truth: Trained
    rounded: dict[str, float]


def state_of(engine: Engine) -> State:
    """Weights and moments by kind and name, on the host in float64."""
    state: State = {}
    for piece in engine.state_pieces(to_write=True):
        values = piece.data.detach().double().cpu().clone()
        state.setdefault(piece.kind, {})[f"{piece.info.name}@{piece.offset}"] = values
    return state


def begin_with(engine: Engine, weights: dict[str, Tensor]) -> None:
    """Give the engine these weights, as a restored checkpoint does: a card draws others from the
    same seed."""
    for piece in engine.state_pieces(to_write=False):
        if piece.kind == "master":
            piece.data.copy_(weights[f"{piece.info.name}@{piece.offset}"])
    engine.resumed(0, engine.scalars())


def batches_of(plan: Plan, engine: Engine, step: int) -> list[MicroBatch]:
    consumed = step * plan.parallel.global_batch_samples
    samples = samples_of_step(plan.parallel, engine.mesh.coord, consumed)
    packed = plan.job.data.isolate_documents
    return [micro_batch(plan, indices, packed) for indices in samples]


def train(
    plan: Plan,
    device: torch.device,
    precision: Recipe,
    weights: dict[str, Tensor],
    with_memory: bool = False,
) -> Trained:
    """Steps from these weights; `with_memory`: and one more, whose memory is measured."""
    engine = Engine(plan, Mesh.alone(plan), device, precision)
    begin_with(engine, weights)
    losses = list[float]()
    norms = list[float]()
    begin = time.perf_counter()
    for step in range(STEPS):
        batches = batches_of(plan, engine, step)
        tokens = sum(batch.valid_tokens for batch in batches)
        on_device = [batch.to(device) for batch in batches]
        with waits_of_the_host(device) as waits:
            loss, norm = engine.gradients(on_device, tokens)
            engine.update(norm, LR)
        losses.append(float(loss) / tokens)
        norms.append(float(norm))
    spent = time.perf_counter() - begin
    state = state_of(engine)
    memory: dict[str, dict[str, int]] = {}
    if with_memory:
        memory = memory_of(
            engine, lambda: engine.update(engine.gradients(on_device, tokens)[1], LR)
        )
    return Trained(losses, norms, state, waits, spent, memory)


def distance(trained: Trained, truth: Trained) -> dict[str, float]:
    """Relative errors by what is compared; a number that is not finite is infinitely far."""
    errors = dict[str, float]()
    for name in ("loss", "norm"):
        pairs = zip(getattr(trained, name), getattr(truth, name), strict=True)
        errors[name] = max(abs(here / there - 1) for here, there in pairs)
    for kind, tensors in truth.state.items():
        if kind in ("exp_avg", "momentum", "master"):
            errors[kind] = distance_of_tensors(trained.state.get(kind, {}), tensors)
    return {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}


def distance_of_tensors(here: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """|here - truth| / |truth|, all tensors as one vector."""
    if here.keys() != truth.keys():
        return math.inf
    wrong = sum(float((here[name] - tensor).square().sum()) for name, tensor in truth.items())
    total = sum(float(tensor.square().sum()) for tensor in truth.values())
    return math.sqrt(wrong / total)


def reference_of(name: str) -> Reference:
    plan = plan_of(CASES[name], "cpu", compiled=False)
    weights = state_of(Engine(plan, Mesh.alone(plan), HOST, FP64))["master"]
    truth = train(plan, HOST, FP64, weights)
    rounded = train(plan, HOST, recipe(plan.job.train), weights)
    return Reference(weights, truth, distance(rounded, truth))


def judge(name: str, compiled: bool, device: torch.device, reference: Reference) -> dict[str, Any]:
    """The row of a case."""
    plan = plan_of(CASES[name], device.type, compiled)
    if device.type == "cuda":
        apply_settings(plan)
        torch.cuda.reset_peak_memory_stats()
    try:
        precision = recipe(plan.job.train)
        trained = train(plan, device, precision, reference.weights, with_memory=True)
    finally:
        torch.use_deterministic_algorithms(False)
    errors = distance(trained, reference.truth)
    floor = FLOORS[plan.job.train.precision]
    bounds = {kind: max(floor, MARGIN * reference.rounded[kind]) for kind in errors}
    unexpected = [place for place in trained.waits if not may_wait(name, place)]
    is_muon = plan.job.optim.kind == "muon"
    margin = activations_margin(name, plan.job.train.compile)
    row: dict[str, Any] = {
        "equal": all(errors[kind] <= bounds[kind] for kind in errors),
        "unexpected_waits": unexpected,
        "not_as_planned": differences(trained.memory, margin, is_muon),
    }
    row |= {"errors": errors, "host_errors": reference.rounded, "bounds": bounds}
    row |= {"seconds": trained.seconds, "waits_in_last_step": trained.waits}
    row |= {"bytes": trained.memory}
    return row | {"loss": trained.loss, "loss_float64": reference.truth.loss}
