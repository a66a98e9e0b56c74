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
    offloads = False
    if job.recompute is None:
        train, assumption, offloads = _least_recomputation(job, recipe)
        assumed.append(assumption)
    else:
        train = recomputed(
            job.train,
            job.recompute,
            job.recompute_share,
            whole_layers=job.software.selective == "alternate",
            layers=job.model.layers,
        )
    worst = _fullest_rank(job, train, recipe)
    if offloads:
        offloaded_bytes = min(worst.activations, worst.total - worst.capacity)
        worst = structs.replace(
            worst,
            activations=worst.activations - offloaded_bytes,
            total=worst.total - offloaded_bytes,
        )
    return JobMemory(train, worst, as_measured(worst, kind, recipe), assumed)


def _fullest_rank(job: Job, train: Train, recipe: Recipe) -> Memory:
    """Returns the memory of the fullest pipeline rank."""
    workload = Workload(job.model, job.parallel, train)
    accounts = memory_by_pp_rank(workload, job.cluster, recipe, job.matmul)
    return max(accounts, key=lambda account: account.total)


#: GPUs that reach the memory of their CPU fast enough for activations: recipes offload activations
#: there instead of recomputing them.
_OFFLOADS = ("GB200", "GB300", "GH200")


class LeastRecomputation(NamedTuple):
    train: Train
    assumption: str
    offloads: bool  # True if activations are in the memory of the CPU.


def _least_recomputation(job: Job, recipe: Recipe) -> LeastRecomputation:
    """Returns full recomputation in as few layers as it takes to fit."""
    none = structs.replace(job.train, recompute="none")
    memory_without = _fullest_rank(job, none, recipe)
    overflow = memory_without.total - memory_without.capacity
    if overflow <= 0:
        return LeastRecomputation(none, "recompute=none: fits", False)
    if job.cluster.gpu.name.startswith(_OFFLOADS) and job.software.name in ("nemo", "megatron"):
        return LeastRecomputation(none, "recompute=none: activations in the CPU's memory", True)
    layers = job.model.layers
    memory_with_full = _fullest_rank(
        job,
        structs.replace(job.train, recompute="full"),
        recipe,
    )
    most_saved = max(1, memory_without.total - memory_with_full.total)
    count = min(layers, -(-layers * overflow // most_saved))
    step = max(1, layers // 16)
    # The fullest rank may hold more than its share of the layers that are not recomputed.
    while True:
        share = count / layers
        train = recomputed(
            job.train,
            "full",
            share,
            whole_layers=False,
            layers=layers,
        )
        if count >= layers or _fullest_rank(job, train, recipe).total <= memory_with_full.capacity:
            assumption = f"recompute=full in {share:.0%} of the layers: the least"
            return LeastRecomputation(train, assumption, False)
        count = min(layers, count + step)


def job_recipe(job: Job) -> Recipe:
    """Returns the memory recipe of a row's software, with its meaning of selective
    recomputation."""
    recipe = recipe_for(job.software)
    if recipe.kernels is not None:
        recipe = structs.replace(
            recipe,
            kernels=structs.replace(recipe.kernels, selective=job.software.selective),
        )
    return adapters_only(recipe) if job.task == "lora" else recipe


def recomputed(
    train: Train,
    mode: Recompute,
    share: float,
    whole_layers: bool,
    layers: int,
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
