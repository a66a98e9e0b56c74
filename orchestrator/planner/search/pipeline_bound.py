"""Lower bounds of a mesh with a recomputation mode and an assignment of stages to ranks (`bound`).

Only the schedule's name (micro-batches in flight) and the ZeRO stage are open. With these,
`bytes_of` and `seconds_of` bound a complete layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from orchestrator.cost.memory.activations import LIMITS, logits_in_flight
from orchestrator.cost.memory.deferred_weight_gradients import DeferredGradients
from orchestrator.cost.memory.moments import peak_of_one_stage
from orchestrator.cost.memory.unequal_stages import unequal_peak
from orchestrator.cost.time.pipeline import in_flight_on_rank, weights_at_end
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import CpMethod
from orchestrator.plan.offload import offload_of

from .bound import ROUNDING, RecomputeBound, ZeroStage
from .layer_cost import StageSeconds
from .pipeline_shapes import PipelineShape, RankShape


class ActivationBound:
    """Bounds the activation bytes of a pipeline's ranks with one schedule."""

    def __init__(self, pipeline: PipelineBound, schedule: str, exact: bool):
        """`exact` bounds ranks with unequal stages exactly."""
        cost = pipeline.branch.cost
        mesh = pipeline.branch.mesh
        self.schedule = schedule
        self.exact = exact
        self.held = pipeline.held
        self.pp = mesh.pp
        self.vpp = pipeline.vpp
        self.micro_batches = mesh.micro_batches
        self.recompute = pipeline.branch.recompute
        self.keeps = cost.kept(schedule)
        self.kernels = self.keeps.kernels
        self.deferred: DeferredGradients | None = None
        if pipeline.split and not self.kernels.fills_limit:
            parallel = structs.replace(
                cost.par,
                schedule=schedule,
                pp=mesh.pp,
                vpp=pipeline.vpp,
                micro_batches=mesh.micro_batches,
            )
            workload = Workload(cost.context.model, parallel, cost.context.train)
            self.deferred = DeferredGradients(workload)
        holds_messages = mesh.pp > 1 and self.kernels.holds_messages
        self.message = cost.boundary if holds_messages else 0.0

    def of_rank(self, rank: RankShape) -> float:
        """Returns a lower bound of the activation bytes of one rank."""
        keeps = self.keeps
        # The last stage receives no gradient.
        sent = (1 if rank.head and self.held == 1 else 2) * self.message
        temporary = max(keeps.loss if rank.head else 0.0, keeps.backward)
        if len(rank.unlike) > 1:
            return sent + temporary + self._of_unequal_stages(rank)
        stored = keeps.stored(self.recompute, rank.unlike[0])
        layers = keeps.stage_layers(self.recompute, rank.dense, rank.moe)
        if self.deferred:
            head = keeps.head if rank.head else None
            peak = max(
                self.deferred.peak(
                    rank_index,
                    self._in_flight(rank_index),
                    stored=stored,
                    stages=self.held,
                    layers=layers,
                    head=head,
                )
                for rank_index in {rank.rank, rank.inner}
            )
            return sent + temporary + peak
        recomputing = max((temporaries for *_, temporaries in layers), default=0.0)
        if rank.head:
            logits = logits_in_flight(self.schedule, self.micro_batches)
            recomputing = max(recomputing, keeps.head) + (logits - 1) * keeps.head
        if self.kernels.keep_sent:
            temporaries = recomputing + sent
        else:
            temporaries = max(recomputing + self.message, sent)
        return temporary + stored * self._in_flight(rank.rank) + temporaries

    def _of_unequal_stages(self, rank: RankShape) -> float:
        """Returns a lower bound of the bytes of a rank whose stages keep unequal bytes."""
        if not self.exact:
            stored = min(self.keeps.stored(self.recompute, stage) for stage in rank.unlike)
            return stored * self._in_flight(rank.rank)
        stage_bytes = [
            self.keeps.stage_bytes(self.recompute, stage, self.deferred) for stage in rank.stages
        ]
        return unequal_peak(
            (self.schedule, self.pp, self.micro_batches, self.vpp),
            rank.rank,
            rank.held,
            stage_bytes,
        )

    def _in_flight(self, rank: int) -> int:
        """Returns the micro-batches in flight on a rank."""
        if self.kernels.fills_limit and self.schedule in LIMITS:
            return min(self.micro_batches, LIMITS[self.schedule] * self.pp)
        return in_flight_on_rank(
            self.schedule,
            self.pp,
            self.vpp,
            self.micro_batches,
            rank,
        )


class PipelineBound:
    """A branch with its stages on ranks (`shape`) and backward in one or two parts (`split`)."""

    def __init__(
        self,
        branch: RecomputeBound,
        shape: PipelineShape,
        split: bool,
        vpp: int,
        cp_methods: Sequence[CpMethod],
    ):
        self.branch = branch
        self.shape = shape
        self.split = split
        self.vpp = vpp
        self.cp_methods = tuple(cp_methods)
        self.held = vpp * shape.copies  # stages per rank
        cost = branch.cost
        mesh = branch.mesh
        base = branch.base
        self.params = cost.pipeline_params(shape)
        stage_s = self.one = cost.stage_seconds(branch.recompute, split, self.cp_methods)
        #: Seconds by rank of the shape: (least time of the schedule because of this rank, time of
        #: one micro-batch).
        self.ranks = [self._rank(rank, stage_s) for rank in shape.ranks]
        sends = mesh.micro_batches * shape.sends + 2 * (mesh.pp - 1)
        self.transfers = [once * sends for once in base.transfers]
        chain = 0.0
        if not (split and base.overlapped):
            chain = cost.chain(stage_s, 0.5 if split else 1.0)
        self.longest = max(chain, *(end for end, _ in self.ranks))
        self.most_params = max(map(sum, self.params))
        # The more is sharded, the less work is left to the optimizer.
        constant = branch.sharded[-1].constant(self.most_params)
        #: A lower bound for every ZeRO stage, no less than the one for all pipelines.
        self.least_s = max(
            branch.least_s,
            (self.longest + self._gradients() + min(self.transfers) + constant)
            * base.degrees.factor,
        )
        self._seconds: dict[int, float] = {}

    def _hiding(self, longest: float) -> list[float]:
        """Returns the most seconds of a micro-batch by rank, in a pipeline of this span."""
        if self.branch.base.inner_known:
            return [micro_batch_s for _, micro_batch_s in self.ranks]
        m = self.branch.mesh.micro_batches
        return [micro_batch_s + (longest - end) / m for end, micro_batch_s in self.ranks]

    def _gradients(self) -> float:
        """Returns the least exposed seconds of gradients and weights, with any ZeRO stage."""
        dense_s, experts_s = self.branch.base.degrees.byte_s
        return max(
            self.branch.base.exposed(plain * dense_s + experts * experts_s, hiding)
            for (plain, experts), hiding in zip(
                self.params,
                self._hiding(self.longest),
                strict=True,
            )
        )

    def _rank(self, rank: RankShape, stage_s: StageSeconds) -> tuple[float, float]:
        """Returns (least seconds of the schedule because of a rank, seconds of its micro-batch)."""
        stages, dense, moe = rank.before
        if self.split and self.branch.base.overlapped:
            stages = dense = moe = 0
        (forward, of_moe), (backward, back_of_moe), first, last = stage_s
        ahead = dense * forward + moe * of_moe + (first if stages else 0.0)
        if not self.split:
            ahead += dense * backward + moe * back_of_moe
        micro_batch_s = rank.dense * (forward + backward) + rank.moe * (of_moe + back_of_moe)
        micro_batch_s += rank.table * first + rank.head * sum(last)
        micro_batch_s /= self.shape.copies
        return ahead + self.branch.mesh.micro_batches * micro_batch_s, micro_batch_s

    # ----------------------------------------------------------------- one schedule and ZeRO stage

    def kept(self, schedule: str, exact: bool = False) -> list[float]:
        """Returns a lower bound of the activation bytes of each rank of the shape.

        `exact` also bounds ranks with unequal stages exactly; otherwise all stages count as the
        smallest, which is quick.
        """
        bound = ActivationBound(self, schedule, exact)
        return [bound.of_rank(rank) for rank in self.shape.ranks]

    def bytes_of(self, activation_bytes: list[float], sharded: ZeroStage) -> float:
        """Returns a lower bound of the bytes on the fullest rank."""
        if sharded.one_stage:
            return self._one_stage(sharded) * ROUNDING
        if sharded.pipeline and not self.split:
            return self._sharded_pipeline(activation_bytes, sharded) * ROUNDING
        dense, expert = sharded.state_bytes(self.shape.copies)
        if self.split:
            dense, expert = _split_state_bytes(sharded, self.shape.copies)
            dense += sharded.step_weights[0]
            expert += sharded.step_weights[1]
        fullest = 0.0
        for (plain, experts), keeps in zip(self.params, activation_bytes, strict=True):
            fullest = max(fullest, plain * dense + experts * expert + keeps)
        return self.branch.cost.recipe.process_bytes(fullest + sharded.buffer_bytes) * ROUNDING

    def _sharded_pipeline(self, activation_bytes: list[float], sharded: ZeroStage) -> float:
        """Returns the bytes of a sharded rank, at the loss or in its first layer's backward."""
        keeps = self.branch.cost.kept("1f1b")
        fullest = 0.0
        for (plain, experts), rank_bytes, rank in zip(
            self.params,
            activation_bytes,
            self.shape.ranks,
            strict=True,
        ):
            # Bytes of a layer's backward beyond those of the loss.
            later = max(0.0, keeps.backward - keeps.loss) if rank.head else 0.0
            states = plain * sharded.dense_bytes + experts * sharded.expert_bytes
            fullest = max(fullest, states + rank_bytes - later)
        return self.branch.cost.recipe.process_bytes(fullest + sharded.buffer_bytes)

    def _one_stage(self, sharded: ZeroStage) -> float:
        """Returns the bytes of a rank that holds the whole model."""
        cost = self.branch.cost
        ((plain, experts),) = self.params
        keeps = cost.kept("1f1b")
        dense, expert = sharded.states(1)
        stage_activations = keeps.one_stage(self.branch.recompute)
        grads = plain * dense.grads + experts * expert.grads
        backward = keeps.backward + sharded.bucket_bytes
        train = cost.trains[self.branch.recompute]
        peak = peak_of_one_stage(
            Workload(cost.context.model, sharded.par, train),
            stage_activations,
            grads,
            keeps.loss,
            backward,
        )
        states = (
            plain * (dense.params + dense.optimizer)
            + experts * (expert.params + expert.optimizer)
            + grads
        )
        tensors = states + stage_activations.peak + sharded.buffer_bytes
        return cost.recipe.process_bytes(tensors + peak.buffers - peak.apart)

    def seconds_of(self, sharded: ZeroStage) -> float:
        """Returns a lower bound of the step in seconds, for any nesting order.

        It is the same for all schedules of the pipeline.
        """
        zero = sharded.par.zero
        if zero not in self._seconds:
            self._seconds[zero] = self._seconds_of(sharded, self.longest)
        return self._seconds[zero]

    def seconds_with(self, schedule: str, sharded: ZeroStage) -> float:
        """Returns a lower bound of the step in seconds with one schedule.

        If backward is split, the last gradient of the rank with most stages ahead of it goes back
        through them, while the rank has few weight gradients left (`StepCost`).
        """
        if not self.split or self.branch.base.overlapped:
            return self.seconds_of(sharded)
        (end, _), rank = max(
            zip(self.ranks, self.shape.ranks, strict=True),
            key=lambda both: both[1].before,
        )
        stages, dense, moe = rank.before
        of_dense, of_moe = self.one.backward
        mesh = self.branch.mesh
        back = dense * of_dense + moe * of_moe
        slowest_stage = max(
            stage.dense * of_dense + stage.moe * of_moe + stage.last * self.one.last[1]
            for stage in rank.unlike
        )
        deferred_weights = weights_at_end(
            schedule,
            mesh.pp,
            mesh.micro_batches,
            self.vpp,
            stages,
        )
        return self._seconds_of(
            sharded,
            max(self.longest, end + (back - deferred_weights * slowest_stage) / 2),
        )

    def _seconds_of(self, sharded: ZeroStage, longest: float) -> float:
        """Returns a lower bound of the step in seconds, for a pipeline of `longest` seconds."""
        base = self.branch.base
        # Seconds of gradients and weights by nesting.
        sent = zip(
            *(sharded.sent(held, self.shape.copies) for held in self.params),
            strict=True,
        )
        hiding = self._hiding(longest)
        least = min(  # gradients and weights as `StepCost` bounds them
            longest + sharded.exposed(sent_by_rank, hiding) + transfers
            for sent_by_rank, transfers in zip(sent, self.transfers, strict=True)
        )
        return (least + sharded.constant(self.most_params)) * base.degrees.factor


def _split_state_bytes(sharded: ZeroStage, copies: int) -> tuple[float, float]:
    """Returns the least device bytes of a dense parameter and of an expert parameter if backward is
    split: gradients that the host takes pass through buffers."""
    dense, experts = sharded.states(copies)
    if sharded.par.zero < 3 or offload_of(sharded.context.train).optimizer != "host":
        return dense.on_device, experts.on_device
    return dense.params + dense.optimizer, experts.params + experts.optimizer
