"""Profiles: the cost model's parameters after a fit, with their covariance and provenance."""

from __future__ import annotations

from msgspec import Struct

from .parameters import PRIOR


class Profile(Struct, frozen=True, kw_only=True):
    """Values of all parameters."""

    name: str
    digest: str
    values: dict[str, float]

    @property
    def label(self) -> str:
        return f"{self.name} {self.digest[:8]}".strip()


def prior() -> Profile:
    """What is believed before any fit."""
    return Profile(name="prior", digest="", values={one.name: one.value for one in PRIOR})


SHIPPED: Profile = prior()
