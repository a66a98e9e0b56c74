"""Lower bounds of a layout's step time and memory, a few microseconds each.

Every term is the cost model's own (`LayerCost`, `cost.communication`), with two replacements that
can only lower it: each axis gets the best path that any nesting order could give it (`BestPaths`),
and the pipeline a span that no schedule can beat. A rank that computes longer hides more of its
gradients, but no more than it computes longer, so the span and the gradients of a rank are bounded
together. No layout costs less than its bound, and most nearly that.

`MeshBound`: a mesh in one or several variants. `RecomputeBound`: with a recomputation mode.
`PipelineBound`: with an assignment of stages to ranks as well; what is left are the schedule's name
(micro-batches in flight) and the ZeRO stage, with which `bytes_of` and `seconds_of` bound a
complete layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import structs

from orchestrator.cost.dual import value_of
from orchestrator.cost.memory import rank_memory as memory
from orchestrator.cost.model.layers import DTYPE_BYTES, params_outside_layers
from orchestrator.cost.time.communication import (
    gradient_overlap,
    gradient_seconds,
    transfer_seconds,
)
from orchestrator.cost.time.pipeline import EQUAL
from orchestrator.cost.time.step_time import constant_seconds, step_factor
from orchestrator.cost.time.traffic import DENSE_REPLICAS, reductions
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import CpMethod, Parallel
from orchestrator.plan.expert_mesh import expert_mesh, replicas

from .best_paths import BestPaths
from .layer_cost import LayerCost, LeastWork, least_work
from .pipeline_shapes import PipelineShapes
from .space import Fold, Mesh, Variant

ROUNDING = (1 - EQUAL) * (
    1 - 1e-9
)  # stages count as equal to EQUAL; bounds add up in another order than the model


class Layers(NamedTuple):
    """What a layer may cost in the variants and folds of a mesh that are open."""

    fold: Fold  # of `costs[0]`
    variant: Variant  # with the least work
    cp_methods: tuple[CpMethod, ...]  # those that are open
    sp_open: bool  # sequence parallelism is open too, that of `variant` is one of two
    costs: list[
        LayerCost
    ]  # with each fold of the experts: of several, only `MeshBound.least_seconds` holds for all

    def least_work(self, recompute: str) -> LeastWork:
        return least_work(self.costs, recompute, self.cp_methods, self.sp_open)


def least_of_column(meshes: Iterable[Mesh], layers: Layers) -> float:
    """Lower bound of the step in seconds, of meshes that differ in pp, dp and micro-batches: the
    work of an average rank."""
    work = layers.least_work("none")
    context = layers.costs[0].context
    factors = dict[int, float]()
    for mesh in meshes:
        nodes = -(-mesh.tp * mesh.cp * mesh.ep * mesh.pp * mesh.dp // context.cluster.gpus_per_node)
        least = mesh.micro_batches / mesh.pp
        factors[nodes] = min(least, factors.get(nodes, least))
    share = min(
        least * value_of(step_factor(context.rate, nodes)) for nodes, least in factors.items()
    )
    return (work.forwards + work.backwards) * share * ROUNDING


class MeshBound:
    def __init__(self, mesh: Mesh, layers: Layers, shapes: PipelineShapes, best: BestPaths):
        """`mesh`: with the first variant of `layers`."""
        self.mesh = mesh
        self.layers = layers
        self.shapes = shapes
        cost = self.cost = layers.costs[0]
        self.cp_methods = layers.cp_methods
        key = *mesh[:5], *(layer_cost.experts for layer_cost in layers.costs)
        self.degrees: DegreesBound = cost.share(key, DegreesBound, mesh, layers.costs, best)
        context = cost.context
        self.overlapped = (
            context.software.overlapped_steps
        )  # of schedules that split backward, some are never idle
        self.gradients = cost.share((mesh.pp, mesh.micro_batches), gradient_shares, mesh, cost)
        self.transfers = [0.0 for _ in self.degrees.nestings]
        if mesh.pp > 1:
            job = cost.boundary, mesh.pp, context.rate
            self.transfers = [
                value_of(transfer_seconds(*job, paths)) for paths in self.degrees.nestings
            ]
        #: tensor parallelism lies inside an NVLink domain, and nothing else communicates inside a
        #: stage
        self.inner_known = mesh.cp == 1 and cost.experts.ep == 1 and (mesh.tp == 1 or best.confined)
        self.sharded: list[ZeroStage] = []

    def branches(self, recomputes: Iterable[str], zeros: Iterable[int]) -> Iterator[RecomputeBound]:
        """One bound for each recomputation mode."""
        if not self.sharded:
            par = self.cost.in_mesh(self.mesh)
            self.sharded += [ZeroStage(self, structs.replace(par, zero=zero)) for zero in zeros]
        return (RecomputeBound(self, recompute) for recompute in recomputes)

    def least_seconds(self, recompute: str = "none") -> float:
        """Lower bound of the step in seconds, with one recomputation mode (none: also of all
        others).

        The work of an average rank, or of the one with most layers, or of the one that starts last,
        with the least that its gradients can show.
        """
        m = self.mesh.micro_batches
        degrees = self.degrees
        pp = self.mesh.pp
        work = self.layers.least_work(recompute)
        of_layer = m * work.layer + self.exposed(degrees.layer_gradients_s, work.layer)
        average = m * (work.forwards + work.backwards) / pp
        heaviest = 0.0 if self.cost.mixed else self.shapes.heaviest
        once = min(self.transfers)
        least = float("inf")
        for late in self.shapes.latest_ranks:
            ahead = late.before * (work.forward if late.split else work.layer)
            ahead *= not (late.split and self.overlapped)
            chain = work.forwards + (0.5 if late.split else 1.0) * work.backwards
            chain *= not (late.split and self.overlapped)
            span = max(average, chain, heaviest * m * work.layer, ahead + late.own * m * work.layer)
            rank_s = span + self.exposed(
                degrees.average_gradients_s, span / m
            )  # of an average rank: no longer than all
            rank_s = max(rank_s, heaviest * of_layer, ahead + late.own * of_layer)
            least = min(least, rank_s + once * (m * late.sends + 2 * (pp - 1)))
        return (least + degrees.constant_s) * degrees.factor

    def exposed(self, byte_s: float, micro_batch_s: float) -> float:
        """The least that gradients and weights show, with any ZeRO stage, of a rank whose
        parameters take `byte_s` seconds for a byte of each, behind micro-batches of `micro_batch_s`
        seconds."""
        least = float("inf")
        for size, shown, windows in self.gradients:
            seconds = size * byte_s
            late = seconds - windows * micro_batch_s if windows else 0.0
            least = min(
                least, shown * seconds + (1.0 - shown) * late if late > 0.0 else shown * seconds
            )
        return least

    @cached_property
    def states(self) -> tuple[float, float]:
        """Bytes of states and buffers of (an average rank, one with the fewest layers), with the
        ZeRO stage that needs least."""
        average = self.cost.average_params(self.mesh.pp)
        fewest = self.cost.fewest_params(self.shapes.least)
        return min(stage.bytes_of(*average) for stage in self.sharded), min(
            stage.bytes_of(*fewest) for stage in self.sharded
        )


class GradientShare(NamedTuple):
    """What a ZeRO stage sends of a parameter in a step, and when."""

    size: float  # bytes
    shown: float  # share of it that always shows
    windows: int  # micro-batches that may hide the rest; 0: it is hidden


def gradient_shares(mesh: Mesh, cost: LayerCost) -> list[GradientShare]:
    """Those of which one shows least, whatever hides them; ZeRO stages 0 and 1 send once a step,
    and hide alike."""
    context, (weight, gradient) = cost.context, cost.widths
    shares = []
    for zero in (1, 2, 3):
        par = structs.replace(cost.in_mesh(mesh), zero=zero, schedule="interleaved")
        rounds = reductions(par, context.software.reduces_by_round)
        size = (
            min(2 * gradient, rounds * gradient + weight)
            if zero == 1
            else rounds * gradient + weight
        )
        shown, windows = gradient_overlap(par, context.rate, context.software)
        shares.append(GradientShare(size, min(1.0, value_of(shown)), windows))
    smallest = min(share.size for share in shares)  # of one that hides nothing at all
    return [
        share for share in shares if share.size == smallest or share.shown * share.size < smallest
    ]


class DegreesBound:
    """What meshes of the same degrees have in common, whatever their micro-batches."""

    def __init__(self, mesh: Mesh, folds: Sequence[LayerCost], best: BestPaths):
        self.mesh = mesh
        self.cost = folds[0]
        context = self.cost.context
        par = structs.replace(self.cost.in_mesh(mesh), zero=1)
        #: paths of a nesting with stages inside an NVLink domain, and of one with stages on
        #: different nodes
        self.nestings = [
            best.paths(mesh, near) for near in (True, False) if best.possible(mesh, near)
        ]
        self.nodes = -(-par.world_size // context.cluster.gpus_per_node)
        self.factor = value_of(step_factor(context.rate, self.nodes)) * ROUNDING
        dense, experts = min(layer_cost.average_params(mesh.pp) for layer_cost in folds)
        self.constant_s = value_of(constant_seconds(par, context.rate, dense + experts, self.nodes))
        dense_s, experts_s = self._byte_seconds(best)
        experts_s *= len(folds) == 1  # replicas of experts differ from fold to fold
        self.byte_s = dense_s, experts_s
        #: for a byte of each parameter: of an average rank, and of one layer at least
        self.average_gradients_s = min(
            dense_s * plain + experts_s * routed
            for plain, routed in (layer_cost.average_params(mesh.pp) for layer_cost in folds)
        )
        self.layer_gradients_s = min(
            dense_s * plain + experts_s * routed
            for plain, routed in (layer_cost.fewest_params(1) for layer_cost in folds)
        )

    def _byte_seconds(self, best: BestPaths) -> tuple[float, float]:
        """The least that a byte of the gradient or weight of a dense, and of an expert, parameter
        takes."""
        if self.cost.par.zero_group:  # hybrid sharding: not bounded
            return 0.0, 0.0
        mesh = self.mesh
        of_experts = replicas(self.mesh)
        members = mesh.cp * mesh.ep * mesh.dp, expert_mesh(mesh).edp
        dense_s, experts_s = (
            (member_count - 1)
            / member_count
            * min(best.per_byte(paths[replica_axes, "ring"]) for paths in self.nestings)
            for member_count, replica_axes in zip(
                members, (DENSE_REPLICAS, of_experts), strict=True
            )
        )
        return dense_s, experts_s


class ZeroStage:
    """State bytes and gradient communication of a mesh with one ZeRO stage."""

    def __init__(self, base: MeshBound, par: Parallel):
        self._cost = base.cost
        self.context = base.cost.context
        self.par = par
        mesh = base.mesh
        recipe = self._recipe = base.cost.recipe
        self.nestings = base.degrees.nestings
        self.nodes = base.degrees.nodes

        self._replicas = (
            mesh.cp * mesh.ep * mesh.dp,
            expert_mesh(mesh).edp,
        )  # of a dense and an expert parameter
        self._states: dict[int, tuple[memory.StateBytes, memory.StateBytes]] = {}
        self.dense_bytes, self.expert_bytes = self.state_bytes(1)
        self.pipeline = memory.is_sharded_pipeline(par, recipe)
        if par.zero >= 3 and (
            self.pipeline or memory.is_one_stage(par, recipe)
        ):  # gradients may come after the peak
            gathered_bytes = (
                DTYPE_BYTES[self.context.train.precision] if self.pipeline else 0.0
            )  # gathered weights
            self.dense_bytes, self.expert_bytes = (
                state.params + state.optimizer + gathered_bytes for state in self.states(1)
            )
        workload = Workload(self.context.model, par, self.context.train)
        self.one_stage = memory.is_one_stage(par, recipe)
        by_moment = self.one_stage or self.pipeline
        count_buffers = memory.lasting_buffers if by_moment else memory.buffers
        self.buffer_bytes = count_buffers(workload, self.context.cluster.device, recipe)
        self.bucket_bytes = memory.zero_buffers(workload, recipe) if par.zero == 2 else 0.0
        self._overlap = gradient_overlap(par, self.context.rate, self.context.software)
        self._sent: dict[tuple[tuple[int, int], int], list[float]] = {}
        self._constant: dict[int, float] = {}

    def states(self, copies: int) -> tuple[memory.StateBytes, memory.StateBytes]:
        """Of a dense and an expert parameter. copies: of the model on a pipeline, which share the
        shards."""
        if copies not in self._states:
            arguments = (self.par, self.context.train, self._recipe)
            cost = self._cost
            zero_key = self.par.zero, self.par.micro_batches > 1
            dense, experts = (
                cost.share(
                    (copies * sharers, *zero_key),
                    memory.param_state_bytes,
                    copies * sharers,
                    *arguments,
                )
                for sharers in self._replicas
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
        """Seconds of a rank's gradients and weights, hidden or not, by nesting. held: (dense,
        expert) parameters. copies: of the model on the pipeline."""
        seconds_by_nesting = self._sent.get((held, copies))
        if seconds_by_nesting is None:
            context = self.context
            par = self.par
            if copies == 2:
                par = structs.replace(par, schedule="dualpipe")
            workload = context.workload(par, context.train)
            outside = params_outside_layers(context.model, par.tp)
            seconds_by_nesting = self._sent[held, copies] = [
                0.0  # hybrid sharding: not bounded
                if self.par.zero_group
                else value_of(gradient_seconds(workload, held, context.rate, paths, outside))
                for paths in self.nestings
            ]
        return seconds_by_nesting

    def exposed(self, sent: Iterable[float], hiding: Iterable[float]) -> float:
        """The most that gradient communication shows on any rank, as `exposed_gradients`. By rank:
        seconds that it takes, and of a micro-batch."""
        shown = value_of(self._overlap[0])
        windows = self._overlap[1]
        longest = 0.0
        for seconds, micro_batch in zip(sent, hiding, strict=True):
            late = seconds - micro_batch * windows if windows else 0.0
            longest = max(
                longest, shown * seconds + (1.0 - shown) * late if late > 0.0 else shown * seconds
            )
        return longest

    def constant(self, parameters: int) -> float:
        if parameters not in self._constant:
            seconds = constant_seconds(self.par, self.context.rate, parameters, self.nodes)
            self._constant[parameters] = value_of(seconds)
        return self._constant[parameters]


class RecomputeBound:
    def __init__(self, base: MeshBound, recompute: str):
        self.base = base
        self.mesh = base.mesh
        self.cost = base.cost
        self.sharded = base.sharded
        self.recompute = recompute

    def least_bytes(self) -> float:
        """Lower bound in bytes.

        Some rank holds the states of an average one, and at least one micro-batch; some rank, which
        may hold the fewest layers, as many micro-batches as there are ranks.
        """
        cost, (average, fewest) = self.cost, self.base.states
        layers = cost.kept("1f1b").layers(self.recompute)
        activation_bytes = self.base.shapes.least * min(
            layer.stored for layer in layers if layer.stored
        )
        size = max(
            average + activation_bytes,
            fewest + min(self.mesh.micro_batches, self.mesh.pp) * activation_bytes,
        )
        return cost.recipe.process_bytes(size) * ROUNDING

    @cached_property
    def least_s(self) -> float:
        """Lower bound of the step in seconds."""
        return self.base.least_seconds(self.recompute)
