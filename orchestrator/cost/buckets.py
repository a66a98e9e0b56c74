"""The size of gradient buckets that the planner chooses.

A bucket is summed by one collective while backward goes on, so it costs one latency, and the last
one is hidden by nothing. Hence a bucket has at least the numbers of Megatron-Core's
(`DistributedDataParallelConfig.bucket_size`: 40 million), and a piece for each replica that is long
enough for the links. The predicted step gains 2 % from 25 to 160 MB at 512 replicas of Llama 3 8B,
and nothing more beyond: it does not know of the last bucket. So this is a rule, not a search.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from orchestrator.cost.model.layers import expert_params, parameter_count
from orchestrator.plan.document import Model
from orchestrator.plan.expert_mesh import Degrees, spread

MIB = 1 << 20
NUMBERS = 40_000_000  # of a bucket at least, if the rank has many more
PIECE = MIB  # bytes that a replica owns of a bucket at least
#: Buckets of a rank at least: seven eighths of its gradients leave during backward.
BUCKETS = 8
LEAST = 25 * MIB  # as PyTorch's (arXiv 2006.15704), however small the model

Reason = Literal["least", "numbers", "pieces", "share", "bound"]


class StageDegrees(Degrees, Protocol):
    """Degrees with the number of stages."""

    @property
    def pp(self) -> int: ...


class BucketSize(NamedTuple):
    """The size of a bucket in bytes, and what decided it."""

    size: int
    reason: Reason


def unsharded_params(model: Model, degrees: StageDegrees) -> float:
    """Returns the parameters of an average rank before data-parallel sharding."""
    experts = expert_params(model)
    dense = (model.parameters or parameter_count(model)) - experts
    on_stages = dense / degrees.tp + experts / (degrees.tp * spread(degrees))
    return on_stages / degrees.pp


def bucket_size(
    model: Model,
    degrees: StageDegrees,
    width: int,
    most_bytes: int | None = None,
) -> BucketSize:
    """Returns the size of the buckets of a layout. `width`: bytes of a gradient. `most_bytes`:
    what `train.comm_buffer_mib` bounds them to."""
    bucket = _chosen(model, degrees, width)
    if most_bytes is not None and most_bytes < bucket.size:
        return BucketSize(most_bytes, "bound")
    return bucket


def _chosen(model: Model, degrees: StageDegrees, width: int) -> BucketSize:
    """Returns the size of buckets that nothing bounds."""
    pieces = degrees.cp * degrees.ep * degrees.dp * PIECE
    share = unsharded_params(model, degrees) * width / BUCKETS
    bucket = BucketSize(NUMBERS * width, "numbers")
    if pieces > bucket.size:
        bucket = BucketSize(pieces, "pieces")
    if share < bucket.size:
        bucket = BucketSize(int(share), "share")
    return bucket if bucket.size > LEAST else BucketSize(LEAST, "least")
