"""Seconds of one optimizer step: every pipeline rank's compute and communication, the schedule, gradients, optimizer.

step = (span of the schedule + exposed transfers + exposed gradients + optimizer) * jitter * family. Each pipeline rank
is costed by itself: its layers of each kind with their own communication, its share of token table and head, its own
gradients. The schedule finds the slowest.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from math import log2, sqrt
from typing import NamedTuple

from orchestrator.plan.document import Axis, Model, Parallel, Time, Train
from orchestrator.plan.schedules import copies_of
from orchestrator.planner.model.layers import DTYPE_BYTES, layer_groups
from orchestrator.planner.model.stages import rank_stages, stage_range

from . import collective
from .compute import (
    LayerSeconds,
    layer_seconds_by_kind,
    loss_seconds,
    optimizer_seconds,
    overlap_seconds,
)
from .dual import Number, larger, scaled_like, value_of
from .fabric import Path, Pattern
from .pipeline import EQUAL, rank_seconds, span_seconds
from .rates import Links, Rates
from .software import Software
from .traffic import (
    TensorOperation,
    context_parallel_operations,
    expert_operations,
    gradient_operations,
    rank_parameters,
    recomputed_share,
    sends_per_micro_batch,
    tensor_operations,
    vocabulary_operations,
)

#: (axes that vary in a group, pattern): what a path on a given cluster in a given nesting order depends on.
PathKey = tuple[tuple[Axis, ...], Pattern]
INNER = ("tp", "cp", "ep")  # axes whose communication is part of a stage

#: Schedules without idle time where a step may begin before the last one has ended on all ranks (arXiv 2401.10241).
NO_BUBBLE = ("zb_h2", "zbv")

DENSE_REPLICAS: tuple[Axis, ...] = ("cp", "ep", "dp")
EXPERT_REPLICAS: tuple[Axis, ...] = ("cp", "dp")


class Stage(NamedTuple):
    """What a virtual stage holds."""

    layers: tuple[tuple[int, str, int], ...]  # (kind as in `sample_layers`, recomputation mode, number)
    first: bool
    last: bool


class Work(NamedTuple):
    """Compute of a step: everything that does not depend on where the ranks are."""

    model: Model
    parallel: Parallel
    train: Train
    rate: Rates
    software: Software
    kinds: tuple[LayerSeconds, LayerSeconds]
    loss: tuple[Number, Number]  # (forward, backward) of output projection and loss
    overlap_s: dict[str, Number]  # seconds of the matrix product that one operation overlaps with
    stages: list[Stage]
    held: list[tuple[int, int]]  # (dense, expert) parameters of each pipeline rank
    nodes: int


def step_work(
    model: Model, parallel: Parallel, train: Train, rate: Rates, software: Software, gpus_per_node: int
) -> Work:
    """The compute of one step, from the cost model's rates."""
    kinds = layer_seconds_by_kind(model, parallel, train, rate, software)
    last = len(parallel.stage_layers) - 1
    stages = [
        Stage(
            tuple(one for one in layer_groups(model, train, [stage_range(parallel, at)]) if one[2]), at == 0, at == last
        )
        for at in range(last + 1)
    ]
    return Work(
        model=model,
        parallel=parallel,
        train=train,
        rate=rate,
        software=software,
        kinds=kinds,
        loss=loss_seconds(model, parallel, train, rate),
        overlap_s=overlap_seconds(model, parallel, train, rate, kinds),
        stages=stages,
        held=rank_parameters(model, parallel),
        nodes=-(-parallel.world_size // gpus_per_node),
    )


class StepCost:
    """Seconds of one step with the ranks in one nesting order."""

    def __init__(self, work: Work, paths: Mapping[PathKey, Path]):
        self.work, self.paths = work, paths
        self.parallel = work.parallel
        self._inner = self._layer_communication()
        self._vocabulary = self._vocabulary_communication()
        known: dict[Stage, tuple[Number, Number]] = {}
        for stage in work.stages:
            if stage not in known:
                known[stage] = self._stage(stage)
        self.stages = [known[stage] for stage in work.stages]
        #: seconds of one micro-batch on each pipeline rank
        self.ranks = rank_seconds(self.parallel, [sum(both) for both in self.stages])
        self.slowest = max(range(len(self.ranks)), key=lambda rank: value_of(self.ranks[rank]))

    # ---------------------------------------------------------------------------------- one layer, one stage

    def _links(self, path: Path) -> Links:
        rate = self.work.rate
        return rate.tensor_outside if path.fabric_s else rate.tensor

    def _layer_communication(self) -> list[dict[str, Number]]:
        """By kind of layer: exposed seconds of one layer and micro-batch, forward and backward, by axis."""
        work, par = self.work, self.parallel
        rate, share = work.rate, recomputed_share(par, work.train, work.software)
        hidden = hidden_bytes(work.model, par, work.train)
        own: dict[str, Number] = {"tp": self._tensor(tensor_operations(par, share), hidden), "cp": 0.0, "ep": 0.0}
        total: Number = 0.0
        for operation, size, count, window in context_parallel_operations(work.model, par, work.train, share):
            path = self.paths[("cp",), collective.PATTERN[operation]]
            seconds = count * collective.seconds(operation, size, par.cp, path, rate.ring)
            total += seconds * rate.cp_exposed if window == "attention" else seconds
        own["cp"] = total
        found = [own, dict(own)]
        if par.ep > 1 and work.model.moe is not None:
            for operation, size, count in expert_operations(work.model, par, work.train, share):
                path = self.paths[("ep",), collective.PATTERN[operation]]
                seconds = count * collective.seconds(operation, size, par.ep, path, rate.ring)
                found[1]["ep"] += seconds * rate.ep_exposed
        return found

    def _tensor(self, operations: Sequence[TensorOperation], size: float) -> Number:
        if self.parallel.tp == 1:
            return 0.0
        work, path = self.work, self.paths[("tp",), "ring"]
        total: Number = 0.0
        links = self._links(path)
        shown = work.rate.tp_exposed
        for operation, overlap, count in operations:
            once = collective.seconds(operation, size, self.parallel.tp, path, links)
            if overlap:  # whole, behind a product that does not need it
                total += count * shown * larger(0.0, once - work.overlap_s[overlap])
            elif work.software.tp_overlap:  # in pieces, behind the product before or after it
                for block in ("attention", "mlp"):
                    late = larger(0.0, once - work.overlap_s[block])
                    total += count / 2 * (shown * once + (1.0 - shown) * late)
            else:
                total += count * shown * once
        return total

    def _vocabulary_communication(self) -> tuple[Number, Number]:
        """Exposed seconds of a micro-batch on the first stage, and on the last."""
        if self.parallel.tp == 1:
            return 0.0, 0.0
        hidden = hidden_bytes(self.work.model, self.parallel, self.work.train)
        first, last = (self._tensor(vocabulary_operations(self.parallel, *ends), hidden) for ends in ((1, 0), (0, 1)))
        tokens = self.parallel.micro_batch_size * self.work.train.seq_len / self.parallel.cp
        last = last + self._tensor([("all_gather", "", 1.0)], tokens * 2 * 4 * self.parallel.tp)  # two numbers a token
        return first, last

    def _stage(self, stage: Stage) -> tuple[Number, Number]:
        """(forward, backward) seconds of one micro-batch, communication inside the stage and recomputation included."""
        forward: Number = 0.0
        backward: Number = 0.0
        for kind, mode, count in stage.layers:
            layer, inner = self.work.kinds[kind], sum(self._inner[kind].values()) / 2
            forward += count * (layer.forward + inner)
            backward += count * (layer.backward + layer.recompute_s(mode) + inner)
        if stage.first:
            forward += self._vocabulary[0]
        if stage.last:
            forward += self.work.loss[0] + self._vocabulary[1] / 2
            backward += self.work.loss[1] + self._vocabulary[1] / 2
        return forward, backward

    # ---------------------------------------------------------------------------------- the step

    @cached_property
    def transfers(self) -> Number:
        """Exposed seconds of transfers between stages."""
        par, work = self.parallel, self.work
        if par.pp == 1:
            return 0.0
        size = hidden_bytes(work.model, par, work.train) / (par.tp if par.sp else 1)
        once = collective.seconds("p2p", size, par.pp, self.paths[("pp",), "chain"], work.rate.ring)
        return work.rate.pp_exposed * once * (par.micro_batches * sends_per_micro_batch(par) + 2 * (par.pp - 1))

    @cached_property
    def gradients(self) -> Number:
        """Exposed seconds of gradients and of weights that are gathered, of the rank that waits longest."""
        found: dict[tuple[tuple[int, int], float], Number] = {}
        for held, seconds in zip(self.work.held, self.ranks, strict=True):
            key = held, value_of(seconds)
            if key not in found:
                found[key] = self._gradients(*held, seconds)
        worst: Number = 0.0
        for seconds in found.values():
            worst = larger(worst, seconds)
        return worst

    def _gradients(self, dense: int, experts: int, micro_batch: Number) -> Number:
        work, par = self.work, self.parallel
        width, gradient = DTYPE_BYTES[work.train.precision], grad_bytes(work.train, work.software)
        total: Number = 0.0
        for parameters, varying in ((dense, DENSE_REPLICAS), (experts, EXPERT_REPLICAS)):
            members = par.cp * par.dp * (par.ep if "ep" in varying else 1)
            if members == 1 or not parameters:
                continue
            for operation, size, count, _ in gradient_operations(parameters, par, width, gradient):
                path = self.paths[varying, collective.PATTERN[operation]]
                total += count * collective.seconds(operation, size, members, path, work.rate.ring)
        return exposed_gradients(total, par, work.rate, work.software, micro_batch)

    @cached_property
    def outside(self) -> Number:
        """Seconds of the step outside the pipeline."""
        par, rate = self.parallel, self.work.rate
        replicas = par.dp * par.ep * par.cp
        most = max(map(sum, self.work.held))
        total = self.transfers + self.gradients + optimizer_seconds(most, replicas if par.zero else 1, rate)
        return total + rate.slow_fabric_s * sqrt(replicas) if self.work.nodes > 1 else total

    @cached_property
    def factor(self) -> Number:
        return (1.0 + self.work.rate.nodes * log2(self.work.nodes)) * self.work.rate.family

    @property
    def _no_bubble(self) -> bool:
        return self.work.software.overlapped_steps and self.parallel.schedule in NO_BUBBLE

    @cached_property
    def span(self) -> tuple[Number, float]:
        """(seconds from the first forward to the last backward, idle / busy). May simulate the schedule."""
        par = self.parallel
        if self._no_bubble:
            return par.micro_batches * self.ranks[self.slowest], 0.0
        forward, backward = ([value_of(stage[way]) for stage in self.stages] for way in (0, 1))
        span, idle = span_seconds(par, forward, backward)
        # the span is proportional to the slowest rank where that rank's time changes
        return scaled_like(span, self.ranks[self.slowest]), idle

    @cached_property
    def step_s(self) -> Number:
        return (self.span[0] + self.outside) * self.factor

    @cached_property
    def lower_bound_s(self) -> float:
        """Lower bound of `step_s` that needs no simulation.

        Each rank waits until a micro-batch has come through the stages ahead of it, then does all of its work.
        """
        ahead, total = [0.0], 0.0
        for forward, _ in self.stages:
            total += 0.0 if self._no_bubble else value_of(forward)
            ahead.append(total)
        m = self.parallel.micro_batches
        firsts = map(min, rank_stages(self.parallel))
        span = max(ahead[first] + m * value_of(rank) for first, rank in zip(firsts, self.ranks, strict=True))
        return (span + value_of(self.outside)) * value_of(self.factor) * (1 - EQUAL)

    @cached_property
    def exposed(self) -> dict[str, Number]:
        """Communication that no compute hides, by axis, in seconds per step, of the slowest rank."""
        par, m = self.parallel, self.parallel.micro_batches
        result: dict[str, Number] = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
        for stage in rank_stages(par)[self.slowest]:
            held = self.work.stages[stage]
            for kind, _, count in held.layers:
                for axis, seconds in self._inner[kind].items():
                    result[axis] += m * count * seconds
            result["tp"] += m * (held.first * self._vocabulary[0] + held.last * self._vocabulary[1])
        copies = copies_of(par)
        result = {axis: seconds * self.factor / copies for axis, seconds in result.items()}
        return result | {"pp": self.transfers * self.factor, "dp": self.gradients * self.factor}

    def terms(self) -> dict[str, Number]:
        """Seconds of the step by term; they sum to `step_s`."""
        par, m, work = self.parallel, self.parallel.micro_batches, self.work
        result: dict[str, Number] = {}

        def add(name: str, seconds: Number) -> None:
            result[name] = result.get(name, 0.0) + seconds

        scale = self.factor * m / copies_of(par)
        for at in rank_stages(par)[self.slowest]:
            stage = work.stages[at]
            for kind, mode, count in stage.layers:
                layer = work.kinds[kind]
                for name, seconds in layer.terms.items():
                    add(name, count * seconds * scale)
                add("recompute", count * layer.recompute_s(mode) * scale)
            if stage.last:
                add("head", (work.loss[0] + work.loss[1]) * scale)
        for axis, seconds in self.exposed.items():
            add(axis, seconds)
        add("bubble", (self.span[0] - m * self.ranks[self.slowest]) * self.factor)
        add("optimizer", (self.outside - self.transfers - self.gradients) * self.factor)
        return {name: seconds for name, seconds in result.items() if value_of(seconds) != 0.0}


def hidden_bytes(model: Model, parallel: Parallel, train: Train) -> float:
    """Bytes of one micro-batch's hidden states on a rank, not cut by sequence parallelism."""
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    return tokens * model.hidden * DTYPE_BYTES[train.precision]


def grad_bytes(train: Train, software: Software) -> int:
    """Bytes of one gradient on the wire."""
    return software.grad_bytes or DTYPE_BYTES[train.grad_dtype]


def exposed_gradients(total: Number, par: Parallel, rate: Rates, software: Software, micro_batch: Number) -> Number:
    """Seconds that gradient communication of `total` seconds shows. `micro_batch`: seconds of one on the rank."""
    overlap = software.dp_overlap
    if par.zero == 3 and overlap in ("modern", "early"):
        overlap, shown = "fsdp", rate.dp_sharded
    else:
        shown = rate.dp_exposed
    if overlap in ("early", "zero_2021"):
        return shown * total
    window = micro_batch * (par.micro_batches if par.zero >= 2 or overlap == "jax" else 1)
    return shown * total + (1.0 - shown) * larger(0.0, total - window)


def predict(cost: StepCost, sd: float = 0.0, profile: str = "", outside: Container[str] = ()) -> Time:
    """The plan's `time`. `outside`: axes whose groups leave their NVLink domain, for the advice in `limited_by`."""
    work, par = cost.work, cost.parallel
    step = value_of(cost.step_s)
    exposed = {axis: value_of(seconds) for axis, seconds in cost.exposed.items()}
    terms = {name: value_of(seconds) for name, seconds in cost.terms().items()}
    bubble = max(0.0, terms.get("bubble", 0.0))
    compute = sum(seconds for name, seconds in terms.items() if name not in exposed and name != "bubble")
    return Time(
        step_s=step,
        compute_s=compute,
        exposed_comm_s={axis: exposed[axis] for axis in ("tp", "cp", "ep", "pp", "dp")},
        bubble_ratio=bubble / step,
        limited_by=_limited_by(step, compute, bubble, exposed, par, outside),
        sd=sd,
        terms=terms,
        software=work.software.name,
        profile=profile,
    )


ADVICE = {
    "tp": "tensor-parallel communication: lower tp",
    "cp": "context-parallel communication: lower cp or raise the sequence length a rank",
    "ep": "expert all-to-all: lower ep",
    "pp": "transfers between pipeline stages: lower pp or raise the micro-batch size",
    "dp": "gradient synchronisation: raise the micro-batches a step, or lower dp",
    "bubble": "the pipeline bubble: more micro-batches, virtual stages (vppN) or a lower pp",
}


def _limited_by(
    step: float,
    compute: float,
    bubble: float,
    exposed: Mapping[str, float],
    parallel: Parallel,
    outside: Container[str],
) -> str:
    """The largest term that is not compute and what reduces it; compute itself when no other term reaches 5 %."""
    terms = {**exposed, "bubble": bubble}
    worst = max(terms, key=lambda name: terms[name])
    share = terms[worst] / step
    if share < 0.05:
        return f"compute ({compute / step:.0%} of the step)"
    if worst == "bubble" and parallel.pp > 1 and parallel.micro_batches * parallel.vpp < parallel.pp:
        return f"the pipeline bubble ({share:.0%} of the step): fewer micro-batches than stages; raise the global batch"
    inside = ", so that its groups stay inside one NVLink domain" if worst in ("tp", "ep") and worst in outside else ""
    return f"{ADVICE[worst]}{inside} ({share:.0%} of the step)"
