"""Restricts what configuration may hold: printable text, finite numbers, `${a.key}`; no code and
no environment."""

from __future__ import annotations

import re
from typing import Any

from orchestrator.plan.exits import Exit

from .config_errors import Origin

#: Resolvers that configuration may use. `oc.env` is not among them: a resolved value is written
#: into the run folder.
RESOLVERS = frozenset({"oc.select"})


def check_interpolations(tree: Any, origin: Origin, key: str = "") -> None:
    """Refuses resolvers outside `RESOLVERS`, also where names are nested or built up."""
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for name, value in pairs:
            check_interpolations(value, origin, f"{key}.{name}" if key else str(name))
        return
    remainder = tree if isinstance(tree, str) else ""
    while match := re.search(r"\$\{([^${}]*)\}", remainder):
        name, colon, _ = match[1].partition(":")
        if colon and name.strip() not in RESOLVERS:
            reason = "its value would be frozen into the run folder; ${a.key} is what there is"
            problem = f"the resolver {name.strip()!r} is not allowed: {reason}"
            raise origin.error(key, problem, Exit.SECURITY)
        remainder = f"{remainder[: match.start()]}x{remainder[match.end() :]}"
    if "${" in remainder:
        raise origin.error(key, "an interpolation that cannot be read; ${a.key} is what there is")


def check_leaves(tree: Any, origin: Origin, key: str = "") -> None:
    """Requires that every text is printable, every number finite and exact in JSON, and every
    value of a kind that JSON has, and refuses `_target_`."""
    if isinstance(tree, dict | list):
        pairs = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
        for name, value in pairs:
            path = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                raise origin.error(
                    key,
                    "_target_ would run code from configuration; orch never does",
                    Exit.SECURITY,
                )
            if isinstance(tree, dict) and not (isinstance(name, str) and name.isprintable()):
                raise origin.error(key, f"the key {name!a} is not printable text")
            check_leaves(value, origin, path)
    elif isinstance(tree, str):
        if not tree.isprintable():
            character = next(c for c in tree if not c.isprintable())
            raise origin.error(
                key,
                f"holds the unprintable character {character!a}: text is printable and on one line",
            )
    elif isinstance(tree, float):
        if tree != tree or tree in (float("inf"), float("-inf")):
            raise origin.error(key, f"must be a finite number, not {tree}")
    elif isinstance(tree, int):
        if abs(tree) > 2**53:
            raise origin.error(key, f"{tree} is larger than 2**53")
    elif tree is not None:
        raise origin.error(
            key,
            f"must be text, a number, true, false, null, a list or keys, not {type(tree).__name__}",
        )
