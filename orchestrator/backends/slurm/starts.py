"""When a job would start, as Slurm estimates it, and which of several sizes to take for that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from orchestrator.errors import OrchError
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit
from orchestrator.style import seconds


class Start(Frozen):
    """The answer of `sbatch --test-only` for one size of a job."""

    nodes: int
    at: str = ""  # local ISO-8601 time, "" when Slurm could not say
    refusal: str = ""  # why Slurm would not take it, or has no nodes for it today
    code: int = 0  # exit code that goes with it

    def wait_s(self, now: datetime) -> float | None:
        """Seconds from now, 0 for a time that has passed; None when unknown."""
        return max(0.0, (datetime.fromisoformat(self.at) - now).total_seconds()) if self.at else None

    def text(self, now: datetime) -> str:
        wait = self.wait_s(now)
        if wait is None:
            return f"no start in sight ({self.refusal})" if self.refusal else "no start in sight"
        if wait < 60:
            return "starts at once"
        in_ = f"{wait / 60:.0f} min" if wait < 3600 else seconds(wait)
        return f"starts about {self.at.replace('T', ' ')}, in {in_}"


def choose(starts: Sequence[Start], now: datetime, within_s: float) -> int:
    """Index of the size to submit: the first (largest) that starts soon enough, else the one that starts first.

    Where Slurm cannot tell for any, the first that it does not refuse. Raises OrchError when it refuses all.
    """
    waits = [start.wait_s(now) for start in starts]
    for index, wait in enumerate(waits):
        if wait is not None and wait <= within_s:
            return index
    known = [index for index, wait in enumerate(waits) if wait is not None]
    if known:
        return min(known, key=lambda index: waits[index])
    for index, start in enumerate(starts):
        if not start.refusal:
            return index
    sizes = ", ".join(str(start.nodes) for start in starts)
    raise OrchError(f"Slurm takes none of the sizes {sizes}: {starts[0].refusal}", Exit(starts[0].code))
