"""Judges what runs have left: each step is computed anew from the state that the step before it has
saved.

So an error cannot hide in the chaos of later steps, nor grow into it: bounds are those of one step.
What a run shows of a step is its report (loss, norm, learning rate, samples) and two checkpoints.
The first moment before and after gives the gradient that AdamW was given; the moments after give
the update of the weights.

How far a gradient may be off is measured, not chosen: it is `ALLOWED` times the difference between
this oracle in the run's own precision, cut into the run's micro-batches, and this oracle in fp64.
docs/verify.md has the measurements. No bound is below what the arithmetic of its sum explains
(`findings.rounding`); in fp64, where nothing is measured, that alone is the unit.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import optimizer
from .choices import Choices, Unrecorded
from .choices import read as read_choices
from .data import Batch, Reader
from .findings import ALLOWED, ALLOWED_KIND, Findings, distance, narrow, rms, rounding
from .network import Counts, Network, Pass, Tensors, Unknown
from .routing import RoutingJudge
from .shapes import shapes
from .state import State, Unreadable, harsh, initial, read, saved_steps, step_folder, write

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
#: In fp64 a margin beyond the statistics of rounding costs nothing: nothing real is that small, and
#: kernels for other processors cancel nearly equal numbers in another order.
LEAST_ROUNDING = 2e-13
#: Operations of AdamW that round an element of the second moment, and of the weight.
MOMENT_OPERATIONS = 4
WEIGHT_OPERATIONS = 8


def judge(runs: Sequence[Path], start: str) -> Findings:
    """Of runs of which each but the first goes on from a checkpoint of the one before, which lies
    in its folder. `start` of the first: "initial", or "harsh"."""
    findings = Findings()
    try:
        for number, folder in enumerate(runs):
            RunJudge(folder, fresh=number == 0 and start == "initial", findings=findings).judge()
    except (Unreadable, Unrecorded, Unknown, ValueError, OSError, KeyError) as error:
        findings.problems.append(f"{type(error).__name__}: {error}")
    return findings


def prepare(run: Path, scale: float, good: int) -> None:
    """Write the checkpoint from which a harsh run starts, with this loss scale and steps since it
    changed."""
    plan = json.loads((run / "plan.json").read_bytes())
    train = plan["job"]["train"]
    state = harsh(
        plan["model"], train["seed"], torch.promote_types(DTYPES[train["precision"]], torch.float32)
    )
    state.scale = scale
    state.good = good
    write(run, state, train["precision"])


class RunJudge:
    """One run of one layout."""

    def __init__(self, folder: Path, fresh: bool, findings: Findings):
        """`fresh`: the run began from nothing; else its oldest checkpoint is its start."""
        self.folder = folder
        self.findings = findings
        self.plan = json.loads((folder / "plan.json").read_bytes())
        self.model = self.plan["model"]
        self.job = self.plan["job"]
        self.name = folder.name
        self.train = self.job["train"]
        self.optim = self.job["optim"]
        self.precision = DTYPES[self.train["precision"]]
        self.wide = torch.promote_types(self.precision, torch.float32)  # of master and moments
        self.ulp = torch.finfo(self.wide).eps / 2
        self.fresh = fresh
        self.reader = Reader(self.plan)
        every = shapes(self.model).values()
        # A value passes each matrix forward and backward, and is summed over the step's tokens.
        tokens = self.plan["parallel"]["global_batch_samples"] * self.reader.length
        terms = tokens + sum(sum(one[-2:]) for one in every)
        self.sum_rounding = max(rounding(terms, self.wide), LEAST_ROUNDING)
        # The norm is the root of a sum over all parameters: it is off by half as much as the sum.
        self.norm_rounding = rounding(sum(math.prod(one) for one in every), self.wide) / 2
        self.exact, self.same = (
            Network(self.model, torch.float64),
            Network(self.model, self.precision),
        )
        self.noise: dict[str, float] = {}  # of each gradient, over its norm
        self.kind_noise: dict[str, float] = {}  # the same over all layers' gradients of a kind
        self.moe = self.model.get("moe") or {}
        self.floor = ALLOWED * self.sum_rounding
        self.routing = RoutingJudge(self.model, self.precision, findings, self.floor)
        self.measured = False
        self._roundness = Tensors()  # gradients of the first step in the run's precision
        self.reports = list(self._reports())

    def _reports(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            yield from (json.loads(line) for line in path.read_text().splitlines())

    def judge(self) -> None:
        steps = saved_steps(self.folder)
        if self.fresh:
            state = initial(self.model, self.train["seed"], self.wide)
        else:
            state = read(step_folder(self.folder, steps.pop(0)), self.model)
        if self.precision != torch.float16:
            state.scale = 1.0
        wanted = list(range(state.step + 1, self.train["steps"] + 1))
        self.findings.expect(steps == wanted, f"{self.name}: saved steps {steps}, not {wanted}")
        for step in steps:
            after = read(step_folder(self.folder, step), self.model)
            self.step(state, after)
            state = after
        self.findings.steps += len(steps)

    # -------------------------------------------------------------------------------------------
    #     one step

    def step(self, before: State, after: State) -> None:
        where = f"{self.name} step {after.step}"
        expect = self.findings.expect
        size = self.reader.size(before.samples)
        lr = optimizer.learning_rate(after.step, self.optim, self.train["steps"])
        reports = [
            one for one in self.reports if one["kind"] == "step" and one["step"] == after.step
        ]
        expect(
            len(reports) == self.plan["parallel"]["world_size"],
            f"{where}: {len(reports)} ranks have reported it",
        )
        expect(
            after.samples == before.samples + size,
            f"{where}: {after.samples - before.samples} samples, not {size}",
        )
        for one in reports:
            near = math.isclose(one["lr"], lr, rel_tol=1e-12, abs_tol=1e-12 * self.optim["lr"])
            same = one["samples"] == after.samples and near
            expect(
                same,
                f"{where}: rank {one['rank']} reports {one['samples']} samples, lr {one['lr']}, not"
                f" {lr}",
            )
        losses = {one["loss"] for one in reports if one.get("loss") is not None}
        norms = {one.get("grad_norm") for one in reports}
        expect(
            len(losses) == 1 and len(norms) == 1,
            f"{where}: ranks report losses {losses}, norms {norms}",
        )
        if self.findings.problems:
            return
        (norm,) = norms
        skipped = norm is None and self.precision == torch.float16
        scale = before.scale
        good = before.good
        if self.precision == torch.float16:
            scale, good = optimizer.rescaled(before.scale, before.good, not skipped)
            expect(
                (after.scale, after.good) == (scale, good),
                f"{where}: loss scale {after.scale}, not {scale}",
            )
        updates = before.updates + (not skipped)
        expect(after.updates == updates, f"{where}: {after.updates} updates, not {updates}")
        choices = self._choices(after.step, before.samples)
        if self.moe:
            self.routing.biases(before, after, choices, skipped, where)
        if skipped:
            self._skipped(before, after, choices, where)
            return
        if norm is None:
            expect(False, f"{where}: no norm is reported")
            return
        exact = self._exact(before, choices)
        rounded = (
            exact
            if self.precision == torch.float64
            else self._rounded_finite(before, choices, where)
        )
        self._measure_noise(exact, rounded, before, choices)
        if self.moe:
            self.routing.choices(before, choices, exact, rounded, where)
        self.routing.reports(reports, after, choices, exact, rounded)
        valid = self.reader.batch(before.samples).valid
        self.findings.mean(
            "loss", losses.pop(), exact.losses / valid, rounded.losses / valid, self.floor, where
        )
        self._gradient(before, after, exact.grads, norm, where)
        self._update(before, after, norm, updates, lr, where)

    # -----------------------------------------------------------------------------------------
    #     computed anew

    def _choices(self, step: int, consumed: int) -> Choices:
        if not self.moe:
            return Choices({}, {}, {})
        size = self.reader.size(consumed), self.reader.length
        return read_choices(
            self.folder, step, consumed, *size, list(self.exact.mixtures), self.moe["top_k"]
        )

    def _weights(self, state: State) -> Tensors:
        """As the run computes with them: rounded to its precision."""
        return {name: weight.to(self.precision) for name, weight in state.tensors["master"].items()}

    def _counts(self, batch: Batch) -> Counts:
        return Counts(batch.valid, len(batch.tokens), batch.tokens.numel())

    def _exact(self, before: State, choices: Choices) -> Pass:
        """The whole step at once, in fp64."""
        batch = self.reader.batch(before.samples)
        return self.exact.run(
            self._weights(before), batch, self._counts(batch), 1.0, choices, before.loads()
        )

    def _rounded(self, before: State, choices: Choices, scale: float, at_once: int = 1) -> Pass:
        """As one process of the run's precision has it: micro-batch by micro-batch (`at_once`
        together), each rounded, gradients summed in the wide dtype; not a number where fp16 has
        overflowed."""
        batch = self.reader.batch(before.samples)
        size = self.plan["parallel"]["micro_batch_size"] * at_once
        weights = self._weights(before)
        counts = self._counts(batch)
        total = Tensors()
        parts = list[Pass]()
        for first in reversed(
            range(0, len(batch.tokens), size)
        ):  # in another order than the exact one
            some = slice(first, first + size)
            part = self.same.run(
                weights, batch.rows(some), counts, scale, choices.rows(some), before.loads()
            )
            parts.insert(0, part)
            for name, grad in parts[0].grads.items():
                total[name] = total.get(name, 0) + grad.to(self.wide)
        return together(parts, {name: grad / scale for name, grad in total.items()})

    def _rounded_finite(self, before: State, choices: Choices, where: str) -> Pass:
        rounded = self._rounded(before, choices, before.scale)
        if not finite(rounded.grads):
            rounded = self._rounded(before, choices, before.scale / 4)
            problem = (
                f"{where}: not skipped at loss scale {before.scale}, which overflows fp16 four"
                " times"
            )
            self.findings.expect(finite(rounded.grads), problem)
        return rounded

    def _skipped(self, before: State, after: State, choices: Choices, where: str) -> None:
        self.findings.skipped += 1
        overflows = not finite(self._rounded(before, choices, before.scale * 4).grads)
        self.findings.expect(
            overflows,
            f"{where}: skipped at loss scale {before.scale}, but fp16 holds four times that",
        )
        for kind, tensors in before.tensors.items():
            for name, tensor in tensors.items():
                same = torch.equal(tensor, after.tensors[kind][name])
                self.findings.expect(same, f"{where}: a skipped step has changed {kind} of {name}")

    # ---------------------------------------------------------------------------------------------
    #     compared

    def _measure_noise(self, exact: Pass, rounded: Pass, before: State, choices: Choices) -> None:
        """What rounding alone does to each gradient. In fp64 it is that of a sum whose terms are as
        large as the model's gradients, though its result may be small: attention's backward
        subtracts nearly equal numbers."""
        overall = rms(exact.grads)
        term = self.sum_rounding * overall if self.precision == torch.float64 else 0.0
        noises = defaultdict[str, float](float)
        sizes = defaultdict[str, float](float)  # squares, by kind
        for name, grad in exact.grads.items():
            off = distance(rounded.grads[name], grad, overall, term * grad.numel() ** 0.5)
            self.noise[name] = max(off, self.sum_rounding)
            size = float(grad.norm())
            noises[kind_of(name)] += (self.noise[name] * size) ** 2
            sizes[kind_of(name)] += size**2
        self.kind_noise = {
            kind: math.sqrt(noises[kind] / max(size, 1e-300)) for kind, size in sizes.items()
        }
        if not self.measured:
            self._roundness = dict(rounded.grads)
            self.measured = True
            if (
                (ranks := self.plan["parallel"]["ep"]) > 1
                and self.moe
                and self.precision != self.wide
            ):
                # An expert multiplies the tokens of all ranks that share experts at once.
                merged = self._rounded(before, choices, before.scale / 4, ranks).grads
                self._roundness |= {
                    name: grad for name, grad in merged.items() if ".experts." in name
                }

    def _gradient(
        self, before: State, after: State, exact: Tensors, norm: float, where: str
    ) -> None:
        """The gradient that AdamW was given, from the first moments before and after."""
        beta = self.optim["beta1"]
        clip = optimizer.clipping(norm, self.train["clip_grad_norm"])
        overall = rms(exact)
        square = 0.0
        unsure = 0.0
        found = Tensors()
        kinds = dict[str, list[float]]()
        for name, wanted in exact.items():
            first = before.tensors["exp_avg"][name].double()
            then = after.tensors["exp_avg"][name].double()
            found[name] = (then - beta * first) / (1 - beta) / clip
            blur = (
                2 * self.ulp * float((then.abs() + beta * first.abs()).norm()) / (1 - beta) / clip
            )
            error = distance(found[name], wanted, overall)
            # One layer's few elements may be rounded by little, by luck: not those of all layers.
            noise = max(self.noise[name], self.kind_noise[kind_of(name)])
            bound = ALLOWED * noise + distance(wanted, wanted, overall, blur)
            self.findings.measure("gradient", error, bound, f"{where}, {name}")
            self._add_kind(kinds, name, float((found[name] - wanted).norm()), float(wanted.norm()))
            square = square + float(found[name].square().sum())
            unsure = unsure + blur**2
        for kind, (error, size) in kinds.items():
            bound = ALLOWED_KIND * self.kind_noise[kind]
            self.findings.measure("rounding", math.sqrt(error / size), bound, f"{where}, {kind}")
        total = math.sqrt(sum(float(one.square().sum()) for one in exact.values()))
        noise = (
            math.sqrt(
                sum((self.noise[name] * float(one.norm())) ** 2 for name, one in exact.items())
            )
            / total
        )
        allowed = ALLOWED * (noise + self.norm_rounding)
        self.findings.measure("norm", abs(norm - total) / total, allowed, where)
        blur = 4 * math.sqrt(unsure) / total + ALLOWED * self.norm_rounding
        self.findings.measure(
            "clipping", abs(math.sqrt(square) - norm) / max(norm, 1e-300), blur, where
        )
        self._grid(found, where)

    def _add_kind(
        self, kinds: dict[str, list[float]], name: str, error: float, size: float
    ) -> None:
        """Squares of error and size over all layers' matrices of a kind, in a narrow precision."""
        if self.precision == self.wide or not optimizer.decays(shapes(self.model)[name]):
            return
        of_kind = kinds.setdefault(kind_of(name), [0.0, 0.0])
        of_kind[0] += error**2
        of_kind[1] += size**2

    def _grid(self, found: Tensors, where: str) -> None:
        """A gradient summed in fp32 from several narrow ones is not a narrow number itself, but for
        a few elements."""
        if self.precision == self.wide or self.train["grad_dtype"] != "fp32" or not self._roundness:
            return
        names = [
            name for name, grad in found.items() if grad.dim() > 1 and not name.startswith("embed")
        ]
        ours, theirs = (
            narrow([grads[name] for name in names], self.precision)
            for grads in (found, self._roundness)
        )
        self._roundness = Tensors()  # measured once a run, as it is
        self.findings.measure("narrow", ours, 1.5 * theirs + 0.03, where)

    def _update(
        self, before: State, after: State, norm: float, updates: int, lr: float, where: str
    ) -> None:
        """AdamW, element by element, from the moments that were saved."""
        beta1 = self.optim["beta1"]
        beta2 = self.optim["beta2"]
        for name, saved in after.tensors["master"].items():
            first, then = (state.tensors["exp_avg"][name].double() for state in (before, after))
            second, squared = (
                state.tensors["exp_avg_sq"][name].double() for state in (before, after)
            )
            grad = (then - beta1 * first) / (1 - beta1)
            blur = 2 * self.ulp * (then.abs() + beta1 * first.abs()) / (1 - beta1)
            wanted = beta2 * second + (1 - beta2) * grad.square()
            room = self._room(MOMENT_OPERATIONS, wanted)
            room += (1 - beta2) * (2 * grad.abs() + blur) * blur
            self.findings.elements("second moment", squared, wanted, room, f"{where}, {name}")
            weight = before.tensors["master"][name].double()
            wanted = optimizer.updated(weight, then, squared, updates, lr, self.optim)
            room = self._room(WEIGHT_OPERATIONS, weight.abs() + (wanted - weight).abs())
            self.findings.elements("weight", saved.double(), wanted, room, f"{where}, {name}")

    def _room(self, operations: int, size: Tensor) -> Tensor:
        """What elements of this size may be off after so many operations. Below the smallest normal
        number a rounding is no part of the size, and a device may take such numbers for zero."""
        return ALLOWED * rounding(operations, self.wide) * size + torch.finfo(self.wide).tiny


def kind_of(name: str) -> str:
    """The parameter's name without its layer: `layers.attn.wq.weight`."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def finite(grads: Tensors) -> bool:
    return all(bool(grad.isfinite().all()) for grad in grads.values())


def together(parts: Sequence[Pass], grads: Tensors) -> Pass:
    """The passes of a step's micro-batches, in the order of their samples, as one."""
    first = parts[0]
    return replace(
        first,
        grads=grads,
        losses=torch.cat([one.losses for one in parts]),
        terms={name: torch.cat([one.terms[name] for one in parts]) for name in first.terms},
        scores={layer: torch.cat([one.scores[layer] for one in parts]) for layer in first.scores},
        logits={layer: torch.cat([one.logits[layer] for one in parts]) for layer in first.logits},
        weights={
            layer: torch.cat([one.weights[layer] for one in parts]) for layer in first.weights
        },
    )
