"""Applies expert and tensor parallelism to the experts of a stage, and lets them add their terms to
the loss."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.model.block import Block
from trainer.model.experts import Dispatch, MixtureOfExperts
from trainer.model.loss import LossTerms
from trainer.model.stage import Stage
from trainer.parallel.tensor import Gather, Region, Scatter

from .capacity import WholeSequences
from .dispatch import ExpertDispatch
from .hierarchical import HierarchicalDispatch
from .tensor_parallel import GatheredTokens, ReplicatedTokens, SequenceCounts


def apply_to_experts(
    stage: Stage, mesh: Mesh, sp: bool, cp_method: str, terms: LossTerms, counter: CommCounter
) -> None:
    """After tensor parallelism has been put around the blocks of the stage."""
    for block in stage.blocks.values():
        if isinstance(block.mlp, MixtureOfExperts):
            block.mlp.terms = terms
            block.mlp.sum_counts = SequenceCounts(mesh, sp, counter)
            block.mlp.of_sequences = WholeSequences(mesh, sp, cp_method, counter)
            _place(block, block.mlp, mesh, sp, counter)


def _place(
    block: Block, mixture: MixtureOfExperts, mesh: Mesh, sp: bool, counter: CommCounter
) -> None:
    """Experts are spread over the ranks of "experts", each is cut over those of "etp" (of tp, where
    nothing folds). Where tokens go to other ranks, tp ranks with tokens of their own (SP) send
    those alone and gather what arrived over "etp"; else they gather the tokens before."""
    experts = mesh.group("experts")
    tensor = mesh.group("tp")
    each_its_own = sp and experts is not None
    if experts is not None:
        slices = mesh.group("etp") if each_its_own else None
        mixture.dispatch = _dispatch(mesh, slices, counter)
    if tensor is None:
        return
    if each_its_own:
        block.mlp_out = nn.Identity()
        mixture.shared_in = Region(Gather, tensor, counter)
        mixture.shared_out = Region(Scatter, tensor, counter)
    else:
        mixture.enter = GatheredTokens(tensor, counter) if sp else ReplicatedTokens(tensor, counter)


def _dispatch(mesh: Mesh, slices: dist.ProcessGroup | None, counter: CommCounter) -> Dispatch:
    """Straight to the ranks of the experts, or by their NVLink domains where the plan has groups
    for that."""
    if "experts_across" not in mesh.groups:
        return ExpertDispatch(mesh.group("experts"), slices, counter, mesh.levels("experts"))
    inside = ExpertDispatch(
        mesh.group("experts_inside"), slices, counter, mesh.levels("experts_inside")
    )
    return HierarchicalDispatch(
        mesh.required_group("experts_across"), inside, counter, list(mesh.levels("experts_across"))
    )
