"""Many cases in one launch of ranks: their start and the pages of a first backward cost more than a case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.verify.ranks import run_ranks


@contextlib.contextmanager
def told(name: str) -> Iterator[None]:
    """What fails inside says in which case."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {name!r}")
        raise


def run_together(fn: Callable[..., Any], world: int, cases: Mapping[str, tuple]) -> dict[str, list[Any]]:
    """Case -> [fn(rank, *arguments of the case) for each rank], one case after the other on the same ranks."""

    def work(rank: int) -> list[Any]:
        found = []
        for name, args in cases.items():
            with told(name):
                found.append(fn(rank, *args))
        return found

    answers = run_ranks(work, world, timeout=300.0)
    return {name: [answer[at] for answer in answers] for at, name in enumerate(cases)}
