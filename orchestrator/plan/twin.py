"""The answers of `python -m trainer.twin` to `orch twin`: one JSON object per line for each rank
that was run."""

from __future__ import annotations

from .document import Frozen


class Transfer(Frozen):
    """One rank's part of a collective or a message."""

    #: all-reduce, reduce-scatter, all-gather, all-to-all, send, receive, rotate (send to the next
    #: rank of a ring)
    operation: str
    axis: str  # tp, cp, pp, dp; "norm": the gradient's norm, one number
    bytes: int  # that this rank sends, with ring algorithms; for a receive, that it receives
    ranks: list[int]  # global ranks of the group; for a message its sender and its receiver


class RankRun(Frozen):
    """The second step of one rank that was run alone."""

    rank: int
    micro_batches: int
    transfers: list[Transfer]  # the distinct ones
    #: the step's transfers in the order in which they start, as indices into `transfers`
    sequence: list[int]
    #: bytes: params, grads, optimizer before the step; activations at their own peak
    memory: dict[str, int]
    #: bytes by category at the moment of their largest sum, which is `total`
    peak: dict[str, int]
    seconds: float
    process_bytes: int  # largest resident size of the process so far
