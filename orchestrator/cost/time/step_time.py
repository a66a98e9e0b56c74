"""Seconds per optimizer step: compute and communication of every pipeline rank, and their schedule.

step = (span of the schedule + exposed transfers + exposed gradients + optimizer) * jitter * family.

Each pipeline rank is costed by itself: its layers of each kind with their own communication, its
share of token table and head, its own gradients. The schedule finds the slowest rank.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cached_property
from math import log2, sqrt
from typing import NamedTuple

from orchestrator.cost.dual import Number, scaled_like, value_of
from orchestrator.cost.memory.offloaded_inputs import input_bytes, stage_inputs
from orchestrator.cost.model.layers import layer_groups, params_outside_layers
from orchestrator.cost.model.stages import held_layers, rank_parameters, rank_stages
from orchestrator.cost.rates import Rates
from orchestrator.cost.time import collective
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Cluster, Parallel, Time
from orchestrator.plan.offload import keeps_shards_away, offload_of
from orchestrator.plan.schedules import copies_of

from .communication import (
    context_seconds,
    expert_seconds,
    exposed_gradients,
    gradient_seconds,
    tensor_seconds,
    transfer_seconds,
)
from .compute import NARROW_STATE, Compute, micro_batch_compute, optimizer_seconds
from .fabric import Path
from .limited_by import limited_by
from .offload import activation_seconds, offload_seconds, travel_seconds
from .pipeline import rank_seconds, span_seconds
from .traffic import (
    PathKey,
    sends_per_micro_batch,
    shard_ranks,
    sums_table,
    table_gradient_bytes,
)

INNER = ("tp", "cp", "ep")  # the axes whose communication is part of a stage

#: Schedules that are never idle if a step may begin before the last one has ended on all ranks
#: (arXiv 2401.10241).
NO_BUBBLE = ("zb_h2", "zbv")


#: The term of a step in which tensor-parallel ranks gather the inputs that they share.
SHARED_INPUTS = "inputs"


class Stage(NamedTuple):
    """The layers and model ends of a virtual stage."""

    # (kind as in `sample_layers`, recomputation mode, number)
    layers: tuple[tuple[int, str, int], ...]
    first: bool
    last: bool
    #: Bytes per micro-batch of inputs that leave the device in forward and come back in backward,
    #: or are copied into a reserved buffer.
    away: float = 0.0


class Work(NamedTuple):
    """The compute of a step: everything that does not depend on where the ranks are."""

    workload: Workload
    rate: Rates
    compute: Compute
    stages: list[Stage]
    held: list[tuple[int, int]]  # (dense, expert) parameters of each pipeline rank
    nodes: int
    state: str = ""  # as `Optim.state`
    offload: Cluster | None = None  # the cluster whose hosts compute the update or keep activations


def step_work(
    workload: Workload,
    rate: Rates,
    gpus_per_node: int,
    compute: Compute | None = None,
    cluster: Cluster | None = None,
    state: str = "",
) -> Work:
    """Returns the compute of one step at the cost model's rates.

    `compute` is that of its micro-batches, if it is known. `cluster` has the hosts of an offloaded
    update, if the plan asks for one.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    last = len(parallel.stage_layers) - 1
    held = [held_layers(model, parallel, stage) for stage in range(last + 1)]
    stages = [
        Stage(
            tuple(group for group in layer_groups(model, train, [layers]) if group[2]),
            first=stage_index == 0,
            last=stage_index == last,
            away=stage_inputs(workload, stage_index) * input_bytes(workload),
        )
        for stage_index, layers in enumerate(held)
    ]
    return Work(
        workload=workload,
        rate=rate,
        compute=compute or micro_batch_compute(workload, rate),
        stages=stages,
        held=rank_parameters(model, parallel),
        nodes=-(-parallel.world_size // gpus_per_node),
        state=state,
        offload=cluster if train.offload else None,
    )


class StepCost:
    """Seconds per step with the ranks in one nesting order."""

    def __init__(self, work: Work, paths: Mapping[PathKey, Path]):
        self.work = work
        self.paths = paths
        self.workload = work.workload
        self.parallel = self.workload.parallel
        self.tensor = tensor_seconds(self.workload, work.rate, work.compute, paths)
        context = context_seconds(self.workload, work.rate, paths)
        experts = expert_seconds(self.workload, work.rate, paths)
        #: Exposed communication of a dense and of an MoE layer, forward and backward, by axis.
        self.inner: list[dict[str, Number]] = [
            {"tp": self.tensor.dense, "cp": context, "ep": 0.0},
            {"tp": self.tensor.moe, "cp": context, "ep": experts},
        ]
        #: Seconds per micro-batch by which the copies of activations to the host and back outlast
        #: its work, or of those into a reserved buffer.
        self.late: dict[Stage, Number] = {}
        seconds_of_stage: dict[Stage, tuple[Number, Number]] = {}
        for stage in work.stages:
            if stage not in seconds_of_stage:
                seconds_of_stage[stage] = self._stage(stage)
        self.stages = [seconds_of_stage[stage] for stage in work.stages]
        #: Seconds of one micro-batch on each pipeline rank.
        self.ranks = rank_seconds(self.parallel, [sum(both) for both in self.stages])
        self.slowest = max(range(len(self.ranks)), key=lambda rank: value_of(self.ranks[rank]))

    def _input_gathers(self) -> list[Number]:
        """Returns the part of `tensor` that gathers shared inputs (ZeRO-R's Pa), of a dense and of
        an MoE layer."""
        without_gathers = tensor_seconds(
            self.workload.with_whole_inputs,
            self.work.rate,
            self.work.compute,
            self.paths,
        )
        return [
            self.tensor.dense - without_gathers.dense,
            self.tensor.moe - without_gathers.moe,
        ]

    # ---------------------------------------------------------------------------------- one stage

    def _stage(self, stage: Stage) -> tuple[Number, Number]:
        """Returns the (forward, backward) seconds of one micro-batch.

        Communication inside the stage and recomputation are included.
        """
        forward: Number = 0.0
        backward: Number = 0.0
        for kind, mode, count in stage.layers:
            layer = self.work.compute.kinds[kind]
            inner = sum(self.inner[kind].values()) / 2
            forward += count * (layer.forward + inner)
            backward += count * (layer.backward + layer.recompute_s(mode) + inner)
        if stage.first:
            forward += self.tensor.first
        if stage.last:
            forward += self.work.compute.loss[0] + self.tensor.last / 2
            backward += self.work.compute.loss[1] + self.tensor.last / 2
        offload = self.work.offload
        if not stage.away:
            return forward, backward
        if self.workload.train.contiguous_activations is True:  # read and written
            self.late[stage] = 2 * stage.away * self.work.rate.byte_s
            return forward + self.late[stage], backward
        if offload is None:
            return forward, backward

        def exposed_copies(work_s: Number) -> Number:
            """Returns the seconds by which copies of activations outlast `work_s`."""
            return activation_seconds(
                stage.away,
                self.workload.train,
                offload,
                self.work.rate.byte_s,
                work_s,
            )

        forward_late = exposed_copies(forward)
        backward_late = exposed_copies(backward)
        self.late[stage] = forward_late + backward_late
        return forward + forward_late, backward + backward_late

    # ---------------------------------------------------------------------------------- the step

    @cached_property
    def transfers(self) -> Number:
        """Exposed seconds of transfers between stages."""
        par = self.parallel
        work = self.work
        if par.pp == 1:
            return 0.0
        size = self.workload.boundary_bytes
        once = transfer_seconds(size, par.pp, work.rate, self.paths)
        return once * (par.micro_batches * sends_per_micro_batch(par) + 2 * (par.pp - 1))

    @cached_property
    def sent(self) -> list[Number]:
        """Seconds of gradients and gathered weights, hidden or not, of each pipeline rank."""
        work = self.work
        seconds_of_held = dict[tuple[int, int], Number]()
        outside = params_outside_layers(self.workload.model, self.parallel.tp)
        for held in work.held:
            if held not in seconds_of_held:
                seconds_of_held[held] = gradient_seconds(
                    self.workload,
                    held,
                    work.rate,
                    self.paths,
                    outside,
                )
        return [seconds_of_held[held] for held in work.held]

    @cached_property
    def gradients(self) -> Number:
        """Exposed seconds of gradients and gathered weights, of the rank that waits longest.

        With tied embeddings, both ends of the pipeline sum the gradient of the table.
        """
        work = self.work
        par = self.parallel
        exposed = dict[tuple[float, float], Number]()
        for sent, seconds in zip(self.sent, self.ranks, strict=True):
            key = value_of(sent), value_of(seconds)
            if key not in exposed:
                exposed[key] = exposed_gradients(
                    sent,
                    par,
                    work.rate,
                    self.workload.software,
                    seconds,
                )
        shown = max(exposed.values(), key=value_of)
        model = self.workload.model
        if sums_table(model, par) and (("pp",), "ring") in self.paths:
            size = table_gradient_bytes(self.workload)
            shown += collective.seconds(
                "all_reduce",
                size,
                2,
                self.paths[("pp",), "ring"],
                work.rate.ring,
            )
        return shown

    @cached_property
    def constant(self) -> Number:
        """Seconds of optimizer and network that are the same wherever the ranks are."""
        par = self.parallel
        work = self.work
        most_parameters = max(map(sum, self.work.held))
        shards = shard_ranks(par)
        narrow_bytes = NARROW_STATE.get(work.state, 0.0)
        if work.offload is None or not offload_of(self.workload.train).optimizer:
            narrow = narrow_bytes * most_parameters / shards
            optimizer_s = constant_seconds(par, work.rate, most_parameters, work.nodes)
            return optimizer_s + narrow * work.rate.byte_s
        train = self.workload.train
        away = keeps_shards_away(offload_of(train), par)
        costs = {
            "byte_s": work.rate.byte_s,
            "gpu_work_s": par.micro_batches * self.ranks[self.slowest],
        }
        offload_s = offload_seconds(
            most_parameters,
            shards,
            train,
            work.offload,
            shards_away=away,
            narrow_bytes=narrow_bytes,
            **costs,
        )
        if away:
            shard = most_parameters / shards
            offload_s += travel_seconds(shard, par, train, work.offload, **costs)
        return constant_seconds(par, work.rate, 0.0, work.nodes) + offload_s

    @cached_property
    def outside(self) -> Number:
        """Seconds of the step outside the pipeline."""
        return self.transfers + self.gradients + self.constant

    @cached_property
    def factor(self) -> Number:
        """The factor of jitter and of the software's family."""
        return step_factor(self.work.rate, self.work.nodes)

    @property
    def never_idle(self) -> bool:
        """Whether the schedule and the software leave no pipeline rank idle."""
        return self.workload.software.overlapped_steps and self.parallel.schedule in NO_BUBBLE

    @cached_property
    def span(self) -> tuple[Number, float]:
        """(seconds from first forward to last backward, idle / busy). May simulate the schedule."""
        par = self.parallel
        if self.never_idle:
            return par.micro_batches * self.ranks[self.slowest], 0.0
        forward, backward = (
            [value_of(stage[direction]) for stage in self.stages] for direction in (0, 1)
        )
        span, idle = span_seconds(par, forward, backward)
        # The span is proportional to the time of the slowest rank.
        return scaled_like(span, self.ranks[self.slowest]), idle

    @cached_property
    def step_s(self) -> Number:
        """Seconds per step."""
        return (self.span[0] + self.outside) * self.factor

    @cached_property
    def exposed(self) -> dict[str, Number]:
        """Communication that no compute hides, by axis, in seconds per step of the slowest rank."""
        par = self.parallel
        m = self.parallel.micro_batches
        seconds_by_axis: dict[str, Number] = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
        for stage in rank_stages(par)[self.slowest]:
            held = self.work.stages[stage]
            for kind, _, count in held.layers:
                for axis, seconds in self.inner[kind].items():
                    seconds_by_axis[axis] += m * count * seconds
            seconds_by_axis["tp"] += m * (
                held.first * self.tensor.first + held.last * self.tensor.last
            )
        copies = copies_of(par)
        seconds_by_axis = {
            axis: seconds * self.factor / copies for axis, seconds in seconds_by_axis.items()
        }
        return seconds_by_axis | {
            "pp": self.transfers * self.factor,
            "dp": self.gradients * self.factor,
        }

    @cached_property
    def gathered_inputs(self) -> Number:
        """The part of the exposed tensor parallelism that gathers shared inputs. A search, which
        compares whole steps, does not ask for it."""
        if not self.workload.shares_inputs:
            return 0.0
        of_layers = self._input_gathers()
        gathers: Number = 0.0
        for stage in rank_stages(self.parallel)[self.slowest]:
            for kind, _, count in self.work.stages[stage].layers:
                gathers += count * of_layers[kind]
        return gathers * self.parallel.micro_batches * self.factor / copies_of(self.parallel)

    def terms(self) -> dict[str, Number]:
        """Returns the seconds of the step by term; they sum to `step_s`."""
        par = self.parallel
        m = self.parallel.micro_batches
        work = self.work
        seconds_by_term: dict[str, Number] = {}

        def add(name: str, seconds: Number) -> None:
            """Adds seconds to a term."""
            seconds_by_term[name] = seconds_by_term.get(name, 0.0) + seconds

        scale = self.factor * m / copies_of(par)
        reserves = self.workload.train.contiguous_activations is True
        copies = "checkpoints" if reserves else "activations"
        for stage_index in rank_stages(par)[self.slowest]:
            stage = work.stages[stage_index]
            for kind, mode, count in stage.layers:
                layer = work.compute.kinds[kind]
                for name, seconds in layer.terms.items():
                    add(name, count * seconds * scale)
                add("recompute", count * layer.recompute_s(mode) * scale)
            add(copies, self.late.get(stage, 0.0) * scale)
            if stage.last:
                add("head", (work.compute.loss[0] + work.compute.loss[1]) * scale)
        for axis, seconds in self.exposed.items():
            add(axis, seconds)
        add(SHARED_INPUTS, self.gathered_inputs)
        add("tp", -self.gathered_inputs)
        add("bubble", (self.span[0] - m * self.ranks[self.slowest]) * self.factor)
        add("optimizer", (self.outside - self.transfers - self.gradients) * self.factor)
        return {
            name: seconds for name, seconds in seconds_by_term.items() if value_of(seconds) != 0.0
        }


def constant_seconds(
    par: Parallel,
    rate: Rates,
    parameters: float,
    nodes: int,
) -> Number:
    """Returns the seconds of the optimizer on the fullest rank, and of a slow network.

    The fullest rank holds `parameters` parameters.
    """
    replicas = par.dp * par.ep * par.cp
    total = optimizer_seconds(parameters, replicas if par.zero else 1, rate)
    return total + rate.slow_fabric_s * sqrt(replicas) if nodes > 1 else total


def step_factor(rate: Rates, nodes: int) -> Number:
    """Returns the factor of the jitter of many nodes, and of the software's family."""
    return (1.0 + rate.nodes * log2(nodes)) * rate.family


def predict(cost: StepCost, profile: str = "", outside: Container[str] = ()) -> Time:
    """Returns the plan's `time`.

    `outside` holds the axes whose groups leave their NVLink domain, for the advice in `limited_by`.
    """
    par = cost.parallel
    step = value_of(cost.step_s)
    exposed = {axis: value_of(seconds) for axis, seconds in cost.exposed.items()}
    terms = {name: value_of(seconds) for name, seconds in cost.terms().items()}
    bubble = max(0.0, terms.get("bubble", 0.0))
    waiting = {*exposed, SHARED_INPUTS, "bubble"}
    compute = sum(seconds for name, seconds in terms.items() if name not in waiting)
    return Time(
        step_s=step,
        compute_s=compute,
        exposed_comm_s={axis: exposed[axis] for axis in ("tp", "cp", "ep", "pp", "dp")},
        bubble_ratio=bubble / step,
        limited_by=limited_by(
            step,
            compute,
            bubble,
            exposed=exposed,
            parallel=par,
            outside=outside,
        ),
        terms=terms,
        software=cost.workload.software.name,
        profile=profile,
    )
