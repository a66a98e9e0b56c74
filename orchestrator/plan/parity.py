"""What `orch verify` asks `python -m trainer.verify`, and what it answers: one JSON object a line,
both ways."""

from __future__ import annotations

from .document import Frozen, Plan

#: In which precisions every cell is compared.
ALWAYS = ("fp64", "fp32")
#: What else is compared where rounding happens at the same places as in one process: that process,
#: our engine itself.
ALONE = ", one process"
#: Largest relative error that passes, by precision of the layout. One process computes in float64
#: for all but ALONE. A sum of 3,000 terms rounds by the root of their number times half of epsilon,
#: and six times as much is the limit: 2e-5 in fp32. In fp64 it is 4e-14, of tensors a thousandth as
#: large as the largest 4e-11, as much as AdamW adds (`trainer.verify.compare`). In bf16 and fp16
#: root mean squares are compared, and the limit is that of 100 and of 200 independent roundings one
#: after the other. ALONE rounds at the same places; what sums in fp32 differ by flips a few of
#: these roundings, and their limit does not follow from arithmetic. In fp32 a bias that began at
#: zero is 1.1e-5 off in one of 511 cells that are equal to 2e-12 in float64.
LIMITS = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 4e-2, "fp16": 7e-3}
LIMITS |= {f"{precision}{ALONE}": 2e-4 for precision in ("bf16", "fp16")}


class Cell(Frozen):
    """A layout to hold against one process."""

    name: str
    plan: Plan
    packed: bool = False  # every sample holds three documents that must not see each other
    empty: bool = False  # a third of the micro-batches have no target that counts
    precision: str = ""  # "bf16" or "fp16": compared in it too
    note: str = ""  # what was asked for, where that was scaled down


#: In place of infinity and nan, which JSON does not have.
HOPELESS = 1e300


class Errors(Frozen):
    """The worst relative error of each quantity over all ranks, parameters and both optimizer
    steps."""

    loss: float
    grad: float
    norm: float  # of the whole gradient, before clipping
    weight: float
    worst_grad: str  # the parameter
    worst_weight: str
    more: float = 0.0  # of the terms that modules add to the loss, and of state without gradient
    worst_more: str = ""  # its name

    @property
    def largest(self) -> float:
        """Infinite if one is not a number."""
        errors = (self.loss, self.grad, self.norm, self.weight, self.more)
        return max(value if value == value else float("inf") for value in errors)


class Verdict(Frozen):
    """Exactly one of `errors`, `refused` and `failed` is filled."""

    name: str
    note: str = ""  # what was asked for, where that was scaled down
    errors: dict[str, Errors] = {}  # by precision, of the keys of LIMITS
    refused: str = ""  # why the layout is not run
    failed: str = ""  # a rank raised or hung: one line
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        found = self.errors.items()
        return bool(found) and all(
            errors.largest <= LIMITS[precision] for precision, errors in found
        )

    @property
    def word(self) -> str:
        if self.refused:
            return "refused"
        return "failed" if self.failed else "equal" if self.equal else "DIFFERENT"
