"""Builds one rank's part of the model. The techniques are applied in this order:

1. refuse unsupported plans                           errors.check_supported
2. build each stage whole on meta: names and shapes   model.Stage
3. shard it over tp: the registry of parameters       tensor.shard
4. allocate and initialise this rank's slices         model.init_stage, seed_dropout (same values on
   every layout)
5. tensor-parallel communication                      tensor.Region, column_parallel,
   vocab.ShardedLookup
6. products in 8 bits                                 fp8.apply_fp8
7. experts over ranks, their terms of the loss        expert.apply_to_experts
8. attention over a sequence shard                    context.apply_context_parallel
9. recomputation of all of the above                  recompute.apply_recompute
10. compilation, block by block, of all of the above   nn.Module.compile
11. the loss over a sharded vocabulary                 vocab.VocabParallelLoss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from orchestrator.plan.expert_mesh import expert_mesh, position, spread
from orchestrator.plan.ranks import embeds_at_both_ends
from orchestrator.plan.schedules import schedule_of
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.errors import LayoutError, check_supported
from trainer.host.activations import ActivationStore
from trainer.model.dropout import seed_dropout
from trainer.model.experts import MixtureOfExperts
from trainer.model.init import init_stage
from trainer.model.loss import LossTerms
from trainer.model.mla import LatentAttention
from trainer.model.prediction import MTP
from trainer.model.stage import Stage, term_names
from trainer.model.state import states

from .column_parallel import OverlappedColumnLinears
from .context.apply import apply_context_parallel
from .expert.apply import apply_to_experts
from .expert.choice_states import ChoiceStates
from .expert.load import ExpertMeter
from .fp8 import apply_fp8
from .kept_inputs import KeptInputs
from .params import DENSE, EXPERT, ParamInfo, ParamTable, even_shard
from .recompute import apply_recompute, recompute_mode
from .tensor import (
    EXPERT_COLUMN,
    EXPERT_ROW,
    Copy,
    Gather,
    Reduce,
    Region,
    Scatter,
    SequenceShard,
    shard,
)
from .vocab import ShardedLookup, VocabParallelLoss

#: (logits [b, s, local vocab], targets int64 [b, s]) -> sum over valid tokens, the same on every tp
#: rank
Loss = Callable[[Tensor, Tensor], Tensor]


#: (elements, dtype) -> a tensor of 1-D
NewTensor = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True)
class ModelPart:
    """One rank's part of the model: its stages in model order, their loss, the terms that their
    modules add to it, and the registry of its parameters."""

    stages: list[Stage]
    loss: Loss
    table: ParamTable
    terms: LossTerms
    state_table: ParamTable  # of what modules keep without gradient
    expert_meter: ExpertMeter
    expert_choices: ChoiceStates

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, ParamInfo]]:
        """Every parameter once, in order of execution."""
        seen: set[int] = set()
        for stage in self.stages:
            for name, param in stage.named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield name, param, self.table[name]

    def states(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """All state without gradient, as it is now."""
        for stage in self.stages:
            for name, module, key, _ in states(stage):
                yield self.state_table[name], getattr(module, key)


def build(
    plan: Plan,
    mesh: Mesh,
    counter: CommCounter,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    indices: Sequence[int] | None = None,
    new: NewTensor | None = None,
    store: ActivationStore | None = None,
) -> ModelPart:
    """The stages `indices` (of pp * vpp; default: the looped placement, rank r holds r, r + pp,
    ...) of this rank. `new`: where parameters are, if not on the device; `store`: where inputs of
    recomputed layers are.

    Raises LayoutError for a plan that this trainer does not run.
    """
    check_supported(plan)
    par = plan.parallel
    count = par.pp * par.vpp
    if indices is None:
        indices = range(mesh.coord.pp, count, par.pp)
    stages = list[Stage]()
    table = ParamTable()
    state_table = ParamTable()
    terms = LossTerms()
    terms.declare(*term_names(plan.model))
    if plan.model.mtp:  # computed from the logits, of which tensor-parallel ranks have parts
        terms.declare(MTP, copies=par.tp if par.sp else 1)
    meter = ExpertMeter(terms)
    choices = ChoiceStates(terms)
    if plan.job.train.compile:  # its counters would be constants to the compiler
        terms.add = torch.compiler.disable(terms.add)  # type: ignore[method-assign]
    for index in sorted(indices):
        first = sum(par.stage_layers[:index])
        layers = range(first, first + par.stage_layers[index])
        with torch.device("meta"):
            stage = Stage(plan.model, layers, first=index == 0, last=index == count - 1)
        infos = registry(plan, stage, mesh.coord)
        materialise(stage, infos, torch.device(device), dtype, new)
        init_stage(stage, plan.model, plan.job.train.seed, infos)
        seed_dropout(stage, plan.job.train.seed, device)
        state_table |= allocate_states(stage, mesh, torch.device(device))
        if mesh.group("tp") is not None:
            apply_tensor_parallel(stage, infos, mesh, plan, counter)
        if plan.job.matmul:
            apply_fp8(stage, plan, mesh, counter)
        if plan.model.moe is not None:
            apply_to_experts(stage, mesh, par.sp, par.cp_method, terms, counter)
            moe = plan.model.moe
            if moe.bias_update or (moe.balance_over == "batch" and moe.balance_loss):
                choices.watch(stage)
            meter.watch(stage)
        if mesh.group("cp") is not None:
            apply_context_parallel(stage, par.cp_method, mesh, counter)
        if plan.model.dropout:
            set_dropout_heads(stage, plan, mesh)
        apply_recompute(stage, plan.job.train, kept_inputs(plan, mesh, counter, store))
        if plan.job.train.compile:
            for block in stage.blocks.values():
                # The compiler would trace into communication, and into lengths of documents, which
                # no step has twice.
                if mesh.group("cp") is not None or plan.job.data.isolate_documents:
                    block.attn.core = torch.compiler.disable(block.attn.core)
                if isinstance(block.mlp, MixtureOfExperts):  # its shapes depend on the tokens
                    block.mlp.forward = torch.compiler.disable(block.mlp.forward)  # type: ignore[method-assign]
                block.compile()
        stages.append(stage)
        table = (
            infos | table
        )  # a tied copy on the last stage never replaces the first stage's entry
    if len(stages) > 1 and embeds_at_both_ends(plan.model) and stages[0].first and stages[-1].last:
        stages[-1].embed.weight = stages[
            0
        ].embed.weight  # both ends on one rank: one parameter, no copy
        stages[-1].tie()
        info = table["embed.weight"]
        table["embed.weight"] = replace(
            info, sums=tuple(name for name in info.sums if name != "embedding")
        )
    loss = make_loss(plan, stages[-1], table, mesh, counter)
    stages[-1].terms = terms
    stages[-1].token_loss = loss
    return ModelPart(stages, loss, table, terms, state_table, meter, choices)


def registry(plan: Plan, stage: Stage, coord: Coord) -> ParamTable:
    """ParamInfo of every parameter of a stage with global shapes, for the rank at `coord`."""
    model = plan.model
    par = plan.parallel
    table, (etp, ranks, _) = {}, expert_mesh(par)
    for name, param in stage.named_parameters():
        if ranks > 1 and name.endswith((*EXPERT_COLUMN, *EXPERT_ROW)):
            info = shard(name, tuple(param.shape), model, etp, coord.tp % etp, sp=False)
            cut = even_shard(0, param.shape[0], position(par, coord), ranks, "ep")
            info = replace(info, shards=(cut, *info.shards), replicas=(coord.tp,), owner=True)
            info = replace(info, groups=EXPERT if spread(par) > 1 else DENSE)
        else:
            info = shard(name, tuple(param.shape), model, par.tp, coord.tp, par.sp)
        if name == "embed.weight" and embeds_at_both_ends(model) and par.pp > 1:
            # first and last stage hold copies
            info = replace(info, sums=(*info.sums, "embedding"), owner=info.owner and stage.first)
        table[name] = info
    return table


def materialise(
    stage: Stage,
    table: ParamTable,
    device: torch.device,
    dtype: torch.dtype,
    new: NewTensor | None = None,
) -> None:
    """Replace every parameter by an uninitialised one of this rank's shape."""
    for path, module in stage.named_modules():
        for key, _ in list(module.named_parameters(recurse=False)):
            name = f"{path}.{key}" if path else key
            if name in table:  # the tied head is not: it follows the embedding
                shape = table[name].local_shape
                empty = (
                    torch.empty(shape, device=device, dtype=dtype)
                    if new is None
                    else new(prod(shape), dtype)
                )
                setattr(module, key, nn.Parameter(empty.view(shape)))
    stage.tie()


def allocate_states(stage: Stage, mesh: Mesh, device: torch.device) -> ParamTable:
    """Replace the state without gradient by this rank's part of it, and describe that. Raises
    LayoutError for a dimension that tensor parallelism does not divide."""
    table = ParamTable()
    tp = mesh.size("tp")
    for name, module, key, state in states(stage):
        info = ParamInfo(
            name, state.shape, decay=False, replicas=tuple(range(tp)), owner=mesh.coord.tp == 0
        )
        if state.tp_dim is not None and tp > 1:
            cut = even_shard(state.tp_dim, state.shape[state.tp_dim], mesh.coord.tp, tp)
            if state.shape[state.tp_dim] % tp:
                raise LayoutError(
                    f"tp={tp} does not divide dimension {cut.dim} of {name}, {list(state.shape)}"
                )
            info = replace(info, shards=(cut,), replicas=(mesh.coord.tp,), owner=True)
        setattr(
            module, key, torch.full(info.local_shape, state.start, dtype=state.dtype, device=device)
        )
        table[name] = info
    return table


def apply_tensor_parallel(
    stage: Stage, table: ParamTable, mesh: Mesh, plan: Plan, counter: CommCounter
) -> None:
    """Put tensor-parallel communication around blocks, embedding and head. Column-parallel linears
    contain the communication of their input, which overlaps it with their gradients. If the
    schedule defers weight gradients, a `Region` before the linears does it instead, since the
    deferred gradients need the whole input."""
    group = mesh.required_group("tp")
    sp = plan.parallel.sp
    train = plan.job.train
    into, out = (Gather, Scatter) if sp else (Copy, Reduce)
    splits = schedule_of(plan.parallel).splits_backward
    for layer, block in stage.blocks.items():
        columns = OverlappedColumnLinears(
            group, counter, sp, keep=recompute_mode(train, layer) != "none"
        )
        block.attn_out = Region(out, group, counter)
        if isinstance(block.attn, LatentAttention):  # its latents are smaller than its input
            block.attn.latents_in = Region(into, group, counter)
        elif splits:
            block.attn_in = Region(into, group, counter)
        else:
            block.attn.apply_linears = columns
        block.mlp_out = Region(out, group, counter)
        if isinstance(block.mlp, MixtureOfExperts):
            continue  # `apply_to_experts`
        if splits:
            block.mlp_in = Region(into, group, counter)
        else:
            block.mlp.apply_linears = columns
    if stage.embeds:
        stage.embed.op = ShardedLookup(*table["embed.weight"].along(0))
        stage.embed_out = Region(out, group, counter)
        if sp:
            stage.positions_out = SequenceShard(mesh.size("tp"), mesh.index("tp"))
    if sp:
        stage.rows = SequenceShard(mesh.size("tp"), mesh.index("tp"))
    if stage.last and splits:
        stage.head_in = Region(into, group, counter)
    elif stage.last:
        stage.head.run = OverlappedColumnLinears(group, counter, sp).run


def kept_inputs(
    plan: Plan, mesh: Mesh, counter: CommCounter, store: ActivationStore | None = None
) -> KeptInputs | None:
    """How recomputed parts keep their inputs; None: whole, on the device."""
    shares = plan.job.train.partition_activations is True and not plan.parallel.sp
    group = mesh.group("tp") if shares else None
    return None if group is None and store is None else KeptInputs(group, counter, store)


def set_dropout_heads(stage: Stage, plan: Plan, mesh: Mesh) -> None:
    """Tell attention dropout the number of the first head of this rank in the whole model."""
    par = plan.parallel
    heads = plan.model.heads // plan.parallel.tp
    first = mesh.index("tp") * heads
    if par.cp > 1 and par.cp_method == "ulysses":
        first += mesh.index("cp") * heads // par.cp
    for block in stage.blocks.values():
        if block.attn.drop is not None:
            block.attn.drop.first_head = first


def make_loss(
    plan: Plan, stage: Stage, table: ParamTable, mesh: Mesh, counter: CommCounter
) -> Loss:
    if not stage.last:
        return _no_loss
    start, stop = table["embed.weight" if plan.model.tied_embeddings else "head.weight"].along(0)
    return VocabParallelLoss(start, stop - start, mesh.group("tp"), counter, plan.job.train.compile)


def _no_loss(logits: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("only the rank with the last stage has logits")
