"""Verdicts for a terminal, and docs/parity.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.plan.parity import ALWAYS, LIMITS, Errors, Verdict
from orchestrator.style import GRAY, GREEN, RED, YELLOW, Style

from .matrix import AXES, MODELS, PARTS, UNEQUAL, Entry

COLOUR = {"equal": GREEN, "DIFFERENT": RED, "failed": RED, "refused": YELLOW}
COLUMNS = ("loss", "grad", "norm", "weight")


def lines(verdict: Verdict, look: Style) -> list[str]:
    """One verdict: a line of four numbers a precision, the parameter that is furthest off, and the
    term of the loss or state without gradient that is."""
    word = look.paint(f"{verdict.word:<9}", COLOUR[verdict.word], bold=True)
    found = [f"{word} {look.paint(verdict.name, bold=True)}"]
    if verdict.note:
        found.append(look.paint(f"          {verdict.note}", GRAY))
    if verdict.refused or verdict.failed:
        return [*found, f"          {verdict.refused or verdict.failed}"]
    for precision, errors in verdict.errors.items():
        numbers = "  ".join(f"{name} {getattr(errors, name):7.1e}" for name in COLUMNS)
        limit = look.paint(f"<= {LIMITS[precision]:.0e}", GRAY)
        name, _, alone = precision.partition(", ")
        found.append(f"  {name}  {numbers}  {limit}{alone and ' of ' + alone}")
        more = f"; {errors.worst_more} {errors.more:.1e}" if errors.worst_more else ""
        found.append(
            look.paint(
                f"        worst: gradient of {errors.worst_grad}, {errors.worst_weight}{more}", GRAY
            )
        )
    return found


def summary(verdicts: Sequence[Verdict]) -> str:
    """ "3 equal, 1 refused"."""
    counts = Counter(verdict.word for verdict in verdicts)
    return (
        ", ".join(f"{counts[word]} {word}" for word in COLOUR if counts[word])
        or "nothing to verify"
    )


# -------------------------------------------------------------------------------------------
#     docs/parity.md


def document(entries: Sequence[Entry], verdicts: dict[str, Verdict], versions: str) -> str:
    """The published table: every cell with what was measured, or why it is refused."""
    found = [HEAD.format(**{f"{name}_limit": f"{LIMITS[name]:.0e}" for name in ALWAYS})]
    found += [
        f"Measured with {versions}: **{summary(list(verdicts.values()))}** of {len(entries)}"
        " cells.\n"
    ]
    largest = _largest(list(verdicts.values()))
    if largest:
        found += [f"Largest error of all equal cells: {largest}.\n"]
    found += [_models(), _techniques()]
    for part, title in PARTS.items():
        rows = [_row(entry, verdicts[entry.name]) for entry in entries if entry.part == part]
        if rows:
            found += [f"## {title}\n", *TABLE, *rows, ""]
    return "\n".join(found)


HEAD = """# Parity: every layout against one process

Each cell trains a small model for two optimizer steps on a layout of real processes (gloo, CPU) and once in one process
that is made of torch's own pieces (autograd, `clip_grad_norm_`, `AdamW`) on the same tokens, in float64. Loss, the
gradient of every parameter, the norm before clipping and every weight after each step are compared on every rank, as
the largest difference over the largest element of the tensor. A layout in float64 must agree to {fp64_limit}, in fp32
to {fp32_limit} (how near-zero tensors are judged: `trainer/verify/compare.py`).

Every sample masks another share of its targets, so valid tokens are unequal over ranks and micro-batches; where masks
say "empty", a third of the micro-batches have no target at all, never the same in both steps. Micro-batches are given
as their number on a replica times their samples; those of one or three samples are clipped to a norm of 0.1. The
vocabulary is 257, which no tp divides. "packed" samples hold three documents that must not see each other. Refused
cells say which rule refuses them; `orch` refuses the same at start. Products in 8 bits are compared in float64 alone
(docs/precision.md).

Written by `orch verify --matrix full` (`make verify`); do not edit.
"""

TABLE = (
    (
        "| layout | ranks | model | buckets | micro-batches | text | masks "
        "| fp64 loss | grad | norm | weights | fp32 loss | grad | norm | weights | verdict |"
    ),
    "|---|--:|---|---|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
)


def _row(entry: Entry, verdict: Verdict) -> str:
    layout = (
        " + ".join(technique.name for technique in entry.techniques) or "one process, our engine"
    )
    model, buckets, *rest = entry.settings
    cells = [layout, str(entry.processes), model, buckets.split()[0], *rest]
    for precision in ALWAYS:
        cells += _numbers(verdict.errors.get(precision))
    reason = verdict.refused or verdict.failed
    cells.append(f"{verdict.word}: {_escape(reason)}" if reason else verdict.word)
    return f"| {' | '.join(cells)} |"


def _numbers(errors: Errors | None) -> list[str]:
    return ["" if errors is None else f"{getattr(errors, name):.0e}" for name in COLUMNS]


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _largest(verdicts: Sequence[Verdict]) -> str:
    equal = [verdict for verdict in verdicts if verdict.equal]
    return ", ".join(
        f"{precision} {max(found):.1e} (limit {LIMITS[precision]:.0e})"
        for precision in ALWAYS
        if (found := [v.errors[precision].largest for v in equal if precision in v.errors])
    )


def _models() -> str:
    rows = []
    for name, fields in MODELS.items():
        rest = [
            f"{key} {value}" for key, value in fields.items() if key not in ("vocab", "max_seq_len")
        ]
        rows.append(f"- `{name}`: {', '.join(rest)}")
    return (
        "Models (what is not said: RMSNorm, rotary positions, gated SiLU, no biases, untied):\n\n"
        + "\n".join(rows)
        + "\n"
    )


def _techniques() -> str:
    axes = {**AXES, "unequal replicas, of which the first takes one micro-batch more": UNEQUAL}
    rows = [
        f"- {axis}: {', '.join(technique.name for technique in techniques)}"
        for axis, techniques in axes.items()
    ]
    return "Techniques, of which a cell takes at most one an axis:\n\n" + "\n".join(rows) + "\n"
