"""The trainer itself in one process, in the precision of the layout.

Rounding to 8 or 11 bits hides errors that float64 would show. But a layout that computes every
micro-batch as one process does (no tensor or context parallelism) rounds at the same places, and
differs only by its sums, which are in a wider precision. So a sum in a narrow precision, or one
that misses a small term, is found.
"""

from __future__ import annotations

import torch
from msgspec import UNSET, structs
from torch import Tensor

from orchestrator.plan import Plan, seal
from orchestrator.plan.learning_rate import learning_rate
from orchestrator.plan.offload import offload_of
from orchestrator.plan.ranks import all_groups, coords, embeds_at_both_ends
from orchestrator.plan.schedules import shards_layers
from trainer.comm.mesh import Mesh
from trainer.engine import Engine
from trainer.model.init import init_stage
from trainer.model.stage import Stage
from trainer.precision import Recipe

from .oracle import Outcome
from .samples import step_batches


def rounds_as_one(plan: Plan) -> bool:
    """Whether a layout rounds where one process does. A process that holds both uses of an
    embedding adds their gradients in the parameter's precision; it sends no gradients, which a
    narrow wire rounds."""
    par = plan.parallel
    if plan.job.train.grad_wire:
        return False
    return par.tp == par.cp == 1 and not (embeds_at_both_ends(plan.model) and par.pp > 1)


def shards_masters(plan: Plan) -> bool:
    """Whether ranks hold only shards of the master weights, which begin unrounded."""
    return shards_layers(plan.parallel) and not offload_of(plan.job.train).optimizer


def one_process(plan: Plan) -> Plan:
    """Returns the plan of the same job without any parallelism."""
    par = plan.parallel
    train = plan.job.train
    degrees = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "dp": 1}
    coordinates = coords(par.order, degrees)
    count = par.global_batch_samples // par.micro_batch_size
    alone = structs.replace(
        par,
        **degrees,
        zero=0,
        vpp=1,
        sp=False,
        zero_group=0,
        world_size=1,
        replica_micro_batches=[],
        schedule="1f1b",
        schedule_rows=[],
        stage_layers=[plan.model.layers],
        etp=UNSET,
        fold_cp=UNSET,
        expert_all_to_all=UNSET,
        micro_batches=count,
        accumulation=count,
    )
    train = structs.replace(
        train,
        recompute="none",
        recompute_layers=[],
        compile=False,
    )
    job = structs.replace(plan.job, train=train)
    cluster = structs.replace(plan.cluster, gpus_per_node=1)
    cluster = structs.replace(
        cluster,
        node_names=cluster.node_names[:1],
        nvlink_domains=[[0]],
    )
    changed = {
        "cluster": cluster,
        "parallel": alone,
        "job": job,
        "ranks": plan.ranks[:1],
    }
    return seal(
        structs.replace(
            plan,
            **changed,
            groups=all_groups(coordinates, 1),
        )
    )


def train(
    plan: Plan,
    steps: int,
    packed: bool,
    empty: bool,
    use: Recipe,
) -> list[Outcome]:
    """Runs `steps` optimizer steps of the plan's job in one process. For `fully_shard` it runs one
    step and compares matrices only: torch passes on the gradient of a norm unrounded, more exactly
    than one process does."""
    sharded = shards_layers(plan.parallel)
    unrounded = shards_masters(plan)
    plan = one_process(plan)
    engine = Engine(plan, Mesh.alone(plan), torch.device("cpu"), use)
    if unrounded:
        _start_unrounded(engine)
    outcomes = []
    for step in range(1, 2 if sharded else steps + 1):
        consumed = (step - 1) * plan.parallel.global_batch_samples
        batches, valid_tokens = step_batches(plan, plan.ranks[0].coord, consumed, packed, empty)
        loss_sum, norm = engine.gradients(batches, valid_tokens)
        loss = engine.mean_loss(loss_sum, valid_tokens)
        assert loss is not None, "one process has the last stage"
        grads = {
            name: grad.double() / engine.loss_scale
            for name, grad in engine.buckets.full_grads().items()
        }
        engine.update(
            norm,
            learning_rate(step, plan.job.optim, plan.job.train.steps),
        )
        weights = {info.name: param.double() for info, param in engine.buckets.full_params()}
        if unrounded:
            weights = {
                name: piece.view(weights[name].shape).double()
                for name, piece in _masters(engine).items()
            }
        if sharded:
            grads = _matrices(grads)
            weights = _matrices(weights)
        outcomes.append(
            Outcome(
                loss,
                float(norm),
                grads,
                weights,
                engine.loss_terms(),
            )
        )
    return outcomes


def _matrices(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() > 1}


def _masters(engine: Engine) -> dict[str, Tensor]:
    """Returns flat views of the optimizer's own weights by parameter, complete in one process."""
    return {
        piece.info.name: piece.data
        for piece in engine.state_pieces(to_write=False)
        if piece.kind == "master"
    }


def _start_unrounded(engine: Engine) -> None:
    """Starts with unrounded master weights, as `fully_shard` without offload does, whose only
    weights are the optimizer's in fp32; elsewhere master weights are made from rounded ones."""
    model = engine.plan.model
    stage = Stage(model, range(model.layers), first=True, last=True)
    init_stage(stage, model, engine.plan.job.train.seed)
    drawn = dict(stage.named_parameters())
    for name, master in _masters(engine).items():
        master.copy_(drawn[name].detach().flatten())
    engine.optimizer.copy_masters_to_params()
