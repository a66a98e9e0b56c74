"""Writes which experts each token chose, by what logits and with what weights, in reported steps
(`job.record_choices` of the plan).

A token is named by its number in the run's data order, so what ranks of any layout have written
adds up to one table, and whoever computes the model anew can take the same choices: in narrow
precisions two right programs need not choose alike where scores are nearly equal.
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

#: What is recorded of a layer: numbers of n tokens, and [n, k] of their choices.
PARTS = ("tokens", "experts", "logits", "weights")


class ChoiceRecord:
    """The choices of one rank's own tokens; of tensor-parallel ranks with the same tokens the first
    one writes."""

    def __init__(
        self, plan: Plan, env: WorkerEnv, engine: Engine, failed: Callable[[OSError], None]
    ):
        """`failed` is called with the error if a file cannot be written; the record ends with
        it."""
        self.env = env
        self.failed = failed
        own = plan.parallel.sp or engine.mesh.coord.tp == 0
        self.every = plan.job.train.log_every_steps if plan.job.record_choices and own else 0
        self._on = False
        self._tokens: Tensor | None = None  # int64 [n]: of the stage that computes now
        self._parts: dict[int, list[tuple[Tensor, ...]]] = {}  # by layer, what `PARTS` names
        if self.every:
            for stage in engine.part.stages:
                stage.register_forward_pre_hook(self._enter)
                watch(stage, engine.part.terms, self._look)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around optimizer step `number`, whose file is written at the end if the step is
        reported."""
        self._on = self.every > 0 and number % self.every == 0
        yield
        if self._on and self._parts:
            try:
                self._write(number)
            except OSError as error:
                self.every = 0
                self.failed(error)
        self._parts.clear()

    def _write(self, number: int) -> None:
        path = choices_file(self.env.run_dir, number, self.env.rank)
        tensors = dict[str, Tensor]()
        for layer, parts in sorted(self._parts.items()):
            columns = zip(PARTS, zip(*parts, strict=True), strict=True)
            tensors |= {f"{layer}.{name}": torch.cat(column) for name, column in columns}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of this step, before the run was restarted
        write_tensors(path, tensors)

    def _enter(self, stage: Stage, inputs: tuple[Any, ...]) -> None:
        self._tokens = stage.rows(inputs[1].serial).flatten() if self._on else None

    def _look(self, layer: int, routing: Routing) -> None:
        if self._tokens is not None:
            logits = routing.logits.detach().gather(-1, routing.experts)
            found = self._tokens, routing.experts.int(), logits, routing.weights.detach()
            self._parts.setdefault(layer, []).append(found)
