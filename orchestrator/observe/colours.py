"""The colours of areas, in pictures and on pages alike: one table, each colour with one meaning.

Colours are xterm's 256-colour codes. Any two that can stand side by side differ by a CIEDE2000 of
10 or more, also for people with the three common kinds of colour-blindness; any two of the table
do for everybody else (tests/observe/test_colours.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.style import GREEN, RED, YELLOW

Tints = tuple[int, int]  # of even and of odd stages or chunks

#: Replicas beyond the eighth have the colours again, with a pattern.
REPLICA: Sequence[Tints] = (
    (69, 147),
    (142, 185),
    (36, 121),
    (126, 218),
    (66, 109),
    (95, 224),
    (62, 103),
    (58, 101),
)
#: One per round of the replicas' colours: hatches in pictures, characters in terminals.
HATCH = ("", "////", "....", "xxxx", "----", "oooo", "\\\\\\\\", "++++")
MARK = " /.x-o\\+"
CATEGORY = {"params": 60, "grads": 124, "optimizer": 100, "activations": 137, "buffers": 92}
COMMUNICATION = 214
COMPUTE = 245
IDLE = 238
FORWARD: Tints = (153, 75)
BACKWARD: Tints = (86, 29)
#: States of a run's time.
STATE = {
    "productive": GREEN,
    "replay": 141,
    "startup": 81,
    "checkpoint_stall": 132,
    "rendezvous": YELLOW,
    "waiting": 241,
    "hang": RED,
}
BLACK = 16
WHITE = 231


def replica_colour(replica: int, stage: int) -> int:
    """Returns the code of a replica's pipeline stage."""
    return REPLICA[replica % len(REPLICA)][stage % 2]


def replica_round(replica: int) -> int:
    """Returns the index of a replica's hatch and mark."""
    return replica // len(REPLICA) % len(HATCH)


def ink_on(code: int) -> int:
    """Returns the code of text on an area: black, or white on a dark one."""
    red, green, blue = (int(hex_of(code)[i : i + 2], 16) / 255 for i in (1, 3, 5))
    # Relative luminance, with a gamma of 2.2 (WCAG 2.2).
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return BLACK if luminance > 0.18 else WHITE


def hex_of(code: int) -> str:
    """Returns #rrggbb of a code, from 16 on."""
    if code >= 232:
        return "#" + f"{8 + 10 * (code - 232):02x}" * 3
    levels = (0, 95, 135, 175, 215, 255)
    code = code - 16
    return "#" + "".join(f"{levels[code // step % 6]:02x}" for step in (36, 6, 1))
