"""The instruction set of a pipeline, whose actions a rank executes in order.

An action names its stage and its micro-batch: `3F0` is the forward of micro-batch 0 through stage
3, `3RECV_B0` receives the gradient of stage 3's output. Torch's pipelining tables use the same
text.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule cannot be built or run. The message is one line: schedule, problem, legal
    choices."""


class Kind(StrEnum):
    F = "F"  # forward
    B = "B"  # whole backward: I and W in one
    I = "I"  # backward for the input (and for the few weights that are not matrices)
    W = "W"  # backward for the matrix weights of the same micro-batch
    SEND_F = "SEND_F"  # the stage's output to the next stage
    RECV_F = "RECV_F"  # the stage's input from the stage before
    SEND_B = "SEND_B"  # the gradient of the stage's input to the stage before
    RECV_B = "RECV_B"  # the gradient of the stage's output from the next stage


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})


class Action(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


_TEXT = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


def parse_action(token: str) -> Action:
    """Parses `"3F0"` to Action(F, stage 3, micro-batch 0). Raises ScheduleError."""
    match = _TEXT.fullmatch(token.strip())
    if match is None:
        kinds = ", ".join(Kind)
        raise ScheduleError(
            f"{token!r} is not an action: want <stage><kind><micro-batch>, kind one of {kinds}"
        )
    return Action(Kind(match[2]), int(match[1]), int(match[3]))
