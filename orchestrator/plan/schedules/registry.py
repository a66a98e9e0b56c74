"""The schedules by name, the numbers that each accepts, and `build`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from . import afab, dualpipe, dualpipev, interleaved, one_f_one_b, zb_h1, zb_h2, zbv
from .actions import Action, ScheduleError
from .schedule import Schedule, loop_placement, mirror_placement, v_placement

Order = Callable[[int, int, int, int], Iterator[Action]]  # (rank, pp, micro_batches, vpp)


class Entry(NamedTuple):
    order: Order
    place: Callable[[int, int], tuple[int, ...]]  # (pp, vpp) -> stage_rank
    vpp: tuple[int, int | None]  # fewest and most stages per rank; None: no limit
    even: bool = False  # pp and micro_batches must be even


def _v(pp: int, vpp: int) -> tuple[int, ...]:
    return v_placement(pp)


def _mirror(pp: int, vpp: int) -> tuple[int, ...]:
    return mirror_placement(pp)


SCHEDULES: dict[str, Entry] = {
    "afab": Entry(afab.order, loop_placement, (1, None)),
    "1f1b": Entry(one_f_one_b.order, loop_placement, (1, 1)),
    "interleaved": Entry(interleaved.order, loop_placement, (2, None)),
    "zb_h1": Entry(zb_h1.order, loop_placement, (1, 1)),
    "zb_h2": Entry(zb_h2.order, loop_placement, (1, 1)),
    "zbv": Entry(zbv.order, _v, (2, 2)),
    "dualpipe": Entry(dualpipe.order, _mirror, (1, 1), even=True),
    "dualpipev": Entry(dualpipev.order, _v, (2, 2)),
}


def illegal(name: str, pp: int, micro_batches: int, vpp: int) -> str | None:
    """Checks the numbers of a schedule. Returns one line with the illegal number and the nearest
    legal one, or None."""
    entry = SCHEDULES.get(name)
    if entry is None:
        import difflib  # takes a few milliseconds, and only this line needs it

        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"no schedule {name!r}{hint} Choices: {', '.join(SCHEDULES)}"
    for number_name, value in (
        ("pp", pp),
        ("micro_batches", micro_batches),
        ("vpp", vpp),
    ):
        if value < 1:
            return f"schedule {name}: {number_name} is {value}, want at least 1"
    low, high = entry.vpp
    if not low <= vpp <= (high or vpp):
        want = f"exactly {low}" if low == high else f"at least {low}"
        remark = " (vpp=1 is 1f1b)" if name == "interleaved" else ""
        return (
            f"schedule {name} wants {want} virtual stages per rank, vpp is {vpp}{remark}; nearest:"
            f" vpp={low}"
        )
    for number_name, value in (("pp", pp), ("micro_batches", micro_batches)):
        if entry.even and value % 2:
            nearest = [number for number in (value - 1, value + 1) if number]
            return (
                f"schedule {name} wants an even {number_name}, not {value}; nearest:"
                f" {' or '.join(map(str, nearest))}"
            )
    return None


def build(name: str, pp: int, micro_batches: int, vpp: int = 1) -> Schedule:
    """Builds the named schedule for `pp` ranks of `vpp` stages each. Raises ScheduleError with the
    line of `illegal`.

    Any number of micro-batches runs, even fewer than ranks. Bubbles equal the published ones from
    the number of micro-batches on that each schedule's module states.
    """
    problem = illegal(name, pp, micro_batches, vpp)
    if problem:
        raise ScheduleError(problem)
    entry = SCHEDULES[name]
    orders = tuple(tuple(entry.order(rank, pp, micro_batches, vpp)) for rank in range(pp))
    return Schedule(
        name=name,
        pp=pp,
        vpp=vpp,
        micro_batches=micro_batches,
        stage_rank=entry.place(pp, vpp),
        orders=orders,
    )
