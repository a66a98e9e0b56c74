"""Finds the largest part of a step that is not compute, and what makes it smaller."""

from __future__ import annotations

from collections.abc import Container, Mapping

from orchestrator.plan.document import Parallel

ADVICE = {
    "tp": "tensor-parallel communication: lower tp",
    "cp": "context-parallel communication: lower cp or raise the sequence length a rank",
    "ep": "expert all-to-all: lower ep",
    "pp": "transfers between pipeline stages: lower pp or raise the micro-batch size",
    "dp": "gradient synchronisation: raise the micro-batches a step, or lower dp",
    "bubble": "the pipeline bubble: more micro-batches, virtual stages (vppN) or a lower pp",
}


def limited_by(
    step: float,
    compute: float,
    bubble: float,
    exposed: Mapping[str, float],
    parallel: Parallel,
    outside: Container[str],
) -> str:
    """Returns the largest term that is not compute, with the change that reduces it.

    Returns compute itself if no other term reaches 5 %.
    """
    terms = {**exposed, "bubble": bubble}
    worst = max(terms, key=lambda name: terms[name])
    share = terms[worst] / step
    if share < 0.05:
        return f"compute ({compute / step:.0%} of the step)"
    if (
        worst == "bubble"
        and parallel.pp > 1
        and parallel.micro_batches * parallel.vpp < parallel.pp
    ):
        return (
            f"the pipeline bubble ({share:.0%} of the step): fewer micro-batches than stages; raise"
            " the global batch"
        )
    inside = (
        ", so that its groups stay inside one NVLink domain"
        if worst in ("tp", "ep") and worst in outside
        else ""
    )
    return f"{ADVICE[worst]}{inside} ({share:.0%} of the step)"
