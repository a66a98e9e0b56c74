"""One rank's part of an optimizer step, for every layout:

    micro-batches -> pipeline (forward, backward) -> buckets (reduce) -> norm, clip -> optimizer on
    the shard -> gather

This module only connects the parts. Data files, checkpoints, signals and reports are the business
of `trainer.train`, so parity tests run exactly the code that trains.
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
from orchestrator.plan.offload import offload_of
from orchestrator.plan.schedules import schedule_of

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
from .parallel.data.zero2 import ShardedGradBuckets
from .parallel.params import STALE, classes_of
from .pipeline.runtime import Pipeline, stage_indices
from .precision import Recipe

if TYPE_CHECKING:
    from .parallel.data.fsdp import FullyShardedParameters

    Buckets = GradBuckets | FullyShardedParameters


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
        """`counter`: the default is one for the collectives of the device. `scratch`: for what is
        offloaded to a disk, if the plan names no folder. Raises LayoutError for a plan that this
        trainer does not run."""
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
        shards_weights = par.zero == 3 and mesh.size("shard") > 1
        holds_masters = shards_weights and not self.offload.optimizer
        dtype = recipe.master if holds_masters else recipe.param
        self._one = torch.ones((), dtype=torch.float64, device=device)
        folder = (
            Path(self.offload.dir) if self.offload.dir else scratch or Path(tempfile.gettempdir())
        )
        self.host: HostMemory | None = None
        self.store: ActivationStore | None = None
        if self.offload.optimizer or self.offload.activations:
            in_memory = self.offload.optimizer == "host"
            weights = folder if self.offload.weights else None
            self.host = HostMemory(device, takes_gradients=in_memory, weights=weights)
            if self.offload.activations:
                self.store = ActivationStore(
                    self.host, folder if self.offload.activations == "disk" else None
                )
        new = self.host.device_zeros if self.host is not None and self.offload.weights else None
        self.part = apply.build(
            plan,
            mesh,
            self.counter,
            device,
            dtype,
            indices=stage_numbers,
            new=new,
            store=self.store,
        )
        rules = rules_of(plan.job.optim, plan.job.train.seed)
        table = self.part.table
        table |= {
            name: replace(info, whole=rules.owns(info), narrow=rules.narrows(info))
            for name, info in table.items()
        }
        self.buckets = self._fully_sharded() if shards_weights else self._flat_buckets()
        self.optimizer = self._optimizer(rules, folder)
        replica = replica_of(par, mesh.coord)
        self._taken = taken(par)[replica]  # micro-batches per step, but for a batch-size ramp
        self._empty = (
            computed(par, replica) - self._taken
        )  # empty ones beside them, if others take more
        self.pipeline = Pipeline.from_plan(
            plan,
            self.part.stages,
            self.part.loss,
            mesh,
            self.counter,
            dtype=recipe.param,
            device=device,
            on_grad=self.buckets.accumulate_grad,
            timer=self.timer,
            micro_batches=computed(par, replica),
            terms=self.part.terms,
        )

    def _optimizer(
        self, rules: Rules, folder: Path
    ) -> ShardedOptimizer | DelayedOptimizer | DiskOptimizer:
        host = self._state_host
        if host is None or self.offload.optimizer == "host":
            optimizer = ShardedOptimizer(self.buckets, rules, self.recipe.master, host)
            return DelayedOptimizer(optimizer, host) if host and self.offload.delayed else optimizer
        return DiskOptimizer(
            self.buckets, rules, self.recipe.master, folder, self.offload.buffer_bytes, host
        )

    @property
    def _state_host(self) -> HostMemory | None:
        """Where the optimizer's state is, if not on the device."""
        return self.host if self.offload.optimizer else None

    def _flat_buckets(self) -> GradBuckets:
        par = self.plan.parallel
        alone = self.mesh.size("shard") == 1  # nothing to shard over: all ZeRO stages are equal
        kind, zero = (
            (ShardedGradBuckets, 2)
            if par.zero == 2 and not alone
            else (GradBuckets, min(par.zero, 1))
        )
        params = list(self.part.parameters())
        classes = classes_of(spread(par))
        recipe = self.recipe
        size = par.bucket_bytes
        buckets = kind(
            params, self.mesh, zero, recipe.reduce, size, self.counter, classes, self._state_host
        )
        buckets.gather_ahead(self.part.stages)
        return buckets

    def _fully_sharded(self) -> Buckets:
        from .parallel.data.fsdp import (
            FullyShardedParameters,
        )  # brings torch._dynamo: a second, only here

        model_part = self.part
        pipelined = self.plan.parallel.pp > 1
        return FullyShardedParameters(
            model_part.stages,
            model_part.table,
            self.mesh,
            self.recipe,
            self.counter,
            self.device,
            interleaved=pipelined,
            classes=classes_of(spread(self.plan.parallel)),
            host=self._state_host,
        )

    def gradients(self, batches: Sequence[MicroBatch], valid_tokens: int) -> tuple[Tensor, Tensor]:
        """Compute the summed gradients of the global batch into the buckets. `batches` hold whole
        sequences [b, s], also under context parallelism; `valid_tokens` is the global count.

        Returns the summed loss of this rank's micro-batches (zero without the last stage) and the
        norm of the whole gradient before clipping, float64 and equal on all ranks; both 0-d.
        """
        self.buckets.start_forward()
        par = self.plan.parallel
        samples = par.global_batch_samples
        if len(batches) != self._taken:  # a batch-size ramp, on all replicas alike
            samples = len(batches) * par.micro_batch_size * par.dp * par.ep
        self.part.terms.start(
            self.current_scale,
            valid_tokens,
            len(batches),
            samples,
            samples * self.plan.job.train.seq_len,
        )
        self.part.expert_choices.start()
        batches = self._pad_micro_batches(batches)
        self.buckets.expect(len(batches))
        if (mtp := self.plan.model.mtp) and self.has_loss:
            batches = [look_ahead(batch, mtp.depth) for batch in batches]
        scale = self.current_scale / valid_tokens
        cp = self.mesh.size("cp"), self.mesh.index("cp")
        batches = [shard_batch(batch, self.plan.parallel.cp_method, *cp) for batch in batches]
        if len(batches) != self.pipeline.schedule.micro_batches:  # a batch-size ramp
            self.pipeline.set_schedule(schedule_of(self.plan.parallel, len(batches)))
        loss_sum = self.pipeline.run(batches, scale)
        with self.timer.phase("comm"):
            self.buckets.finish()
        with self.timer.phase("optimizer"):
            norm = grad_norm(self.buckets, self.device)
            norm = norm if self.scaler is None else norm / self.scaler.current
        return loss_sum, norm

    def _pad_micro_batches(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """`batches`, padded with empty ones if every micro-batch is a collective and other replicas
        take more."""
        return [*batches, *[without_targets(batches[-1])] * self._empty] if self._empty else batches

    def update(self, norm: Tensor, lr: float) -> Tensor:
        """Apply the gradient, unless `norm` is not finite: in fp16 the scaled gradient has then
        overflowed, elsewhere something is broken. The device decides, the host does not wait;
        whether it was applied, 0-d bool."""
        finite = torch.isfinite(norm)
        with self.timer.phase("optimizer"):
            clip = clip_coefficient(norm, self.plan.job.train.clip_grad_norm)
            self.optimizer.step(
                lr, clip if self.scaler is None else clip / self.scaler.current, finite
            )
            if self.scaler is not None:
                self.scaler.update(finite)
        self.part.expert_choices.apply(finite, self.mesh, self.plan.parallel.sp, self.counter)
        return finite

    @property
    def current_scale(self) -> Tensor:
        """`loss_scale` on the device, 0-d float64; later steps do not change it."""
        return self._one if self.scaler is None else self.scaler.current

    @property
    def loss_scale(self) -> float:
        """The factor by which the next backward multiplies the loss. Waits for the device."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def loss_total(self, loss_sum: Tensor) -> Tensor | None:
        """The loss summed over the global batch, 0-d float64; None on ranks without the last stage.
        Collective."""
        if not self.has_loss:
            return None
        return all_reduce(loss_sum.double(), self.mesh.group("grad"), "dp", self.counter)

    def mean_loss(self, loss_sum: Tensor, valid_tokens: int) -> float | None:
        """Mean over the step's global valid tokens; None on ranks that do not hold the last stage.
        Waits for the device. Collective."""
        total = self.loss_total(loss_sum)
        return None if total is None else float(total) / valid_tokens

    def loss_term_totals(self) -> dict[str, Tensor]:
        """What modules have added to the loss of this step, by name, over all ranks, each 0-d
        float64. Collective; nothing is sent for a model without such terms."""
        sums = self.part.terms.sums
        if not sums:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.stack([zero if term_sum is None else term_sum for term_sum in sums.values()])
        if self.mesh.coord.tp and not self.plan.parallel.sp:
            total.zero_()  # tp ranks hold the same tokens
        all_reduce(total, self.mesh.group("grad"), "dp", self.counter)
        all_reduce(total, self.mesh.group("model"), "norm", self.counter)
        return dict(zip(sums, total.unbind(), strict=True))

    def loss_terms(self) -> dict[str, float]:
        """`loss_term_totals` as numbers. Waits for the device. Collective."""
        return {name: float(total) for name, total in self.loss_term_totals().items()}

    def expert_loads(self) -> Tensor | None:
        """What routers have chosen in this step, for `part.expert_meter.loads`; None if it is not
        sampled. Collective among ranks with the same layers."""
        return self.part.expert_meter.totals(self.mesh, self.plan.parallel.sp, self.counter)

    @property
    def tells_expert_loads(self) -> bool:
        """Whether this rank reports them for all that hold its layers."""
        return self.mesh.index("grad") == 0 and self.mesh.coord.tp == 0

    def measure(self, on: bool) -> None:
        """Whether times are measured from now on. On a GPU that takes two events an action and a
        collective; on a CPU they are always measured."""
        self.counter.measuring = self.pipeline.action_times.measuring = on

    def state_pieces(self, to_write: bool) -> Iterator[StatePiece]:
        """Training state as checkpoint pieces, the optimizer's and what modules keep without
        gradient: all that this rank holds, or (`to_write`) only those that it writes."""
        for state_slice in self.optimizer.slices():
            if state_slice.writes or not to_write:
                yield StatePiece(
                    state_slice.kind, state_slice.info, state_slice.start, state_slice.tensor
                )
        for info, tensor in self.part.states():
            if (info.owner and self.mesh.index("grad") == 0) or not to_write:
                yield StatePiece("state", info, 0, tensor.view(-1))

    def scalars(self) -> dict[str, float]:
        """The scalar state of a checkpoint, equal on all ranks."""
        scale = self.scaler.state() if self.scaler is not None else {}
        stale = {STALE: 1.0} if self.offload.delayed else {}
        return {"optimizer_steps": float(self.optimizer.step_count), **scale, **stale}

    def resumed(self, step: int, scalars: Mapping[str, float] = {}) -> None:
        """After the pieces were filled from a checkpoint of `step`: set counters and parameters
        accordingly."""
        self.optimizer.step_count = int(scalars.get("optimizer_steps", step))
        if self.scaler is not None:
            self.scaler.restore(scalars)
        self.optimizer.copy_masters_to_params(stale=STALE in scalars)
