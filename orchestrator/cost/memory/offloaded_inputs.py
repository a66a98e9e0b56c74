"""Inputs of recomputed layers that are away from the device from forward to backward
(`train.offload_activations`)."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cost.model.layers import layer_groups, sample_layers
from orchestrator.cost.model.stages import held_layers, rank_stages, stage_range
from orchestrator.cost.time.layer_traffic import boundary_bytes
from orchestrator.cost.time.recomputed import shares_inputs
from orchestrator.plan.document import Model, Parallel, Train
from orchestrator.plan.flops import layer_moe
from orchestrator.plan.offload import BLOCK, ROOMS, offload_of
from orchestrator.plan.schedules import TABLE, schedule_of

from .unequal_stages import StageBytes, unequal_peak

#: On the device while a layer is recomputed: its own, and that of the next one, which comes back.
BACK = 2


def input_bytes(model: Model, parallel: Parallel, train: Train) -> float:
    """What a rank keeps of one input."""
    return boundary_bytes(model, parallel, train) / (
        parallel.tp if shares_inputs(parallel, train) else 1
    )


def inputs_of(model: Model, layer: int, train: Train, mode: str) -> int:
    """Inputs of a layer that are away: of a recomputed layer, or of its halves. Experts keep all,
    and no input."""
    if not offload_of(train).activations or mode == "none":
        return 0
    return 1 if mode == "full" or layer_moe(model, layer) is not None else 2


def received(parallel: Parallel, train: Train, index: int) -> bool:
    """Whether a stage holds the input of its first recomputed layer anyway, since it has received
    it."""
    layers = stage_range(parallel, index)
    modes = train.recompute_layers if train.recompute == "budget" else [train.recompute]
    return bool(layers) and layers.start > 0 and modes[min(layers.start, len(modes) - 1)] != "none"


def stage_inputs(model: Model, parallel: Parallel, train: Train, index: int) -> int:
    """Inputs of a micro-batch in one stage that are away."""
    if not offload_of(train).activations:
        return 0  # asked for each stage of each layout that is costed
    kinds = sample_layers(model)
    count = 0
    for kind, mode, many in layer_groups(model, train, [held_layers(model, parallel, index)]):
        layer = kinds[kind]
        assert layer is not None or not many
        count += many * inputs_of(model, layer, train, mode) if layer is not None else 0
    return count - 1 if count and received(parallel, train, index) else count


def back_bytes(model: Model, parallel: Parallel, train: Train, stages: Sequence[int]) -> float:
    """Bytes on the device of inputs that are away otherwise, on the rank that holds `stages`."""
    if not offload_of(train).activations:
        return 0.0
    most = max(stage_inputs(model, parallel, train, index) for index in stages)
    return min(BACK, most) * input_bytes(model, parallel, train)


def offloaded_inputs(model: Model, parallel: Parallel, train: Train) -> list[tuple[float, float]]:
    """(bytes of host memory, bytes of disk) of each pipeline rank at the peak of a step."""
    place = offload_of(train).activations
    size = input_bytes(model, parallel, train)
    if not place:
        return [(0.0, 0.0)] * parallel.pp
    schedule = (
        schedule_of(parallel)
        if parallel.schedule == TABLE
        else (parallel.schedule, parallel.pp, parallel.micro_batches, parallel.vpp)
    )
    result = []
    for rank, stages in enumerate(rank_stages(parallel)):
        counts = [stage_inputs(model, parallel, train, index) for index in stages]
        most = unequal_peak(schedule, rank, stages, [StageBytes(float(count)) for count in counts])
        block = -(-int(size) // BLOCK) * BLOCK
        rooms = ROOMS * (block + BLOCK) if most else 0
        result.append((float(rooms), most * block) if place == "disk" else (most * size, 0.0))
    return result
