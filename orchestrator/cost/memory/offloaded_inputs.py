"""Inputs of recomputed layers that autograd does not keep: those that are offloaded from forward to
backward (`train.offload_activations`), and those in a reserved buffer
(`train.contiguous_activations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from orchestrator.cost.model.layers import layer_groups, sample_layers
from orchestrator.cost.model.stages import held_layers, rank_stages, stage_range
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Model, Parallel, Train
from orchestrator.plan.layer import layer_moe
from orchestrator.plan.offload import BLOCK, ROOMS, offload_of, slot_bytes
from orchestrator.plan.schedules import TABLE, schedule_of

from .unequal_stages import StageBytes, unequal_peak

#: Inputs on the device while a layer is recomputed: its own, and that of the next one, which comes
#: back.
BACK = 2


def input_bytes(workload: Workload) -> float:
    """Returns the bytes that a rank keeps of one input."""
    parallel = workload.parallel
    return workload.boundary_bytes / (parallel.tp if workload.shares_inputs else 1)


def keeps_inputs_apart(train: Train) -> bool:
    """Reports whether the trainer, in place of autograd, keeps the inputs of recomputed layers."""
    return bool(offload_of(train).activations) or train.contiguous_activations is True


def inputs_of(model: Model, layer: int, train: Train, mode: str) -> int:
    """Returns the number of a layer's inputs that the trainer keeps in place of autograd.

    A recomputed layer has one, and selective recomputation one per half. Experts keep all of their
    tensors and no input.
    """
    if not keeps_inputs_apart(train) or mode == "none":
        return 0
    return 1 if mode == "full" or layer_moe(model, layer) is not None else 2


def received(parallel: Parallel, train: Train, index: int) -> bool:
    """Reports whether a stage holds its first recomputed layer's input because it received it."""
    layers = stage_range(parallel, index)
    modes = train.recompute_layers if train.recompute == "budget" else [train.recompute]
    return bool(layers) and layers.start > 0 and modes[min(layers.start, len(modes) - 1)] != "none"


def stage_inputs(workload: Workload, index: int) -> int:
    """Returns the number of those inputs per micro-batch in one stage."""
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    if not keeps_inputs_apart(train):
        return 0  # a short cut, because every stage of every costed layout comes here
    kinds = sample_layers(model)
    count = 0
    for kind, mode, layer_count in layer_groups(
        model,
        train,
        [held_layers(model, parallel, index)],
    ):
        layer = kinds[kind]
        assert layer is not None or not layer_count
        count += layer_count * inputs_of(model, layer, train, mode) if layer is not None else 0
    return count - 1 if count and received(parallel, train, index) else count


def back_bytes(workload: Workload, stages: Sequence[int]) -> float:
    """Returns the device bytes of offloaded inputs that are back on the rank with `stages`."""
    train = workload.train
    if not offload_of(train).activations:
        return 0.0
    most_inputs = max(stage_inputs(workload, index) for index in stages)
    return min(BACK, most_inputs) * input_bytes(workload)


def reserved_bytes(workload: Workload) -> list[float]:
    """Returns the bytes of the buffer that each pipeline rank reserves for inputs."""
    if workload.train.contiguous_activations is not True:
        return [0.0] * workload.parallel.pp
    slot = slot_bytes(ceil(input_bytes(workload)))
    return [inputs * slot for inputs in _most_inputs(workload)]


def _most_inputs(workload: Workload) -> list[float]:
    """Returns the number of inputs of each pipeline rank at the peak of a step."""
    parallel = workload.parallel
    schedule = (
        schedule_of(parallel)
        if parallel.schedule == TABLE
        else (parallel.schedule, parallel.pp, parallel.micro_batches, parallel.vpp)
    )
    return [
        unequal_peak(
            schedule,
            rank,
            stages,
            [StageBytes(float(stage_inputs(workload, index))) for index in stages],
        )
        for rank, stages in enumerate(rank_stages(parallel))
    ]


def offloaded_inputs(workload: Workload) -> list[tuple[float, float]]:
    """Returns (bytes of host memory, bytes of disk) of each pipeline rank at the peak of a step."""
    offload_target = offload_of(workload.train).activations
    size = input_bytes(workload)
    if not offload_target:
        return [(0.0, 0.0)] * workload.parallel.pp
    bytes_by_rank = []
    for peak_inputs in _most_inputs(workload):
        block = -(-int(size) // BLOCK) * BLOCK
        rooms = ROOMS * (block + BLOCK) if peak_inputs else 0
        bytes_by_rank.append(
            (float(rooms), peak_inputs * block)
            if offload_target == "disk"
            else (peak_inputs * size, 0.0)
        )
    return bytes_by_rank
