"""Judges a step's routers: choices, their weights, the terms that balance experts, biases, reported
loads."""

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

#: The scores behind a choice may be off by this many times the largest rounding of the layer's
#: scores. Correct runs reach 1.5 (docs/verify.md).
ALLOWED_CHOICE = 3.0
#: Allowed error of a bias or a load, over its size: both are kept in fp32 and rounded twice.
ALLOWED_STATE = ALLOWED * rounding(2, torch.float32)


class RoutingJudge:
    """Judges the routers of a plan's model, for runs of one precision. `floor` is the least allowed
    error of a number, over its size."""

    def __init__(
        self, model: dict[str, Any], precision: torch.dtype, findings: Findings, floor: float
    ):
        self.moe = model.get("moe") or {}
        self.precision = precision
        self.findings = findings
        self.wide = torch.promote_types(precision, torch.float32)
        self.floor = floor

    def choices(
        self, before: State, choices: Choices, exact: Pass, rounded: Pass, location: str
    ) -> None:
        """Judges the choices of a step: each is the best by the exact scores, but for rounding; its
        logits and weights are exact, but for rounding, and wide numbers."""
        logits_noise = noise_of(exact.logits, rounded.logits)
        weights_noise = noise_of(exact.weights, rounded.weights)
        for layer, chosen in choices.experts.items():
            layer_location = f"{location}, layer {layer}"
            bias = self._bias(before, layer)
            values = exact.scores[layer] + bias
            rounded_values = rounded.scores[layer].double() + bias
            largest_error = float((rounded_values - values).abs().max())
            rounding_error = max(largest_error, self.floor * float(values.abs().max()))
            needed = needed_rounding(values.flatten(0, 1), chosen.flatten(0, 1), self.moe).max()
            bound = ALLOWED_CHOICE * rounding_error
            self.findings.measure("choice", float(needed), bound, layer_location)
            self._numbers(
                "logits",
                choices.logits[layer],
                exact=exact.logits[layer],
                rounded=rounded.logits[layer],
                noise_of_layers=logits_noise,
                location=layer_location,
            )
            self._numbers(
                "weights",
                choices.weights[layer],
                exact=exact.weights[layer],
                rounded=rounded.weights[layer],
                noise_of_layers=weights_noise,
                location=layer_location,
            )

    def _numbers(
        self,
        quantity: str,
        actual: Tensor,
        *,
        exact: Tensor,
        rounded: Tensor,
        noise_of_layers: float,
        location: str,
    ) -> None:
        """Judges logits or weights of one layer. `noise_of_layers` is their rounding in all layers,
        since that of one layer may be small by luck."""
        size = float(exact.norm())
        error = float((actual.double() - exact).norm()) / size
        noise = max(float((rounded.double() - exact).norm()) / size, noise_of_layers)
        allowed = ALLOWED if self.precision == self.wide else ALLOWED_KIND
        bound = max(allowed * noise, self.floor)
        self.findings.measure(f"choice {quantity}", error, bound, location)
        self.findings.expect(
            actual.dtype == self.wide, f"{location}: {quantity} of choices are {actual.dtype}"
        )
        if self.precision != self.wide:
            share = narrow([actual], self.precision)
            bound = 1.5 * narrow([rounded], self.precision) + 0.03
            self.findings.measure(f"narrow {quantity}", share, bound, location)

    def _bias(self, state: State, layer: int) -> Tensor:
        no_bias = torch.zeros(self.moe["experts"], dtype=torch.float64)
        return state.tensors[STATE].get(f"layers.{layer}.mlp.router.bias", no_bias).double()

    def biases(
        self, before: State, after: State, choices: Choices, skipped: bool, location: str
    ) -> None:
        """Judges the state of routers. A step moves each bias by `bias_update` towards an equal
        load of the step's choices, unless it is skipped. Stored loads are those of the step."""
        for layer, chosen in choices.experts.items():
            name = f"layers.{layer}.mlp.router.bias"
            load = name.replace("bias", "load")
            if load in after.tensors[STATE]:
                choice_counts = counts(chosen, self.moe["experts"]).double()
                expected = (
                    before.tensors[STATE][load].double()
                    if skipped
                    else choice_counts / choice_counts.mean()
                )
                actual = after.tensors[STATE][load].double()
                self.findings.elements(
                    "load", actual, expected, ALLOWED_STATE * expected, f"{location}, {load}"
                )
            if name not in after.tensors[STATE]:
                continue
            bias = before.tensors[STATE][name].double()
            choice_counts = counts(chosen, self.moe["experts"]).double()
            moved = (choice_counts.mean() - choice_counts).sign() * (
                0.0 if skipped else self.moe["bias_update"]
            )
            allowed = ALLOWED_STATE * (bias.abs() + moved.abs()) * (moved != 0)
            self.findings.elements(
                "bias",
                after.tensors[STATE][name].double(),
                bias + moved,
                allowed,
                f"{location}, {name}",
            )

    def reports(
        self,
        reports: list[dict[str, Any]],
        after: State,
        choices: Choices,
        exact: Pass,
        rounded: Pass,
    ) -> None:
        """Judges the terms of the loss and the loads of experts that ranks report."""
        location = f"step {after.step}"
        for report in reports:
            terms = report.get("loss_terms", {})
            same_terms = terms.keys() == exact.terms.keys()
            self.findings.expect(
                same_terms,
                f"{location}: rank {report['rank']} reports terms {sorted(terms)} of the loss",
            )
            for name in exact.terms if same_terms else ():
                self.findings.mean(
                    f"term {name}",
                    terms[name],
                    exact.terms[name],
                    rounded=rounded.terms[name],
                    floor=self.floor,
                    location=location,
                    alike=name != MTP,
                )
        loads = [
            (int(layer), load)
            for report in reports
            for layer, load in report.get("experts", {}).items()
        ]
        reported_layers = sorted(layer for layer, _ in loads)
        self.findings.expect(
            reported_layers == sorted(choices.experts),
            f"{location}: loads of layers {reported_layers} are reported",
        )
        for layer, load in loads:
            if layer in choices.experts:
                layer_location = f"{location}, layer {layer}"
                self._load(load, layer, after, choices, location=layer_location)
                if (experts := self.moe["experts"]) > 1:
                    self.findings.mean(
                        "entropy",
                        load["entropy"],
                        _entropies(exact.scores[layer].double(), experts),
                        rounded=_entropies(rounded.scores[layer].double(), experts),
                        floor=self.floor,
                        location=layer_location,
                        alike=True,
                    )

    def _load(
        self, load: dict[str, Any], layer: int, after: State, choices: Choices, *, location: str
    ) -> None:
        """Judges the reported load, dropped share and range of biases of a layer."""
        choice_counts = counts(choices.experts[layer], self.moe["experts"]).tolist()
        self.findings.expect(
            load["tokens"] == choice_counts,
            f"{location}: reports {load['tokens']} tokens, not {choice_counts}",
        )
        dropped = float((~taken_choices(choices.experts[layer], self.moe)).double().mean())
        reported = load.get("dropped", 0.0)
        self.findings.expect(
            math.isclose(reported, dropped, abs_tol=1e-12),
            f"{location}: reports {reported} dropped, not {dropped}",
        )
        bias = after.tensors[STATE].get(f"layers.{layer}.mlp.router.bias")
        bias_range = None if bias is None else [float(bias.min()), float(bias.max())]
        self.findings.expect(
            load.get("bias") == bias_range,
            f"{location}: reports biases {load.get('bias')}, not {bias_range}",
        )


def _entropies(scores: Tensor, experts: int) -> Tensor:
    """Returns the entropy of each token, over the number of tokens and the largest entropy: their
    sum is reported."""
    share = scores / scores.sum(-1, keepdim=True)
    entropy = torch.special.entr(share).sum(-1).flatten()
    return entropy / (len(entropy) * math.log(experts))


def noise_of(exact: dict[int, Tensor], rounded: dict[int, Tensor]) -> float:
    """Returns the rounding of numbers of all layers together, over their size."""
    squared_error = 0.0
    squared_size = 0.0
    for layer, tensor in exact.items():
        squared_error += float((rounded[layer].double() - tensor).square().sum())
        squared_size += float(tensor.square().sum())
    return math.sqrt(squared_error / max(squared_size, 1e-300))
