"""Lower bounds of a layout's step time and memory, a few microseconds each.

Every term is the cost model's own (`layer_cost`), with two replacements that can only lower it: each axis gets the
best path that any nesting order could give it (`best_paths`), and the pipeline a span that no schedule can beat. So no
layout costs less than its bound, and on a regular cluster most cost exactly that.

`MeshBound`: a mesh in one or several variants. `RecomputeBound`: with a recomputation mode. `PipelineBound`: with an
assignment of stages to ranks as well; what is left are the schedule's name (micro-batches in flight) and the ZeRO
stage, with which `bytes_of` and `seconds_of` bound a complete layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from orchestrator.plan.document import CpMethod, Parallel
from orchestrator.planner.cost import collective
from orchestrator.planner.cost.compute import optimizer_seconds
from orchestrator.planner.cost.fabric import Path
from orchestrator.planner.cost.pipeline import EQUAL, in_flight_on_rank
from orchestrator.planner.cost.traffic import gradient_operations
from orchestrator.planner.memory import rank_memory as memory
from orchestrator.planner.memory.activations import logits_in_flight
from orchestrator.planner.memory.deferred_weight_gradients import in_flight_before_input_gradient

from .best_paths import BestPaths
from .layer_cost import LayerCost
from .pipeline_shapes import PipelineShape, PipelineShapes, RankShape
from .space import Mesh

ROUNDING = 1 - 1e-9  # bounds add up in another order than the model
ENDLESS = float("inf")


class MeshBound:
    def __init__(
        self,
        mesh: Mesh,
        cost: LayerCost,
        shapes: PipelineShapes,
        best: BestPaths,
        cp_methods: Sequence[CpMethod],
        sp_open: bool = False,
    ):
        """cp_methods: those that are open; sp_open: sequence parallelism is open too, `mesh.sp` is one of two."""
        self.mesh, self.cost, self.shapes, self.cp_methods, self.sp_open = mesh, cost, shapes, cp_methods, sp_open
        self.nestings = list(self._nestings(best))
        self.sharded: list[ZeroStage] = []
        self._gradients: dict[str | None, float] = {}

    def branches(self, recomputes: Iterable[str], zeros: Iterable[int], par: Parallel) -> Iterator[RecomputeBound]:
        """One bound for each recomputation mode. `par`: the `parallel` of any layout of the same job."""
        if not self.sharded:
            par = structs.replace(par, **self.mesh._asdict())
            self.sharded = [ZeroStage(self, structs.replace(par, zero=zero)) for zero in zeros]
        return (RecomputeBound(self, recompute) for recompute in recomputes)

    def least_seconds(self, recompute: str | None = None) -> float:
        """Lower bound of the step in seconds, for one recomputation mode (None: for all of them).

        The work of the slowest rank, or of the rank that starts last, plus transfers between stages, exposed
        context-parallel communication, and gradient communication that nothing can hide.
        """
        mesh, cost, shapes, m = self.mesh, self.cost, self.shapes, self.mesh.micro_batches
        mode = cost.recompute_cost(recompute or "none")
        work = mode.work_s / mesh.pp  # of the average rank; of equal layers some rank has the rounded-up number
        if not cost.mixed:
            work = max(work, -(-(cost.dense + cost.moe) // mesh.pp) * mode.slowest_s)
        if self.sp_open:
            inner = shapes.least * min(*mode.tensor_s, cost.other_sp[0])
        else:
            inner = shapes.least * min(mode.tensor_s) + (min(map(sum, cost.vocabulary_s)) if mesh.pp == 1 else 0.0)
        if mesh.cp > 1:
            window = 3 * shapes.most * cost.most_core
            shown = ENDLESS
            for method in self.cp_methods:
                own = 0.0
                for once, count, hides in cost.cp_communication(method, recompute or "none"):
                    own += max(0.0, once * count * shapes.least - window * hides)
                shown = min(shown, own)
            inner += shown
        transfer, busy = self.nestings[0][0], m * (work + inner)
        span = min(
            max(
                busy,
                late.before * (cost.fastest_forward if late.split else mode.fastest_s)
                + m * (late.own * mode.fastest_s + inner),
            )
            + transfer * (m * late.sends + 2 * (mesh.pp - 1))
            for late in shapes.latest_ranks
        )
        return (span + self.gradients(recompute)) * ROUNDING

    def gradients(self, recompute: str | None) -> float:
        """Lower bound of exposed gradient communication of dense parameters, in seconds, for any ZeRO stage."""
        if recompute not in self._gradients:
            self._gradients[recompute] = self._shown(recompute)
        return self._gradients[recompute]

    def _shown(self, recompute: str | None) -> float:
        cost, mesh, m = self.cost, self.mesh, self.mesh.micro_batches
        members = mesh.cp * mesh.ep * mesh.dp
        if members == 1:
            return 0.0
        # at most one micro-batch's forward and backward, recomputation included, hides them
        slowest = cost.slowest(recompute) + (4 * cost.other_sp[1] if self.sp_open else 0.0)
        both = self.shapes.most * slowest + 3 * cost.head_s
        seconds = min(dense.seconds_per_byte for _, dense, _ in self.nestings) * (members - 1) / members
        seconds *= cost.busiest_params(mesh.pp, self.shapes.least)
        weight, gradient = (width * seconds for width in cost.widths)
        zero0, zero1 = max(0.0, 2 * gradient - both), max(0.0, gradient - both) + weight
        scatter = max(0.0, m * (gradient - both))
        zero3 = scatter + (weight if mesh.pp > 1 else max(0.0, m * (2 * weight - both)))
        return min(zero0, zero1, scatter + weight, zero3)

    def _nestings(self, best: BestPaths) -> Iterator[tuple[float, Path, Path]]:
        """(seconds of a transfer between stages, ring path of dense gradients, of expert gradients).

        Once with stages inside an NVLink domain, where they leave fewer GPUs of it to those rings, once with stages on
        different nodes.
        """
        mesh, boundary = self.mesh, self.cost.boundary
        dense, experts = mesh.cp * mesh.ep * mesh.dp, mesh.cp * mesh.dp
        for near in (True, False):
            if near and mesh.pp > best.members_in_block(mesh.tp):
                continue
            transfer = collective.seconds("p2p", boundary, mesh.pp, best.chain(mesh.pp, mesh.tp, near))
            sharing = mesh.pp if near else 1
            yield transfer, best.ring(dense, mesh.tp, sharing), best.ring(experts, mesh.tp, sharing)
            if mesh.pp == 1:
                return


class ZeroStage:
    """State bytes and gradient communication of a mesh with one ZeRO stage."""

    def __init__(self, base: MeshBound, par: Parallel):
        context, mesh, recipe, self.widths = base.cost.context, base.mesh, base.cost.recipe, base.cost.widths
        self.par, self.replicas = par, (mesh.cp * mesh.ep * mesh.dp, mesh.cp * mesh.dp)
        states = [memory.param_state_bytes(replicas, par, context.train, recipe) for replicas in self.replicas]
        self.dense_bytes, self.expert_bytes = (one.params + one.grads + one.optimizer for one in states)
        self.buffer_bytes = memory.buffers(context.model, par, context.train, context.cluster.device, recipe)

    def gradients(self, parameters: int, experts: bool, path: Path, windows: dict[str, float]) -> float:
        """Exposed seconds of gradient communication, as `traffic` and `step_time.exposed_seconds` count them."""
        members = self.replicas[experts]
        if members == 1 or parameters == 0:
            return 0.0
        exposed = 0.0
        for operation, size, count, window in gradient_operations(parameters, self.par, *self.widths):
            exposed += _exposed(collective.seconds(operation, size, members, path), count, windows[window])
        return exposed


class RecomputeBound:
    def __init__(self, base: MeshBound, recompute: str):
        self.base, self.mesh, self.cost, self.sharded = base, base.mesh, base.cost, base.sharded
        self.recompute, self.mode = recompute, base.cost.recompute_cost(recompute)
        self.gradients = base.gradients(recompute)

    def least_bytes(self) -> float:
        """Lower bound in bytes: states of an average rank and the micro-batches that some rank must hold."""
        cost, pp = self.cost, self.mesh.pp
        plain, experts = cost.average_params(pp)
        states = min(one.buffer_bytes + plain * one.dense_bytes + experts * one.expert_bytes for one in self.sharded)
        kept = min(one.stored for one in cost.activation_bytes(self.recompute) if one.stored)
        tensors = states + min(self.mesh.micro_batches, pp) * self.base.shapes.least * kept
        return cost.recipe.process_bytes(tensors) * ROUNDING

    def least_seconds(self) -> float:
        return self.base.least_seconds(self.recompute)


class PipelineBound:
    """A branch with stages on ranks (`shape`) and backward in one layer_cost or two (`split`)."""

    def __init__(
        self, branch: RecomputeBound, shape: PipelineShape, split: bool, vpp: int, cp_methods: Sequence[CpMethod]
    ):
        self.branch, self.shape, self.split, self.vpp, self.cp_methods = branch, shape, split, vpp, cp_methods
        self.held = vpp * shape.copies  # stages of a rank
        cost, mode, mesh, m = branch.cost, branch.mode, branch.mesh, branch.mesh.micro_batches
        self.params = params = cost.pipeline_params(shape)
        first, last = cost.vocabulary_s[split]
        inner = params.layers * mode.tensor_s[split] + params.moe_layers * cost.expert_s * 2 * (
            2 + mode.recomputed.layer
        )
        inner += min(first * passing + last * leaving for passing, leaving in params.ends)
        if mesh.cp > 1:
            core = max(rank.dense * cost.layer_s[0].core + rank.moe * cost.layer_s[1].core for rank in shape.ranks)
            inner += min([self._cp_seconds(method, core) for method in cp_methods]) / m
        self.backward = self.both = 0.0  # seconds of the slowest rank: the windows that hide gradients and weights
        self.span = self._span(inner, split)
        self.transfers = m * shape.sends + 2 * (mesh.pp - 1)
        #: with the cheaper nesting and the ZeRO stage that exposes least; the optimizer is not in it yet
        self.least_s = (self.span + branch.base.nestings[0][0] * self.transfers + branch.gradients) * ROUNDING

    def _cp_seconds(self, method: CpMethod, core: float) -> float:
        """Exposed context-parallel seconds of a step. `core`: attention seconds of one micro-batch."""
        m, seconds = self.branch.mesh.micro_batches, 0.0
        times, window = self.params.layers * m, 3 * m * core
        for once, count, hides in self.branch.cost.cp_communication(method, self.branch.recompute):
            seconds += _exposed(once, count * times, window) if hides else once * count * times
        return seconds

    def _span(self, inner: float, split: bool) -> float:
        """Lower bound of the seconds from the first forward to the last backward.

        A rank starts only when a micro-batch has come through all stages ahead of it, does all of its work, and then
        the gradients go back through those stages.
        """
        branch, shape, cost = self.branch, self.shape, self.branch.cost
        m, pp = branch.mesh.micro_batches, branch.mesh.pp
        (dense_s, moe_s), (dense_recompute, moe_recompute) = (
            (one.forward for one in cost.layer_s),
            branch.mode.recompute_s,
        )
        longest, least, most, each = 0.0, ENDLESS, 0.0, inner / self.vpp
        for rank in shape.ranks:
            forward = rank.dense * dense_s + rank.moe * moe_s + rank.head * cost.head_s
            backward = 2 * forward + rank.dense * dense_recompute + rank.moe * moe_recompute
            self.backward, self.both = max(self.backward, backward), max(self.both, forward + backward)
            own = (forward + backward) / shape.copies + inner
            least, most = min(least, own), max(most, own)
            stages, dense, moe = rank.before
            ahead = dense * dense_s + moe * moe_s
            if split:
                ahead += stages * each / 3
            else:
                ahead += 2 * ahead + dense * dense_recompute + moe * moe_recompute + stages * each
            longest = max(longest, ahead + m * own)
        if pp == 1:
            return m * most
        if not split and most <= least * (1 + EQUAL):  # where the model's closed form holds
            longest = min(longest, least * (m + (pp - 1) / self.vpp))
        return longest

    # ---------------------------------------------------------------------------------- of one schedule and ZeRO

    def kept(self, schedule: str) -> list[float]:
        """Lower bound of the activation bytes of each rank of the shape."""
        return [self._kept(rank, schedule) for rank in self.shape.ranks]

    def _kept(self, rank: RankShape, schedule: str) -> float:
        branch, mesh, cost = self.branch, self.branch.mesh, self.branch.cost
        (dense, dense_more), (moe, moe_more) = (
            (one.stored, one.recomputing) for one in cost.activation_bytes(branch.recompute)
        )
        inner, last = cost.stage_bytes
        held = rank.dense * dense + rank.moe * moe + (self.held - rank.head) * inner + rank.head * last
        recomputing = max(dense_more if rank.dense else 0.0, moe_more if rank.moe else 0.0)
        m = mesh.micro_batches
        in_flight = in_flight_on_rank(schedule, mesh.pp, self.vpp, m, rank.rank)
        # deferred weight gradients come on top of this
        in_flight = in_flight_before_input_gradient(schedule, mesh.pp, m, rank.rank, in_flight)
        if rank.head:
            more = logits_in_flight(schedule, m) - 1
            recomputing = max(recomputing, cost.head_kept) + more * cost.head_kept + cost.loss_bytes
        received = 2 * cost.boundary if mesh.pp > 1 and cost.kernels.keep_sent else 0.0
        return held / self.held * in_flight + recomputing + received

    def bytes_of(self, kept: list[float], sharded: ZeroStage) -> float:
        """Lower bound of the bytes on the fullest rank."""
        fullest = 0.0
        for (plain, experts), keeps in zip(self.params.held, kept, strict=True):
            fullest = max(fullest, plain * sharded.dense_bytes + experts * sharded.expert_bytes + keeps)
        return self.branch.cost.recipe.process_bytes(fullest + sharded.buffer_bytes) * ROUNDING

    def seconds_of(self, sharded: ZeroStage) -> float:
        """Lower bound of the step in seconds, for any nesting order."""
        params, m = self.params, self.branch.mesh.micro_batches
        windows = {"none": 0.0, "backward": self.backward, "compute": m * self.both / self.shape.copies}
        talk = min(
            transfer * self.transfers
            + sharded.gradients(params.dense, False, dense, windows)
            + sharded.gradients(params.experts, True, experts, windows)
            for transfer, dense, experts in self.branch.base.nestings
        )
        shards = sharded.replicas[0] if sharded.par.zero else 1
        optimizer = optimizer_seconds(params.dense + params.experts, shards, self.branch.cost.context.rate)
        return (self.span + talk + optimizer) * ROUNDING


def _exposed(once: float, count: float, window: float) -> float:
    late = once * count - once  # the last has nothing to hide behind
    return once * count - window if window < late else once if late > 0.0 else once * count
