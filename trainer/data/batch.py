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
    #: from 0, within the sample or, with isolated documents, within the document
    positions: Tensor
    documents: Documents | None  # None: attention sees the whole sample
    #: number of the token in the run's data order, for dropout and recorded choices
    serial: Tensor | None = None
    fingerprint: int = 0  # of its samples, as they were read (`trainer.data.fingerprint`)
    next_tokens: Tensor | None = None  # [batch, sequence, depth], further tokens: of `look_ahead`
    next_targets: Tensor | None = None  # [batch, sequence, depth], targets of `next_tokens`

    @property
    def valid_tokens(self) -> int:
        """Number of targets that count. On an accelerator it waits for the device: read it before
        `to`."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> MicroBatch:
        """Copies the batch to `device`; a copy from pinned memory does not block the host."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        """Copies the batch to page-locked host memory (CUDA only)."""
        return self.each(Tensor.pin_memory)

    def each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Returns the batch with `change` applied to every tensor."""

        def change_optional(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return MicroBatch(
            tokens=change(self.tokens),
            targets=change(self.targets),
            positions=change(self.positions),
            documents=None if self.documents is None else self.documents.each(change),
            serial=change_optional(self.serial),
            fingerprint=self.fingerprint,
            next_tokens=change_optional(self.next_tokens),
            next_targets=change_optional(self.next_targets),
        )


def from_windows(windows: Tensor, eod: int | None = None) -> MicroBatch:
    """Makes a micro-batch from [batch, sequence + 1] token ids: inputs are all but the last,
    targets all but the first.

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
    """Returns the same samples with all targets ignored: loss and gradients are zero."""
    return replace(batch, targets=torch.full_like(batch.targets, IGNORED))


def look_ahead(batch: MicroBatch, depth: int) -> MicroBatch:
    """Returns the batch, of whole sequences, with the tokens and targets of modules that predict
    further tokens.

    At depth k the module reads at i the token at i + k, and its target is that token's own target.
    The target counts if it counts for the token at i + k and that token is in the sample and in the
    document of the token at i. Beyond the end of the sample the tokens are 0 and have no target.
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
            target = target.masked_fill(
                numbers != F.pad(numbers[:, k:], end, value=-1),
                IGNORED,
            )
        targets.append(target)
    return replace(
        batch,
        next_tokens=torch.stack(tokens, -1),
        next_targets=torch.stack(targets, -1),
    )


def with_serials(batch: MicroBatch, indices: Sequence[int]) -> MicroBatch:
    """Returns the batch with its tokens' serial numbers. `indices` are the numbers of its samples
    in the run's data order."""
    length = batch.tokens.shape[1]
    serial = torch.tensor(indices)[:, None] * length + torch.arange(length)
    return replace(batch, serial=serial)
