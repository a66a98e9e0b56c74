"""The cost of a layer on one GPU, computed once for all meshes with equal shards and micro-batches.

Every number is the cost model's own (`cost.compute`, `cost.communication`, `memory`), with the
cheapest path that an axis can have. Methods of context parallelism that divide attention evenly
differ only in communication, so they share a `LayerCost`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from msgspec import UNSET, structs

from orchestrator.cost.context import CostContext
from orchestrator.cost.dual import value_of
from orchestrator.cost.memory import activations
from orchestrator.cost.memory.deferred_weight_gradients import (
    SPLIT_BACKWARD,
    DeferredGradients,
    Layers,
    bytes_of_stage,
)
from orchestrator.cost.memory.layer_activations import ActivationBytes
from orchestrator.cost.memory.moments import OneStage
from orchestrator.cost.memory.recipe import Recipe, kernels_of
from orchestrator.cost.memory.unequal_stages import StageBytes
from orchestrator.cost.model.layers import (
    DTYPE_BYTES,
    dense_and_moe,
    sample_layers,
)
from orchestrator.cost.time.communication import (
    TensorSeconds,
    context_seconds,
    expert_seconds,
    tensor_seconds,
)
from orchestrator.cost.time.compute import NO_LAYER
from orchestrator.cost.time.traffic import PathKey
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import AllToAll, CpMethod, Parallel
from orchestrator.plan.expert_mesh import axes, expert_mesh
from orchestrator.plan.flops import prediction_blocks

from .best_paths import BestPaths
from .layout import Mesh
from .pipeline_shapes import PipelineShape, StageShape
from .shard_params import ShardParams

Pair = tuple[float, float]  # (dense layer, MoE layer)


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch through the parts of a stage.

    Communication and recomputation are included.
    """

    forward: Pair
    backward: Pair
    first: float  # token table
    last: tuple[float, float]  # output projection and loss, (forward, backward)


NO_ACTIVATIONS = ActivationBytes(0.0, 0.0)


class Kept:
    """Activation bytes of the parts of a stage for one micro-batch.

    They hold for schedules that treat backward as `schedule` does.
    """

    def __init__(self, cost: LayerCost, schedule: str):
        model = cost.context.model
        train = cost.context.train
        self.cost = cost
        self.par = structs.replace(cost.par, schedule=schedule)
        self.kernels = kernels_of(
            cost.recipe,
            cost.context.cluster,
            model,
            self.par,
            cost.context.matmul,
        )
        workload = Workload(model, self.par, train)
        self.head = activations.head_bytes(workload, self.kernels)
        self.stage = activations.stage_bytes(workload, self.kernels)
        self.loss = activations.loss_bytes(workload, self.kernels)
        self.backward = activations.backward_bytes(workload, self.kernels)
        self._layers: dict[str, list[ActivationBytes]] = {}
        self._one_stage: dict[str, OneStage] = {}

    def layers(self, recompute: str) -> list[ActivationBytes]:
        """Returns the bytes of a dense layer and of an MoE layer with this recomputation mode."""
        if recompute not in self._layers:
            cost = self.cost
            workload = Workload(cost.context.model, self.par, cost.context.trains[recompute])
            of_layers = activations.bytes_of_layers(workload, self.kernels)
            model_layers = (range(cost.context.model.layers),)
            self._layers[recompute] = [
                NO_ACTIVATIONS if layer is None else of_layers(kind, recompute, model_layers)
                for kind, layer in enumerate(cost.kinds)
            ]
        return self._layers[recompute]

    def stage_layers(self, recompute: str, dense: int, moe: int) -> list[Layers]:
        """Returns the layers of a stage by kind, with their bytes."""
        kinds = enumerate(zip((dense, moe), self.layers(recompute), strict=True))
        return [
            (count, kind, layer.stored, layer.recomputing)
            for kind, (count, layer) in kinds
            if count
        ]

    def stored(self, recompute: str, stage: StageShape) -> float:
        """Returns the bytes of one micro-batch in a stage until backward.

        Output projection and loss are left out.
        """
        dense, moe = self.layers(recompute)
        return stage.dense * dense.stored + stage.moe * moe.stored + self.stage[stage.last]

    def one_stage(self, recompute: str) -> OneStage:
        """Returns the activation bytes if the whole model is one stage."""
        if recompute not in self._one_stage:
            model = self.cost.context.model
            par = structs.replace(self.par, pp=1, vpp=1, stage_layers=[model.layers])
            workload = Workload(model, par, self.cost.trains[recompute])
            self._one_stage[recompute] = activations.kept_of_one_stage(workload, self.kernels)
        return self._one_stage[recompute]

    def stage_bytes(
        self,
        recompute: str,
        stage: StageShape,
        deferred: DeferredGradients | None,
    ) -> StageBytes:
        """Returns the bytes of one micro-batch in one of a rank's several stages."""
        layers = self.stage_layers(recompute, stage.dense, stage.moe)
        stored = self.stored(recompute, stage)
        return bytes_of_stage(layers, stored, self.head if stage.last else 0.0, deferred)


def remembered(
    results: dict[tuple[object, ...], Any],
    key: tuple[object, ...],
    make: Callable[..., Any],
    *args: Any,
) -> Any:
    """Returns the result for `key`, which `make(*args)` computes if it is missing."""
    if key not in results:
        results[key] = make(*args)
    return results[key]


class LayerCost:
    """Seconds, parameters and bytes of one layer of each kind (dense, MoE).

    They are those of one micro-batch on one GPU.
    """

    def __init__(
        self,
        par: Parallel,
        mesh: Mesh,
        context: CostContext,
        best: BestPaths,
        params: ShardParams,
        recipe: Recipe,
        shared: dict[tuple[object, ...], Any],
        all_to_alls: tuple[AllToAll, ...] = ("direct",),
    ):
        """`par` is the `parallel` of any layout of the mesh.

        Only its tp, cp, ep, etp, fold_cp, sp, cp_method and micro_batch_size are read. `shared`
        holds the parts that several layer costs have in common. `all_to_alls` are the open
        exchanges of expert tokens.
        """
        model = context.model
        train = context.train
        par = structs.replace(par, schedule="1f1b", expert_all_to_all=UNSET)
        self.par = par
        self.context = context
        self.params = params
        self.recipe = recipe
        self.best = best
        self.shared = shared
        self.all_to_alls = all_to_alls
        self.experts = expert_mesh(par)
        self.kinds = sample_layers(model)
        self.trains = context.trains
        self.tokens = par.micro_batch_size * train.seq_len / par.cp
        self.compute = context.compute(par)
        self.paths = best.paths(mesh, False)
        self.widths = DTYPE_BYTES[train.precision], context.workload(par, train).wire_width
        blocks = model.layers + prediction_blocks(model)
        self.dense, self.moe = dense_and_moe(model, 0, blocks)
        self.mixed = bool(self.dense and self.moe)
        self.boundary = Workload(model, par, train).boundary_bytes
        self.known: dict[tuple[object, ...], Any] = {}
        #: The least dense parameters of a layer of either kind.
        self.least_params = min(
            size for size, layer in zip(params.dense, self.kinds, strict=True) if layer is not None
        )
        self._kept: dict[str, Kept] = {}
        self._pipeline_params: dict[tuple[str, int, int], list[tuple[int, int]]] = {}

    def in_mesh(self, mesh: Mesh) -> Parallel:
        """Returns the `parallel` of an arbitrary layout of a mesh."""
        world = mesh.tp * mesh.cp * mesh.ep * mesh.pp * mesh.dp
        parallel = structs.replace(
            self.par,
            pp=mesh.pp,
            dp=mesh.dp,
            micro_batches=mesh.micro_batches,
            world_size=world,
        )
        return self.context.with_buckets(parallel)

    def stage_seconds(
        self,
        recompute: str,
        split: bool,
        cp_methods: tuple[CpMethod, ...],
    ) -> StageSeconds:
        """Returns the seconds with the method that sends least; `split` if backward is split."""
        seconds: StageSeconds = self._once(
            self._seconds,
            recompute,
            (split,),
            cp_methods,
            (self.par.sp,),
        )
        return seconds

    def least(
        self,
        recompute: str,
        cp_methods: tuple[CpMethod, ...],
        sp_open: bool,
    ) -> StageSeconds:
        """Returns the least seconds, with backward split or not.

        `sp_open` also allows layouts without sequence parallelism, which compute no less.
        """
        along = (True, False) if sp_open else (self.par.sp,)
        seconds: StageSeconds = self._once(
            self._seconds,
            recompute,
            (False, True),
            cp_methods,
            along,
        )
        return seconds

    def _seconds(
        self,
        recompute: str,
        splits: tuple[bool, ...],
        cp_methods: tuple[CpMethod, ...],
        along: tuple[bool, ...],
    ) -> StageSeconds:
        """Returns the least seconds over these splits, methods and sequence parallelisms."""
        *layer_seconds, table, last = self._least_tensor(recompute, splits, along)
        context = self._least_context(recompute, cp_methods)
        forward = []
        backward = []
        for kind, layer in enumerate(self.compute.kinds):
            inner = layer_seconds[kind] + context
            if kind == 1 and layer is not NO_LAYER:
                inner += self._least_expert(recompute, along)
            forward.append(value_of(layer.forward) + inner / 2)
            backward.append(
                value_of(layer.backward) + value_of(layer.recompute_s(recompute)) + inner / 2
            )
        loss = [value_of(seconds) + last / 2 for seconds in self.compute.loss]
        return StageSeconds(
            forward=(forward[0], forward[1]),
            backward=(backward[0], backward[1]),
            first=table,
            last=(loss[0], loss[1]),
        )

    def _least_tensor(
        self,
        recompute: str,
        splits: tuple[bool, ...],
        along: tuple[bool, ...],
    ) -> list[float]:
        """Returns the least exposed seconds of tensor parallelism.

        They are those of a dense layer, of an MoE layer, of the token table and of the loss.
        """
        # The samples decide how a micro-batch is cut into pieces.
        shards = self.par.tp, self.tokens, self.experts[:2], self.par.micro_batch_size
        tensors = [
            self.share(
                (*shards, recompute, split, sp),
                self._tensor,
                recompute,
                split,
                sp,
            )
            for split in splits
            for sp in along
        ]
        return [value_of(min(variants, key=value_of)) for variants in zip(*tensors, strict=True)]

    def _least_context(self, recompute: str, cp_methods: tuple[CpMethod, ...]) -> float:
        """Returns the exposed seconds of context parallelism with the method that sends least."""
        par = self.par
        shards = par.tp, par.cp, par.micro_batch_size
        # Zig-zag and contiguous rings send the same bytes.
        rings = {"ring" if method == "zigzag" else method for method in cp_methods}
        seconds: float = min(
            self.share(
                (*shards, recompute, method),
                self._context,
                recompute,
                method,
            )
            for method in rings
        )
        return seconds

    def _least_expert(self, recompute: str, along: tuple[bool, ...]) -> float:
        """Returns the least exposed seconds of expert parallelism."""
        shards = self.par.tp, self.tokens, self.experts[:2]
        seconds: float = min(
            self.share(
                (*shards, recompute, sp),
                self._expert,
                recompute,
                sp,
            )
            for sp in along
        )
        return seconds

    def chain(self, stage: StageSeconds, back: float) -> float:
        """Returns the seconds of a micro-batch through all stages and `back` of their backward."""
        forward = (
            self.dense * stage.forward[0]
            + self.moe * stage.forward[1]
            + stage.first
            + stage.last[0]
        )
        return forward + back * (
            self.dense * stage.backward[0] + self.moe * stage.backward[1] + stage.last[1]
        )

    def _tensor(self, recompute: str, split: bool, sp: bool) -> TensorSeconds:
        """Returns the exposed seconds of tensor parallelism."""
        par = self.par
        context = self.context
        if split or sp != par.sp:
            par = structs.replace(par, schedule="zb_h1" if split else "1f1b", sp=sp)
        workload = context.workload(par, self.trains[recompute])
        return tensor_seconds(workload, context.rate, self.compute, self.paths)

    def _context(self, recompute: str, method: CpMethod) -> float:
        """Returns the exposed seconds of context parallelism with this method."""
        par = structs.replace(self.par, cp_method=method)
        context = self.context
        workload = context.workload(par, self.trains[recompute])
        return value_of(context_seconds(workload, context.rate, self.paths))

    def _expert(self, recompute: str, sp: bool) -> float:
        """Returns the exposed seconds of the fastest exchange of expert tokens."""
        context = self.context
        train = self.trains[recompute]
        exchange_key: PathKey = axes(self.par), "exchange"
        etp, ep, _ = self.experts
        moe = context.model.moe
        seconds_by_path = list[float]()
        for all_to_all in self.all_to_alls if ep > 1 else ("direct",):
            par = structs.replace(self.par, sp=sp, expert_all_to_all=UNSET)
            paths = [self.paths[exchange_key]]
            if all_to_all == "hierarchical" and moe is not None:
                par = structs.replace(par, expert_all_to_all=all_to_all)
                paths = self.best.by_domain(ep, etp, moe)
            for path in paths:
                seconds = expert_seconds(
                    context.workload(par, train),
                    context.rate,
                    {exchange_key: path},
                )
                seconds_by_path.append(value_of(seconds))
        # infinite if no number of domains suits the exchange
        return min(seconds_by_path, default=inf)

    def _once(self, make: Callable[..., Any], *args: Any) -> Any:
        """Returns `make(*args)`, computed once per layer cost."""
        return remembered(self.known, (make.__name__, *args), make, *args)

    def share(self, key: tuple[object, ...], make: Callable[..., Any], *args: Any) -> Any:
        """Returns `make(*args)`, computed once for all layer costs that have `key` in common."""
        return remembered(self.shared, (make.__name__, *key), make, *args)

    def kept(self, schedule: str) -> Kept:
        """Returns the activation bytes, equal for all schedules that treat backward alike."""
        like_schedule = schedule if schedule in SPLIT_BACKWARD else "1f1b"
        if like_schedule not in self._kept:
            self._kept[like_schedule] = Kept(self, like_schedule)
        return self._kept[like_schedule]

    # ---------------------------------------------------------------------------------- parameters

    def average_params(self, pp: int) -> tuple[float, float]:
        """Returns the (dense, expert) parameters of an average pipeline rank."""
        layers = self.dense * self.params.dense[0] + self.moe * self.params.dense[1]
        # Tied embeddings count once, because both ends may share a rank.
        ends = self.params.first + self.params.single_last
        return (layers + ends) / pp, self.moe * self.params.experts / pp

    def fewest_params(self, layers: float) -> tuple[float, float]:
        """Returns the least (dense, expert) parameters of `layers` layers of either kind."""
        return layers * self.least_params, 0.0 if self.dense else layers * self.params.experts

    def pipeline_params(self, shape: PipelineShape) -> list[tuple[int, int]]:
        """Returns the (dense, expert) parameters of each rank of a shape.

        They are the same for all schedules, ZeRO stages and batches.
        """
        params_by_rank = self._pipeline_params.get(shape.key)
        if params_by_rank is None:
            params_by_rank = self._pipeline_params[shape.key] = [
                self.params.on_rank(rank, shape.single) for rank in shape.ranks
            ]
        return params_by_rank
