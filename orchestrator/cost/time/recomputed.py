"""The parts of forward that recomputation repeats, and the inputs from which it starts.

Tensor-parallel ranks may share these inputs.
"""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.cost.software import Software
from orchestrator.plan.document import Parallel, Train


class RecomputedShare(NamedTuple):
    """Shares of the layers that recompute a part of forward in backward."""

    layer: float  # the whole layer
    gather: float  # the all-gather of the sequence (sequence parallelism)
    core: float  # attention, with its communication of keys and values (context parallelism)
    end: float  # the layer's last operation; this trainer stops once it has what backward needs
    #: Inputs of a recomputed part that its tensor-parallel ranks share and gather again.
    inputs: float = 0.0
    mlp_inputs: float = 0.0  # the same for the input of a dense MLP alone


def recomputed_share(
    parallel: Parallel,
    train: Train,
    software: Software,
) -> RecomputedShare:
    """Returns the shares of a layout.

    This trainer's selective recomputation keeps neither gathered inputs nor attention over other
    ranks' keys.
    """
    if train.recompute == "budget":
        modes = train.recompute_layers or ["full"]
        full, selective = (modes.count(mode) / len(modes) for mode in ("full", "selective"))
    else:
        full = float(train.recompute == "full")
        selective = float(train.recompute == "selective")
    orch = software.selective == "orch"
    selective *= orch
    end = 0.0 if orch else full
    inputs = 0.0
    mlp_inputs = 0.0
    if shares_inputs(parallel, train):
        received_share = held_inputs(parallel) / max(1, sum(parallel.stage_layers))
        inputs = (full + selective) * (1.0 - received_share)
        mlp_inputs = selective
    return RecomputedShare(
        layer=full,
        gather=full + selective * parallel.sp,
        core=full + selective * (parallel.cp > 1),
        end=end,
        inputs=inputs,
        mlp_inputs=mlp_inputs,
    )


def shares_inputs(parallel: Parallel, train: Train) -> bool:
    """Reports whether tensor-parallel ranks each keep a share of the inputs of recomputation.

    This is Pa of ZeRO-R (arXiv 1910.02054, section 6.1). Sequence parallelism shares them already.
    """
    return train.partition_activations is True and parallel.tp > 1 and not parallel.sp


def held_inputs(parallel: Parallel) -> int:
    """Returns the number of layers whose input a stage receives and keeps whole.

    The stage keeps it until its gradient is sent back.
    """
    return sum(count > 0 for count in parallel.stage_layers[1:])
