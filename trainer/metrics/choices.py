"""Writes the experts that each token chose in reported steps, with their logits and weights
(`job.record_choices` of the plan).

A token is named by its number in the run's data order, so the files of all ranks of any layout form
one table, and a program that recomputes the model can make the same choices: in narrow precisions
two correct programs may choose differently where scores are nearly equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.worker import WorkerEnv, choices_file
from trainer.checkpoint.files import write_tensors
from trainer.engine import Engine
from trainer.model.router import Routing
from trainer.model.stage import Stage
from trainer.parallel.expert.choices import watch

#: The recorded tensors of a layer: numbers [n] of tokens, and [n, k] of their choices.
FIELDS = ("tokens", "experts", "logits", "weights")


class ChoiceRecord:
    """Records the choices of one rank's tokens; of tensor-parallel ranks with the same tokens only
    the first writes."""

    def __init__(
        self,
        plan: Plan,
        env: WorkerEnv,
        engine: Engine,
        failed: Callable[[OSError], None],
    ):
        """If a file cannot be written, `failed` is called with the error and the record ends."""
        self.env = env
        self.failed = failed
        writes = plan.parallel.sp or engine.mesh.coord.tp == 0
        self.every = plan.job.train.log_every_steps if plan.job.record_choices and writes else 0
        self._on = False
        self._tokens: Tensor | None = None  # int64 [n], of the stage that is in its forward
        #: by layer, the tensors of `FIELDS` for each call of its router
        self._calls: dict[int, list[tuple[Tensor, ...]]] = {}
        if self.every:
            for stage in engine.part.stages:
                stage.register_forward_pre_hook(self._enter)
                watch(stage, engine.part.terms, self._record)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records optimizer step `number`, and writes its file at the end if the step is
        reported."""
        self._on = self.every > 0 and number % self.every == 0
        yield
        if self._on and self._calls:
            try:
                self._write(number)
            except OSError as error:
                self.every = 0
                self.failed(error)
        self._calls.clear()

    def _write(self, number: int) -> None:
        path = choices_file(self.env.run_dir, number, self.env.rank)
        tensors = dict[str, Tensor]()
        for layer, calls in sorted(self._calls.items()):
            columns = zip(FIELDS, zip(*calls, strict=True), strict=True)
            tensors |= {f"{layer}.{name}": torch.cat(column) for name, column in columns}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # written before the run was restarted
        write_tensors(path, tensors)

    def _enter(self, stage: Stage, inputs: tuple[Any, ...]) -> None:
        self._tokens = stage.rows(inputs[1].serial).flatten() if self._on else None

    def _record(self, layer: int, routing: Routing) -> None:
        if self._tokens is not None:
            logits = routing.logits.detach().gather(-1, routing.experts)
            choices = self._tokens, routing.experts.int(), logits, routing.weights.detach()
            self._calls.setdefault(layer, []).append(choices)
