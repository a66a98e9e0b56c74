"""Seeded bugs: each a patch that makes the trainer wrong in one way, and the smallest layout on
which that shows.

They are put on the trainer's modules from outside, for one test, before its ranks are forked. The
mistakes are those that trainers have really made; a word on each says which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutation(NamedTuple):
    name: str
    layout: dict[str, Any]  # arguments of tests.beds.plans.make_plan, and "packed"
    patch: Patch
    caught: str  # the verdict that it must get


class Mutations(list[Mutation]):
    """Filled by `@mutations(name, **layout)` on functions that patch."""

    def __call__(
        self, name: str, caught: str = "DIFFERENT", **layout: Any
    ) -> Callable[[Patch], Patch]:
        def add(patch: Patch) -> Patch:
            self.append(Mutation(name, layout, patch, caught))
            return patch

        return add


def after(patch: pytest.MonkeyPatch, owner: object, name: str, then: Callable[..., None]) -> None:
    """Call `then` with the method's arguments when the method has ended."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(*args, **kwargs)
        return result

    patch.setattr(owner, name, both)
