"""The page of `orch plan --explain`."""

from __future__ import annotations

from orchestrator.planner.explain import Explanation

GIB = 1 << 30


def render(found: Explanation, step_s: float) -> str:
    lines = ["Why", "the step is:"]
    lines += [f"  {term.seconds:>9.4g} s  {term.seconds / step_s:>6.1%}  {term.name}" for term in found.terms]
    lines.append(f"limited by {found.limited_by}")
    if found.over_bytes:
        lines += ["", f"It does not fit: the fullest rank lacks {found.over_bytes / GIB:.2f} GiB. It holds:"]
        for name, size in found.categories:
            alone = "  (without it the plan would fit)" if size >= found.over_bytes else ""
            lines.append(f"  {size / GIB:>9.2f} GiB  {name}{alone}")
    what = "that make it fit, fastest first" if found.over_bytes else "that make it faster"
    lines += ["", f"Changes {what} (one thing each of {found.tried} tried; else the best of all layouts):"]
    for change in found.changes:
        faster = f"{change.step_s:.4g} s a step ({-change.saves_s / step_s:+.1%})"
        memory = f"{change.memory.total / GIB:.1f} GiB ({-change.frees_bytes / GIB:+.1f})"
        lines.append(f"  {' '.join(change.words):<48}  {faster:<24}  {memory}")
    if not found.changes:
        lines.append("  none: nothing fits these GPUs" if found.over_bytes else "  none: no single change is faster")
    if found.warnings:
        lines += ["", "Warnings, each with its price:"] + [f"  {line}" for line in found.warnings]
    return "\n".join(lines)
