"""Lower bounds of a layout's step time and memory, at a few microseconds each.

Every term is the cost model's own (`LayerCost`, `cost.communication`), with two replacements that
can only lower it. Each axis gets the best path that any nesting order could give it (`BestPaths`),
and the pipeline gets a span that no schedule can beat. A rank that computes longer hides more of
its gradients, but no more than the additional time. So the span and the gradients of a rank are
bounded together. No layout costs less than its bound, and most cost nearly that.

`MeshBound` bounds a mesh in one or several variants. `RecomputeBound` adds a recomputation mode.
`PipelineBound` also adds an assignment of stages to ranks. Then only the schedule's name
(micro-batches in flight) and the ZeRO stage are open; with these, `bytes_of` and `seconds_of` bound
a complete layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import structs

from orchestrator.cost.context import CostContext
from orchestrator.cost.dual import value_of
from orchestrator.cost.memory import rank_memory as memory
from orchestrator.cost.model.layers import DTYPE_BYTES, params_outside_layers
from orchestrator.cost.time.communication import (
    gradient_overlap,
    gradient_seconds,
    transfer_seconds,
)
from orchestrator.cost.time.fabric import Pattern
from orchestrator.cost.time.pipeline import EQUAL
from orchestrator.cost.time.step_time import constant_seconds, step_factor
from orchestrator.cost.time.traffic import DENSE_REPLICAS, reductions, shard_ranks
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import CpMethod, Parallel
from orchestrator.plan.expert_mesh import expert_mesh, replicas
from orchestrator.plan.offload import offload_of

from .best_paths import BestPaths
from .layer_cost import LayerCost
from .layout import Fold, Mesh, Variant
from .least_work import LeastWork, least_work
from .pipeline_shapes import PipelineShapes

# Stages within EQUAL count as equal, and bounds are summed in another order than the model.
ROUNDING = (1 - EQUAL) * (1 - 1e-9)


class Layers(NamedTuple):
    """The costs that a layer may have in the open variants and folds of a mesh."""

    fold: Fold  # the fold of `costs[0]`
    variant: Variant  # the variant with the least work
    cp_methods: tuple[CpMethod, ...]  # the open methods
    sp_open: bool  # sequence parallelism is open too; `variant` has one of both settings
    # One cost per fold of the experts; with several folds, only `MeshBound.least_seconds` holds for
    # all.
    costs: list[LayerCost]

    def least_work(self, recompute: str) -> LeastWork:
        """Returns the least work that a layer may have."""
        return least_work(self.costs, recompute, self.cp_methods, self.sp_open)


def least_of_column(meshes: Iterable[Mesh], layers: Layers) -> float:
    """Returns a lower bound in seconds of the step of meshes that differ in pp, dp and batches.

    It is the work of an average rank.
    """
    work = layers.least_work("none")
    context = layers.costs[0].context
    factors = dict[int, float]()
    for mesh in meshes:
        gpus = mesh.tp * mesh.cp * mesh.ep * mesh.pp * mesh.dp
        nodes = -(-gpus // context.cluster.gpus_per_node)
        least = mesh.micro_batches / mesh.pp
        factors[nodes] = min(least, factors.get(nodes, least))
    share = min(
        least * value_of(step_factor(context.rate, nodes)) for nodes, least in factors.items()
    )
    return (work.forwards + work.backwards) * share * ROUNDING


class MeshBound:
    """Bounds of one mesh in one or several variants."""

    def __init__(
        self,
        mesh: Mesh,
        layers: Layers,
        shapes: PipelineShapes,
        best: BestPaths,
    ):
        """`mesh` has the first variant of `layers`."""
        self.mesh = mesh
        self.layers = layers
        self.shapes = shapes
        cost = self.cost = layers.costs[0]
        self.cp_methods = layers.cp_methods
        key = *mesh[:5], *(layer_cost.experts for layer_cost in layers.costs)
        self.degrees: DegreesBound = cost.share(key, DegreesBound, mesh, layers.costs, best)
        context = cost.context
        # Some of the schedules that split backward are never idle.
        self.overlapped = context.software.overlapped_steps
        self.gradients = cost.share(
            (mesh.pp, mesh.micro_batches),
            gradient_shares,
            mesh,
            cost,
        )
        self.transfers = [0.0 for _ in self.degrees.nestings]
        if mesh.pp > 1:
            job = cost.boundary, mesh.pp, context.rate
            self.transfers = [
                value_of(transfer_seconds(*job, paths)) for paths in self.degrees.nestings
            ]
        #: True if tensor parallelism lies inside an NVLink domain and nothing else communicates
        #: inside a stage.
        self.inner_known = mesh.cp == 1 and cost.experts.ep == 1 and (mesh.tp == 1 or best.confined)
        self.sharded: list[ZeroStage] = []

    def branches(self, recomputes: Iterable[str], zeros: Iterable[int]) -> Iterator[RecomputeBound]:
        """Yields one bound per recomputation mode."""
        if not self.sharded:
            par = self.cost.in_mesh(self.mesh)
            lasting = memory.least_lasting_buffers(
                Workload(self.cost.context.model, par, self.cost.context.train),
                self.cost.context.cluster,
                self.cost.recipe,
            )
            self.sharded += [
                ZeroStage(self, structs.replace(par, zero=zero), lasting) for zero in zeros
            ]
        return (RecomputeBound(self, recompute) for recompute in recomputes)

    def least_seconds(self, recompute: str = "none") -> float:
        """Returns a lower bound of the step in seconds, with one recomputation mode.

        The bound of mode "none" holds for all others too. It is the largest of three amounts of
        work: that of an average rank, of the rank with most layers, and of the rank that starts
        last, each with the least exposed gradients.
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
            span = max(
                average,
                chain,
                heaviest * m * work.layer,
                ahead + late.layers * m * work.layer,
            )
            # The gradients of an average rank take no longer than those of the slowest rank.
            rank_s = span + self.exposed(degrees.average_gradients_s, span / m)
            rank_s = max(rank_s, heaviest * of_layer, ahead + late.layers * of_layer)
            least = min(least, rank_s + once * (m * late.sends + 2 * (pp - 1)))
        return (least + degrees.constant_s) * degrees.factor

    def exposed(self, byte_s: float, micro_batch_s: float) -> float:
        """Returns the shortest exposed time of gradients and weights, with any ZeRO stage.

        The rank's parameters take `byte_s` seconds for one byte of each, and its micro-batches take
        `micro_batch_s` seconds.
        """
        least = float("inf")
        for size, shown, windows in self.gradients:
            seconds = size * byte_s
            late = seconds - windows * micro_batch_s if windows else 0.0
            least = min(
                least,
                shown * seconds + (1.0 - shown) * late if late > 0.0 else shown * seconds,
            )
        return least

    @cached_property
    def states(self) -> tuple[float, float]:
        """State and buffer bytes of (an average rank, a rank with the fewest layers).

        They are those of the ZeRO stage that needs least.
        """
        average = self.cost.average_params(self.mesh.pp)
        fewest = self.cost.fewest_params(self.shapes.least)
        average_bytes = min(stage.bytes_of(*average) for stage in self.sharded)
        fewest_bytes = min(stage.bytes_of(*fewest) for stage in self.sharded)
        return average_bytes, fewest_bytes


class GradientShare(NamedTuple):
    """Size and timing of the bytes that a ZeRO stage sends per parameter and step."""

    size: float  # bytes
    shown: float  # the share that is always exposed
    windows: int  # micro-batches that may hide the rest; 0: it is hidden


def gradient_shares(mesh: Mesh, cost: LayerCost) -> list[GradientShare]:
    """Returns the shares of the ZeRO stages, without those that can never expose least.

    ZeRO stages 0 and 1 send once per step and hide alike.
    """
    context = cost.context
    weight, gradient = cost.widths
    shares = []
    for zero in (1, 2, 3):
        par = structs.replace(
            cost.in_mesh(mesh),
            zero=zero,
            schedule="interleaved",
        )
        rounds = reductions(par, context.software.reduces_by_round)
        size = rounds * gradient + weight
        if zero == 1:
            size = min(2 * gradient, size)
        shown, windows = gradient_overlap(par, context.rate, context.software)
        shares.append(GradientShare(size, min(1.0, value_of(shown)), windows))
    smallest = min(share.size for share in shares)  # the exposed bytes if nothing is hidden
    return [
        share for share in shares if share.size == smallest or share.shown * share.size < smallest
    ]


def _updated(context: CostContext, parameters: float) -> float:
    """Returns the parameters whose update a bound counts: none if the host computes it, which may
    overlap with other work."""
    return 0.0 if offload_of(context.train).optimizer else parameters


class DegreesBound:
    """Values that meshes of the same degrees share, whatever their micro-batches."""

    def __init__(self, mesh: Mesh, folds: Sequence[LayerCost], best: BestPaths):
        self.mesh = mesh
        self.cost = folds[0]
        context = self.cost.context
        par = structs.replace(self.cost.in_mesh(mesh), zero=1)
        #: Paths of a nesting with stages inside an NVLink domain, and of one with stages on
        #: different nodes.
        self.nestings = [
            best.paths(mesh, near) for near in (True, False) if best.possible(mesh, near)
        ]
        self.nodes = -(-par.world_size // context.cluster.gpus_per_node)
        self.factor = value_of(step_factor(context.rate, self.nodes)) * ROUNDING
        dense, experts = min(layer_cost.average_params(mesh.pp) for layer_cost in folds)
        updated = _updated(context, dense + experts)
        self.constant_s = value_of(constant_seconds(par, context.rate, updated, self.nodes))
        dense_s, experts_s = self._byte_seconds(best)
        experts_s *= len(folds) == 1  # the replicas of experts differ between folds
        self.byte_s = dense_s, experts_s
        #: Seconds for one byte of each parameter: of an average rank, and of one layer at least.
        self.average_gradients_s = min(
            dense_s * plain + experts_s * routed
            for plain, routed in (layer_cost.average_params(mesh.pp) for layer_cost in folds)
        )
        self.layer_gradients_s = min(
            dense_s * plain + experts_s * routed
            for plain, routed in (layer_cost.fewest_params(1) for layer_cost in folds)
        )

    def _byte_seconds(self, best: BestPaths) -> tuple[float, float]:
        """Returns the least seconds per byte of (dense, expert) gradients or weights."""
        if self.cost.par.zero_group:  # hybrid sharding: not bounded
            return 0.0, 0.0
        mesh = self.mesh
        of_experts = replicas(self.mesh)
        members = mesh.cp * mesh.ep * mesh.dp, expert_mesh(mesh).edp
        narrow = self.cost.context.train.grad_wire
        patterns: tuple[Pattern, ...] = ("ring", "exchange") if narrow else ("ring",)
        dense_s, experts_s = (
            (member_count - 1)
            / member_count
            * min(
                best.per_byte(paths[replica_axes, pattern])
                for paths in self.nestings
                for pattern in patterns
            )
            for member_count, replica_axes in zip(
                members,
                (DENSE_REPLICAS, of_experts),
                strict=True,
            )
        )
        return dense_s, experts_s


class ZeroStage:
    """State bytes and gradient communication of a mesh with one ZeRO stage."""

    def __init__(self, base: MeshBound, par: Parallel, lasting: float):
        """`lasting` has the bytes of the buffers that the whole step holds."""
        self._cost = base.cost
        self.context = base.cost.context
        self.par = par
        mesh = base.mesh
        recipe = self._recipe = base.cost.recipe
        self.nestings = base.degrees.nestings
        self.nodes = base.degrees.nodes
        # Replicas of a dense parameter and of an expert parameter.
        self._replicas = (mesh.cp * mesh.ep * mesh.dp, expert_mesh(mesh).edp)
        self._states: dict[int, tuple[memory.StateBytes, memory.StateBytes]] = {}
        self.pipeline = memory.is_sharded_pipeline(par, recipe)
        split = structs.replace(par, schedule="zb_h1")
        split_workload = Workload(self.context.model, split, self.context.train)
        #: Bytes of a (dense, expert) parameter's weight that a step gathers if backward is split.
        self.step_weights = (
            memory.step_weights(split_workload, (1.0, 0.0), recipe),
            memory.step_weights(split_workload, (0.0, 1.0), recipe),
        )
        self.one_stage = memory.is_one_stage(par, recipe)
        self.dense_bytes, self.expert_bytes = self._peak_state_bytes()
        workload = Workload(self.context.model, par, self.context.train)
        zero_bytes = memory.zero_buffers(workload, recipe)
        by_moment = self.one_stage or self.pipeline
        self.buffer_bytes = lasting if by_moment else lasting + zero_bytes
        self.bucket_bytes = zero_bytes if par.zero < 3 else 0.0
        self._overlap = gradient_overlap(par, self.context.rate, self.context.software)
        self._sent: dict[tuple[tuple[int, int], int], list[float]] = {}
        self._constant: dict[int, float] = {}

    def states(self, copies: int) -> tuple[memory.StateBytes, memory.StateBytes]:
        """Returns the state bytes of a dense parameter and of an expert parameter.

        `copies` is the number of copies of the model on a pipeline, which share the shards.
        """
        if copies not in self._states:
            arguments = (self.par, self.context.train, self._recipe)
            cost = self._cost
            is_sharded = shard_ranks(self.par) > 1
            zero_key = self.par.zero, is_sharded, self.par.micro_batches > 1
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
        """Returns the device bytes of a dense parameter and of an expert parameter."""
        dense, experts = self.states(copies)
        return dense.on_device, experts.on_device

    def _peak_state_bytes(self) -> tuple[float, float]:
        """Returns the least bytes of (a dense, an expert) parameter's state at the peak."""
        # Gradients may come after the peak.
        if self.par.zero >= 3 and (self.pipeline or self.one_stage):
            # Bytes per parameter of gathered weights.
            gathered_bytes = DTYPE_BYTES[self.context.train.precision] if self.pipeline else 0.0
            dense, experts = (
                state.params + state.optimizer + gathered_bytes for state in self.states(1)
            )
            return dense, experts
        return self.state_bytes(1)

    def bytes_of(self, dense: float, experts: float) -> float:
        """Returns the bytes of a rank with these parameters of one model copy, with buffers."""
        return self.buffer_bytes + dense * self.dense_bytes + experts * self.expert_bytes

    def sent(self, held: tuple[int, int], copies: int) -> list[float]:
        """Returns the seconds of a rank's gradients and weights, hidden or not, by nesting.

        `held` is (dense, expert) parameters. `copies` is the number of copies of the model on the
        pipeline.
        """
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
        """Returns the longest exposed gradient communication of any rank (`exposed_gradients`).

        `sent` has the seconds of communication of each rank, and `hiding` the seconds of a
        micro-batch.
        """
        shown = value_of(self._overlap[0])
        windows = self._overlap[1]
        longest = 0.0
        for seconds, micro_batch in zip(sent, hiding, strict=True):
            late = seconds - micro_batch * windows if windows else 0.0
            longest = max(
                longest,
                shown * seconds + (1.0 - shown) * late if late > 0.0 else shown * seconds,
            )
        return longest

    def constant(self, parameters: int) -> float:
        """Returns the seconds of optimizer and network for a rank with these parameters."""
        if parameters not in self._constant:
            updated = _updated(self.context, parameters)
            seconds = constant_seconds(self.par, self.context.rate, updated, self.nodes)
            self._constant[parameters] = value_of(seconds)
        return self._constant[parameters]


class RecomputeBound:
    """Bounds of a mesh with one recomputation mode."""

    def __init__(self, base: MeshBound, recompute: str):
        self.base = base
        self.mesh = base.mesh
        self.cost = base.cost
        self.sharded = base.sharded
        self.recompute = recompute

    def least_bytes(self) -> float:
        """Returns a lower bound in bytes.

        Some rank holds the states of an average one and at least one micro-batch. Some rank,
        possibly the one with the fewest layers, holds as many micro-batches as there are ranks.
        """
        cost = self.cost
        average, fewest = self.base.states
        layers = cost.kept("1f1b").layers(self.recompute)
        # Of a layer whose input the trainer keeps apart nothing is stored.
        activation_bytes = self.base.shapes.least * min(
            (layer.stored for layer in layers if layer.stored),
            default=0.0,
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
