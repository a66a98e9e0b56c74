"""Puts tensor-parallel communication around the blocks, the embedding and the head of a stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from orchestrator.plan import Plan
from orchestrator.plan.schedules import schedule_of
from orchestrator.plan.trained import tensor_pieces
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.model.block import Block
from trainer.model.experts import MixtureOfExperts
from trainer.model.mla import LatentAttention
from trainer.model.stage import Stage

from .column_parallel import OverlappedColumnLinears
from .params import ParamTable
from .recompute import recompute_mode
from .row_parallel import OverlappedRowLinear
from .tensor import Copy, Gather, Reduce, Region, Scatter, SequenceShard
from .vocab import ShardedLookup

MakeRegion = Callable[[], Region]


def apply_tensor_parallel(
    stage: Stage, table: ParamTable, mesh: Mesh, plan: Plan, counter: CommCounter
) -> None:
    """Column-parallel linears communicate their input themselves, overlapped with their gradients.
    If the schedule defers weight gradients, a `Region` before the linears communicates instead,
    since the deferred gradients need the whole input. If tokens travel in pieces, row-parallel
    linears sum their results themselves."""
    group = mesh.required_group("tp")
    sp = plan.parallel.sp
    into, out = (Gather, Scatter) if sp else (Copy, Reduce)
    splits = schedule_of(plan.parallel).splits_backward
    pieces = tensor_pieces(plan)
    row = OverlappedRowLinear(group, counter, sp, pieces) if pieces > 1 else None
    for layer, block in stage.blocks.items():
        mode = recompute_mode(plan.job.train, layer)
        columns = OverlappedColumnLinears(
            group,
            counter,
            sp,
            keep=mode != "none",
            pieces=1 if mode == "selective" else pieces,  # it keeps whole products
        )
        _enter_regions(block, None if splits else columns, partial(Region, into, group, counter))
        _leave_regions(block, row, partial(Region, out, group, counter))
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
        stage.head.run = OverlappedColumnLinears(group, counter, sp, pieces=pieces).run


def _enter_regions(
    block: Block, columns: OverlappedColumnLinears | None, region: MakeRegion
) -> None:
    """Communicates the inputs of a block's halves: in their linears, or without `columns` before
    them. `apply_to_experts` adds the communication of experts."""
    if isinstance(block.attn, LatentAttention):  # its latents are smaller than its input
        block.attn.latents_in = region()
    elif columns is None:
        block.attn_in = region()
    else:
        block.attn.apply_linears = columns
    if isinstance(block.mlp, MixtureOfExperts):
        return
    if columns is None:
        block.mlp_in = region()
    else:
        block.mlp.apply_linears = columns


def _leave_regions(block: Block, row: OverlappedRowLinear | None, region: MakeRegion) -> None:
    """Sums the results of a block's halves over ranks: in their last linears, or without `row`
    behind them."""
    if row is None:
        block.attn_out = region()
    else:
        block.attn.wo.run = row
    if row is None or isinstance(block.mlp, MixtureOfExperts):
        block.mlp_out = region()
    else:
        block.mlp.down.run = row
