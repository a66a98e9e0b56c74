"""Loads the micro-batches of one rank step by step, and reads those of the next step during the
current one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from trainer.data.batch import MicroBatch, from_windows, with_serials
from trainer.data.fingerprint import fingerprint
from trainer.data.objectives.masked import masked_tokens
from trainer.data.order import SampleOrder, micro_batches_at, samples_at, samples_of_step
from trainer.data.store import TokenStore
from trainer.errors import DataError
from trainer.model.dropout import draws

#: (a batch that predicts the next token, its samples' numbers in the run's data order) -> the batch
#: with the inputs and targets of an objective
Objective = Callable[[MicroBatch, Sequence[int]], MicroBatch]


class Loader:
    """Reads the samples of `samples_of_step` from a token store. Its only state is the
    read-ahead."""

    def __init__(
        self,
        plan: Plan,
        coord: Coord,
        store: TokenStore,
        pin_memory: bool = False,
    ):
        """`pin_memory` puts batches into page-locked memory, from which copies to a CUDA device
        overlap with computation.

        Raises DataError if the corpus is shorter than one sample, its tokenizer has more ids than
        the model's embedding has rows, or it lacks a token that the objective needs.
        """
        index = store.index
        self.seq_len = plan.job.train.seq_len
        if not store.samples(self.seq_len):
            needed = self.seq_len + 1
            raise DataError(
                f"the corpus has {index.tokens} tokens, one sample needs {needed} (train.seq_len"
                " + 1)"
            )
        if index.vocab_size > plan.model.vocab:
            raise DataError(
                f"tokenizer {plan.job.data.tokenizer!r} has {index.vocab_size} ids, "
                f"model {plan.model.name} only {plan.model.vocab} (model.vocab)"
            )
        self.parallel = plan.parallel
        self.coord = coord
        self.store = store
        self.ramp = plan.job.train.batch_ramp
        self.numbers_tokens = draws(plan.model) or plan.job.record_choices
        self.eod = index.eod if plan.job.data.isolate_documents else None
        self.objective: Objective | None = None  # None: the next token
        if plan.job.train.objective == "masked":
            self.objective = masked_tokens(plan, index.vocab_size, index.eod)
        self.order = SampleOrder(store.samples(self.seq_len), plan.job.data.seed)
        self._pin = pin_memory
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: tuple[int, Future[list[MicroBatch]]] | None = None

    def step(self, consumed: int) -> list[MicroBatch]:
        """Returns the micro-batches, on the CPU, of the step that starts when the run has consumed
        `consumed` samples."""
        if self._ahead and self._ahead[0] == consumed:
            batches = self._ahead[1].result()
        else:
            if self._ahead:
                self._ahead[1].result()  # one reader at a time
            batches = self._read(consumed)
        following = consumed + self.samples_at(consumed)
        self._ahead = following, self._pool.submit(self._read, following)
        return batches

    def samples_at(self, consumed: int) -> int:
        """Returns the samples, over all ranks, of the step that starts after `consumed` samples."""
        return samples_at(self.parallel, self.ramp, consumed)

    def _read(self, consumed: int) -> list[MicroBatch]:
        count = micro_batches_at(self.parallel, self.ramp, consumed)
        samples = samples_of_step(self.parallel, self.coord, consumed, count)
        return [self._micro_batch(indices) for indices in samples]

    def _micro_batch(self, indices: list[int]) -> MicroBatch:
        windows = [self.store.window(self.order(index), self.seq_len) for index in indices]
        batch = from_windows(torch.from_numpy(np.stack(windows).astype(np.int64)), self.eod)
        batch = replace(batch, fingerprint=fingerprint(indices, windows))
        batch = batch if self.objective is None else self.objective(batch, indices)
        batch = with_serials(batch, indices) if self.numbers_tokens else batch
        return batch.pinned() if self._pin else batch

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
