"""Builds one rank's part of the model. The methods of `_Builder` apply the techniques in this
order:

1. refuse unsupported plans                           errors.check_supported
2. build each stage whole on meta: names and shapes   model.Stage
3. shard it over tp: the registry of parameters       tensor.shard
4. allocate and initialise this rank's slices         model.init_stage, seed_dropout
   (the same values on every layout; ZeRO-3 does it unit by unit when it shards them)
5. tensor-parallel communication                      tensor_regions.apply_tensor_parallel
6. products in 8 bits                                 fp8.apply_fp8
7. experts over ranks, their terms of the loss        expert.apply_to_experts
8. attention over a sequence shard                    context.apply_context_parallel
9. recomputation of all of the above                  recompute.apply_recompute
10. compilation, block by block, of all of the above  compiled.compile_blocks
11. the loss over a sharded vocabulary                vocab.VocabParallelLoss
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
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.errors import LayoutError, check_supported
from trainer.model.dropout import seed_dropout
from trainer.model.fp8.delayed import declare_history
from trainer.model.fp8.narrow import narrow_linears
from trainer.model.init import init_stage
from trainer.model.loss import LossTerms
from trainer.model.prediction import MTP
from trainer.model.stage import Stage, term_names
from trainer.model.state import states

from .compiled import compile_blocks, hide_untraced
from .context.apply import apply_context_parallel
from .delayed_scaling import DelayedScales
from .expert.apply import apply_to_experts
from .expert.choice_states import ChoiceStates
from .expert.load import ExpertMeter
from .fp8 import apply_fp8
from .kept_inputs import InputStore, KeptInputs
from .params import DENSE, EXPERT, ParamInfo, ParamTable, even_shard
from .recompute import apply_recompute
from .tensor import EXPERT_COLUMN, EXPERT_ROW, shard
from .tensor_regions import apply_tensor_parallel
from .vocab import VocabParallelLoss

#: (logits [b, s, local vocab], targets int64 [b, s]) -> sum over valid tokens, the same on every tp
#: rank
Loss = Callable[[Tensor, Tensor], Tensor]


#: (elements, dtype) -> a new 1-D tensor.
Allocate = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True)
class ModelPart:
    """One rank's part of the model: its stages in model order, their loss, the terms that modules
    add to the loss, and the registry of parameters."""

    stages: list[Stage]
    loss: Loss
    table: ParamTable
    terms: LossTerms
    state_table: ParamTable  # the registry of training state without gradient
    expert_meter: ExpertMeter
    expert_choices: ChoiceStates
    delayed_scales: DelayedScales
    kept_inputs: list[int]  # per stage, the inputs of a micro-batch that `store` keeps
    #: (stage, registry of some of its parameters): allocates and initialises them.
    fill: Callable[[Stage, ParamTable], None]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, ParamInfo]]:
        """Yields every parameter once, in order of execution."""
        seen: set[int] = set()
        for stage in self.stages:
            for name, param in stage.named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield name, param, self.table[name]

    def states(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """Yields all training state without gradient, as it is now."""
        for stage in self.stages:
            for name, module, key, _ in states(stage):
                yield self.state_table[name], getattr(module, key)


def build(
    plan: Plan,
    mesh: Mesh,
    counter: CommCounter,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    indices: Sequence[int] | None = None,
    allocate: Allocate | None = None,
    deferred: bool = False,
    store: InputStore | None = None,
) -> ModelPart:
    """Builds the stages of this rank.

    `indices`: the stages' numbers among pp * vpp; by default those of the looped placement, in
    which rank r holds r, r + pp, ... `allocate`: allocates parameters that are not on the device.
    `deferred`: parameters stay on meta until `ModelPart.fill`. `store`: holds the inputs of
    recomputed layers, on the device or elsewhere.

    Raises LayoutError for a plan that this trainer does not run.
    """
    check_supported(plan)
    builder = _Builder(
        plan,
        mesh,
        counter,
        device=torch.device(device),
        dtype=dtype,
        allocate=allocate,
        deferred=deferred,
        store=store,
    )
    if indices is None:
        indices = range(mesh.coord.pp, builder.stage_count, plan.parallel.pp)
    for index in sorted(indices):
        stage = builder.build_on_meta(index)
        infos = builder.shard_parameters(stage)
        builder.allocate_slices(stage, infos)
        builder.add_tensor_parallel_communication(stage, infos)
        builder.round_products_to_8_bits(stage, infos)
        builder.spread_experts(stage)
        builder.shard_attention(stage)
        builder.recompute_and_compile(stage)
        builder.add_stage(stage, infos)
    builder.tie_embeddings()
    return builder.attach_loss()


class _Builder:
    """The part of the model that is being built. The methods are called once in the order in which
    they are written, those with a stage once per stage."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        counter: CommCounter,
        *,
        device: torch.device,
        dtype: torch.dtype,
        allocate: Allocate | None,
        deferred: bool,
        store: InputStore | None,
    ):
        self.plan = plan
        self.mesh = mesh
        self.counter = counter
        self.device = device
        self.dtype = dtype
        self.allocate = allocate
        self.deferred = deferred
        self.store = store
        self.stage_count = plan.parallel.pp * plan.parallel.vpp
        self.stages = list[Stage]()
        self.table = ParamTable()
        self.state_table = ParamTable()
        self.terms = _declare_terms(plan)
        self.meter = ExpertMeter(self.terms)
        self.choices = ChoiceStates(self.terms)
        self.scales = DelayedScales(self.terms)
        self.kept_inputs = list[int]()

    def build_on_meta(self, index: int) -> Stage:
        """Builds stage `index` with the shapes of the whole model."""
        par = self.plan.parallel
        first_layer = sum(par.stage_layers[:index])
        layers = range(first_layer, first_layer + par.stage_layers[index])
        last = index == self.stage_count - 1
        with torch.device("meta"):
            stage = Stage(self.plan.model, layers, first=index == 0, last=last)
            if self.plan.job.matmul == "fp8_delayed":
                for _, linear in narrow_linears(stage, self.plan.job.train):
                    declare_history(linear)
            return stage

    def shard_parameters(self, stage: Stage) -> ParamTable:
        return registry(self.plan, stage, self.mesh.coord)

    def allocate_slices(self, stage: Stage, infos: ParamTable) -> None:
        """Allocates and initialises this rank's slices of parameters and of other state."""
        if self.deferred:
            materialise(stage, infos, torch.device("meta"), self.dtype)
        else:
            self.fill(stage, infos)
        seed_dropout(stage, self.plan.job.train.seed, self.device)
        self.state_table |= allocate_states(stage, self.mesh, self.device)

    def fill(self, stage: Stage, infos: ParamTable) -> None:
        """Allocates and initialises this rank's slices of the parameters in `infos`."""
        materialise(stage, infos, self.device, self.dtype, self.allocate)
        init_stage(stage, self.plan.model, self.plan.job.train.seed, infos)

    def add_tensor_parallel_communication(self, stage: Stage, infos: ParamTable) -> None:
        if self.mesh.group("tp") is not None:
            apply_tensor_parallel(
                stage,
                infos,
                self.mesh,
                self.plan,
                self.counter,
            )

    def round_products_to_8_bits(self, stage: Stage, infos: ParamTable) -> None:
        if self.plan.job.matmul:
            apply_fp8(
                stage,
                self.plan,
                self.mesh,
                self.counter,
                infos=infos,
                scales=self.scales,
            )

    def spread_experts(self, stage: Stage) -> None:
        """Spreads experts over ranks, and observes what their routers choose."""
        par = self.plan.parallel
        moe = self.plan.model.moe
        if moe is None:
            return
        apply_to_experts(
            stage,
            self.mesh,
            sp=par.sp,
            cp_method=par.cp_method,
            terms=self.terms,
            counter=self.counter,
        )
        if moe.bias_update or (moe.balance_over == "batch" and moe.balance_loss):
            self.choices.watch(stage)
        self.meter.watch(stage)

    def shard_attention(self, stage: Stage) -> None:
        """Computes attention on sequence shards, and draws dropout masks of this rank's heads."""
        if self.mesh.group("cp") is not None:
            method = self.plan.parallel.cp_method
            apply_context_parallel(stage, method, self.mesh, self.counter)
        if self.plan.model.dropout:
            set_dropout_heads(stage, self.plan, self.mesh)

    def recompute_and_compile(self, stage: Stage) -> None:
        inputs = kept_inputs(self.plan, self.mesh, self.counter, self.store)
        train = self.plan.job.train
        if train.compile:
            hide_untraced(stage, self.plan, self.mesh)
        whole_sequences = self.mesh.group("cp") is None
        apply_recompute(stage, train, inputs, whole_sequences=whole_sequences)
        self.kept_inputs.append(0 if inputs is None else inputs.count)
        if train.compile:
            compile_blocks(stage, self.plan, self.mesh)

    def add_stage(self, stage: Stage, infos: ParamTable) -> None:
        """Adds a finished stage. A tied copy on the last stage never replaces the first stage's
        entry in the table."""
        self.stages.append(stage)
        self.table = infos | self.table

    def tie_embeddings(self) -> None:
        """Makes the embeddings of both ends of the model one parameter, if this rank holds both."""
        first = self.stages[0]
        last = self.stages[-1]
        holds_both_ends = len(self.stages) > 1 and first.first and last.last
        if not holds_both_ends or not embeds_at_both_ends(self.plan.model):
            return
        last.embed.weight = first.embed.weight
        last.tie()
        info = self.table["embed.weight"]
        sums = tuple(group for group in info.sums if group != "embedding")
        self.table["embed.weight"] = replace(info, sums=sums)

    def attach_loss(self) -> ModelPart:
        """Gives the last stage its loss. Returns the finished part."""
        last = self.stages[-1]
        loss = make_loss(self.plan, last, self.table, self.mesh, self.counter)
        last.terms = self.terms
        last.token_loss = loss
        return ModelPart(
            stages=self.stages,
            loss=loss,
            table=self.table,
            terms=self.terms,
            state_table=self.state_table,
            expert_meter=self.meter,
            expert_choices=self.choices,
            delayed_scales=self.scales,
            kept_inputs=self.kept_inputs,
            fill=self.fill,
        )


def _declare_terms(plan: Plan) -> LossTerms:
    """The terms that modules of any stage add to the loss."""
    par = plan.parallel
    terms = LossTerms()
    terms.declare(*term_names(plan.model))
    if plan.model.mtp:  # computed from the logits, of which tensor-parallel ranks hold shards
        terms.declare(MTP, copies=par.tp if par.sp else 1)
    return terms


def registry(plan: Plan, stage: Stage, coord: Coord) -> ParamTable:
    """Returns the ParamInfo of every parameter of a stage with global shapes, for the rank at
    `coord`."""
    model = plan.model
    par = plan.parallel
    table = ParamTable()
    etp, ranks, _ = expert_mesh(par)
    for name, param in stage.named_parameters():
        if ranks > 1 and name.endswith((*EXPERT_COLUMN, *EXPERT_ROW)):
            info = shard(
                name,
                tuple(param.shape),
                model,
                tp=etp,
                index=coord.tp % etp,
                sp=False,
            )
            cut = even_shard(
                0,
                param.shape[0],
                position(par, coord),
                ranks,
                "ep",
            )
            info = replace(
                info,
                shards=(cut, *info.shards),
                replicas=(coord.tp,),
                owner=True,
            )
            info = replace(info, groups=EXPERT if spread(par) > 1 else DENSE)
        else:
            info = shard(name, tuple(param.shape), model, tp=par.tp, index=coord.tp, sp=par.sp)
        if name == "embed.weight" and embeds_at_both_ends(model) and par.pp > 1:
            # The first and the last stage hold copies.
            info = replace(info, sums=(*info.sums, "embedding"), owner=info.owner and stage.first)
        table[name] = info
    return table


def materialise(
    stage: Stage,
    table: ParamTable,
    device: torch.device,
    dtype: torch.dtype,
    allocate: Allocate | None = None,
) -> None:
    """Replaces every parameter in `table` by an uninitialised one of this rank's shape."""
    for path, module in stage.named_modules():
        for key, _ in list(module.named_parameters(recurse=False)):
            name = f"{path}.{key}" if path else key
            if name not in table:  # such as the tied head, which follows the embedding
                continue
            shape = table[name].local_shape
            if allocate is None:
                weight = torch.empty(shape, device=device, dtype=dtype)
            else:
                weight = allocate(prod(shape), dtype)
            setattr(module, key, nn.Parameter(weight.view(shape)))
    stage.tie()


def allocate_states(stage: Stage, mesh: Mesh, device: torch.device) -> ParamTable:
    """Replaces the state without gradient by this rank's slices. Returns their registry. Raises
    LayoutError for a dimension that tensor parallelism does not divide."""
    table = ParamTable()
    tp = mesh.size("tp")
    for name, module, key, state in states(stage):
        replicas = tuple(range(tp))
        info = ParamInfo(
            name, state.shape, decay=False, replicas=replicas, owner=mesh.coord.tp == 0
        )
        if state.tp_dim is not None and tp > 1:
            size = state.shape[state.tp_dim]
            cut = even_shard(state.tp_dim, size, mesh.coord.tp, tp)
            if size % tp:
                raise LayoutError(
                    f"tp={tp} does not divide dimension {cut.dim} of {name}, {list(state.shape)}"
                )
            info = replace(info, shards=(cut,), replicas=(mesh.coord.tp,), owner=True)
        local = torch.full(info.local_shape, state.start, dtype=state.dtype, device=device)
        setattr(module, key, local)
        table[name] = info
    return table


def kept_inputs(
    plan: Plan,
    mesh: Mesh,
    counter: CommCounter,
    store: InputStore | None = None,
) -> KeptInputs | None:
    """Returns the hooks that keep the inputs of recomputed parts, or None if autograd keeps them
    whole on the device."""
    shares = plan.job.train.partition_activations is True and not plan.parallel.sp
    group = mesh.group("tp") if shares else None
    if group is None and store is None:
        return None
    return KeptInputs(group, counter, store)


def set_dropout_heads(stage: Stage, plan: Plan, mesh: Mesh) -> None:
    """Sets the number that this rank's first head has in the whole model, in attention dropout."""
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
    """Returns the loss over this rank's shard of the vocabulary."""
    if not stage.last:
        return _no_loss
    head = "embed.weight" if plan.model.tied_embeddings else "head.weight"
    start, stop = table[head].along(0)
    compiled = plan.job.train.compile
    return VocabParallelLoss(start, stop - start, mesh.group("tp"), counter, compiled)


def _no_loss(logits: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("only the rank with the last stage has logits")
