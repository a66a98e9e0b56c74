"""One rank's part of an optimizer step, for every layout:

    micro-batches -> pipeline (forward, backward) -> buckets (reduce) -> norm, clip
        -> optimizer on the shard -> gather

This module only connects the parts. `trainer.train` handles data files, checkpoints, signals and
reports, so parity tests run exactly the code that trains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.batch import computed, replica_of, taken
from orchestrator.plan.expert_mesh import spread
from orchestrator.plan.offload import comm_buffer_of, offload_of
from orchestrator.plan.schedules import peak_inputs, schedule_of, shards_layers

from .checkpoint.format import StatePiece
from .comm.collectives import CommCounter, all_reduce
from .comm.mesh import Mesh
from .comm.timers import PhaseTimer
from .data.batch import MicroBatch, look_ahead, without_targets
from .host.activations import ActivationStore
from .host.memory import HostMemory
from .optim.clip import clip_coefficient, grad_norm
from .optim.delayed import DelayedOptimizer
from .optim.disk import DiskOptimizer
from .optim.loss_scale import LossScale
from .optim.rule import Rules
from .optim.sharded import ShardedOptimizer, rules_of
from .parallel import apply
from .parallel.context.apply import shard_batch
from .parallel.data.buckets import GradBuckets
from .parallel.data.step_gathers import StepGatheredBuckets
from .parallel.data.zero2 import ShardedGradBuckets
from .parallel.params import STALE, classes_of
from .parallel.reserved_inputs import ReservedInputs
from .pipeline.runtime import Pipeline, stage_indices
from .precision import Recipe

if TYPE_CHECKING:
    from .parallel.data.fsdp import FullyShardedParameters

    Buckets = GradBuckets | FullyShardedParameters

#: The flat buckets of ZeRO stages that shard more than the optimizer's state.
BUCKETS: dict[int, type[GradBuckets]] = {
    2: ShardedGradBuckets,
    3: StepGatheredBuckets,
}


class Engine:
    """Model part, pipeline, gradient buckets and optimizer of one rank."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        recipe: Recipe,
        counter: CommCounter | None = None,
        scratch: Path | None = None,
    ):
        """`counter` counts communication; the default suits the device's collectives. `scratch` is
        the folder of state that is offloaded to a disk, if the plan does not name one. Raises
        LayoutError for a plan that this trainer does not run."""
        par = plan.parallel
        self.offload = offload_of(plan.job.train)
        self.plan = plan
        self.mesh = mesh
        self.device = device
        self.recipe = recipe
        self.counter = counter or CommCounter(gloo=device.type == "cpu")
        self.timer = PhaseTimer()
        self.scaler = LossScale(device) if recipe.param == torch.float16 else None
        stage_numbers = stage_indices(plan, mesh.coord.pp)
        self.has_loss = stage_numbers[-1] == par.pp * par.vpp - 1
        self._unit_scale = torch.ones((), dtype=torch.float64, device=device)
        folder = self._offload_folder(scratch)
        self.host = self._host_memory(folder)
        self.store = self._activation_store(folder)
        self.reserved = self._reserved_inputs()
        self.part = self._build_part(stage_numbers)
        self._reserve(stage_numbers)
        rules = rules_of(plan.job.optim, plan.job.train.seed)
        self._mark_parameters(rules)
        self.buckets = self._fully_sharded() if self._shards_layers else self._flat_buckets()
        self.optimizer = self._optimizer(rules, folder)
        replica = replica_of(par, mesh.coord)
        computed_micro_batches = computed(par, replica)
        #: Micro-batches of this replica per step, except during a batch-size ramp.
        self._micro_batches = taken(par)[replica]
        #: Empty micro-batches per step that make up for those of replicas that take more.
        self._padding = computed_micro_batches - self._micro_batches
        self.pipeline = self._pipeline(computed_micro_batches)

    def _pipeline(self, micro_batches: int) -> Pipeline:
        return Pipeline.from_plan(
            self.plan,
            self.part.stages,
            self.part.loss,
            self.mesh,
            self.counter,
            dtype=self.recipe.param,
            device=self.device,
            on_grad=self.buckets.accumulate_grad,
            timer=self.timer,
            micro_batches=micro_batches,
            terms=self.part.terms,
        )

    @property
    def _shards_layers(self) -> bool:
        return shards_layers(self.plan.parallel) and self.mesh.size("shard") > 1

    @property
    def _state_host(self) -> HostMemory | None:
        """The memory that holds the optimizer's state, or None if the device holds it."""
        return self.host if self.offload.optimizer else None

    def _offload_folder(self, scratch: Path | None) -> Path:
        if self.offload.dir:
            return Path(self.offload.dir)
        return scratch or Path(tempfile.gettempdir())

    def _host_memory(self, folder: Path) -> HostMemory | None:
        offload = self.offload
        if not offload.optimizer and not offload.activations:
            return None
        return HostMemory(
            self.device,
            takes_gradients=offload.optimizer == "host",
            weights=folder if offload.weights and offload.optimizer == "disk" else None,
        )

    def _activation_store(self, folder: Path) -> ActivationStore | None:
        if self.host is None or not self.offload.activations:
            return None
        on_disk = self.offload.activations == "disk"
        return ActivationStore(self.host, folder if on_disk else None)

    def _reserved_inputs(self) -> ReservedInputs | None:
        if self.plan.job.train.contiguous_activations is not True:
            return None
        return ReservedInputs.of_plan(self.plan, self.recipe.param, self.device)

    def _reserve(self, stage_numbers: list[int]) -> None:
        """Reserves the buffer of all inputs that the schedule keeps at once."""
        if self.reserved is None:
            return
        inputs_of_stage = dict(zip(stage_numbers, self.part.kept_inputs, strict=True))
        slots = peak_inputs(
            schedule_of(self.plan.parallel),
            self.mesh.coord.pp,
            inputs_of_stage,
        )
        self.reserved.reserve(slots)

    def _build_part(self, stage_numbers: list[int]) -> apply.ModelPart:
        """Builds this rank's stages, in the master dtype if the shards of `fully_shard` are the
        master weights, which it makes later, unit by unit."""
        holds_masters = self._shards_layers and not self.offload.optimizer
        dtype = self.recipe.master if holds_masters else self.recipe.param
        allocate = None
        if self.host is not None and self.offload.weights and not self._shards_layers:
            allocate = self.host.device_zeros
        return apply.build(
            self.plan,
            self.mesh,
            self.counter,
            self.device,
            dtype,
            indices=stage_numbers,
            allocate=allocate,
            deferred=self._shards_layers,
            store=self.store or self.reserved,
        )

    def _mark_parameters(self, rules: Rules) -> None:
        """Records in the registry how the optimizer's rules treat each parameter."""
        table = self.part.table
        for name, info in table.items():
            table[name] = replace(info, whole_matrix=rules.owns(info), narrow=rules.narrows(info))

    def _optimizer(
        self, rules: Rules, folder: Path
    ) -> ShardedOptimizer | DelayedOptimizer | DiskOptimizer:
        host = self._state_host
        if host is not None and self.offload.optimizer != "host":
            return DiskOptimizer(
                self.buckets,
                rules,
                self.recipe.master,
                folder=folder,
                buffer_bytes=self.offload.buffer_bytes,
                host=host,
            )
        optimizer = ShardedOptimizer(self.buckets, rules, self.recipe.master, host)
        if host is not None and self.offload.delayed:
            return DelayedOptimizer(optimizer, host)
        return optimizer

    def _flat_buckets(self) -> GradBuckets:
        par = self.plan.parallel
        zero = par.zero
        if self.mesh.size("shard") == 1:  # then all ZeRO stages are equal
            zero = min(zero, 1)
        kind = BUCKETS.get(zero, GradBuckets)
        buckets = kind(
            list(self.part.parameters()),
            self.mesh,
            zero,
            reduce_dtype=self.recipe.reduce,
            wire=self.recipe.wire,
            bucket_bytes=par.bucket_bytes,
            counter=self.counter,
            classes=classes_of(spread(par)),
            host=self._state_host,
            most_bytes=comm_buffer_of(self.plan.job.train),
        )
        buckets.gather_ahead(self.part.stages)
        return buckets

    def _fully_sharded(self) -> Buckets:
        # Imports torch._dynamo, which takes a second: only where it is needed.
        from .parallel.data.fsdp import FullyShardedParameters

        return FullyShardedParameters(
            self.part.stages,
            self.part.table,
            self.mesh,
            recipe=self.recipe,
            counter=self.counter,
            device=self.device,
            interleaved=self.plan.parallel.pp > 1,
            classes=classes_of(spread(self.plan.parallel)),
            host=self._state_host,
            away=self.offload.weights,
            fill=self.part.fill,
        )

    def gradients(self, batches: Sequence[MicroBatch], valid_tokens: int) -> tuple[Tensor, Tensor]:
        """Computes the summed gradients of the global batch into the buckets.

        `batches` hold whole sequences [b, s], also under context parallelism. `valid_tokens` is the
        global count.

        Returns the summed loss of this rank's micro-batches (zero without the last stage) and the
        norm of the whole gradient before clipping, float64 and equal on all ranks; both 0-d.
        """
        self.buckets.start_forward()
        self._start_terms(len(batches), valid_tokens)
        self.part.expert_choices.start()
        self.part.delayed_scales.start()
        batches = self._pad_micro_batches(batches)
        self.buckets.expect(len(batches))
        if (mtp := self.plan.model.mtp) and self.has_loss:
            batches = [look_ahead(batch, mtp.depth) for batch in batches]
        scale = self.current_scale / valid_tokens
        cp_method = self.plan.parallel.cp_method
        cp_size = self.mesh.size("cp")
        cp_index = self.mesh.index("cp")
        batches = [shard_batch(batch, cp_method, cp_size, cp_index) for batch in batches]
        if len(batches) != self.pipeline.schedule.micro_batches:  # a batch-size ramp
            self.pipeline.set_schedule(schedule_of(self.plan.parallel, len(batches)))
        loss_sum = self.pipeline.run(batches, scale)
        with self.timer.phase("comm"):
            self.buckets.finish()
        with self.timer.phase("optimizer"):
            norm = grad_norm(self.buckets, self.device)
            norm = norm if self.scaler is None else norm / self.scaler.current
        return loss_sum, norm

    def _start_terms(self, micro_batches: int, valid_tokens: int) -> None:
        """Tells the loss terms the counts by which they divide."""
        par = self.plan.parallel
        samples = par.global_batch_samples
        if micro_batches != self._micro_batches:  # a batch-size ramp, equal on all replicas
            samples = micro_batches * par.micro_batch_size * par.dp * par.ep
        tokens = samples * self.plan.job.train.seq_len
        self.part.terms.start(self.current_scale, valid_tokens, micro_batches, samples, tokens)

    def _pad_micro_batches(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Returns `batches`, padded with empty ones if every micro-batch is a collective and other
        replicas take more."""
        if not self._padding:
            return batches
        return [*batches, *[without_targets(batches[-1])] * self._padding]

    def update(self, norm: Tensor, lr: float) -> Tensor:
        """Applies the gradient, unless `norm` is not finite: in fp16 the scaled gradient has then
        overflowed, in other precisions something is broken.

        Returns whether the gradient was applied, 0-d bool. The device decides; the host does not
        wait.
        """
        finite = torch.isfinite(norm)
        # Before the weights are gathered, which takes until the next step.
        self.part.expert_choices.apply(finite, self.mesh, self.plan.parallel.sp, self.counter)
        self.part.delayed_scales.apply(finite, self.mesh, self.counter)
        with self.timer.phase("optimizer"):
            factor = clip_coefficient(norm, self.plan.job.train.clip_grad_norm)
            if self.scaler is not None:
                factor = factor / self.scaler.current
            self.optimizer.step(lr, factor, finite)
            if self.scaler is not None:
                self.scaler.update(finite)
        return finite

    @property
    def current_scale(self) -> Tensor:
        """`loss_scale` on the device, 0-d float64; later steps do not change this tensor."""
        return self._unit_scale if self.scaler is None else self.scaler.current

    @property
    def loss_scale(self) -> float:
        """The factor by which the next backward multiplies the loss. Waits for the device."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def loss_total(self, loss_sum: Tensor) -> Tensor | None:
        """Returns the loss summed over the global batch, 0-d float64; None on ranks without the
        last stage. Collective."""
        if not self.has_loss:
            return None
        return all_reduce(loss_sum.double(), self.mesh.group("grad"), "dp", self.counter)

    def mean_loss(self, loss_sum: Tensor, valid_tokens: int) -> float | None:
        """Returns the mean over the step's global valid tokens; None on ranks without the last
        stage. Waits for the device. Collective."""
        total = self.loss_total(loss_sum)
        return None if total is None else float(total) / valid_tokens

    def loss_term_totals(self) -> dict[str, Tensor]:
        """Returns the sum over all ranks of each term that modules have added to the loss of this
        step, 0-d float64. Collective; a model without such terms sends nothing."""
        sums = self.part.terms.sums
        if not sums:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.stack([zero if term_sum is None else term_sum for term_sum in sums.values()])
        if self.mesh.coord.tp and not self.plan.parallel.sp:
            total.zero_()  # tp ranks hold the same tokens, which count once
        all_reduce(total, self.mesh.group("grad"), "dp", self.counter)
        all_reduce(total, self.mesh.group("model"), "norm", self.counter)
        return dict(zip(sums, total.unbind(), strict=True))

    def loss_terms(self) -> dict[str, float]:
        """Returns `loss_term_totals` as numbers. Waits for the device. Collective."""
        return {name: float(total) for name, total in self.loss_term_totals().items()}

    def expert_loads(self) -> Tensor | None:
        """Returns the routers' choices in this step, for `part.expert_meter.loads`; None if the
        step is not sampled. Collective among ranks with the same layers."""
        return self.part.expert_meter.totals(self.mesh, self.plan.parallel.sp, self.counter)

    @property
    def reports_expert_loads(self) -> bool:
        """Whether this rank reports expert loads for all ranks that hold its layers."""
        return self.mesh.index("grad") == 0 and self.mesh.coord.tp == 0

    def measure(self, on: bool) -> None:
        """Starts or stops measuring times. On a GPU a measurement takes two events per action and
        per collective; on a CPU times are always measured."""
        self.counter.measuring = self.pipeline.action_times.measuring = on

    def state_pieces(self, to_write: bool) -> Iterator[StatePiece]:
        """Yields the training state as checkpoint pieces: the optimizer's, and that of modules
        without gradient. With `to_write` only the pieces that this rank writes to checkpoints, else
        all that it holds."""
        for state_slice in self.optimizer.slices():
            if state_slice.writes or not to_write:
                yield StatePiece(
                    state_slice.kind, state_slice.info, state_slice.start, state_slice.tensor
                )
        for info, tensor in self.part.states():
            if (info.owner and self.mesh.index("grad") == 0) or not to_write:
                yield StatePiece("state", info, 0, tensor.view(-1))

    def scalars(self) -> dict[str, float]:
        """Returns the scalar state of a checkpoint, equal on all ranks."""
        scale = self.scaler.state() if self.scaler is not None else {}
        stale = {STALE: 1.0} if self.offload.delayed else {}
        return {"optimizer_steps": float(self.optimizer.step_count), **scale, **stale}

    def resumed(self, step: int, scalars: Mapping[str, float] = {}) -> None:
        """Sets counters and parameters after the pieces were filled from a checkpoint of `step`."""
        self.optimizer.step_count = int(scalars.get("optimizer_steps", step))
        self.part.delayed_scales.has_history = step > 0
        if self.scaler is not None:
            self.scaler.restore(scalars)
        self.optimizer.copy_masters_to_params(stale=STALE in scalars)
