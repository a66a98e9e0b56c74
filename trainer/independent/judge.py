"""Judges what runs have left: each step is computed anew from the state that the step before it has saved.

So an error cannot hide in the chaos of later steps, nor grow into it: bounds are those of one step. What a run shows of
a step is its report (loss, norm, learning rate, samples) and two checkpoints. The first moment before and after gives
the gradient that AdamW was given; the moments after give the update of the weights.

How far a gradient may be off is measured, not chosen: it is `ALLOWED` times the difference between this oracle in the
run's own precision, cut into the run's micro-batches, and this oracle in fp64. docs/verify.md has the measurements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import optimizer
from .data import Reader
from .network import Network, Unknown
from .state import State, Tensors, Unreadable, harsh, initial, read, saved_steps, shapes, step_folder, write

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Times the measured rounding that a gradient, its norm or the loss may be off (docs/verify.md: correct runs).
ALLOWED = 6.0
#: The same over all matrices of a kind together (every layer's `attn.wq`), in bf16 and fp16: so many elements that the
#: ratio hardly varies, and a rounding too many shows.
ALLOWED_KIND = 2.0
#: What a gradient may be off whatever is measured. In fp64 nothing real is that small, while attention's backward
#: subtracts nearly equal numbers, which another kernel rounds otherwise.
FLOOR = {torch.float64: 1e-12}
#: Units in the last place that AdamW's few operations may be off. Correct runs reach 3.
ALLOWED_ULP = 12.0


@dataclass
class Findings:
    """The worst of each quantity as (error, bound, where), by error over bound; and what is wrong whatever the size."""

    worst: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    skipped: int = 0  # of those, because fp16 overflowed

    def measure(self, what: str, error: float, bound: float, where: str) -> None:
        """Not a number is beyond any bound."""
        if not error < math.inf:
            error = 1e300
        bound = max(bound, 1e-300)
        if what not in self.worst or error / bound > self.worst[what][0] / self.worst[what][1]:
            self.worst[what] = error, bound, where

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def judge(runs: Sequence[Path], start: str) -> Findings:
    """Of runs of which each but the first goes on from a checkpoint of the one before, which lies in its folder.
    `start` of the first: "initial", or "harsh"."""
    findings = Findings()
    try:
        for number, folder in enumerate(runs):
            RunJudge(folder, fresh=number == 0 and start == "initial", findings=findings).judge()
    except (Unreadable, Unknown, ValueError, OSError, KeyError) as error:
        findings.problems.append(f"{type(error).__name__}: {error}")
    return findings


def prepare(run: Path, scale: float, good: int) -> None:
    """Write the checkpoint from which a harsh run starts, with this loss scale and steps since it changed."""
    plan = json.loads((run / "plan.json").read_bytes())
    train = plan["job"]["train"]
    state = harsh(plan["model"], train["seed"], torch.promote_types(DTYPES[train["precision"]], torch.float32))
    state.scale, state.good = scale, good
    write(run, state, train["precision"])


class RunJudge:
    """One run of one layout."""

    def __init__(self, folder: Path, fresh: bool, findings: Findings):
        """`fresh`: the run began from nothing; else its oldest checkpoint is its start."""
        self.folder, self.findings = folder, findings
        self.plan = json.loads((folder / "plan.json").read_bytes())
        self.model, self.job, self.name = self.plan["model"], self.plan["job"], folder.name
        self.train, self.optim = self.job["train"], self.job["optim"]
        self.precision = DTYPES[self.train["precision"]]
        self.wide = torch.promote_types(self.precision, torch.float32)  # of master and moments
        self.ulp = torch.finfo(self.wide).eps / 2
        self.fresh = fresh
        self.reader = Reader(self.plan)
        self.exact, self.same = Network(self.model, torch.float64), Network(self.model, self.precision)
        self.noise: dict[str, float] = {}  # of each gradient, over its norm
        self.loss_noise = 0.0  # of one token, over the mean loss
        self.measured, self._roundness = False, Tensors()  # gradients of the first step in the run's precision
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

    # ------------------------------------------------------------------------------------------- one step

    def step(self, before: State, after: State) -> None:
        where, expect = f"{self.name} step {after.step}", self.findings.expect
        size, lr = (
            self.reader.size(before.samples),
            optimizer.learning_rate(after.step, self.optim, self.train["steps"]),
        )
        reports = [one for one in self.reports if one["kind"] == "step" and one["step"] == after.step]
        expect(len(reports) == self.plan["parallel"]["world_size"], f"{where}: {len(reports)} ranks have reported it")
        expect(after.samples == before.samples + size, f"{where}: {after.samples - before.samples} samples, not {size}")
        for one in reports:
            same = one["samples"] == after.samples and math.isclose(one["lr"], lr, rel_tol=1e-12)
            expect(same, f"{where}: rank {one['rank']} reports {one['samples']} samples, lr {one['lr']}, not {lr}")
        losses = {one["loss"] for one in reports if one.get("loss") is not None}
        norms = {one.get("grad_norm") for one in reports}
        expect(len(losses) == 1 and len(norms) == 1, f"{where}: ranks report losses {losses}, norms {norms}")
        if self.findings.problems:
            return
        (norm,) = norms
        skipped = norm is None and self.precision == torch.float16
        scale, good = before.scale, before.good
        if self.precision == torch.float16:
            scale, good = optimizer.rescaled(before.scale, before.good, not skipped)
            expect((after.scale, after.good) == (scale, good), f"{where}: loss scale {after.scale}, not {scale}")
        updates = before.updates + (not skipped)
        expect(after.updates == updates, f"{where}: {after.updates} updates, not {updates}")
        if skipped:
            self._skipped(before, after, where)
            return
        if norm is None:
            expect(False, f"{where}: no norm is reported")
            return
        exact, loss = self._exact(before)
        self._measure_noise(before, exact, where)
        self._loss(losses.pop(), loss, self.reader.batch(before.samples).valid, where)
        self._gradient(before, after, exact, norm, where)
        self._update(before, after, norm, updates, lr, where)

    def _weights(self, state: State) -> Tensors:
        """As the run computes with them: rounded to its precision."""
        return {name: weight.to(self.precision) for name, weight in state.tensors["master"].items()}

    def _exact(self, before: State) -> tuple[Tensors, float]:
        """(gradients, mean loss) of the whole step in fp64."""
        batch = self.reader.batch(before.samples)
        losses, grads = self.exact.gradients(self._weights(before), batch, 1 / batch.valid)
        return grads, float(losses.sum()) / batch.valid

    def _rounded(self, before: State, scale: float) -> tuple[Tensors, Tensor]:
        """(gradients, loss of every token) as one process of the run's precision has them: micro-batch by micro-batch,
        each rounded, summed in the wide dtype; not a number where fp16 has overflowed."""
        batch, size = self.reader.batch(before.samples), self.plan["parallel"]["micro_batch_size"]
        weights, total, losses = self._weights(before), Tensors(), list[Tensor]()
        for first in reversed(range(0, len(batch.tokens), size)):  # in another order than the exact one
            loss, grads = self.same.gradients(weights, batch.rows(slice(first, first + size)), scale / batch.valid)
            losses.insert(0, loss)
            for name, grad in grads.items():
                total[name] = total.get(name, 0) + grad.to(self.wide)
        return {name: grad / scale for name, grad in total.items()}, torch.cat(losses)

    def _skipped(self, before: State, after: State, where: str) -> None:
        self.findings.skipped += 1
        grads, _ = self._rounded(before, before.scale * 4)
        finite = all(bool(grad.isfinite().all()) for grad in grads.values())
        self.findings.expect(
            not finite, f"{where}: skipped at loss scale {before.scale}, but fp16 holds four times that"
        )
        for kind, tensors in before.tensors.items():
            for name, tensor in tensors.items():
                same = torch.equal(tensor, after.tensors[kind][name])
                self.findings.expect(same, f"{where}: a skipped step has changed {kind} of {name}")

    def _measure_noise(self, before: State, exact: Tensors, where: str) -> None:
        """What rounding alone does to each gradient and to the loss."""
        scale = before.scale
        grads, losses = self._rounded(before, scale)
        if not all(bool(grad.isfinite().all()) for grad in grads.values()):
            grads, losses = self._rounded(before, scale / 4)
            finite = all(bool(grad.isfinite().all()) for grad in grads.values())
            self.findings.expect(finite, f"{where}: not skipped at loss scale {scale}, which overflows fp16 four times")
        batch = self.reader.batch(before.samples)
        true, _ = self.exact.gradients(self._weights(before), batch, 1.0)
        self.loss_noise = float((losses.double() - true).norm()) / batch.valid**0.5 / (float(true.sum()) / batch.valid)
        overall = rms(exact)
        for name, grad in exact.items():
            self.noise[name] = distance(grads[name], grad, overall)
        if not self.measured:
            self._roundness = grads
        self.measured = True

    def _loss(self, reported: float, exact: float, valid: int, where: str) -> None:
        bound = ALLOWED * max(self.loss_noise / valid**0.5, torch.finfo(self.wide).eps)
        self.findings.measure("loss", abs(reported - exact) / abs(exact), bound, where)

    def _gradient(self, before: State, after: State, exact: Tensors, norm: float, where: str) -> None:
        """The gradient that AdamW was given, from the first moments before and after."""
        beta, clip = self.optim["beta1"], optimizer.clipping(norm, self.train["clip_grad_norm"])
        overall, square, unsure = rms(exact), 0.0, 0.0
        found, kinds = Tensors(), dict[str, list[float]]()
        for name, wanted in exact.items():
            first, then = before.tensors["exp_avg"][name].double(), after.tensors["exp_avg"][name].double()
            found[name] = (then - beta * first) / (1 - beta) / clip
            blur = 2 * self.ulp * float((then.abs() + beta * first.abs()).norm()) / (1 - beta) / clip
            error = distance(found[name], wanted, overall)
            noise = max(ALLOWED * max(self.noise[name], 2 * self.ulp), FLOOR.get(self.precision, 0.0))
            bound = noise + distance(wanted, wanted, overall, blur)
            self.findings.measure("gradient", error, bound, f"{where}, {name}")
            self._add_kind(kinds, name, float((found[name] - wanted).norm()), float(wanted.norm()))
            square, unsure = square + float(found[name].square().sum()), unsure + blur**2
        for kind, (error, noise, size) in kinds.items():
            bound = ALLOWED_KIND * math.sqrt(noise / size)
            self.findings.measure("rounding", math.sqrt(error / size), bound, f"{where}, {kind}")
        total = math.sqrt(sum(float(one.square().sum()) for one in exact.values()))
        noise = math.sqrt(sum((self.noise[name] * float(one.norm())) ** 2 for name, one in exact.items())) / total
        bound = ALLOWED * max(noise, 4 * self.ulp)
        self.findings.measure("norm", abs(norm - total) / total, bound, where)
        blur = 4 * math.sqrt(unsure) / total + 1e3 * self.ulp  # the norm is summed in fp32
        self.findings.measure("clipping", abs(math.sqrt(square) - norm) / max(norm, 1e-300), blur, where)
        self._grid(found, where)

    def _add_kind(self, kinds: dict[str, list[float]], name: str, error: float, size: float) -> None:
        """Squares of error, measured rounding and size over all layers' matrices of a kind, in a narrow precision."""
        if self.precision == self.wide or not optimizer.decays(shapes(self.model)[name]):
            return
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        of_kind = kinds.setdefault(kind, [0.0, 0.0, 0.0])
        for at, value in enumerate((error, self.noise[name] * size, size)):
            of_kind[at] += value**2

    def _grid(self, found: Tensors, where: str) -> None:
        """A gradient summed in fp32 from several narrow ones is not a narrow number itself, but for a few elements."""
        if self.precision == self.wide or self.train["grad_dtype"] != "fp32" or not self._roundness:
            return
        names = [name for name, grad in found.items() if grad.dim() > 1 and not name.startswith("embed")]
        ours, theirs = (self._narrow([grads[name] for name in names]) for grads in (found, self._roundness))
        self._roundness = Tensors()  # measured once a run, as it is
        self.findings.measure("narrow", ours, 1.5 * theirs + 0.03, where)

    def _narrow(self, grads: list[Tensor]) -> float:
        """Share of elements that are numbers of the run's precision, to a few units of fp32."""
        flat = torch.cat([grad.double().flatten() for grad in grads])
        flat = flat[flat.abs() > flat.abs().mean() / 4]
        mantissa = torch.frexp(flat)[0]  # the exponent range of fp16 is no matter of this
        near = mantissa.to(self.precision).double()
        return float(((mantissa - near).abs() < 2.0**-19).double().mean())

    def _update(self, before: State, after: State, norm: float, updates: int, lr: float, where: str) -> None:
        """AdamW, element by element, from the moments that were saved."""
        beta1, beta2 = self.optim["beta1"], self.optim["beta2"]
        for name, saved in after.tensors["master"].items():
            first, then = (state.tensors["exp_avg"][name].double() for state in (before, after))
            second, squared = (state.tensors["exp_avg_sq"][name].double() for state in (before, after))
            grad = (then - beta1 * first) / (1 - beta1)
            blur = 2 * self.ulp * (then.abs() + beta1 * first.abs()) / (1 - beta1)
            wanted = beta2 * second + (1 - beta2) * grad.square()
            room = ALLOWED_ULP * self.ulp * wanted + (1 - beta2) * (2 * grad.abs() + blur) * blur
            self._elements("second moment", squared, wanted, room, f"{where}, {name}")
            weight = before.tensors["master"][name].double()
            wanted = optimizer.updated(weight, then, squared, updates, lr, self.optim)
            room = ALLOWED_ULP * self.ulp * (weight.abs() + (wanted - weight).abs())
            self._elements("weight", saved.double(), wanted, room, f"{where}, {name}")

    def _elements(self, what: str, found: Tensor, wanted: Tensor, room: Tensor, where: str) -> None:
        """The element furthest beyond its room; where the room is nothing, both must be equal."""
        error = (found - wanted).abs()
        over = torch.where(error > 0, error / room.clamp(min=1e-300), 0.0).flatten()
        at = int(over.argmax())
        scale = max(float(wanted.abs().max()), 1e-300)
        self.findings.measure(what, float(error.flatten()[at]) / scale, float(room.flatten()[at]) / scale, where)


def rms(grads: Tensors) -> float:
    """Root mean square of all elements."""
    return math.sqrt(
        sum(float(g.double().square().sum()) for g in grads.values()) / sum(g.numel() for g in grads.values())
    )


def distance(found: Tensor, wanted: Tensor, overall: float, blur: float = 0.0) -> float:
    """2-norm of the difference (and of `blur`) over that of `wanted`; a gradient that is zero but for rounding (a key
    bias) is measured by a thousandth of the model's `overall` root mean square."""
    scale = max(float(wanted.double().norm()), 1e-3 * overall * wanted.numel() ** 0.5)
    return (float((found.double() - wanted.double()).norm()) + blur) / scale
