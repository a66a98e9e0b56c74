"""The order of DualPipe and DualPipeV, as a script over a rank's two chunks.

It follows the eight steps of DeepSeek's reference implementation
(github.com/deepseek-ai/DualPipe, MIT). `depth` is the distance from the ends of the pipeline, which
have depth 0; `half` is the number of depths. A forward directly before a backward of the other
chunk is a pair whose communication and compute DeepSeek overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Kind
from .counting import Step

F = Kind.F
B = Kind.B
I = Kind.I
W = Kind.W


def script(depth: int, half: int, micro_batches: int) -> Iterator[Step]:
    """Yields the script of a rank. `micro_batches`: number per chunk, at least 2 * half."""
    rest = half - depth - 1
    yield from [(F, 0)] * (2 * rest)
    yield from [(F, 0), (F, 1)] * (depth + 1)
    yield from [(I, 1), (W, 1), (F, 1)] * rest
    yield from [(F, 0), (B, 1), (F, 1), (B, 0)] * (micro_batches - 2 * half + depth + 1)
    yield from [(B, 1), (F, 1), (B, 0)] * rest
    # The second half of this step postpones weight gradients to fill the waits of the last two.
    drain = [(kind, chunk) for _ in range(depth + 1) for kind, chunk in ((B, 1), (B, 0))]
    yield from ((B if index <= depth else I, chunk) for index, (_, chunk) in enumerate(drain))
    yield from [(W, 0), (I, 0)] * rest
    yield from [(W, 0)] * (depth + 1)
