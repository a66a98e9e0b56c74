"""The overrides of a command line as the user has typed them, before they are composed."""

from __future__ import annotations

from collections.abc import Sequence


def typed_values(overrides: Sequence[str]) -> dict[str, str]:
    """Returns the values by key, the last one where a key is typed twice. A group counts as a
    key, with or without the plus of Hydra."""
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return {key: value for key, _, value in pairs}
