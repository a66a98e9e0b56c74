"""`--after RUN`: one run waits for the end of another. Pure, from what is known of the other runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.backends.base import After
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.state import RunState

WORD = {"ok": "afterok", "any": "afterany", "notok": "afternotok"}


def add_dependencies(options: Mapping[str, Any], found: Sequence[tuple[After, RunState, str | None]]) -> dict[str, Any]:
    """`backend.options` with `dependency` extended. `found`: the wish, the other run's true state, and its job.

    A run that has ended is no dependency any more: Slurm forgets it, and then no job may name it. OrchError (64) when
    it has ended in a way that can never start the new one, or has not been submitted.
    """
    parts = [str(options["dependency"])] if options.get("dependency") else []
    if any("?" in part for part in parts) and found:
        raise OrchError(f"--after cannot be joined with backend.options.dependency={parts[0]}, which holds an `or`")
    for wish, state, job in found:
        run = wish.folder.run_id
        if state.is_final:
            well = state.state == "done"
            if wish.how != "any" and well != (wish.how == "ok"):
                never = f"a run after {wish.how}:{run} would never start"
                raise OrchError(f"--after: {run} has ended {state.state}: {never}", Exit.USAGE)
            continue
        if job is None:
            raise OrchError(f"--after: the script of {run} has not been submitted yet", Exit.USAGE)
        parts.append(f"{WORD[wish.how]}:{job}")
    return {**options, "dependency": ",".join(parts)} if parts else dict(options)


def without_dependency(options: Mapping[str, Any]) -> dict[str, Any]:
    """`backend.options` without the jobs that a run waited for before its first life; `singleton` stays."""
    kept = [part for part in re.split(r"[,?]", str(options.get("dependency") or "")) if part == "singleton"]
    rest = {name: value for name, value in options.items() if name != "dependency"}
    return {**rest, "dependency": "singleton"} if kept else rest
