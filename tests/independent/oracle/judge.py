"""Judges the runs of a case: each step is recomputed from the state that the step before it has
saved.

So an error cannot hide in the chaos of later steps, nor grow into it: bounds are those of one step.
The traces of a step are its report (loss, norm, learning rate, samples) and two checkpoints. The
first moment before and after gives the gradient that AdamW was given; the moments after give the
update of the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import optimizer
from .choices import Choices, Unrecorded
from .choices import read as read_choices
from .data import Reader
from .findings import ALLOWED, Findings
from .gradients import GradientJudge
from .network import Pass, Unknown
from .recompute import Recomputation, finite
from .routing import RoutingJudge
from .state import State, Unreadable, harsh, initial, read, saved_steps, step_folder, write

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def judge(runs: Sequence[Path], start: str) -> Findings:
    """Judges runs of which each but the first resumes a checkpoint of the one before, copied to its
    folder. `start` is "initial" or "harsh": the start of the first run."""
    findings = Findings()
    try:
        for number, folder in enumerate(runs):
            RunJudge(folder, fresh=number == 0 and start == "initial", findings=findings).judge()
    except (Unreadable, Unrecorded, Unknown, ValueError, OSError, KeyError) as error:
        findings.problems.append(f"{type(error).__name__}: {error}")
    return findings


def prepare(run: Path, scale: float, good_steps: int) -> None:
    """Writes the checkpoint from which a harsh run starts, with this loss scale and number of steps
    since it changed."""
    plan = json.loads((run / "plan.json").read_bytes())
    train = plan["job"]["train"]
    wide = torch.promote_types(DTYPES[train["precision"]], torch.float32)
    state = harsh(plan["model"], train["seed"], wide)
    state.scale = scale
    state.good_steps = good_steps
    write(run, state, train["precision"])


class RunJudge:
    """Judges one run of one layout."""

    def __init__(self, folder: Path, fresh: bool, findings: Findings):
        """A `fresh` run began with initial weights; any other starts from its oldest checkpoint."""
        self.folder = folder
        self.fresh = fresh
        self.findings = findings
        self.name = folder.name
        self.plan = json.loads((folder / "plan.json").read_bytes())
        self.model = self.plan["model"]
        self.moe = self.model.get("moe") or {}
        self.train = self.plan["job"]["train"]
        self.optim = self.plan["job"]["optim"]
        self.precision = DTYPES[self.train["precision"]]
        self.wide = torch.promote_types(self.precision, torch.float32)  # of master and moments
        self.reader = Reader(self.plan)
        self.recomputation = Recomputation(self.plan, self.reader, self.precision)
        self.gradients = GradientJudge(self.plan, self.reader, self.precision, findings)
        self.floor = ALLOWED * self.gradients.sum_rounding
        self.routing = RoutingJudge(self.model, self.precision, findings, self.floor)
        self.reports = list(self._reports())

    def _reports(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            yield from (json.loads(line) for line in path.read_text().splitlines())

    def judge(self) -> None:
        """Judges every step of the run."""
        steps = saved_steps(self.folder)
        if self.fresh:
            state = initial(self.model, self.train["seed"], self.wide)
        else:
            state = read(step_folder(self.folder, steps.pop(0)), self.model)
        if self.precision != torch.float16:
            state.scale = 1.0
        expected = list(range(state.step + 1, self.train["steps"] + 1))
        self.findings.expect(steps == expected, f"{self.name}: saved steps {steps}, not {expected}")
        for step in steps:
            after = read(step_folder(self.folder, step), self.model)
            self.step(state, after)
            state = after
        self.findings.steps += len(steps)

    def step(self, before: State, after: State) -> None:
        """Judges one step."""
        location = f"{self.name} step {after.step}"
        reports = [
            report
            for report in self.reports
            if report["kind"] == "step" and report["step"] == after.step
        ]
        lr = optimizer.learning_rate(after.step, self.optim, self.train["steps"])
        self._check_reports(reports, before, after, lr=lr, location=location)
        losses = {report["loss"] for report in reports if report.get("loss") is not None}
        norms = {report.get("grad_norm") for report in reports}
        self.findings.expect(
            len(losses) == 1 and len(norms) == 1,
            f"{location}: ranks report losses {losses}, norms {norms}",
        )
        if self.findings.problems:
            return
        (loss,) = losses
        (norm,) = norms
        skipped = norm is None and self.precision == torch.float16
        self._check_counters(before, after, skipped, location)
        choices = self._choices(after.step, before.samples)
        if self.moe:
            self.routing.biases(before, after, choices, skipped, location)
        if skipped:
            self._judge_skipped(before, after, choices, location)
        elif norm is None:
            self.findings.expect(False, f"{location}: no norm is reported")
        else:
            exact, rounded = self._recompute(before, choices, location)
            if self.moe:
                self.routing.choices(before, choices, exact, rounded, location)
            self.routing.reports(reports, after, choices, exact, rounded)
            self._judge_loss(loss, before, exact, rounded, location)
            self.gradients.judge(before, after, exact.grads, norm, location)
            updates = before.updates + 1
            self.gradients.judge_update(before, after, updates=updates, lr=lr, location=location)

    # -------------------------------------------------------------------------------------------
    #     reports and counters

    def _check_reports(
        self,
        reports: Sequence[dict[str, Any]],
        before: State,
        after: State,
        *,
        lr: float,
        location: str,
    ) -> None:
        """Checks samples and learning rate, and that every rank has reported the step."""
        expect = self.findings.expect
        size = self.reader.size(before.samples)
        expect(
            len(reports) == self.plan["parallel"]["world_size"],
            f"{location}: {len(reports)} ranks have reported it",
        )
        expect(
            after.samples == before.samples + size,
            f"{location}: {after.samples - before.samples} samples, not {size}",
        )
        for report in reports:
            tolerance = 1e-12 * self.optim["lr"]
            same_lr = math.isclose(report["lr"], lr, rel_tol=1e-12, abs_tol=tolerance)
            expect(
                report["samples"] == after.samples and same_lr,
                f"{location}: rank {report['rank']} reports {report['samples']} samples, lr"
                f" {report['lr']}, not {lr}",
            )

    def _check_counters(self, before: State, after: State, skipped: bool, location: str) -> None:
        """Checks the loss scale and the number of updates."""
        if self.precision == torch.float16:
            expected = optimizer.rescaled(before.scale, before.good_steps, not skipped)
            self.findings.expect(
                (after.scale, after.good_steps) == expected,
                f"{location}: loss scale {after.scale}, not {expected[0]}",
            )
        updates = before.updates + (not skipped)
        self.findings.expect(
            after.updates == updates, f"{location}: {after.updates} updates, not {updates}"
        )

    # -----------------------------------------------------------------------------------------
    #     recomputed

    def _choices(self, step: int, consumed: int) -> Choices:
        if not self.moe:
            return Choices({}, {}, {})
        return read_choices(
            self.folder,
            step,
            consumed=consumed,
            samples=self.reader.size(consumed),
            length=self.reader.length,
            layers=list(self.recomputation.exact_network.mixtures),
            top_k=self.moe["top_k"],
        )

    def _recompute(self, before: State, choices: Choices, location: str) -> tuple[Pass, Pass]:
        """Returns the step exactly and in the run's precision, and measures the rounding between
        the two."""
        exact = self.recomputation.exact(before, choices)
        rounded = exact
        if self.precision != torch.float64:
            rounded = self._finite_rounded(before, choices, location)
        self.gradients.measure_noise(exact.grads, rounded.grads)
        if self.gradients.rounded_grads is None:
            self.gradients.rounded_grads = self._run_like_grads(before, choices, rounded)
        return exact, rounded

    def _finite_rounded(self, before: State, choices: Choices, location: str) -> Pass:
        rounded = self.recomputation.rounded(before, choices, before.scale)
        if finite(rounded.grads):
            return rounded
        rounded = self.recomputation.rounded(before, choices, before.scale / 4)
        problem = (
            f"{location}: not skipped at loss scale {before.scale}, which overflows fp16 four times"
        )
        self.findings.expect(finite(rounded.grads), problem)
        return rounded

    def _run_like_grads(
        self, before: State, choices: Choices, rounded: Pass
    ) -> dict[str, torch.Tensor]:
        """Returns the rounded gradients, those of experts as the run's ranks compute them: an
        expert multiplies the tokens of all ranks that share experts at once."""
        grads = dict(rounded.grads)
        ranks = self.plan["parallel"]["ep"]
        if ranks > 1 and self.moe and self.precision != self.wide:
            scale = before.scale / 4
            shared = self.recomputation.rounded(before, choices, scale, together=ranks).grads
            grads |= {name: grad for name, grad in shared.items() if ".experts." in name}
        return grads

    # ---------------------------------------------------------------------------------------------
    #     compared

    def _judge_loss(
        self, loss: float, before: State, exact: Pass, rounded: Pass, location: str
    ) -> None:
        valid = self.reader.batch(before.samples).valid
        self.findings.mean(
            "loss",
            loss,
            exact.losses / valid,
            rounded=rounded.losses / valid,
            floor=self.floor,
            location=location,
        )

    def _judge_skipped(self, before: State, after: State, choices: Choices, location: str) -> None:
        """Judges a step that fp16 has skipped: it overflows, and changes no state."""
        self.findings.skipped += 1
        overflowing = self.recomputation.rounded(before, choices, before.scale * 4)
        self.findings.expect(
            not finite(overflowing.grads),
            f"{location}: skipped at loss scale {before.scale}, but fp16 holds four times that",
        )
        for kind, tensors in before.tensors.items():
            for name, tensor in tensors.items():
                self.findings.expect(
                    torch.equal(tensor, after.tensors[kind][name]),
                    f"{location}: a skipped step has changed {kind} of {name}",
                )
