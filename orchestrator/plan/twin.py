"""What `python -m trainer.twin` answers to `orch twin`: one JSON object a line for each rank that
it has run."""

from __future__ import annotations

from .document import Frozen


class Transfer(Frozen):
    """A collective, or a message, as one rank takes part in it."""

    #: all-reduce, reduce-scatter, all-gather, all-to-all, send, receive, rotate (send to the next
    #: of a ring)
    operation: str
    axis: str  # tp, cp, pp, dp; "norm": the gradient's norm, one number
    bytes: int  # that this rank sends, with ring algorithms; of a receive, that arrive
    ranks: list[int]  # global ranks of the group; of a message its sender and its receiver


class RankRun(Frozen):
    """The second step of one rank, which it ran alone."""

    rank: int
    micro_batches: int
    transfers: list[Transfer]  # the distinct ones
    sequence: list[
        int
    ]  # the step's transfers in the order in which they start, as indices into `transfers`
    memory: dict[
        str, int
    ]  # bytes: params, grads, optimizer before the step; activations at their own peak
    peak: dict[
        str, int
    ]  # bytes by category at the moment at which their sum is largest, and that `total`
    seconds: float
    process_bytes: int  # largest resident size of the process so far
