"""Predicts the memory of a row's job by the recipe of its software, as the kind of memory that the
row measured: allocated, reserved, or of the whole process."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from orchestrator.cost.memory.rank_memory import as_measured, memory_by_pp_rank
from orchestrator.cost.memory.recipe import Recipe, adapters_only, measured_kind, recipe_for
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Memory, Recompute, Train

from .rows import Job


class JobMemory(NamedTuple):
    train: Train  # With the recomputation that the row states, or the least with which it fits.
    worst: Memory  # Memory of the fullest pipeline rank.
    peak_bytes: float  # The peak that the row's kind of measurement would show.
    assumed: list[str]

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.worst.capacity


def job_memory(job: Job) -> JobMemory:
    """Returns the memory of a row's job, with the assumptions that were made beyond those of
    `read_row`."""
    recipe = job_recipe(job)
    assumed = list[str]()
    kind, is_stated = measured_kind(job.mem_kind, recipe)
    if job.mem_kind and not is_stated:
        assumed.append(f"peak_mem_gib: {kind}")
    cluster = job.cluster
    model = job.model
    parallel = job.parallel
    offloaded = False
    if job.recompute is None:
        train, assumption, offloaded = _least(job, recipe)
        assumed.append(assumption)
    else:
        train = recomputed(
            job.train,
            job.recompute,
            job.recompute_share,
            job.software.selective == "alternate",
            model.layers,
        )
    accounts = memory_by_pp_rank(Workload(model, parallel, train), cluster, recipe, job.matmul)
    worst = max(accounts, key=lambda account: account.total)
    if offloaded:
        offloaded_bytes = min(worst.activations, worst.total - worst.capacity)
        worst = structs.replace(
            worst,
            activations=worst.activations - offloaded_bytes,
            total=worst.total - offloaded_bytes,
        )
    return JobMemory(train, worst, as_measured(worst, kind, recipe), assumed)


#: GPUs that reach the memory of their CPU fast enough for activations: recipes offload activations
#: there instead of recomputing them.
_OFFLOADS = ("GB200", "GB300", "GH200")


def _least(job: Job, recipe: Recipe) -> tuple[Train, str, bool]:
    """Returns (`train` with full recomputation in as few layers as it takes to fit, the assumption,
    True if activations are offloaded)."""

    def fullest_rank(train: Train) -> Memory:
        accounts = memory_by_pp_rank(
            Workload(job.model, job.parallel, train), job.cluster, recipe, job.matmul
        )
        return max(accounts, key=lambda account: account.total)

    not_recomputed = structs.replace(job.train, recompute="none")
    memory_without = fullest_rank(not_recomputed)
    if memory_without.total <= memory_without.capacity:
        return not_recomputed, "recompute=none: fits", False
    if job.cluster.gpu.name.startswith(_OFFLOADS) and job.software.name in ("nemo", "megatron"):
        return not_recomputed, "recompute=none: activations in the CPU's memory", True
    layers = job.model.layers
    memory_with_full = fullest_rank(structs.replace(job.train, recompute="full"))
    count = min(
        layers,
        -(
            -layers
            * (memory_without.total - memory_without.capacity)
            // max(1, memory_without.total - memory_with_full.total)
        ),
    )
    step = max(1, layers // 16)
    # The fullest rank may hold more than its share of the layers that are not recomputed.
    while True:
        train = recomputed(job.train, "full", count / layers, False, layers)
        if count >= layers or fullest_rank(train).total <= memory_with_full.capacity:
            return train, f"recompute=full in {count / layers:.0%} of the layers: the least", False
        count = min(layers, count + step)


def job_recipe(job: Job) -> Recipe:
    """Returns the memory recipe of a row's software, with its meaning of selective
    recomputation."""
    recipe = recipe_for(job.software)
    if recipe.kernels is not None:
        recipe = structs.replace(
            recipe, kernels=structs.replace(recipe.kernels, selective=job.software.selective)
        )
    return adapters_only(recipe) if job.task == "lora" else recipe


def recomputed(
    train: Train, mode: Recompute, share: float, whole_layers: bool, layers: int
) -> Train:
    """Returns `train` with a mode of recomputation in a share of the layers, spread evenly.
    `whole_layers` says that selective recomputation means whole layers."""
    if mode == "none" or (share >= 1.0 and not (whole_layers and mode == "selective")):
        return structs.replace(train, recompute=mode)
    chosen: Recompute = "full" if whole_layers else mode
    modes: list[Recompute] = [
        chosen if int((layer + 1) * share) > int(layer * share) else "none"
        for layer in range(layers)
    ]
    return structs.replace(train, recompute="budget", recompute_layers=modes)
