"""Seconds of one operation: latency plus bytes over the path (alpha-beta, Hockney 1994).

Sizes follow the ring algorithms (Thakur et al. 2005; NCCL's accounting). With a tensor of B bytes
over n ranks, a rank sends B*(n-1)/n in an all-gather or reduce-scatter, and twice that in an
all-reduce. It sends B*(n-1)/n in an all-to-all of B bytes per rank, and B in a point-to-point
transfer.
"""

from __future__ import annotations

from orchestrator.cost.dual import Number, larger
from orchestrator.cost.rates import Links
from orchestrator.plan.cluster import Operation

from .fabric import Path, Pattern

PATTERN: dict[str, Pattern] = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "exchange",
    "p2p": "chain",
}
#: Links at their own rates, without further latency: the reference that `orch bench` fits.
IDEAL = Links(1.0, 1.0, 1.0, 0.0)


def sent_bytes(operation: Operation, size: Number, n: int) -> Number:
    """Returns the bytes that one rank sends.

    `size` is the bytes of the whole tensor; for all-to-all and p2p, of one rank's buffer.
    """
    if n == 1:
        return 0.0
    if operation == "p2p":
        return size
    return size * (n - 1) / n * (2 if operation == "all_reduce" else 1)


def seconds(
    operation: Operation,
    size: Number,
    n: int,
    path: Path,
    links: Links = IDEAL,
) -> Number:
    """Returns the seconds of one operation over groups of n ranks, if all groups run it at once.

    `size` is the same as in `sent_bytes`. Latency: a ring pays its hops once (an all-reduce twice),
    or 2*log2(n) of its longest hop if a tree is faster. An all-to-all serves its n-1 peers over up
    to 8 channels at a time. A point-to-point transfer pays one hop.
    """
    if n == 1:
        return 0.0
    rounds = 2 if operation == "all_reduce" else 1
    if operation == "p2p":
        latency = path.hop_s
    elif operation == "all_to_all":
        latency = path.hop_s * (1 + (n - 1) / 8)
    else:
        ring = rounds * path.ring_latency_s * (n - 1) / n
        tree = rounds * 2 * max(1, (n - 1).bit_length()) * path.hop_s
        latency = min(ring, tree)
    per_byte = larger(path.nvlink_s / links.nvlink, path.fabric_s / links.nic)
    moved = sent_bytes(operation, size, n) * path.stretch.get(operation, 1.0)
    return latency * links.latency + moved * per_byte + links.launch_s
