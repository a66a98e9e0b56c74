"""What cannot be combined, whoever asks: the planner never chooses it, and the trainer refuses it by the same rule."""

from __future__ import annotations

from collections.abc import Iterable

from .schedules import TABLE, illegal

#: Schedules whose backward is one piece.
WHOLE_BACKWARD = ("afab", "1f1b", "interleaved")


def sharding(zero: int, zero_group: int, pp: int, schedule: str, replicas: int, copies: int) -> str | None:
    """One line, or None. replicas: ranks that hold the same weights of one copy of the model (dp x cp x ep); copies: of
    the model on one pipeline, 2 for a bidirectional schedule."""
    holders = replicas * copies
    if zero_group and (zero == 0 or holders % zero_group):
        return (
            f"parallel.zero_group={zero_group} needs zero 1 to 3 and must divide the {holders} ranks with the same"
            " weights"
        )
    if zero == 3 and pp > 1 and schedule not in WHOLE_BACKWARD:
        return (
            f"zero=3 with schedule {schedule}: torch's fully_shard does not take a split backward; legal schedules:"
            f" {', '.join(WHOLE_BACKWARD)}, or zero 0 to 2"
        )
    if zero >= 2 and copies > 1:
        return (
            f"zero={zero} with schedule {schedule}: both ranks of a stage complete its gradients in different orders;"
            " use zero0 or zero1"
        )
    return None


def unequal(counts: Iterable[int], ep: int, pp: int, vpp: int, schedule: str, ramp: bool) -> str | None:
    """One line, or None: whether replicas may compute these unequal numbers of micro-batches a step. `ramp`: the batch
    grows during the run."""
    if ep > 1:
        return f"ep={ep}: the experts' exchanges join replicas for every micro-batch, so all need equally many"
    if ramp:
        return "train.batch_ramp grows the batch in whole micro-batches on every replica"
    if schedule == TABLE:
        return "a schedule table is for one number of micro-batches"
    return next((problem for many in sorted(set(counts)) if (problem := illegal(schedule, pp, many, vpp))), None)
