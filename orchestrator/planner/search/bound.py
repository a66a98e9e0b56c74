"""Lower bounds of step time and memory: the cost model with the best paths there are, in microseconds each.

Every term is the cost model's own (`pieces`) with two exchanges, both downwards: the cheapest path that an axis can
have in any nesting order, and a pipeline span that no order of work can beat. So no choice costs less than its bound,
and on a regular cluster most cost just that.

`SpotBound`: how ranks and batch are cut up, in one form or a family of forms. `BranchBound`: recomputation chosen too.
`RowBound`: also the way stages lie on ranks; what is left is the schedule's name (what is in flight) and ZeRO, which
bound a whole choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from orchestrator.plan.document import CpMethod, Parallel
from orchestrator.planner.cost import collective
from orchestrator.planner.cost.compute import optimizer_seconds
from orchestrator.planner.cost.fabric import Path
from orchestrator.planner.cost.pipeline import EQUAL, held_at_once
from orchestrator.planner.cost.traffic import gradient_operations
from orchestrator.planner.memory import rank_memory as memory
from orchestrator.planner.memory.activations import heads_at_once
from orchestrator.planner.memory.deferred_weight_gradients import full_at_once

from .best_paths import BestPaths
from .layer_cost import Piece
from .pipeline_shapes import Pipes, RankShape, Shape
from .space import Spot

ROUNDING = 1 - 1e-9  # bounds add up in another order than the model
ENDLESS = float("inf")


class SpotBound:
    def __init__(
        self, spot: Spot, piece: Piece, pipes: Pipes, best: BestPaths, ways: Sequence[CpMethod], along: bool = False
    ):
        """ways: of context parallelism that are open; along: sequence parallelism is open too."""
        self.spot, self.piece, self.pipes, self.ways, self.along = spot, piece, pipes, ways, along
        self.nestings = list(self._nestings(best))
        self.sharded: list[Sharded] = []
        self._gradients: dict[str | None, float] = {}

    def branches(self, recomputes: Iterable[str], zeros: Iterable[int], par: Parallel) -> Iterator[BranchBound]:
        """`par`: any layout of the same job."""
        if not self.sharded:
            par = structs.replace(par, **self.spot._asdict())
            self.sharded = [Sharded(self, structs.replace(par, zero=zero)) for zero in zeros]
        return (BranchBound(self, recompute) for recompute in recomputes)

    def least_seconds(self, recompute: str | None = None) -> float:
        """No choice takes less, whatever it recomputes or as this: work of the slowest rank, or of the last to start,
        with transfers between stages, attention over other ranks' keys, and gradients that nothing can hide.
        """
        spot, piece, pipes, m = self.spot, self.piece, self.pipes, self.spot.micro_batches
        mode = piece.mode(recompute or "none")
        work = mode.work_s / spot.pp  # of the average rank; where layers are alike some rank has the rounded-up number
        if not piece.mixed:
            work = max(work, -(-(piece.dense + piece.moe) // spot.pp) * mode.slowest_s)
        if self.along:
            inner = pipes.least * min(*mode.tensor_s, piece.other_along[0])
        else:
            inner = pipes.least * min(mode.tensor_s) + (min(map(sum, piece.vocabulary_s)) if spot.pp == 1 else 0.0)
        if spot.cp > 1:
            window = 3 * pipes.most * piece.most_core
            shown = ENDLESS
            for way in self.ways:
                own = 0.0
                for once, count, hides in piece.context(way, recompute or "none"):
                    own += max(0.0, once * count * pipes.least - window * hides)
                shown = min(shown, own)
            inner += shown
        transfer, busy = self.nestings[0][0], m * (work + inner)
        span = min(
            max(
                busy,
                way.before * (piece.fastest_forward if way.split else mode.fastest_s)
                + m * (way.own * mode.fastest_s + inner),
            )
            + transfer * (m * way.sends + 2 * (spot.pp - 1))
            for way in pipes.ways
        )
        return (span + self.gradients(recompute)) * ROUNDING

    def gradients(self, recompute: str | None) -> float:
        """Seconds of dense parameters that no ZeRO stage hides, at least."""
        if recompute not in self._gradients:
            self._gradients[recompute] = self._shown(recompute)
        return self._gradients[recompute]

    def _shown(self, recompute: str | None) -> float:
        piece, spot, m = self.piece, self.spot, self.spot.micro_batches
        members = spot.cp * spot.ep * spot.dp
        if members == 1:
            return 0.0
        # what they hide behind, at most: a micro-batch forward and backward; what is repeated adds to that
        slowest = piece.slowest(recompute) + (4 * piece.other_along[1] if self.along else 0.0)
        both = self.pipes.most * slowest + 3 * piece.head_s
        seconds = min(dense.seconds_per_byte for _, dense, _ in self.nestings) * (members - 1) / members
        seconds *= piece.busiest_params(spot.pp, self.pipes.least)
        weight, gradient = (width * seconds for width in piece.widths)
        zero0, zero1 = max(0.0, 2 * gradient - both), max(0.0, gradient - both) + weight
        scatter = max(0.0, m * (gradient - both))
        zero3 = scatter + (weight if spot.pp > 1 else max(0.0, m * (2 * weight - both)))
        return min(zero0, zero1, scatter + weight, zero3)

    def _nestings(self, best: BestPaths) -> Iterator[tuple[float, Path, Path]]:
        """(seconds of a transfer between stages, rings that sum dense and expert gradients): with stages inside an
        NVLink domain, where they leave it fewer places for those rings, and with stages apart.
        """
        spot, boundary = self.spot, self.piece.boundary
        dense, experts = spot.cp * spot.ep * spot.dp, spot.cp * spot.dp
        for near in (True, False):
            if near and spot.pp > best.mates(spot.tp):
                continue
            transfer = collective.seconds("p2p", boundary, spot.pp, best.chain(spot.pp, spot.tp, near))
            beside = spot.pp if near else 1
            yield transfer, best.ring(dense, spot.tp, beside), best.ring(experts, spot.tp, beside)
            if spot.pp == 1:
                return


class Sharded:
    """A spot with its ZeRO stage."""

    def __init__(self, base: SpotBound, par: Parallel):
        ground, spot, self.widths = base.piece.ground, base.spot, base.piece.widths
        self.par, self.replicas = par, (spot.cp * spot.ep * spot.dp, spot.cp * spot.dp)
        states = [memory.state_bytes(replicas, par, ground.train) for replicas in self.replicas]
        self.dense_bytes, self.expert_bytes = (one.params + one.grads + one.optimizer for one in states)
        self.beside = memory.buffers(ground.model, par, ground.train, ground.profile)

    def gradients(self, parameters: int, experts: bool, path: Path, windows: dict[str, float]) -> float:
        """Exposed seconds, as `traffic._gradients` and `step_time.exposed_seconds`."""
        members = self.replicas[experts]
        if members == 1 or parameters == 0:
            return 0.0
        exposed = 0.0
        for operation, size, count, window in gradient_operations(parameters, self.par, *self.widths):
            exposed += _exposed(collective.seconds(operation, size, members, path), count, windows[window])
        return exposed


class BranchBound:
    def __init__(self, base: SpotBound, recompute: str):
        self.base, self.spot, self.piece, self.sharded = base, base.spot, base.piece, base.sharded
        self.recompute, self.mode = recompute, base.piece.mode(recompute)
        self.gradients = base.gradients(recompute)

    def least_bytes(self) -> float:
        """That every pipeline needs: an average rank's states and the micro-batches that some rank must hold."""
        piece, pp = self.piece, self.spot.pp
        plain, experts = piece.average_params(pp)
        states = min(one.beside + plain * one.dense_bytes + experts * one.expert_bytes for one in self.sharded)
        kept = min(one.held for one in piece.kept(self.recompute) if one.held)
        return (states + min(self.spot.micro_batches, pp) * self.base.pipes.least * kept) * ROUNDING

    def least_seconds(self) -> float:
        return self.base.least_seconds(self.recompute)


class RowBound:
    """A branch with stages on ranks (`shape`) and backward in one piece or two (`split`)."""

    def __init__(self, branch: BranchBound, shape: Shape, split: bool, vpp: int, ways: Sequence[CpMethod]):
        self.branch, self.shape, self.split, self.vpp, self.ways = branch, shape, split, vpp, ways
        self.held = vpp * shape.copies  # stages of a rank
        piece, mode, spot, m = branch.piece, branch.mode, branch.spot, branch.spot.micro_batches
        self.fill = fill = piece.fill(shape)
        first, last = piece.vocabulary_s[split]
        inner = fill.layers * mode.tensor_s[split] + fill.mixtures * piece.expert_s * 2 * (2 + mode.repeats.layer)
        inner += min(first * passing + last * leaving for passing, leaving in fill.ends)
        if spot.cp > 1:
            core = max(rank.dense * piece.layer_s[0].core + rank.moe * piece.layer_s[1].core for rank in shape.ranks)
            inner += min([self._context_s(way, core) for way in ways]) / m
        self.backward = self.both = 0.0  # of the slowest rank: what gradients, and gathered weights, hide behind
        self.span = self._span(inner, split)
        self.transfers = m * shape.sends + 2 * (spot.pp - 1)
        #: with the nearer nesting, the ZeRO stage that shows least, and the optimizer still to come
        self.least_s = (self.span + branch.base.nestings[0][0] * self.transfers + branch.gradients) * ROUNDING

    def _context_s(self, way: CpMethod, core: float) -> float:
        """Exposed seconds of a step's attention over other ranks' keys; `core`: of a micro-batch's own attention."""
        m, seconds = self.branch.spot.micro_batches, 0.0
        times, window = self.fill.layers * m, 3 * m * core
        for once, count, hides in self.branch.piece.context(way, self.branch.recompute):
            seconds += _exposed(once, count * times, window) if hides else once * count * times
        return seconds

    def _span(self, inner: float, split: bool) -> float:
        """First forward to last backward. A rank cannot start before a micro-batch has come through all stages ahead,
        has all its work to do, and ends before the gradients have gone back through them.
        """
        branch, shape, piece = self.branch, self.shape, self.branch.piece
        m, pp = branch.spot.micro_batches, branch.spot.pp
        (dense_s, moe_s), (dense_again, moe_again) = (one.forward for one in piece.layer_s), branch.mode.again
        longest, least, most, each = 0.0, ENDLESS, 0.0, inner / self.vpp
        for rank in shape.ranks:
            forward = rank.dense * dense_s + rank.moe * moe_s + rank.head * piece.head_s
            backward = 2 * forward + rank.dense * dense_again + rank.moe * moe_again
            self.backward, self.both = max(self.backward, backward), max(self.both, forward + backward)
            own = (forward + backward) / shape.copies + inner
            least, most = min(least, own), max(most, own)
            stages, dense, moe = rank.before
            way = dense * dense_s + moe * moe_s
            if split:
                way += stages * each / 3
            else:
                way += 2 * way + dense * dense_again + moe * moe_again + stages * each
            longest = max(longest, way + m * own)
        if pp == 1:
            return m * most
        if not split and most <= least * (1 + EQUAL):  # where the model's closed form holds
            longest = min(longest, least * (m + (pp - 1) / self.vpp))
        return longest

    # ---------------------------------------------------------------------------------- of one schedule and ZeRO

    def kept(self, schedule: str) -> list[float]:
        """Bytes that each rank of the shape keeps for backward, at least."""
        return [self._kept(rank, schedule) for rank in self.shape.ranks]

    def _kept(self, rank: RankShape, schedule: str) -> float:
        branch, spot, piece = self.branch, self.branch.spot, self.branch.piece
        (dense, dense_live), (moe, moe_live) = ((one.held, one.live) for one in piece.kept(branch.recompute))
        inner, last = piece.stage_bytes
        held = rank.dense * dense + rank.moe * moe + (self.held - rank.head) * inner + rank.head * last
        live = max(dense_live if rank.dense else 0.0, moe_live if rank.moe else 0.0)
        m = spot.micro_batches
        flying = held_at_once(schedule, spot.pp, self.vpp, m, rank.rank)
        flying = full_at_once(schedule, spot.pp, m, rank.rank, flying)  # what waits for weight gradients comes on top
        if rank.head:
            more = heads_at_once(schedule, m) - 1
            live = max(live, piece.head_kept) + more * piece.head_kept + piece.loss_bytes
        return held / self.held * flying + live + (2 * piece.boundary if spot.pp > 1 else 0.0)

    def bytes_of(self, kept: list[float], sharded: Sharded) -> float:
        """What the fullest rank holds, at least."""
        fullest = 0.0
        for (plain, experts), keeps in zip(self.fill.held, kept, strict=True):
            fullest = max(fullest, plain * sharded.dense_bytes + experts * sharded.expert_bytes + keeps)
        return (fullest + sharded.beside) * ROUNDING

    def seconds_of(self, sharded: Sharded) -> float:
        """No nesting order lets this choice's step take less."""
        fill, m = self.fill, self.branch.spot.micro_batches
        windows = {"none": 0.0, "backward": self.backward, "compute": m * self.both / self.shape.copies}
        talk = min(
            transfer * self.transfers
            + sharded.gradients(fill.dense, False, dense, windows)
            + sharded.gradients(fill.experts, True, experts, windows)
            for transfer, dense, experts in self.branch.base.nestings
        )
        shards = sharded.replicas[0] if sharded.par.zero else 1
        optimizer = optimizer_seconds(fill.dense + fill.experts, shards, self.branch.piece.ground.rate)
        return (self.span + talk + optimizer) * ROUNDING


def _exposed(once: float, count: float, window: float) -> float:
    late = once * count - once  # the last has nothing to hide behind
    return once * count - window if window < late else once if late > 0.0 else once * count
