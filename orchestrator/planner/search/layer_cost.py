"""Cost of one layer on one GPU, computed once for all meshes that give it equal shards and micro-batches.

Every number is the cost model's own (`compute`, `traffic`, `memory`), with the cheapest path that an axis can have.
Methods of context parallelism that divide attention evenly differ only in communication: they share a `LayerCost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import NamedTuple

from msgspec import structs

from orchestrator.plan.cluster import Operation
from orchestrator.plan.document import CpMethod, Model, Parallel
from orchestrator.planner.cost import collective
from orchestrator.planner.cost.compute import layer_seconds_by_kind, loss_seconds, overlap_seconds
from orchestrator.planner.cost.fabric import Path
from orchestrator.planner.cost.traffic import (
    Overlap,
    RecomputedShare,
    context_parallel_operations,
    recomputed_share,
    tensor_operations,
    vocabulary_operations,
)
from orchestrator.planner.memory import activations
from orchestrator.planner.memory.recipe import ORCH, Recipe, kernels_of
from orchestrator.planner.model.layers import (
    DTYPE_BYTES,
    dense_and_moe,
    dense_on_rank,
    embedding_params,
    layer_params,
    norm_params,
    sample_layers,
)
from orchestrator.planner.placement.axis_order import CostContext

from .best_paths import BestPaths
from .pipeline_shapes import PipelineShape, RankShape


class RecomputeCost(NamedTuple):
    """One recomputation mode. Pairs are (dense layer, MoE layer)."""

    recompute_s: tuple[float, float]  # seconds of forward that backward recomputes
    recomputed: RecomputedShare
    tensor_s: tuple[float, float]  # exposed, of a layer, forward and backward: with whole backward, with split backward
    work_s: float  # all layers and the head, forward and backward
    fastest_s: float  # of a layer, forward and backward
    slowest_s: float


NO_ACTIVATIONS = activations.ActivationBytes(0.0, 0.0)


class ShardParams(NamedTuple):
    """Parameters on one rank for given tp and ep, as `traffic.rank_parameters` counts them."""

    dense: tuple[int, int]  # of a dense layer, and of an MoE layer without its routed experts
    experts: int  # of an MoE layer
    first: int  # outside its layers, the first stage
    last: int  # outside its layers, the last stage
    single_last: int  # the last stage where it is the first one too


def shard_params(model: Model, tp: int, ep: int) -> ShardParams:
    dense, moe = sample_layers(model)
    table = -(-model.vocab // tp) * model.hidden
    return ShardParams(
        dense=(
            0 if dense is None else dense_on_rank(model, dense, tp),
            0 if moe is None else dense_on_rank(model, moe, tp),
        ),
        experts=0 if moe is None else layer_params(model, moe).experts // (tp * ep),
        first=table + embedding_params(model)[1],
        last=norm_params(model) + table,
        single_last=norm_params(model) + (0 if model.tied_embeddings else table),
    )


class PipelineParams(NamedTuple):
    """Parameters of the pipeline ranks of one pipeline shape."""

    held: list[tuple[int, int]]  # (dense, experts) of each rank of `PipelineShape.ranks`
    dense: int  # of the busiest rank, which sends the gradients
    experts: int
    layers: float  # of the busiest rank, per copy of the model
    moe_layers: float
    ends: set[tuple[float, float]]  # `traffic.end_shares` of the busiest rank; of all where several are equal


class LayerCost:
    """Seconds, parameters and bytes of one layer of each kind (dense, MoE) for one micro-batch on one GPU."""

    def __init__(
        self,
        par: Parallel,
        context: CostContext,
        best: BestPaths,
        params: ShardParams,
        recipe: Recipe = ORCH,
        matmul: str = "",
    ):
        """`par`: only tp, cp, ep, sp, cp_method and micro_batch_size are read."""
        model, train = context.model, context.train
        par = structs.replace(par, schedule="1f1b")  # a schedule that splits backward keeps no less
        self.par, self.context, self.best, self.params, self.recipe = par, context, best, params, recipe
        self.tokens = par.micro_batch_size * train.seq_len / par.cp
        self.kinds = sample_layers(model)
        self.layer_s = layer_seconds_by_kind(model, par, train, context.rate)
        self.head_s = loss_seconds(model, par, train, context.rate)
        self.widths = DTYPE_BYTES[train.precision], DTYPE_BYTES[train.grad_dtype]
        self.dense, self.moe = dense_and_moe(model, 0, model.layers)
        self.mixed = bool(self.dense and self.moe)
        there = [one for one, layer in zip(self.layer_s, self.kinds, strict=True) if layer is not None]
        self.fastest_forward, self.slowest_forward = (of(one.forward for one in there) for of in (min, max))
        self.most_core = max(one.core for one in there)
        self.kernels = kernels_of(recipe, context.cluster, model, par, matmul)
        self.boundary = activations.boundary_bytes(model, par, train)
        self.head_kept = activations.head_bytes(model, par, train, self.kernels)
        self.loss_bytes = activations.loss_bytes(model, par, train, self.kernels)
        self.stage_bytes = activations.stage_bytes(model, par, train, self.kernels)
        self.recompute_cost, self.activation_bytes = cache(self._recompute_cost), cache(self._activation_bytes)
        self.cp_communication = cache(self._cp_communication)
        self._pipeline_params: dict[tuple[str, int, int], PipelineParams] = {}
        self._operations(best)

    def _operations(self, best: BestPaths) -> None:
        par, model, width = self.par, self.context.model, self.widths[0]
        hidden = self.tokens * model.hidden * width
        tensor = best.tensor(par.tp)
        names: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
        self.tensor_s = {name: collective.seconds(name, hidden, par.tp, tensor) for name in names}
        self.overlap_s = overlap_seconds(model, par, self.context.train, self.context.rate, self.layer_s)
        self.pars = par, structs.replace(par, schedule="zb_h1")  # with whole backward, with split backward
        loss = collective.seconds("all_gather", self.tokens * 2 * 4 * par.tp, par.tp, tensor)
        #: by split of backward: exposed seconds of (first stage, last stage)
        self.vocabulary_s = [
            (self._exposed(vocabulary_operations(one, 1, 0)), self._exposed(vocabulary_operations(one, 0, 1)) + loss)
            for one in self.pars
        ]
        routed = self.boundary * model.moe.top_k if model.moe else 0.0
        exchange = best.exchange(par.ep, par.tp)
        self.expert_s = collective.seconds("all_to_all", routed, par.ep, exchange) if routed else 0.0

    @cached_property
    def other_sp(self) -> tuple[float, float]:
        """(exposed tensor-parallel seconds of a layer, most by which its forward may be slower) with `sp` inverted."""
        model, train, par = self.context.model, self.context.train, structs.replace(self.par, sp=not self.par.sp)
        moved = DTYPE_BYTES[train.precision] * self.tokens / self.context.rate.memory
        no_recompute = recomputed_share(par, structs.replace(train, recompute="none"))
        return self._exposed(tensor_operations(par, no_recompute)), 10 * model.hidden * (1 - 1 / par.tp) * moved

    def _exposed(self, operations: Iterable[tuple[Operation, Overlap, float]]) -> float:
        return sum(
            count * max(0.0, self.tensor_s[name] - self.overlap_s[overlap]) for name, overlap, count in operations
        )

    def _cp_communication(self, method: CpMethod, recompute: str) -> list[tuple[float, float, bool]]:
        """Context-parallel operations per layer and micro-batch: (seconds, count, whether attention hides it)."""
        recomputed = self.recompute_cost(recompute).recomputed
        par, best, cp = structs.replace(self.par, cp_method=method), self.best, self.par.cp
        path_of: dict[str, Callable[[int, int], Path]] = {"p2p": best.chain, "all_to_all": best.exchange}
        return [
            (collective.seconds(name, size, cp, path_of.get(name, best.ring)(cp, par.tp)), count, window == "attention")
            for name, size, count, window in context_parallel_operations(
                self.context.model, par, self.context.train, recomputed
            )
        ]

    def _activation_bytes(self, recompute: str) -> list[activations.ActivationBytes]:
        """Bytes of a dense layer and of an MoE layer with this recomputation mode."""
        model, train = self.context.model, structs.replace(self.context.train, recompute=recompute)
        of, same = activations.layer_activation_bytes, (self.tokens, self.par, train, self.kernels, recompute)
        return [NO_ACTIVATIONS if layer is None else of(model, layer, *same) for layer in self.kinds]

    def slowest(self, recompute: str | None) -> float:
        """Most seconds of a layer, forward and backward. `recompute` None: of all modes."""
        return 4 * self.slowest_forward if recompute is None else self.recompute_cost(recompute).slowest_s

    def _recompute_cost(self, recompute: str) -> RecomputeCost:
        train = structs.replace(self.context.train, recompute=recompute)
        recompute_s = [
            {"none": 0.0, "selective": one.selective, "full": one.forward}[recompute] for one in self.layer_s
        ]
        work = [3 * one.forward + more for one, more in zip(self.layer_s, recompute_s, strict=True)]
        there = [one for one, layer in zip(work, self.kinds, strict=True) if layer is not None]
        times, (whole, split) = recomputed_share(self.par, train), self.pars
        return RecomputeCost(
            recompute_s=(recompute_s[0], recompute_s[1]),
            recomputed=times,
            tensor_s=(self._exposed(tensor_operations(whole, times)), self._exposed(tensor_operations(split, times))),
            work_s=self.dense * work[0] + self.moe * work[1] + 3 * self.head_s,
            fastest_s=min(there),
            slowest_s=max(there),
        )

    # -------------------------------------------------------------------------------------- parameters

    def average_params(self, pp: int) -> tuple[float, float]:
        """(dense, expert) parameters of an average pipeline rank."""
        layers = self.dense * self.params.dense[0] + self.moe * self.params.dense[1]
        ends = self.params.first + (self.params.single_last if pp == 1 else self.params.last)
        return (layers + ends) / pp, self.moe * self.params.experts / pp

    def busiest_params(self, pp: int, layers: float) -> float:
        """Dense parameters of the fullest rank, at least; `layers`: it has no fewer. Experts may fill another rank."""
        if not self.moe:
            return self.average_params(pp)[0]
        return layers * min(
            size for size, layer in zip(self.params.dense, self.kinds, strict=True) if layer is not None
        )

    def pipeline_params(self, shape: PipelineShape) -> PipelineParams:
        """Parameters of a pipeline shape, the same for all schedules, ZeRO stages and batches."""
        found = self._pipeline_params.get(shape.key)
        if found is None:
            held = [self._held(rank, shape.single) for rank in shape.ranks]
            most = max(map(sum, held))
            # of equally full ranks the one with the fewest layers, which sends least
            (dense, experts), busiest = min(
                (one for one in zip(held, shape.ranks, strict=True) if sum(one[0]) == most),
                key=lambda one: one[1].dense + one[1].moe,
            )
            layers, moe_layers = (busiest.dense + busiest.moe) / shape.copies, busiest.moe / shape.copies
            ends = {
                (rank.table / shape.copies, rank.head / shape.copies)
                for one, rank in zip(held, shape.ranks, strict=True)
                if sum(one) == most
            }
            found = self._pipeline_params[shape.key] = PipelineParams(held, dense, experts, layers, moe_layers, ends)
        return found

    def _held(self, rank: RankShape, single: bool) -> tuple[int, int]:
        """(dense, expert) parameters of a pipeline rank, as `traffic.rank_parameters`."""
        dense = rank.dense * self.params.dense[0] + rank.moe * self.params.dense[1] + rank.table * self.params.first
        last = self.params.single_last if single else self.params.last
        return dense + rank.head * last, rank.moe * self.params.experts
