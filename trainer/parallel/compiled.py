"""Compilation of a stage's blocks, one by one, and what the compiler must not trace.

A block that is traced whole is one graph, which all blocks of its kind run, however many there are.
Parts that are not traced cut it into several:

- Communication of tensor parallelism. `CommCounter` counts in Python's numbers, which a graph holds
  as constants: each call would be compiled anew, until torch reaches its `recompile_limit` and runs
  the block uncompiled, without a word.
- Attention over a sequence shard, since it communicates, and of packed documents, since their
  lengths differ from step to step.
- Experts, since their shapes depend on the tokens.
- Linears whose backward is split (`pipeline.split`), since weight gradients bypass autograd.

A recomputed block that is traced whole is one graph together with its recomputation. Otherwise
torch would not compile anything inside the recomputation, so the parts of such a block are compiled
there. Halves of which single operators are recomputed (`selective`) run uncompiled if a part is not
traced: a dispatch mode watches their operators, and torch does not compile under one.
"""

from __future__ import annotations

import torch

from orchestrator.plan import Plan
from orchestrator.plan.schedules import schedule_of
from trainer.comm.mesh import Mesh
from trainer.model.block import Block
from trainer.model.experts import MixtureOfExperts
from trainer.model.linear import Linear
from trainer.model.stage import Stage

from .recompute import recompute_mode
from .row_parallel import OverlappedRowLinear
from .tensor import Region


def hide_untraced(stage: Stage, plan: Plan, mesh: Mesh) -> None:
    """Hides from the compiler what it must not trace, before recomputation wraps the blocks. Blocks
    that are recomputed whole and not traced whole are compiled here."""
    untraced_parts = _UntracedParts(plan, mesh)
    for layer, block in stage.blocks.items():
        if untraced_parts.attention:
            block.attn.core = torch.compiler.disable(block.attn.core)
        for half in (block.attn, block.mlp):
            if untraced_parts.linears and hasattr(half, "apply_linears"):
                half.apply_linears = torch.compiler.disable(half.apply_linears)
        for module in block.modules():
            if isinstance(module, Region | MixtureOfExperts):
                untraced = torch.compiler.disable(module.forward)
                module.forward = untraced  # type: ignore[method-assign]
            elif isinstance(module, Linear) and isinstance(module.run, OverlappedRowLinear):
                module.run = torch.compiler.disable(module.run)
        if untraced_parts.splits_recomputation(layer, block):
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]


def compile_blocks(stage: Stage, plan: Plan, mesh: Mesh) -> None:
    """Compiles each block that is not compiled inside its recomputation."""
    untraced_parts = _UntracedParts(plan, mesh)
    for layer, block in stage.blocks.items():
        if not untraced_parts.splits_recomputation(layer, block):
            block.compile()


class _UntracedParts:
    """The parts of a plan's blocks that are not traced."""

    def __init__(self, plan: Plan, mesh: Mesh):
        self.train = plan.job.train
        self.attention = mesh.group("cp") is not None or plan.job.data.isolate_documents
        self.linears = mesh.group("tp") is not None or schedule_of(plan.parallel).splits_backward

    def splits_recomputation(self, layer: int, block: Block) -> bool:
        """Whether a block is recomputed whole, and not traced whole."""
        mixture = isinstance(block.mlp, MixtureOfExperts)
        untraced = self.attention or self.linears or mixture
        return untraced and recompute_mode(self.train, layer) == "full"
