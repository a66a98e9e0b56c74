"""What a layer costs on one GPU: once for all spots that cut layers and micro-batches alike (tp, cp, ep, batch, sp).

Every number is the cost model's own (`compute`, `traffic`, `memory`), with the cheapest path that an axis can have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import structs

from orchestrator.plan.document import Parallel
from orchestrator.planner import activations, collective
from orchestrator.planner.collective import Operation
from orchestrator.planner.compute import NO_LAYER, beside_seconds, layer_seconds, loss_seconds
from orchestrator.planner.model_math import (
    dense_and_moe,
    dense_on_rank,
    embedding_params,
    layer_params,
    norm_params,
    samples_of_kinds,
)
from orchestrator.planner.solve import Ground
from orchestrator.planner.traffic import (
    WIDTH,
    Beside,
    Repeats,
    repeats,
    tensor_operations,
    vocabulary_operations,
)

from .best_paths import BestPaths
from .shapes import RankShape, Shape


class Mode(NamedTuple):
    """A way to recompute. Of pairs the first number is of a dense layer, the second of a mixture."""

    held: tuple[float, float]  # bytes for backward
    live: tuple[float, float]  # more, while the layer runs again
    again: tuple[float, float]  # seconds of forward that backward repeats
    repeats: Repeats
    tensor_s: tuple[float, float]  # tensor-parallel communication of a layer, forward and backward; backward is split
    work_s: float  # all layers and the head, forward and backward
    fastest_s: float  # of a layer, forward and backward
    slowest_s: float


NOTHING = activations.Kept(0.0, 0.0)


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

    def __init__(self, par: Parallel, ground: Ground, best: BestPaths):
        """`par`: only its tp, cp, ep, sp and micro-batch are read."""
        model, train = ground.model, ground.train
        self.par, self.ground = par, ground
        self.tokens = par.micro_batch_size * train.seq_len / par.cp
        self.kinds = samples_of_kinds(model)
        self.layer_s = [
            NO_LAYER if layer is None else layer_seconds(model, layer, par, train, ground.rate) for layer in self.kinds
        ]
        self.head_s = loss_seconds(model, par, train, ground.rate)
        self.widths = WIDTH[train.precision], WIDTH[train.grad_dtype]
        self.dense, self.moe = dense_and_moe(model, 0, model.layers)
        self.mixed = bool(self.dense and self.moe)
        there = [one for one, layer in zip(self.layer_s, self.kinds, strict=True) if layer is not None]
        self.fastest_forward = min(one.forward for one in there)
        self.most_core = max(one.core for one in there)
        par = structs.replace(par, schedule="1f1b")  # one that splits backward keeps no less
        self.kernels = activations.kernels_of(ground.cluster, model, par)
        self.boundary = activations.boundary_bytes(model, par, train)
        self.head_kept = activations.head_bytes(model, par, train, self.kernels)
        self.loss_bytes = activations.loss_bytes(model, par, train)
        self.stage_bytes = activations.stage_bytes(model, par, train, self.kernels)
        self._modes: dict[str, Mode] = {}
        self._fills: dict[tuple[str, int, int], Fill] = {}
        self._parameters()
        self._operations(best)

    def _parameters(self) -> None:
        """Of one layer on one rank, as `traffic.rank_parameters`."""
        model, tp, ep = self.ground.model, self.par.tp, self.par.ep
        own = [None if layer is None else layer_params(model, layer) for layer in self.kinds]
        self.dense_params = [0 if layer is None else dense_on_rank(model, layer, tp) for layer in self.kinds]
        self.expert_params = own[1].experts // (tp * ep) if own[1] else 0
        table = -(-model.vocab // tp) * model.hidden
        self.first_params = table + embedding_params(model)[1]
        self.last_params = norm_params(model) + table
        self.single_last_params = norm_params(model) + (0 if model.tied_embeddings else table)

    def _operations(self, best: BestPaths) -> None:
        par, model, width = self.par, self.ground.model, self.widths[0]
        hidden = self.tokens * model.hidden * width
        tensor, names = best.tensor(par.tp), ("all_reduce", "all_gather", "reduce_scatter")
        self.tensor_s = {name: collective.seconds(name, hidden, par.tp, tensor) for name in names}
        self.beside = beside_seconds(model, par, self.ground.train, self.ground.rate)
        self.pars = par, structs.replace(par, schedule="zb_h1")  # backward in one piece, and in two
        loss = collective.seconds("all_gather", self.tokens * 2 * 4 * par.tp, par.tp, tensor)
        #: of the first and of the last stage
        self.vocabulary_s = [
            (self._exposed(vocabulary_operations(one, 1, 0)), self._exposed(vocabulary_operations(one, 0, 1)) + loss)
            for one in self.pars
        ]
        keys = 2 * max(1, model.kv_heads // par.tp) * model.head_dim * self.tokens * width
        ring = best.chain(par.cp, par.tp)
        self.context_s = [collective.seconds("p2p", size, par.cp, ring) for size in (keys, 2 * keys)]
        routed = self.boundary * model.moe.top_k if model.moe else 0.0
        exchange = best.exchange(par.ep, par.tp)
        self.expert_s = collective.seconds("all_to_all", routed, par.ep, exchange) if routed else 0.0

    def _exposed(self, operations: Iterable[tuple[Operation, Beside, float]]) -> float:
        return sum(count * max(0.0, self.tensor_s[name] - self.beside[beside]) for name, beside, count in operations)

    def mode(self, recompute: str) -> Mode:
        if recompute not in self._modes:
            self._modes[recompute] = self._mode(recompute)
        return self._modes[recompute]

    def _mode(self, recompute: str) -> Mode:
        model, train = self.ground.model, structs.replace(self.ground.train, recompute=recompute)
        kept = [
            NOTHING
            if layer is None
            else activations.layer_kept(model, layer, self.tokens, self.par, train, self.kernels, recompute)
            for layer in self.kinds
        ]
        again = [{"none": 0.0, "selective": one.selective, "full": one.forward}[recompute] for one in self.layer_s]
        work = [3 * one.forward + more for one, more in zip(self.layer_s, again, strict=True)]
        there = [one for one, layer in zip(work, self.kinds, strict=True) if layer is not None]
        times = repeats(self.par, train)
        return Mode(
            held=(kept[0].held, kept[1].held),
            live=(kept[0].live, kept[1].live),
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
        layers = self.dense * self.dense_params[0] + self.moe * self.dense_params[1]
        ends = self.first_params + (self.single_last_params if pp == 1 else self.last_params)
        return (layers + ends) / pp, self.moe * self.expert_params / pp

    def busiest_params(self, pp: int, layers: float) -> float:
        """Dense parameters of the fullest rank, at least; `layers`: it has no fewer. Experts may fill another rank."""
        if not self.moe:
            return self.average_params(pp)[0]
        return layers * min(
            size for size, layer in zip(self.dense_params, self.kinds, strict=True) if layer is not None
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
        dense = rank.dense * self.dense_params[0] + rank.moe * self.dense_params[1] + rank.table * self.first_params
        last = self.single_last_params if single else self.last_params
        return dense + rank.head * last, rank.moe * self.expert_params
