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
    stage: Stage,
    mesh: Mesh,
    *,
    sp: bool,
    cp_method: str,
    terms: LossTerms,
    counter: CommCounter,
) -> None:
    """Applies parallelism to the experts of a stage, whose blocks already have tensor
    parallelism."""
    for block in stage.blocks.values():
        if isinstance(block.mlp, MixtureOfExperts):
            block.mlp.terms = terms
            block.mlp.sum_counts = SequenceCounts(mesh, sp, counter)
            block.mlp.of_sequences = WholeSequences(mesh, sp, cp_method, counter)
            _place(block, block.mlp, mesh, sp, counter)


def _place(
    block: Block,
    mixture: MixtureOfExperts,
    mesh: Mesh,
    sp: bool,
    counter: CommCounter,
) -> None:
    """Spreads experts over the ranks of "experts", and cuts each expert over those of "etp" (tp, if
    experts do not fold). If tokens go to other ranks, tp ranks with tokens of their own (SP) send
    only these, and gather the arriving tokens over "etp"; otherwise they gather tokens first."""
    experts = mesh.group("experts")
    tensor = mesh.group("tp")
    sends_own_tokens = sp and experts is not None
    if experts is not None:
        slices = mesh.group("etp") if sends_own_tokens else None
        mixture.dispatch = _dispatch(mesh, slices, counter)
    if tensor is None:
        return
    if sends_own_tokens:
        block.mlp_out = nn.Identity()
        mixture.shared_in = Region(Gather, tensor, counter)
        mixture.shared_out = Region(Scatter, tensor, counter)
    else:
        kind = GatheredTokens if sp else ReplicatedTokens
        mixture.enter = kind(tensor, counter)


def _dispatch(
    mesh: Mesh,
    slices: dist.ProcessGroup | None,
    counter: CommCounter,
) -> Dispatch:
    """Returns the dispatch: straight to the ranks of the experts, or by their NVLink domains if the
    plan has groups for that."""
    if "experts_across" not in mesh.groups:
        return ExpertDispatch(
            mesh.group("experts"),
            slices,
            counter,
            mesh.levels("experts"),
        )
    inside = ExpertDispatch(
        mesh.group("experts_inside"),
        slices,
        counter,
        mesh.levels("experts_inside"),
    )
    return HierarchicalDispatch(
        mesh.required_group("experts_across"),
        inside,
        counter,
        list(mesh.levels("experts_across")),
    )
