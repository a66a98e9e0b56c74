"""The proposal of linears that should stay wide, judged by their measured errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .measurement import LinearErrors, Proposal
from .wide import FIRST, LAST

#: An error of a product above this is more than rounding to few bits explains. A factor in e4m3 is
#: off by 2.6 % on average, one in e5m2 by 5 %, and the product of two independent ones by 4 to 6 %.
MOST_ERROR = 0.1
#: A linear, or the linears of one name, that change the loss by this share of what all change, each
#: alone, is proposed...
LOSS_SHARE = 0.25
NAME_SHARE = 0.4
#: ... if it changes the loss by this share of it at least: less is no more than noise.
LEAST_CHANGE = 2e-4

PRODUCTS = {
    "forward": "forward product",
    "input_grad": "gradient of the input",
    "weight_grad": "gradient of the weight",
}


class _Reason(NamedTuple):
    linear: LinearErrors
    sentence: str


def propose(
    linears: Sequence[LinearErrors],
    names: dict[str, float],
    wide_loss: float,
    layers: int,
) -> list[Proposal]:
    """Proposes the linears to keep wide, those with the largest effect first. `names` and
    `wide_loss` are those of `Measurement`; `layers`: the model's decoder layers. A name is proposed
    if no linear of that name stands out alone."""
    reasons: dict[tuple[int, str], _Reason] = {}
    for reason in (*_by_loss(linears, wide_loss), *_by_error(linears)):
        reasons.setdefault((reason.linear.layer, reason.linear.name), reason)
    single_names = {name for _, name in reasons}
    by_name = [
        proposal for proposal in _of_names(names, wide_loss) if proposal.pattern not in single_names
    ]
    return by_name + _joined(list(reasons.values()), linears, layers)


def _of_names(names: dict[str, float], wide_loss: float) -> list[Proposal]:
    """Proposes names whose linears together have a large part in the change of the loss."""
    total = sum(map(abs, names.values()))
    return [
        Proposal(
            pattern=name,
            reason=f"in 8 bits alone, {name} of all layers changes the loss by"
            f" {_percent(change / wide_loss)}, {abs(change) / total:.0%} of what the linears of"
            f" all names change (bound {NAME_SHARE:.0%})",
        )
        for name, change in sorted(names.items(), key=lambda item: -abs(item[1]))
        if _counts(change, wide_loss) and abs(change) >= NAME_SHARE * total
    ]


def _by_loss(linears: Sequence[LinearErrors], wide_loss: float) -> Iterable[_Reason]:
    """Yields linears that alone have a large part in the change of the loss."""
    total = sum(abs(linear.loss) for linear in linears)
    for linear in sorted(linears, key=lambda linear: -abs(linear.loss)):
        if _counts(linear.loss, wide_loss) and abs(linear.loss) >= LOSS_SHARE * total:
            yield _Reason(
                linear,
                f"in 8 bits alone it changes the loss by {_percent(linear.loss / wide_loss)},"
                f" {abs(linear.loss) / total:.0%} of what all linears change"
                f" (bound {LOSS_SHARE:.0%})",
            )


def _by_error(linears: Sequence[LinearErrors]) -> Iterable[_Reason]:
    """Yields linears of which a product is further off than rounding explains."""
    for linear in sorted(linears, key=lambda linear: -linear.largest):
        if linear.largest > MOST_ERROR:
            product = max(PRODUCTS, key=lambda product: getattr(linear, product))
            yield _Reason(
                linear,
                f"its {PRODUCTS[product]} is {linear.largest:.1%} off (bound {MOST_ERROR:.0%})",
            )


def _counts(change: float, wide_loss: float) -> bool:
    """Whether a change of the loss is more than noise."""
    return abs(change) >= LEAST_CHANGE * abs(wide_loss)


def _percent(share: float) -> str:
    return f"{share:+.2%}"


def _joined(
    reasons: Sequence[_Reason],
    linears: Sequence[LinearErrors],
    layers: int,
) -> list[Proposal]:
    """Returns a proposal per linear, or one for all linears of a name or of the first or last layer
    if each of them has a reason."""
    proposed = {(reason.linear.layer, reason.linear.name) for reason in reasons}
    proposals: dict[str, Proposal] = {}
    for reason in reasons:
        layer = reason.linear.layer
        name = reason.linear.name
        of_name = {(linear.layer, name) for linear in linears if linear.name == name}
        of_layer = {(layer, linear.name) for linear in linears if linear.layer == layer}
        end = {0: FIRST, layers - 1: LAST}.get(layer)
        pattern = f"{layer}.{name}"
        if len(of_name) > 1 and of_name <= proposed:
            pattern = name
        elif end and of_layer <= proposed:
            pattern = end
        of_linear = "" if pattern == f"{layer}.{name}" else f"{layer}.{name}: "
        single = f"{of_linear}{reason.sentence}"
        proposals.setdefault(pattern, Proposal(pattern=pattern, reason=single))
    return list(proposals.values())
