"""Many cases in one launch of ranks: their start and the pages of a first backward cost more than a
case."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.patience import PATIENCE_S
from trainer.verify.ranks import run_ranks


@contextlib.contextmanager
def told(name: str) -> Iterator[None]:
    """What fails inside says in which case."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {name!r}")
        raise


def run_together(
    fn: Callable[..., Any], world: int, cases: Mapping[str, tuple]
) -> dict[str, list[Any]]:
    """Case -> [fn(rank, *arguments of the case) for each rank], one case after the other on the
    same ranks."""

    def work(rank: int) -> list[Any]:
        outcomes = []
        for name, args in cases.items():
            with told(name):
                outcomes.append(fn(rank, *args))
        return outcomes

    answers = run_ranks(work, world, timeout=PATIENCE_S * len(cases))
    return {name: [answer[at] for answer in answers] for at, name in enumerate(cases)}


def world(case: Mapping[str, Any]) -> int:
    """Ranks of a layout given as arguments of `make_plan`."""
    return math.prod(case.get(axis, 1) for axis in ("tp", "cp", "ep", "pp", "dp"))


def assert_equal(answers: Sequence[Mapping[str, float]], limit: float) -> None:
    """`answers`: what `run_rank` found on each rank, worst errors by quantity."""
    for worst in answers:
        assert {quantity: error for quantity, error in worst.items() if not error <= limit} == {}
