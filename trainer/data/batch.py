"""What a pipeline stage needs to know of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # a target that does not count, as in `torch.nn.functional.cross_entropy`


@dataclass(frozen=True)
class MicroBatch:
    """All [batch, sequence], int64. Every stage builds its own: data is a pure function, only hidden states travel."""

    tokens: Tensor
    targets: Tensor  # the next token, or IGNORED
    positions: Tensor  # from 0, within the sample or, where documents are kept apart, within the document
    documents: Tensor | None  # number of the document within the sample; None: attention sees the whole sample

    @property
    def valid_tokens(self) -> int:
        """Targets that count. On an accelerator this waits for the device; ask before `to`."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> MicroBatch:
        """On `device`; from pinned memory the copy does not stop the host."""
        parts = (self.tokens, self.targets, self.positions, self.documents)
        return MicroBatch(*(part if part is None else part.to(device, non_blocking=True) for part in parts))

    def pinned(self) -> MicroBatch:
        """In page-locked host memory (CUDA only)."""
        parts = (self.tokens, self.targets, self.positions, self.documents)
        return MicroBatch(*(part if part is None else part.pin_memory() for part in parts))


def from_windows(windows: Tensor, eod: int | None = None) -> MicroBatch:
    """A micro-batch from [batch, sequence + 1] token ids: inputs are all but the last, targets all but the first.

    With `eod`, the id that ends a document, documents are kept apart: attention and positions restart behind each
    `eod`, and its own target, the unforeseeable start of the next document, does not count (Llama 3, arXiv 2407.21783,
    section 3.2). Without it, a sample is one stretch of text, as in GPT-2 and GPT-3.
    """
    tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    steps = torch.arange(tokens.shape[1]).expand_as(tokens)
    if eod is None:
        return MicroBatch(tokens, targets, steps.contiguous(), None)
    ends = tokens == eod
    starts = torch.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    positions = steps - torch.where(starts, steps, 0).cummax(dim=1).values
    return MicroBatch(tokens, targets.masked_fill(ends, IGNORED), positions, starts.long().cumsum(dim=1))
