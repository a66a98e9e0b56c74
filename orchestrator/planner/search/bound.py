"""Lower bounds of a layout's step time and memory, a few microseconds each.

Every term is the cost model's own (`LayerCost`, `cost.communication`), with two replacements that can only lower it:
each axis gets the best path that any nesting order could give it (`BestPaths`), and the pipeline a span that no
schedule can beat. A rank that computes longer hides more of its gradients, but no more than it computes longer, so the
span and the gradients of a rank are bounded together. No layout costs less than its bound, and most nearly that.

`MeshBound`: a mesh in one or several variants. `RecomputeBound`: with a recomputation mode. `PipelineBound`: with an
assignment of stages to ranks as well; what is left are the schedule's name (micro-batches in flight) and the ZeRO
stage, with which `bytes_of` and `seconds_of` bound a complete layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from msgspec import structs

from orchestrator.plan.document import CpMethod, Parallel
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.planner.cost.communication import (
    gradient_overlap,
    gradient_seconds,
    transfer_seconds,
)
from orchestrator.planner.cost.dual import value_of
from orchestrator.planner.cost.pipeline import EQUAL, in_flight_on_rank, weights_at_end
from orchestrator.planner.cost.step_time import constant_seconds, step_factor
from orchestrator.planner.cost.traffic import DENSE_REPLICAS
from orchestrator.planner.memory import rank_memory as memory
from orchestrator.planner.memory.activations import LIMITS, logits_in_flight
from orchestrator.planner.memory.deferred_weight_gradients import DeferredGradients
from orchestrator.planner.memory.moments import peak_of_one_stage
from orchestrator.planner.memory.unequal_stages import unequal_peak
from orchestrator.planner.model.layers import params_outside_layers

from .best_paths import BestPaths
from .layer_cost import LayerCost, StageSeconds, least_work
from .pipeline_shapes import PipelineShape, PipelineShapes, RankShape
from .space import Mesh

ROUNDING = (1 - EQUAL) * (1 - 1e-9)  # stages count as equal to EQUAL; bounds add up in another order than the model


class MeshBound:
    def __init__(
        self,
        mesh: Mesh,
        cost: LayerCost,
        shapes: PipelineShapes,
        best: BestPaths,
        cp_methods: Sequence[CpMethod],
        sp_open: bool = False,
        folds: Sequence[LayerCost] = (),
    ):
        """cp_methods: those that are open; sp_open: sequence parallelism is open too, `mesh.sp` is one of two; folds:
        costs with each fold of the experts, where several are open: then only `least_seconds` holds for all."""
        self.mesh, self.cost, self.shapes, self.cp_methods = mesh, cost, shapes, tuple(cp_methods)
        self.sp_open, self.folds = sp_open, folds or [cost]
        key = *mesh[:5], *(one.experts for one in self.folds)
        self.degrees: DegreesBound = cost.share(key, DegreesBound, mesh, self.folds, best)
        context = cost.context
        self.overlapped = context.software.overlapped_steps  # of schedules that split backward, some are never idle
        self.transfers = [0.0 for _ in self.degrees.nestings]
        if mesh.pp > 1:
            job = cost.boundary, mesh.pp, context.rate
            self.transfers = [value_of(transfer_seconds(*job, paths)) for paths in self.degrees.nestings]
        #: tensor parallelism lies inside an NVLink domain, and nothing else communicates inside a stage
        self.inner_known = mesh.cp == 1 and cost.experts.ep == 1 and (mesh.tp == 1 or best.confined)
        self.sharded: list[ZeroStage] = []

    def branches(self, recomputes: Iterable[str], zeros: Iterable[int]) -> Iterator[RecomputeBound]:
        """One bound for each recomputation mode."""
        if not self.sharded:
            par = self.cost.in_mesh(self.mesh)
            self.sharded = [ZeroStage(self, structs.replace(par, zero=zero)) for zero in zeros]
        return (RecomputeBound(self, recompute) for recompute in recomputes)

    def least_seconds(self, recompute: str = "none") -> float:
        """Lower bound of the step in seconds, with one recomputation mode (none: also of all others).

        The work of an average rank, or of the one with most layers, or of the one that starts last, with the least that
        its gradients can show.
        """
        m, degrees, pp = self.mesh.micro_batches, self.degrees, self.mesh.pp
        work = least_work(self.folds, recompute, self.cp_methods, self.sp_open)
        of_layer = m * work.layer + degrees.layer_gradients_s
        span = m * work.whole / pp + degrees.average_gradients_s
        if not self.cost.mixed:
            span = max(span, self.shapes.heaviest * of_layer)
        once, least = min(self.transfers), float("inf")
        for late in self.shapes.latest_ranks:
            ahead = late.before * (work.forward if late.split else work.layer)
            ahead *= not (late.split and self.overlapped)
            own = max(span, ahead + late.own * of_layer)
            least = min(least, own + once * (m * late.sends + 2 * (pp - 1)))
        return (least + degrees.constant_s) * degrees.factor

    @cached_property
    def states(self) -> tuple[float, float]:
        """Bytes of states and buffers of (an average rank, one with the fewest layers), with the ZeRO stage that needs
        least."""
        average, fewest = self.cost.average_params(self.mesh.pp), self.cost.fewest_params(self.shapes.least)
        return min(one.bytes_of(*average) for one in self.sharded), min(one.bytes_of(*fewest) for one in self.sharded)


class DegreesBound:
    """What meshes of the same degrees have in common, whatever their micro-batches."""

    def __init__(self, mesh: Mesh, folds: Sequence[LayerCost], best: BestPaths):
        self.mesh, self.cost = mesh, folds[0]
        context, par = self.cost.context, structs.replace(self.cost.in_mesh(mesh), zero=1)
        #: paths of a nesting with stages inside an NVLink domain, and of one with stages on different nodes
        self.nestings = [best.paths(mesh, near) for near in (True, False) if best.possible(mesh, near)]
        self.nodes = -(-par.world_size // context.cluster.gpus_per_node)
        self.factor = value_of(step_factor(context.rate, self.nodes)) * ROUNDING
        dense, experts = min(one.average_params(mesh.pp) for one in folds)
        self.constant_s = value_of(constant_seconds(par, context.rate, dense + experts, self.nodes))
        gradient_s = self._gradient_seconds(best)
        #: the least that gradients and weights of an average rank show, and of one layer
        self.average_gradients_s, self.layer_gradients_s = gradient_s * dense, gradient_s * self.cost.least_params

    def _gradient_seconds(self, best: BestPaths) -> float:
        """The least that the gradient and the weight of a dense parameter show, for any ZeRO stage."""
        members = self.mesh.cp * self.mesh.ep * self.mesh.dp
        if members == 1 or self.cost.par.zero_group:  # hybrid sharding: not bounded
            return 0.0
        rate, (weight, gradient) = self.cost.context.rate, self.cost.widths
        path = min(best.per_byte(paths[DENSE_REPLICAS, "ring"]) for paths in self.nestings)
        shown = min(value_of(rate.dp_exposed), value_of(rate.dp_sharded))
        return shown * min(2 * gradient, gradient + weight) * (members - 1) / members * path


class ZeroStage:
    """State bytes and gradient communication of a mesh with one ZeRO stage."""

    def __init__(self, base: MeshBound, par: Parallel):
        self._cost, self.context, self.par, mesh = base.cost, base.cost.context, par, base.mesh
        recipe = self._recipe = base.cost.recipe
        self.nestings, self.nodes = base.degrees.nestings, base.degrees.nodes

        self._replicas = mesh.cp * mesh.ep * mesh.dp, expert_mesh(mesh).edp  # of a dense and an expert parameter
        self._states: dict[int, tuple[memory.StateBytes, memory.StateBytes]] = {}
        self.dense_bytes, self.expert_bytes = self.state_bytes(1)
        if memory.is_one_stage(par, recipe) and par.zero >= 3:  # gradients may come after the peak
            self.dense_bytes, self.expert_bytes = (one.params + one.optimizer for one in self.states(1))
        same = self.context.model, par, self.context.train, self.context.cluster.device, recipe
        self.one_stage = memory.is_one_stage(par, recipe)
        self.buffer_bytes = memory.lasting_buffers(*same) if self.one_stage else memory.buffers(*same)
        self.bucket_bytes = memory.zero_buffers(*same[:3], recipe) if par.zero == 2 else 0.0
        self._overlap = gradient_overlap(par, self.context.rate, self.context.software)
        self._sent: dict[tuple[tuple[int, int], int], list[float]] = {}
        self._constant: dict[int, float] = {}

    def states(self, copies: int) -> tuple[memory.StateBytes, memory.StateBytes]:
        """Of a dense and an expert parameter. copies: of the model on a pipeline, which share the shards."""
        if copies not in self._states:
            same, cost = (self.par, self.context.train, self._recipe), self._cost
            like = self.par.zero, self.par.micro_batches > 1
            dense, experts = (
                cost.share((copies * many, *like), memory.param_state_bytes, copies * many, *same)
                for many in self._replicas
            )
            self._states[copies] = dense, experts
        return self._states[copies]

    def state_bytes(self, copies: int) -> tuple[float, float]:
        dense, experts = self.states(copies)
        return dense.on_device, experts.on_device

    def bytes_of(self, dense: float, experts: float) -> float:
        """Of a rank with so many parameters, buffers included; of one copy of the model."""
        return self.buffer_bytes + dense * self.dense_bytes + experts * self.expert_bytes

    def sent(self, held: tuple[int, int], copies: int) -> list[float]:
        """Seconds of a rank's gradients and weights, hidden or not, by nesting. held: (dense, expert) parameters.
        copies: of the model on the pipeline."""
        found = self._sent.get((held, copies))
        if found is None:
            context, par = self.context, self.par
            if copies == 2:
                par = structs.replace(par, schedule="dualpipe")
            same = held, par, context.train, context.rate, context.software
            found = self._sent[held, copies] = [
                0.0  # hybrid sharding: not bounded
                if self.par.zero_group
                else value_of(gradient_seconds(*same, paths, params_outside_layers(context.model, self.par.tp)))
                for paths in self.nestings
            ]
        return found

    def exposed(self, sent: Iterable[float], hiding: Iterable[float]) -> float:
        """The most that gradient communication shows on any rank, as `exposed_gradients`. By rank: seconds that it
        takes, and of a micro-batch."""
        shown, windows, most = value_of(self._overlap[0]), self._overlap[1], 0.0
        for seconds, micro_batch in zip(sent, hiding, strict=True):
            late = seconds - micro_batch * windows if windows else 0.0
            most = max(most, shown * seconds + (1.0 - shown) * late if late > 0.0 else shown * seconds)
        return most

    def constant(self, parameters: int) -> float:
        if parameters not in self._constant:
            seconds = constant_seconds(self.par, self.context.rate, parameters, self.nodes)
            self._constant[parameters] = value_of(seconds)
        return self._constant[parameters]


class RecomputeBound:
    def __init__(self, base: MeshBound, recompute: str):
        self.base, self.mesh, self.cost, self.sharded = base, base.mesh, base.cost, base.sharded
        self.recompute = recompute

    def least_bytes(self) -> float:
        """Lower bound in bytes.

        Some rank holds the states of an average one, and at least one micro-batch; some rank, which may hold the fewest
        layers, as many micro-batches as there are ranks.
        """
        cost, (average, fewest) = self.cost, self.base.states
        layers = cost.kept("1f1b").layers(self.recompute)
        kept = self.base.shapes.least * min(one.stored for one in layers if one.stored)
        size = max(average + kept, fewest + min(self.mesh.micro_batches, self.mesh.pp) * kept)
        return cost.recipe.process_bytes(size) * ROUNDING

    @cached_property
    def least_s(self) -> float:
        """Lower bound of the step in seconds."""
        return self.base.least_seconds(self.recompute)


class PipelineBound:
    """A branch with stages on ranks (`shape`) and backward in one piece or two (`split`)."""

    def __init__(
        self, branch: RecomputeBound, shape: PipelineShape, split: bool, vpp: int, cp_methods: Sequence[CpMethod]
    ):
        self.branch, self.shape, self.split, self.vpp, self.cp_methods = branch, shape, split, vpp, tuple(cp_methods)
        self.held = vpp * shape.copies  # stages of a rank
        cost, mesh, base = branch.cost, branch.mesh, branch.base
        self.params = cost.pipeline_params(shape)
        one = self.one = cost.stage_seconds(branch.recompute, split, self.cp_methods)
        #: by rank of the shape: seconds (that the schedule takes at least for its sake, of one micro-batch)
        self.ranks = [self._rank(rank, one) for rank in shape.ranks]
        sends = mesh.micro_batches * shape.sends + 2 * (mesh.pp - 1)
        self.transfers = [once * sends for once in base.transfers]
        chain = 0.0 if split and base.overlapped else cost.chain(one, 0.5 if split else 1.0)
        self.longest = max(chain, *(end for end, _ in self.ranks))
        self.most_params = max(map(sum, self.params))
        constant = branch.sharded[-1].constant(self.most_params)  # the more is sharded, the less there is to do
        #: whatever the ZeRO stage; no less than what holds for all pipelines
        self.least_s = max(branch.least_s, (self.longest + min(self.transfers) + constant) * base.degrees.factor)
        self._seconds: dict[int, float] = {}

    def _rank(self, rank: RankShape, one: StageSeconds) -> tuple[float, float]:
        stages, dense, moe = (0, 0, 0) if self.split and self.branch.base.overlapped else rank.before
        ahead = dense * one.forward[0] + moe * one.forward[1] + (one.first if stages else 0.0)
        if not self.split:
            ahead += dense * one.backward[0] + moe * one.backward[1]
        own = rank.dense * (one.forward[0] + one.backward[0]) + rank.moe * (one.forward[1] + one.backward[1])
        own += rank.table * one.first + rank.head * sum(one.last)
        own /= self.shape.copies
        return ahead + self.branch.mesh.micro_batches * own, own

    # ---------------------------------------------------------------------------------- of one schedule and ZeRO

    def kept(self, schedule: str, exact: bool = False) -> list[float]:
        """Lower bound of the activation bytes of each rank of the shape.

        exact: also of ranks with unequal stages; otherwise as if all were like the smallest, which is quick.
        """
        cost, mesh, deferred = self.branch.cost, self.branch.mesh, None
        if self.split and not cost.kept(schedule).kernels.fills_limit:
            names = {"schedule": schedule, "pp": mesh.pp, "vpp": self.vpp, "micro_batches": mesh.micro_batches}
            deferred = DeferredGradients(cost.context.model, structs.replace(cost.par, **names), cost.context.train)
        return [self._kept(rank, schedule, deferred, exact) for rank in self.shape.ranks]

    def _kept(self, rank: RankShape, schedule: str, deferred: DeferredGradients | None, exact: bool) -> float:
        mesh, cost = self.branch.mesh, self.branch.cost
        keeps, m, recompute = cost.kept(schedule), mesh.micro_batches, self.branch.recompute
        message = cost.boundary if mesh.pp > 1 and keeps.kernels.holds_messages else 0.0
        sent = (1 if rank.head and self.held == 1 else 2) * message  # the last stage receives no gradient
        temporary = max(keeps.loss if rank.head else 0.0, keeps.backward)
        rest = sent + temporary

        def in_flight(where: int) -> int:
            if keeps.kernels.fills_limit and schedule in LIMITS:
                return min(m, LIMITS[schedule] * mesh.pp)
            return in_flight_on_rank(schedule, mesh.pp, self.vpp, m, where)

        if exact and len(rank.unlike) > 1:
            parts = [keeps.stage_bytes(recompute, one, deferred) for one in rank.stages]
            return rest + unequal_peak((schedule, mesh.pp, m, self.vpp), rank.rank, rank.held, parts)
        stored = min(keeps.stored(recompute, one) for one in rank.unlike)
        if len(rank.unlike) > 1:
            return rest + stored * in_flight(rank.rank)
        layers = keeps.stage_layers(recompute, rank.dense, rank.moe)
        if deferred:
            head = keeps.head if rank.head else None
            return rest + max(
                deferred.peak(where, in_flight(where), stored, self.held, layers, head)
                for where in {rank.rank, rank.inner}
            )
        recomputing = max((more for *_, more in layers), default=0.0)
        if rank.head:
            recomputing = max(recomputing, keeps.head) + (logits_in_flight(schedule, m) - 1) * keeps.head
        more = recomputing + sent if keeps.kernels.keep_sent else max(recomputing + message, sent)
        return temporary + stored * in_flight(rank.rank) + more

    def bytes_of(self, kept: list[float], sharded: ZeroStage) -> float:
        """Lower bound of the bytes on the fullest rank."""
        if sharded.one_stage:
            return self._one_stage(sharded) * ROUNDING
        fullest, (dense, expert) = 0.0, sharded.state_bytes(self.shape.copies)
        for (plain, experts), keeps in zip(self.params, kept, strict=True):
            fullest = max(fullest, plain * dense + experts * expert + keeps)
        return self.branch.cost.recipe.process_bytes(fullest + sharded.buffer_bytes) * ROUNDING

    def _one_stage(self, sharded: ZeroStage) -> float:
        """Bytes of a rank that holds the whole model."""
        cost, ((plain, experts),) = self.branch.cost, self.params
        keeps, (dense, expert) = cost.kept("1f1b"), sharded.states(1)
        of_stage = keeps.one_stage(self.branch.recompute)
        grads, backward = plain * dense.grads + experts * expert.grads, keeps.backward + sharded.bucket_bytes
        train = cost.trains[self.branch.recompute]
        peak = peak_of_one_stage(cost.context.model, sharded.par, train, of_stage, grads, keeps.loss, backward)
        states = plain * (dense.params + dense.optimizer) + experts * (expert.params + expert.optimizer) + grads
        tensors = states + of_stage.most + sharded.buffer_bytes
        return cost.recipe.process_bytes(tensors + peak.buffers - peak.apart)

    def seconds_of(self, sharded: ZeroStage) -> float:
        """Lower bound of the step in seconds, for any nesting order; the same for all schedules of the pipeline."""
        zero = sharded.par.zero
        if zero not in self._seconds:
            self._seconds[zero] = self._seconds_of(sharded, self.longest)
        return self._seconds[zero]

    def seconds_with(self, schedule: str, sharded: ZeroStage) -> float:
        """With one schedule: where backward is split, the last gradient of the rank with most stages ahead of it goes
        back through them, while the rank has few weight gradients left (`StepCost`)."""
        if not self.split or self.branch.base.overlapped:
            return self.seconds_of(sharded)
        (end, _), rank = max(zip(self.ranks, self.shape.ranks, strict=True), key=lambda both: both[1].before)
        (stages, dense, moe), (of_dense, of_moe) = rank.before, self.one.backward
        mesh, back = self.branch.mesh, dense * of_dense + moe * of_moe
        most = max(one.dense * of_dense + one.moe * of_moe + one.last * self.one.last[1] for one in rank.unlike)
        left = weights_at_end(schedule, mesh.pp, mesh.micro_batches, self.vpp, stages)
        return self._seconds_of(sharded, max(self.longest, end + (back - left * most) / 2))

    def _seconds_of(self, sharded: ZeroStage, longest: float) -> float:
        base, m = self.branch.base, self.branch.mesh.micro_batches
        sent = zip(*(sharded.sent(held, self.shape.copies) for held in self.params), strict=True)  # by nesting
        hiding = [own if base.inner_known else own + (longest - end) / m for end, own in self.ranks]
        least = min(  # with gradients and weights as `StepCost` bounds them
            longest + sharded.exposed(each, hiding) + transfers
            for each, transfers in zip(sent, self.transfers, strict=True)
        )
        return (least + sharded.constant(self.most_params)) * base.degrees.factor
