"""The model of a run in one process: its newest weights or initial ones, its data, and the linears
that `train.matmul` narrows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from msgspec import UNSET, structs
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord, Model
from trainer.checkpoint.format import StatePiece
from trainer.checkpoint.load import VerifiedCheckpoint, newest
from trainer.checkpoint.restore import StoredState
from trainer.data.batch import MicroBatch, look_ahead
from trainer.data.build import open_tokens
from trainer.data.loader import Loader
from trainer.errors import CheckpointError
from trainer.model.dropout import seed_dropout
from trainer.model.experts import GroupedLinear, MixtureOfExperts
from trainer.model.fp8.delayed import HISTORY, LARGEST_CODES, DelayedOp, Factor, declare_history
from trainer.model.fp8.experts import ExpertOp
from trainer.model.fp8.linears import BlockOp, Shared, TensorOp
from trainer.model.fp8.narrow import narrow_experts, narrow_linears
from trainer.model.init import init_stage
from trainer.model.linear import Linear, LinearOp
from trainer.model.loss import LossTerms
from trainer.model.stage import Stage, term_names
from trainer.model.state import states
from trainer.parallel.params import whole

#: Up to so many parameters, wide products are computed in float64.
MOST_IN_FP64 = 100_000_000


def in_one_process(plan: Plan, batches: int) -> Plan:
    """Returns the plan of one process that takes so many micro-batches per step, without dropout:
    its noise would hide that of rounding."""
    size = plan.parallel.micro_batch_size
    parallel = structs.replace(
        plan.parallel,
        tp=1,
        cp=1,
        ep=1,
        pp=1,
        dp=1,
        replica_micro_batches=[],
        micro_batches=batches,
        accumulation=batches,
        global_batch_samples=batches * size,
    )
    # All linears are measured, whatever stays wide in the run.
    train = structs.replace(plan.job.train, batch_ramp=None, matmul_wide=UNSET)
    return structs.replace(
        plan,
        parallel=parallel,
        model=structs.replace(plan.model, dropout=0.0),
        job=structs.replace(plan.job, train=train),
    )


def newest_checkpoint(folder: str) -> VerifiedCheckpoint:
    """Returns the newest checkpoint that verifies. Raises CheckpointError if there is none."""
    checkpoint = newest(Path(folder), 0)
    if checkpoint is None:
        raise CheckpointError(f"no checkpoint in {folder}")
    return checkpoint


def make_stage(plan: Plan, checkpoint: VerifiedCheckpoint | None) -> Stage:
    """Returns the whole model with initial weights or those of a checkpoint. Raises
    CheckpointError, and MemoryError for a model that this machine has no room for."""
    model = plan.model
    check_room(model)
    stage = Stage(model, range(model.layers), first=True, last=True)
    if plan.job.matmul == "fp8_delayed":
        for _, linear in narrow_linears(stage, plan.job.train):
            declare_history(linear)
    if checkpoint is None:
        init_stage(stage, model, plan.job.train.seed)
    else:
        _load(stage, checkpoint)
    if model.parameters <= MOST_IN_FP64:
        for parameter in stage.parameters():
            parameter.data = parameter.data.double()
        stage.tie()
    seed_dropout(stage, plan.job.train.seed)
    terms = LossTerms()
    terms.declare(*term_names(model))
    for module in stage.modules():
        if isinstance(module, MixtureOfExperts | Stage):
            module.terms = terms
    return stage


def check_room(model: Model) -> None:
    """Raises MemoryError if weights and gradients take more than the memory that is free."""
    width = 8 if model.parameters <= MOST_IN_FP64 else 4
    size = 2 * width * model.parameters
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(maxsplit=1) for line in lines)
    free = int(fields["MemAvailable:"].split()[0]) << 10
    if size > free:
        raise MemoryError(
            f"weights and gradients of {model.name} take {size / 2**30:,.1f} GiB, and"
            f" {free / 2**30:,.1f} GiB of this machine's memory are free; fewer model.layers"
            " measure a part of it"
        )


@torch.no_grad()
def _load(stage: Stage, checkpoint: VerifiedCheckpoint) -> None:
    """Fills the weights, and the state without gradient that the checkpoint has."""
    stored = StoredState(checkpoint)
    for name, parameter in stage.named_parameters():
        shape = tuple(parameter.shape)
        weights = torch.empty(parameter.numel(), dtype=stored.dtype("master", name))
        stored.fill([StatePiece("master", whole(name, shape), 0, weights)])
        parameter.copy_(weights.view(shape))
    for name, module, key, _ in states(stage):
        if name in checkpoint.manifest.states:
            buffer: Tensor = getattr(module, key)
            stored.fill([StatePiece("state", whole(name, tuple(buffer.shape)), 0, buffer.view(-1))])


def read_batches(plan: Plan, checkpoint: VerifiedCheckpoint | None) -> list[MicroBatch]:
    """Returns the micro-batches that the run would take next. Raises DataError."""
    loader = Loader(plan, Coord(pp=0, dp=0, cp=0, ep=0, tp=0), open_tokens(plan.job.data))
    try:
        batches = loader.step(0 if checkpoint is None else checkpoint.manifest.samples)
    finally:
        loader.close()
    mtp = plan.model.mtp
    return [look_ahead(batch, mtp.depth) for batch in batches] if mtp else batches


#: Returns an op in 8 bits of a linear, or of the matrices of experts.
MakeOp = Callable[[], LinearOp | ExpertOp]


class Linears:
    """The linears and the matrices of experts that `train.matmul` narrows, by the number of their
    block and their name in it, and what makes their ops in 8 bits."""

    def __init__(self, plan: Plan, stage: Stage):
        self.modules: dict[tuple[int, str], Linear | GroupedLinear] = {}
        self.ops: dict[tuple[int, str], MakeOp] = {}
        matmul = plan.job.matmul
        for name, linear in narrow_linears(stage, plan.job.train):
            self._add(name, linear, partial(_linear_op, matmul, linear))
        for name, experts, _ in narrow_experts(stage, plan.job.train):
            self._add(name, experts, partial(_expert_op, matmul, experts))

    def _add(self, path: str, module: Linear | GroupedLinear, make_op: MakeOp) -> None:
        _, layer, name = path.split(".", 2)
        self.modules[int(layer), name] = module
        self.ops[int(layer), name] = make_op


def _expert_op(matmul: str, experts: GroupedLinear) -> ExpertOp:
    count, outputs, inputs = experts.weight.shape
    return ExpertOp(Shared(), matmul, count, (inputs, outputs))


def _linear_op(matmul: str, linear: Linear) -> LinearOp:
    if matmul == "fp8_block":
        return BlockOp(Shared())
    if matmul != "fp8_delayed":
        return TensorOp(Shared())
    op = DelayedOp(Shared(), LossTerms())
    history: Tensor = getattr(linear, HISTORY)
    if history.any():
        largest = history.amax(-1)
        unscaled = largest.new_tensor(LARGEST_CODES)
        op.begin(torch.where(largest > 0, largest, unscaled), torch.zeros(len(Factor)))
    return op
