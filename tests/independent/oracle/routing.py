"""Judges what a step's routers did: choices, their weights, the terms that balance experts, biases,
reported loads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .choices import Choices, counts, needed_rounding
from .findings import ALLOWED, ALLOWED_KIND, Findings, narrow, rounding
from .modules import taken_choices
from .network import MTP, Pass
from .state import STATE, State

#: Times the largest rounding of a layer's scores that the scores behind a choice may have been off.
#: Correct runs reach
#: 1.5 (docs/verify.md).
ALLOWED_CHOICE = 3.0
#: What a bias or a load may be off, over its size: both are kept in fp32 and rounded twice.
STATE_ROOM = ALLOWED * rounding(2, torch.float32)


class RoutingJudge:
    """Of a plan's model, for runs of one precision. `floor`: what a number may be off in any case,
    over its size."""

    def __init__(
        self, model: dict[str, Any], precision: torch.dtype, findings: Findings, floor: float
    ):
        self.moe = model.get("moe") or {}
        self.precision = precision
        self.findings = findings
        self.wide = torch.promote_types(precision, torch.float32)
        self.floor = floor

    def choices(self, before: State, made: Choices, exact: Pass, rounded: Pass, where: str) -> None:
        """Each choice is the best one by the exact scores, but for rounding; its logits and weights
        are exact but for rounding, and wide numbers."""
        of_logits = noise_of(exact.logits, rounded.logits)
        of_weights = noise_of(exact.weights, rounded.weights)
        for layer, chosen in made.experts.items():
            at = f"{where}, layer {layer}"
            bias = self._bias(before, layer)
            values = exact.scores[layer] + bias
            near = rounded.scores[layer].double() + bias
            room = max(float((near - values).abs().max()), self.floor * float(values.abs().max()))
            needed = needed_rounding(values.flatten(0, 1), chosen.flatten(0, 1), self.moe).max()
            self.findings.measure("choice", float(needed), ALLOWED_CHOICE * room, at)
            self._numbers(
                "logits",
                made.logits[layer],
                exact.logits[layer],
                rounded.logits[layer],
                of_logits,
                at,
            )
            self._numbers(
                "weights",
                made.weights[layer],
                exact.weights[layer],
                rounded.weights[layer],
                of_weights,
                at,
            )

    def _numbers(
        self,
        what: str,
        found: Tensor,
        exact: Tensor,
        rounded: Tensor,
        noise_of_layers: float,
        where: str,
    ) -> None:
        """`noise_of_layers`: what rounding does to them in all layers; one layer's may be small by
        luck."""
        size = float(exact.norm())
        error, noise = (float((one.double() - exact).norm()) / size for one in (found, rounded))
        noise = max(noise, noise_of_layers)
        allowed = ALLOWED if self.precision == self.wide else ALLOWED_KIND
        self.findings.measure(f"choice {what}", error, max(allowed * noise, self.floor), where)
        self.findings.expect(
            found.dtype == self.wide, f"{where}: {what} of choices are {found.dtype}"
        )
        if self.precision != self.wide:
            ours, theirs = (narrow([one], self.precision) for one in (found, rounded))
            self.findings.measure(f"narrow {what}", ours, 1.5 * theirs + 0.03, where)

    def _bias(self, state: State, layer: int) -> Tensor:
        none = torch.zeros(self.moe["experts"], dtype=torch.float64)
        return state.tensors[STATE].get(f"layers.{layer}.mlp.router.bias", none).double()

    def biases(self, before: State, after: State, made: Choices, skipped: bool, where: str) -> None:
        """A step moves each by `bias_update` towards an equal load of the step's choices, unless it
        is skipped. Loads, where they are kept, are those of the step."""
        for layer, chosen in made.experts.items():
            name = f"layers.{layer}.mlp.router.bias"
            load = name.replace("bias", "load")
            if load in after.tensors[STATE]:
                often = counts(chosen, self.moe["experts"]).double()
                wanted = before.tensors[STATE][load].double() if skipped else often / often.mean()
                found = after.tensors[STATE][load].double()
                self.findings.elements(
                    "load", found, wanted, STATE_ROOM * wanted, f"{where}, {load}"
                )
            if name not in after.tensors[STATE]:
                continue
            bias = before.tensors[STATE][name].double()
            often = counts(chosen, self.moe["experts"]).double()
            moved = (often.mean() - often).sign() * (0.0 if skipped else self.moe["bias_update"])
            room = STATE_ROOM * (bias.abs() + moved.abs()) * (moved != 0)
            self.findings.elements(
                "bias", after.tensors[STATE][name].double(), bias + moved, room, f"{where}, {name}"
            )

    def reports(
        self, reports: list[dict[str, Any]], after: State, made: Choices, exact: Pass, rounded: Pass
    ) -> None:
        """What ranks report of the terms of the loss and of the load of experts."""
        where = f"step {after.step}"
        for one in reports:
            terms = one.get("loss_terms", {})
            same = terms.keys() == exact.terms.keys()
            self.findings.expect(
                same, f"{where}: rank {one['rank']} reports terms {sorted(terms)} of the loss"
            )
            for name in exact.terms if same else ():
                true = exact.terms[name]
                near = rounded.terms[name]
                self.findings.mean(
                    f"term {name}", terms[name], true, near, self.floor, where, alike=name != MTP
                )
        loads = [
            (int(layer), load) for one in reports for layer, load in one.get("experts", {}).items()
        ]
        told = sorted(layer for layer, _ in loads)
        self.findings.expect(
            told == sorted(made.experts), f"{where}: loads of layers {told} are reported"
        )
        for layer, load in loads:
            if layer in made.experts:
                self._load(load, layer, after, made, exact, rounded, f"{where}, layer {layer}")

    def _load(
        self,
        load: dict[str, Any],
        layer: int,
        after: State,
        made: Choices,
        exact: Pass,
        rounded: Pass,
        where: str,
    ) -> None:
        often = counts(made.experts[layer], self.moe["experts"]).tolist()
        self.findings.expect(
            load["tokens"] == often, f"{where}: reports {load['tokens']} tokens, not {often}"
        )
        dropped = float((~taken_choices(made.experts[layer], self.moe)).double().mean())
        told = load.get("dropped", 0.0)
        self.findings.expect(
            math.isclose(told, dropped, abs_tol=1e-12),
            f"{where}: reports {told} dropped, not {dropped}",
        )
        bias = after.tensors[STATE].get(f"layers.{layer}.mlp.router.bias")
        ends = None if bias is None else [float(bias.min()), float(bias.max())]
        self.findings.expect(
            load.get("bias") == ends, f"{where}: reports biases {load.get('bias')}, not {ends}"
        )
        if (experts := self.moe["experts"]) > 1:
            true, near = (
                self._entropies(one.scores[layer].double(), experts) for one in (exact, rounded)
            )
            self.findings.mean(
                "entropy", load["entropy"], true, near, self.floor, where, alike=True
            )

    @staticmethod
    def _entropies(scores: Tensor, experts: int) -> Tensor:
        """Of each token, over all tokens' number and the largest there is: their sum is what is
        reported."""
        share = scores / scores.sum(-1, keepdim=True)
        entropy = torch.special.entr(share).sum(-1).flatten()
        return entropy / (len(entropy) * math.log(experts))


def noise_of(exact: dict[int, Tensor], rounded: dict[int, Tensor]) -> float:
    """How far numbers of all layers are off together, over their size."""
    error = sum(
        float((rounded[layer].double() - one).square().sum()) for layer, one in exact.items()
    )
    return math.sqrt(error / max(sum(float(one.square().sum()) for one in exact.values()), 1e-300))
