"""The requests of `orch verify` to `python -m trainer.verify` and the answers: one JSON object per
line in both directions."""

from __future__ import annotations

from .document import Frozen, Plan

#: Precisions in which every cell is compared.
ALWAYS = ("fp64", "fp32")
#: Suffix of a precision for the comparison with the trainer itself in one process, which rounds at
#: the same places as the layout.
ALONE = ", one process"
#: Largest relative error that passes, by precision of the layout. The reference process computes in
#: float64, except for ALONE. A sum of 3,000 terms rounds by the root of their number times half of
#: epsilon; the limit is six times as much: 2e-5 in fp32. In fp64 that is 4e-14, and 4e-11 for
#: tensors a thousandth as large as the largest, which is as much as AdamW adds
#: (`trainer.verify.compare`). In bf16 and fp16 root mean squares are compared, and the limit is
#: that of 100 and of 200 independent roundings in sequence. ALONE rounds at the same places, but
#: differences of fp32 sums flip a few of these roundings, so its limit is empirical. In fp32, a
#: bias that began at zero is 1.1e-5 off in one of 511 cells that are equal to 2e-12 in float64.
LIMITS = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 4e-2, "fp16": 7e-3}
LIMITS |= {f"{precision}{ALONE}": 2e-4 for precision in ("bf16", "fp16")}


class Cell(Frozen):
    """A layout that is compared with one process."""

    name: str
    plan: Plan
    packed: bool = False  # every sample holds three documents that must not attend to each other
    empty: bool = False  # a third of the micro-batches have no target that counts
    precision: str = ""  # an additional precision of the comparison: "bf16" or "fp16"
    note: str = ""  # the requested layout, if it was scaled down


#: Stands for infinity and nan, which JSON does not have.
HOPELESS = 1e300


class Errors(Frozen):
    """The largest relative error of each quantity over all ranks, parameters and both optimizer
    steps."""

    loss: float
    grad: float
    norm: float  # of the whole gradient, before clipping
    weight: float
    worst_grad: str  # name of the parameter
    worst_weight: str
    more: float = 0.0  # of the terms that modules add to the loss, and of state without gradient
    worst_more: str = ""  # name of that term or state

    @property
    def largest(self) -> float:
        """The largest of all errors; infinite if one is not a number."""
        errors = (self.loss, self.grad, self.norm, self.weight, self.more)
        return max(value if value == value else float("inf") for value in errors)


class Verdict(Frozen):
    """Exactly one of `errors`, `refused` and `failed` is filled."""

    name: str
    note: str = ""  # the requested layout, if it was scaled down
    errors: dict[str, Errors] = {}  # by precision: keys of LIMITS
    refused: str = ""  # reason why the layout is not run
    failed: str = ""  # a rank raised or hung: one line
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        passed = [errors.largest <= LIMITS[name] for name, errors in self.errors.items()]
        return bool(passed) and all(passed)

    @property
    def word(self) -> str:
        if self.refused:
            return "refused"
        if self.failed:
            return "failed"
        return "equal" if self.equal else "DIFFERENT"
