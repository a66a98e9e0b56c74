"""The micro-batch: the tokens and labels that a pipeline stage reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.documents import Documents

IGNORED = -100  # a target that does not count, as in `torch.nn.functional.cross_entropy`


@dataclass(frozen=True)
class MicroBatch:
    """Tensors [batch, sequence], int64. Every stage builds its own, since data is a pure function
    of the step."""

    tokens: Tensor
    targets: Tensor  # the next token, or IGNORED
    positions: (
        Tensor  # from 0, within the sample or, where documents are kept apart, within the document
    )
    documents: Documents | None  # None: attention sees the whole sample
    serial: Tensor | None = (
        None  # number of the token in the run's data order, for dropout and recorded choices
    )
    fingerprint: int = 0  # of its samples, as they were read (`trainer.data.fingerprint`)
    next_tokens: Tensor | None = None  # [batch, sequence, depth], further tokens: of `look_ahead`
    next_targets: Tensor | None = None  # the same, their targets

    @property
    def valid_tokens(self) -> int:
        """Number of targets that count. On an accelerator this waits for the device: call it before
        `to`."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> MicroBatch:
        """The batch on `device`; from pinned memory the copy does not block the host."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """The batch in page-locked host memory (CUDA only)."""
        return self.each(Tensor.pin_memory)

    def each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """The batch with `change` applied to every tensor."""
        maybe = (self.serial, self.next_tokens, self.next_targets)
        serial, *ahead = (None if part is None else change(part) for part in maybe)
        documents = None if self.documents is None else self.documents.each(change)
        parts = change(self.tokens), change(self.targets), change(self.positions)
        return MicroBatch(*parts, documents, serial, self.fingerprint, *ahead)


def from_windows(windows: Tensor, eod: int | None = None) -> MicroBatch:
    """A micro-batch from [batch, sequence + 1] token ids: inputs are all but the last, targets all
    but the first.

    With `eod`, the id that ends a document, documents are isolated: attention and positions restart
    after each `eod`, whose own target, the start of the next document, does not count (Llama 3,
    arXiv 2407.21783, section 3.2). Without it, a sample is one text, as in GPT-2 and GPT-3.
    """
    tokens = windows[:, :-1].contiguous()
    targets = windows[:, 1:].contiguous()
    steps = torch.arange(tokens.shape[1]).expand_as(tokens)
    if eod is None:
        return MicroBatch(tokens, targets, steps.contiguous(), None)
    ends = tokens == eod
    starts = torch.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    positions = steps - torch.where(starts, steps, 0).cummax(dim=1).values
    documents = Documents.of(starts.long().cumsum(dim=1))
    return MicroBatch(tokens, targets.masked_fill(ends, IGNORED), positions, documents)


def without_targets(batch: MicroBatch) -> MicroBatch:
    """The same samples with all targets ignored: loss and gradients are zero."""
    return replace(batch, targets=torch.full_like(batch.targets, IGNORED))


def look_ahead(batch: MicroBatch, depth: int) -> MicroBatch:
    """The batch, of whole sequences, with what modules read that predict further tokens.

    The token at i has as its target at depth k the one after the token at i + k: that token's own
    target, so it counts where that does (which is in the same document), if the token at i + k is
    in the sample and in the document of the token at i. Behind the end of the sample the tokens are
    0, and have no target.
    """
    tokens = list[Tensor]()
    targets = list[Tensor]()
    length = batch.tokens.shape[1]
    for k in range(1, depth + 1):
        end = (0, min(k, length))
        tokens.append(F.pad(batch.tokens[:, k:], end))
        target = F.pad(batch.targets[:, k:], end, value=IGNORED)
        if batch.documents is not None:
            numbers = batch.documents.numbers
            target = target.masked_fill(numbers != F.pad(numbers[:, k:], end, value=-1), IGNORED)
        targets.append(target)
    return replace(
        batch, next_tokens=torch.stack(tokens, -1), next_targets=torch.stack(targets, -1)
    )


def with_serials(batch: MicroBatch, indices: Sequence[int]) -> MicroBatch:
    """The batch with its tokens' serial numbers; `indices`: those of its samples in the run's data
    order."""
    length = batch.tokens.shape[1]
    serial = torch.tensor(indices)[:, None] * length + torch.arange(length)
    return replace(batch, serial=serial)
