"""The request of `orch precision` to `python -m trainer.rounding`, and its answers: one JSON object
per line."""

from __future__ import annotations

from ..document import Frozen, Plan


class Request(Frozen):
    """What is measured: the plan's model in 8 bits (`job.matmul`), on batches of its data."""

    plan: Plan
    #: the folder of the run's checkpoints, of which the newest that verifies is read; "": a model
    #: with the plan's initial weights
    checkpoints: str = ""
    batches: int = 2  # micro-batches


class LinearErrors(Frozen):
    """The errors of one linear. Those of its three products are root mean squares of the difference
    from the wide product over that of the wide product."""

    layer: int
    name: str  # inside its block: attn.wo
    forward: float
    input_grad: float
    weight_grad: float
    #: the loss with this linear alone in 8 bits, minus the loss without 8 bits
    loss: float

    @property
    def largest(self) -> float:
        """The largest error of the three products."""
        return max(self.forward, self.input_grad, self.weight_grad)


class Proposal(Frozen):
    """A pattern of `train.matmul_wide`, and why it is proposed."""

    pattern: str
    reason: str  # one sentence


class Measurement(Frozen):
    """The errors of all linears of a model."""

    step: int | None  # of the checkpoint; None: initial weights
    tokens: int  # that count in the loss
    dtype: str  # in which wide products were computed
    wide_loss: float  # the mean loss without 8 bits
    narrow_loss: float  # with all linears in 8 bits
    #: by name inside a block: the change of the loss with the linears of that name in all layers in
    #: 8 bits
    names: dict[str, float]
    linears: list[LinearErrors]
    proposals: list[Proposal]
    proposal_loss: float  # with all linears in 8 bits but those of the proposals


class Answer(Frozen):
    """Progress, and in the last answer the measurement."""

    done: int
    total: int
    label: str
    measurement: Measurement | None = None
