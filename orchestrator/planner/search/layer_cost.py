"""What a layer costs on one GPU: once for all spots that cut layers and micro-batches alike (tp, cp, ep, batch, form).

Every number is the cost model's own (`compute`, `traffic`, `memory`), with the cheapest path that an axis can have.
Ways of context parallelism that share the work evenly differ in what they send alone: they share a piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from msgspec import structs

from orchestrator.plan.document import CpMethod, Model, Parallel
from orchestrator.planner.cost import collective
from orchestrator.planner.cost.collective import Operation
from orchestrator.planner.cost.compute import beside_seconds, kinds_seconds, loss_seconds
from orchestrator.planner.cost.traffic import (
    WIDTH,
    Beside,
    Repeats,
    context_operations,
    repeats,
    tensor_operations,
    vocabulary_operations,
)
from orchestrator.planner.memory import activations
from orchestrator.planner.model.layers import (
    dense_and_moe,
    dense_on_rank,
    embedding_params,
    layer_params,
    norm_params,
    samples_of_kinds,
)
from orchestrator.planner.placement.axis_order import Ground

from .best_paths import BestPaths
from .pipeline_shapes import RankShape, Shape


class Mode(NamedTuple):
    """A way to recompute. Of pairs the first number is of a dense layer, the second of a mixture."""

    again: tuple[float, float]  # seconds of forward that backward repeats
    repeats: Repeats
    tensor_s: tuple[float, float]  # tensor-parallel communication of a layer, forward and backward; backward is split
    work_s: float  # all layers and the head, forward and backward
    fastest_s: float  # of a layer, forward and backward
    slowest_s: float


NOTHING = activations.Kept(0.0, 0.0)


class Params(NamedTuple):
    """Parameters on one rank, as `traffic.rank_parameters`."""

    dense: tuple[int, int]  # of a layer, by kind
    experts: int  # of a mixture
    first: int
    last: int
    single_last: int  # where the last stage is the first one


def params_of(model: Model, tp: int, ep: int) -> Params:
    dense, moe = samples_of_kinds(model)
    table = -(-model.vocab // tp) * model.hidden
    return Params(
        dense=tuple(0 if layer is None else dense_on_rank(model, layer, tp) for layer in (dense, moe)),
        experts=0 if moe is None else layer_params(model, moe).experts // (tp * ep),
        first=table + embedding_params(model)[1],
        last=norm_params(model) + table,
        single_last=norm_params(model) + (0 if model.tied_embeddings else table),
    )


class Fill(NamedTuple):
    """Parameters of the pipeline ranks of one shape."""

    held: list[tuple[int, int]]  # (dense, experts) of each rank of `Shape.ranks`
    dense: int  # of the busiest rank, which sends the gradients
    experts: int
    layers: float  # of the busiest rank, a copy of the model
    mixtures: float
    ends: set[tuple[float, float]]  # share of the micro-batches that pass first and last stage there; of equals all


class Piece:
    """Seconds, parameters and bytes of one layer of either kind (dense, mixture) and micro-batch on one GPU."""

    def __init__(self, par: Parallel, ground: Ground, best: BestPaths, params: Params):
        """`par`: only its tp, cp, ep, sp, cp_method and micro-batch are read."""
        model, train = ground.model, ground.train
        par = structs.replace(par, schedule="1f1b")  # one that splits backward keeps no less
        self.par, self.ground, self.best, self.params = par, ground, best, params
        self.tokens = par.micro_batch_size * train.seq_len / par.cp
        self.kinds = samples_of_kinds(model)
        self.layer_s = kinds_seconds(model, par, train, ground.rate)
        self.head_s = loss_seconds(model, par, train, ground.rate)
        self.widths = WIDTH[train.precision], WIDTH[train.grad_dtype]
        self.dense, self.moe = dense_and_moe(model, 0, model.layers)
        self.mixed = bool(self.dense and self.moe)
        there = [one for one, layer in zip(self.layer_s, self.kinds, strict=True) if layer is not None]
        self.fastest_forward, self.slowest_forward = (of(one.forward for one in there) for of in (min, max))
        self.most_core = max(one.core for one in there)
        self.kernels = activations.kernels_of(ground.cluster, model, par)
        self.boundary = activations.boundary_bytes(model, par, train)
        self.head_kept = activations.head_bytes(model, par, train, self.kernels)
        self.loss_bytes = activations.loss_bytes(model, par, train)
        self.stage_bytes = activations.stage_bytes(model, par, train, self.kernels)
        self._modes: dict[str, Mode] = {}
        self._kept: dict[str, list[activations.Kept]] = {}
        self._contexts: dict[tuple[CpMethod, str], list[tuple[float, float, bool]]] = {}
        self._fills: dict[tuple[str, int, int], Fill] = {}
        self._operations(best)

    def _operations(self, best: BestPaths) -> None:
        par, model, width = self.par, self.ground.model, self.widths[0]
        hidden = self.tokens * model.hidden * width
        tensor, names = best.tensor(par.tp), ("all_reduce", "all_gather", "reduce_scatter")
        self.tensor_s = {name: collective.seconds(name, hidden, par.tp, tensor) for name in names}
        self.beside = beside_seconds(model, par, self.ground.train, self.ground.rate, self.layer_s)
        self.pars = par, structs.replace(par, schedule="zb_h1")  # backward in one piece, and in two
        loss = collective.seconds("all_gather", self.tokens * 2 * 4 * par.tp, par.tp, tensor)
        #: of the first and of the last stage
        self.vocabulary_s = [
            (self._exposed(vocabulary_operations(one, 1, 0)), self._exposed(vocabulary_operations(one, 0, 1)) + loss)
            for one in self.pars
        ]
        routed = self.boundary * model.moe.top_k if model.moe else 0.0
        exchange = best.exchange(par.ep, par.tp)
        self.expert_s = collective.seconds("all_to_all", routed, par.ep, exchange) if routed else 0.0

    @cached_property
    def other_along(self) -> tuple[float, float]:
        """(least tensor-parallel communication of a layer, by how much its forward may take longer) if sequence
        parallelism were the other way."""
        model, train, par = self.ground.model, self.ground.train, structs.replace(self.par, sp=not self.par.sp)
        moved = WIDTH[train.precision] * self.tokens / self.ground.rate.memory
        nothing = repeats(par, structs.replace(train, recompute="none"))
        return self._exposed(tensor_operations(par, nothing)), 10 * model.hidden * (1 - 1 / par.tp) * moved

    def _exposed(self, operations: Iterable[tuple[Operation, Beside, float]]) -> float:
        return sum(count * max(0.0, self.tensor_s[name] - self.beside[beside]) for name, beside, count in operations)

    def context(self, way: CpMethod, recompute: str) -> list[tuple[float, float, bool]]:
        """(seconds once, count, whether it hides beside attention) of a layer and micro-batch."""
        if (way, recompute) not in self._contexts:
            self._contexts[way, recompute] = self._context(way, self.mode(recompute).repeats)
        return self._contexts[way, recompute]

    def _context(self, way: CpMethod, again: Repeats) -> list[tuple[float, float, bool]]:
        par, best, cp = structs.replace(self.par, cp_method=way), self.best, self.par.cp
        roads = {"p2p": best.chain, "all_to_all": best.exchange, "all_gather": best.ring, "reduce_scatter": best.ring}
        return [
            (collective.seconds(name, size, cp, roads[name](cp, par.tp)), count, window == "attention")
            for name, size, count, window in context_operations(self.ground.model, par, self.ground.train, again)
        ]

    def mode(self, recompute: str) -> Mode:
        if recompute not in self._modes:
            self._modes[recompute] = self._mode(recompute)
        return self._modes[recompute]

    def kept(self, recompute: str) -> list[activations.Kept]:
        """Bytes of a layer, by kind."""
        if recompute not in self._kept:
            model, train = self.ground.model, structs.replace(self.ground.train, recompute=recompute)
            self._kept[recompute] = [
                NOTHING
                if layer is None
                else activations.layer_kept(model, layer, self.tokens, self.par, train, self.kernels, recompute)
                for layer in self.kinds
            ]
        return self._kept[recompute]

    def slowest(self, recompute: str | None) -> float:
        """Seconds of a layer, forward and backward; None: whatever is recomputed."""
        return 4 * self.slowest_forward if recompute is None else self.mode(recompute).slowest_s

    def _mode(self, recompute: str) -> Mode:
        train = structs.replace(self.ground.train, recompute=recompute)
        again = [{"none": 0.0, "selective": one.selective, "full": one.forward}[recompute] for one in self.layer_s]
        work = [3 * one.forward + more for one, more in zip(self.layer_s, again, strict=True)]
        there = [one for one, layer in zip(work, self.kinds, strict=True) if layer is not None]
        times = repeats(self.par, train)
        return Mode(
            again=(again[0], again[1]),
            repeats=times,
            tensor_s=tuple(self._exposed(tensor_operations(one, times)) for one in self.pars),
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

    def fill(self, shape: Shape) -> Fill:
        """Of all schedules, ZeRO stages and batches of a shape."""
        found = self._fills.get(shape.key)
        if found is None:
            held = [self._held(rank, shape.single) for rank in shape.ranks]
            most = max(map(sum, held))
            # of equally full ranks the one with fewest layers: it sends least
            (dense, experts), busiest = min(
                (one for one in zip(held, shape.ranks, strict=True) if sum(one[0]) == most),
                key=lambda one: one[1].dense + one[1].moe,
            )
            layers, mixtures = (busiest.dense + busiest.moe) / shape.copies, busiest.moe / shape.copies
            ends = {
                (rank.table / shape.copies, rank.head / shape.copies)
                for one, rank in zip(held, shape.ranks, strict=True)
                if sum(one) == most
            }
            found = self._fills[shape.key] = Fill(held, dense, experts, layers, mixtures, ends)
        return found

    def _held(self, rank: RankShape, single: bool) -> tuple[int, int]:
        """(dense, expert) parameters of a pipeline rank, as `traffic.rank_parameters`."""
        dense = rank.dense * self.params.dense[0] + rank.moe * self.params.dense[1] + rank.table * self.params.first
        last = self.params.single_last if single else self.params.last
        return dense + rank.head * last, rank.moe * self.params.experts
