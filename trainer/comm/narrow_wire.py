"""A reduce-scatter of which the addends travel in a narrow format and are summed in a wide one.

A ring narrows every partial sum that it passes on, so the error grows with the ranks. Here each
rank sends every other rank the narrow copy of that rank's slice (an all-to-all) and sums what
arrives in the wide format: one rounding of each addend, however many ranks there are. It sends as
many bytes as a ring of the narrow format, half of those of fp32. The own addend is rounded as
well, so the sum does not depend on who computes it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import CommCounter, Handle, start_reduce_scatter

AXIS = "dp"


class _Arrivals:
    """The narrow slices on their way to this rank, which sums them into `out`."""

    def __init__(self, addends: Tensor, wire: torch.dtype, out: Tensor):
        self.out = out
        self.sent = addends.to(wire, copy=True)  # lives until it has been sent
        self.arrived = torch.empty_like(self.sent)

    def sum(self) -> None:
        """Sums the slices in the dtype of `out`."""
        slices = self.arrived.view(-1, self.out.numel())
        torch.sum(slices, 0, dtype=self.out.dtype, out=self.out)


def start_shard_sum(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    counter: CommCounter,
    wire: torch.dtype | None,
    *,
    out: Tensor | None = None,
) -> Handle:
    """[n*k] -> [k]: starts to sum this rank's slice over the group in the dtype of `tensor`, of
    which `out` may be a part. `wire`: the dtype to which addends are rounded before they travel;
    None: they are summed as they travel."""
    if group is None or wire is None:
        return start_reduce_scatter(tensor, group, AXIS, counter, out=out)
    n = group.size()
    if out is None:
        out = tensor.new_empty(tensor.numel() // n)
    arrivals = _Arrivals(tensor, wire, out)
    counter.count_sent("all-to-all", AXIS, arrivals.sent.nbytes * (n - 1) // n, group)
    with counter.waiting(AXIS, tensor):
        work = dist.all_to_all_single(
            arrivals.arrived,
            arrivals.sent,
            group=group,
            async_op=True,
        )
    return Handle(out, work, AXIS, counter, arrivals.sum)
