"""Lower bounds of step time and memory, in microseconds each: the cost model with the best paths there are.

Every term is the cost model's own (`traffic`, `compute`, `step_time`, `memory`) with two exchanges, both downwards:
the cheapest path that an axis can have in any nesting order, and a pipeline span that no order of work can beat. So no
choice costs less than its bound, and on a regular cluster most cost just that.

A `SpotBound` holds what all choices of a spot share, a `BranchBound` (spot, recomputation, ZeRO) what all its pipelines
share; `BranchBound.pipeline` bounds one whole choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from orchestrator.plan.document import Parallel
from orchestrator.planner import collective, memory
from orchestrator.planner.compute import layer_seconds, loss_seconds, optimizer_seconds
from orchestrator.planner.fabric import Path
from orchestrator.planner.model_math import (
    dense_and_moe,
    embedding_params,
    layer_params,
    norm_params,
    samples_of_kinds,
)
from orchestrator.planner.pipeline import CLOSED_FORM, EQUAL, held_at_once
from orchestrator.planner.solve import Ground
from orchestrator.planner.traffic import WIDTH, gradient_operations

from .best_paths import BestPaths
from .shapes import RankShape, Shape
from .space import Spot

SPLIT = ("zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipev")  # a rank may do weight gradients while others drain
ROUNDING = 1 - 1e-9  # bounds add up in another order than the model


class Pipeline(NamedTuple):
    """What recomputation, schedule and virtual stages decide, whatever the ZeRO stage."""

    seconds: float  # of the step, without transfers between stages, gradients and optimizer
    transfers: float  # between stages, that the busiest rank sends a step
    dense: int  # parameters of the busiest rank
    experts: int
    backward: float  # at most: what gradients hide behind
    compute: float  # at most: what gathered weights hide behind
    held: list[tuple[int, int, float]]  # by rank: (dense parameters, experts, bytes kept for backward)


class SpotBound:
    """Seconds and parameters of a layer of either kind (dense, mixture), and of one operation of each axis."""

    def __init__(self, spot: Spot, ground: Ground, best: BestPaths, template: Parallel):
        self.spot, self.ground, self.best = spot, ground, best
        model, train = ground.model, ground.train
        names = ("tp", "cp", "ep", "pp", "dp", "sp", "micro_batch_size", "micro_batches")
        self.par = structs.replace(template, **{name: getattr(spot, name) for name in names})
        self.tokens = spot.micro_batch_size * train.seq_len / spot.cp
        self.kinds = samples_of_kinds(model)
        (self.dense_s, self.dense_core), (self.moe_s, self.moe_core) = (
            (0.0, 0.0) if layer is None else layer_seconds(model, layer, self.par, train, ground.rate)
            for layer in self.kinds
        )
        self.head_s = loss_seconds(model, self.par, train, ground.rate)
        self._parameters()
        self._operations()
        self.pipelines: dict[tuple[str, str, int], Pipeline] = {}
        width, rows = WIDTH[train.precision], spot.tp if spot.sp else 1
        self.boundary = model.hidden * width / rows * self.tokens
        self.head_kept = memory.head_bytes(model, self.par, train, memory.Kernels())

    def kept(self, recompute: str) -> tuple[float, float]:
        """Bytes that a layer of either kind keeps for backward; with "full", all that is there while it runs again."""
        model, train = self.ground.model, structs.replace(self.ground.train, recompute=recompute)
        found, kernels = [], memory.Kernels()
        for layer in self.kinds:
            kept = (
                memory.layer_activations(model, layer, self.tokens, self.par, train, kernels)
                if layer is not None
                else {}
            )
            found.append(memory.selective_bytes(kept, kernels) if recompute == "selective" else sum(kept.values()))
        return found[0], found[1]

    def states(self, zero: int) -> tuple[float, float]:
        """Bytes of states a dense parameter and an expert's."""
        par, many = structs.replace(self.par, zero=zero), 1 << 30
        found = [memory.model_states(*counts, par, self.ground.train) for counts in ((many, 0), (0, many))]
        dense, experts = ((one.params + one.grads + one.optimizer) / many for one in found)
        return dense, experts

    def beside(self, zero: int) -> float:
        par = structs.replace(self.par, zero=zero)
        return memory.buffers(self.ground.model, par, self.ground.train, self.ground.profile)

    def branches(self, recomputes: Sequence[str], zeros: Sequence[int]) -> Iterator[BranchBound]:
        kept = {recompute: self.kept(recompute) for recompute in recomputes}
        for zero in zeros:
            states, beside = self.states(zero), self.beside(zero)
            for recompute in recomputes:
                yield BranchBound(self, recompute, zero, states, beside, kept[recompute])

    def _parameters(self) -> None:
        """Of one layer on one rank, as `traffic.rank_parameters`."""
        model, tp, ep = self.ground.model, self.spot.tp, self.spot.ep
        own = [None if layer is None else layer_params(model, layer) for layer in self.kinds]
        dense = [0 if one is None else (one.attention + one.ffn) // tp + one.replicated for one in own]
        self.dense_params, self.moe_params = dense
        self.expert_params = own[1].experts // (tp * ep) if own[1] else 0
        table = -(-model.vocab // tp) * model.hidden
        self.first_params = table + embedding_params(model)[1]
        self.last_params = norm_params(model) + table
        self.single_last_params = norm_params(model) + (0 if model.tied_embeddings else table)

    def _operations(self) -> None:
        spot, best, model, train = self.spot, self.best, self.ground.model, self.ground.train
        width = WIDTH[train.precision]
        hidden = self.tokens * model.hidden * width
        rows = spot.tp if spot.sp else 1
        tensor = best.tensor(spot.tp)
        names = ("all_gather", "reduce_scatter") if spot.sp else ("all_reduce",)
        self.tp_s = sum(collective.seconds(name, hidden, spot.tp, tensor) for name in names)
        keys = 2 * max(1, model.kv_heads // spot.tp) * model.head_dim * self.tokens * width
        ring = best.chain(spot.cp, spot.tp)
        self.cp_s = [collective.seconds("p2p", size, spot.cp, ring) for size in (keys, 2 * keys)]
        routed = hidden * model.moe.top_k / rows if model.moe else 0.0
        self.ep_s = (
            collective.seconds("all_to_all", routed, spot.ep, best.exchange(spot.ep, spot.tp)) if routed else 0.0
        )
        self._nest(hidden / rows)

    def _nest(self, boundary: float) -> None:
        """(seconds of a transfer between stages, groups that sum dense and expert gradients with their ring): with
        stages inside an NVLink domain, where they leave it fewer places for those groups, and with stages apart.
        """
        spot, best = self.spot, self.best
        members = spot.cp * spot.ep * spot.dp, spot.cp * spot.dp
        self.nestings = []
        for near in (True, False):
            if near and spot.pp > best.mates(spot.tp):
                continue
            pipeline = collective.seconds("p2p", boundary, spot.pp, best.chain(spot.pp, spot.tp, near))
            beside = spot.pp if near else 1
            self.nestings.append((pipeline, [(n, best.ring(n, spot.tp, beside)) for n in members]))
            if spot.pp == 1:
                break

    def least_seconds(self) -> float:
        """No choice of this spot takes less: the compute of the slowest rank, nothing repeated and nothing idle."""
        return self.spot.micro_batches * 3 * self.slowest_forward() * ROUNDING

    def slowest_forward(self) -> float:
        """At least the average rank's; where layers are alike some rank has the rounded-up number of them."""
        model, pp = self.ground.model, self.spot.pp
        dense, moe = dense_and_moe(model, 0, model.layers)
        average = (dense * self.dense_s + moe * self.moe_s + self.head_s) / pp
        return average if dense and moe else max(average, -(-model.layers // pp) * max(self.dense_s, self.moe_s))

    def parameters(self, rank: RankShape, single: bool) -> tuple[int, int]:
        """(dense, expert) parameters of a pipeline rank, as `traffic.rank_parameters`."""
        dense = rank.dense * self.dense_params + rank.moe * self.moe_params + rank.table * self.first_params
        last = self.single_last_params if single else self.last_params
        return dense + rank.head * last, rank.moe * self.expert_params


class BranchBound:
    """A spot with recomputation and ZeRO chosen."""

    def __init__(
        self,
        base: SpotBound,
        recompute: str,
        zero: int,
        states: tuple[float, float],
        beside: float,
        kept: tuple[float, float],
    ):
        self.base, self.recompute, self.zero, self.beside = base, recompute, zero, beside
        self.par = structs.replace(base.par, zero=zero)
        self.dense_bytes, self.expert_bytes = states
        self.dense_kept, self.moe_kept = kept
        self.passes = 3 if recompute == "full" else 2

    # -------------------------------------------------------------------------------------- of every pipeline

    def least(self, balanced: bool) -> tuple[float, float]:
        """(bytes, seconds) that every pipeline of this branch needs: an average rank's states and work, min(m, p)
        micro-batches in some rank. `balanced`: by the planner, so that each rank has about its share of the layers.
        """
        base, model, pp, m = self.base, self.base.ground.model, self.base.spot.pp, self.base.spot.micro_batches
        dense, moe = dense_and_moe(model, 0, model.layers)
        plain = dense * base.dense_params + moe * base.moe_params + base.first_params
        plain = (plain + (base.single_last_params if pp == 1 else base.last_params)) / pp
        experts = moe * base.expert_params / pp
        layers = model.layers if pp == 1 else max(0, model.layers // pp - 1) * balanced
        kept = min(size for size in (self.dense_kept, self.moe_kept) if size)
        kept = base.boundary if self.recompute == "full" else kept
        size = plain * self.dense_bytes + experts * self.expert_bytes + min(m, pp) * layers * kept + self.beside
        work = 3 * base.slowest_forward()
        if self.recompute == "full":
            work = max(work, 4 * base.slowest_forward() - base.head_s)  # the head is not repeated
        seconds = m * (work + 2 * self.passes * layers * base.tp_s)
        if self.zero:  # what is gathered after the step hides behind nothing
            seconds += min(
                self._gradients(int(plain), *dense_group, float("inf"), float("inf"))
                for _, (dense_group, _) in base.nestings
            )
        self.least_s = seconds * ROUNDING
        return size * ROUNDING, self.row_seconds(1)

    def row_seconds(self, vpp: int) -> float:
        """No pipeline with `vpp` virtual stages a rank, or more, takes less. Needs `least` first."""
        base, spot = self.base, self.base.spot
        if spot.pp == 1:
            return self.least_s
        return self.least_s + base.nestings[0][0] * (spot.micro_batches * (2 * vpp - 1) + 2 * (spot.pp - 1)) * ROUNDING

    # -------------------------------------------------------------------------------------- of one pipeline

    def bytes_of(self, shape: Shape, schedule: str, vpp: int) -> float:
        """What the fullest rank holds, as `memory.accounts`."""
        held = self._pipeline(shape, schedule, vpp).held
        fullest = max(plain * self.dense_bytes + experts * self.expert_bytes + kept for plain, experts, kept in held)
        return (fullest + self.beside) * ROUNDING

    def seconds_of(self, shape: Shape, schedule: str, vpp: int) -> float:
        """No nesting order lets this choice's step take less."""
        base, pipe = self.base, self._pipeline(shape, schedule, vpp)
        windows = pipe.backward, pipe.compute
        cheapest = float("inf")
        for transfer, (dense, experts) in base.nestings:
            seconds = transfer * pipe.transfers + self._gradients(pipe.dense, *dense, *windows)
            cheapest = min(cheapest, seconds + self._gradients(pipe.experts, *experts, *windows))
        shards = base.nestings[0][1][0][0] if self.zero else 1
        optimizer = optimizer_seconds(pipe.dense + pipe.experts, shards, base.ground.rate)
        return (pipe.seconds + cheapest + optimizer) * ROUNDING

    def _pipeline(self, shape: Shape, schedule: str, vpp: int) -> Pipeline:
        """Shared by all ZeRO stages of the spot."""
        key = self.recompute, schedule, vpp
        if key not in self.base.pipelines:
            self.base.pipelines[key] = self._run(shape, schedule, vpp)
        return self.base.pipelines[key]

    def _run(self, shape: Shape, schedule: str, vpp: int) -> Pipeline:
        base, spot, m = self.base, self.base.spot, self.base.spot.micro_batches
        params = [base.parameters(rank, shape.single) for rank in shape.ranks]
        sizes = [plain + experts for plain, experts in params]
        # of equally full ranks the one with fewest layers: it sends least
        (dense, experts), busiest = min(
            (one for one, size in zip(zip(params, shape.ranks, strict=True), sizes, strict=True) if size == max(sizes)),
            key=lambda one: one[1].dense + one[1].moe,
        )
        times = [self._rank(rank) for rank in shape.ranks]
        layers, mixtures = (busiest.dense + busiest.moe) / shape.copies, busiest.moe / shape.copies
        inner = 2 * self.passes * (layers * base.tp_s + mixtures * base.ep_s)  # a micro-batch
        if spot.cp > 1:
            window = m * 3 * max(core for _, _, core in times)
            inner += self._context((spot.cp - 1) * layers * m, window) / m
        seconds = self._span(shape, times, inner, schedule, vpp)
        transfers = m * shape.sends + 2 * (spot.pp - 1)
        backward, compute = max(b for _, b, _ in times), m * max(f + b for f, b, _ in times) / shape.copies
        held = [(*one, self._kept(rank, shape, schedule, vpp)) for one, rank in zip(params, shape.ranks, strict=True)]
        return Pipeline(seconds, transfers, dense, experts, backward, compute, held)

    def _kept(self, rank: RankShape, shape: Shape, schedule: str, vpp: int) -> float:
        """Bytes that a rank keeps for backward, as `memory.activations`."""
        base, live = self.base, 0.0
        if self.recompute == "full":
            held = base.boundary * (rank.dense + rank.moe)
            live = max(self.dense_kept if rank.dense else 0.0, self.moe_kept if rank.moe else 0.0)
        else:
            held = rank.dense * self.dense_kept + rank.moe * self.moe_kept
        flying = held_at_once(schedule, base.spot.pp, vpp, base.spot.micro_batches, rank.rank)
        return held / (vpp * shape.copies) * flying + live + (base.head_kept if rank.head else 0.0)

    def _rank(self, rank: RankShape) -> tuple[float, float, float]:
        """(forward, backward, attention core) seconds of a micro-batch on a rank."""
        base = self.base
        layers = rank.dense * base.dense_s + rank.moe * base.moe_s
        core = rank.dense * base.dense_core + rank.moe * base.moe_core
        forward = layers + rank.head * base.head_s
        return forward, 2 * forward + self._again(layers, core), core

    def _again(self, layers: float, core: float) -> float:
        if self.recompute == "none":
            return 0.0
        return core if self.recompute == "selective" else layers

    def _context(self, steps: float, window: float) -> float:
        exposed = 0.0
        for once, count in zip(self.base.cp_s, (steps * (self.passes - 1), steps), strict=True):
            total = once * count
            exposed += total - min(window, max(0.0, total - once))
        return exposed

    def _span(self, shape: Shape, times, inner: float, schedule: str, vpp: int) -> float:
        """First forward to last backward. A rank cannot start before a micro-batch has come through all stages ahead,
        has all its work to do, and ends before the gradients have gone back through them.
        """
        base, m, pp = self.base, self.base.spot.micro_batches, self.base.spot.pp
        work = [(forward + backward) / shape.copies + inner for forward, backward, _ in times]
        if pp == 1:
            return m * work[0]
        longest, each, split = 0.0, inner / vpp, schedule in SPLIT
        for rank, own in zip(shape.ranks, work, strict=True):
            stages, dense, moe = rank.before
            forward = dense * base.dense_s + moe * base.moe_s
            way = forward + stages * each / 3
            if not split:
                again = self._again(forward, dense * base.dense_core + moe * base.moe_core)
                way += 2 * forward + again + stages * each * 2 / 3
            longest = max(longest, way + m * own)
        if schedule in CLOSED_FORM and max(work) <= min(work) * (1 + EQUAL):
            longest = min(longest, min(work) * (m + (pp - 1) / vpp))
        return longest

    def _gradients(self, parameters: int, members: int, path: Path, backward: float, compute: float) -> float:
        """Exposed seconds, as `traffic._gradients` and `step_time.exposed_seconds`."""
        if members == 1 or parameters == 0:
            return 0.0
        train, windows = self.base.ground.train, {"none": 0.0, "backward": backward, "compute": compute}
        widths = WIDTH[train.precision], WIDTH[train.grad_dtype]
        return sum(
            _exposed(operation, size, members, path, count, windows[window])
            for operation, size, count, window in gradient_operations(parameters, self.par, *widths)
        )


def _exposed(name: collective.Operation, size: float, n: int, path: Path, count: float, window: float) -> float:
    once = collective.seconds(name, size, n, path)
    return once * count - min(window, max(0.0, once * count - once))
