"""The pages of `orch verify`: verdicts for a terminal, and docs/parity.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.plan.parity import ALWAYS, LIMITS, Errors, Verdict
from orchestrator.style import GRAY, GREEN, RED, YELLOW, Style

from .matrix import AXES, MODELS, SECTIONS, UNEQUAL, Entry

COLOUR = {"equal": GREEN, "DIFFERENT": RED, "failed": RED, "refused": YELLOW}
COLUMNS = ("loss", "grad", "norm", "weight")
CELL_COLUMNS = 7  # that say which cell a row of the page is


def lines(verdict: Verdict, look: Style) -> list[str]:
    """Returns the lines of a verdict: four errors per precision, the parameter with the largest
    error, and the loss term or state without gradient with the largest error."""
    verdict_word = look.paint(f"{verdict.word:<9}", COLOUR[verdict.word], bold=True)
    rows = [f"{verdict_word} {look.paint(verdict.name, bold=True)}"]
    if verdict.note:
        rows.append(look.paint(f"          {verdict.note}", GRAY))
    if verdict.refused or verdict.failed:
        return [*rows, f"          {verdict.refused or verdict.failed}"]
    for precision, errors in verdict.errors.items():
        numbers = "  ".join(f"{name} {getattr(errors, name):7.1e}" for name in COLUMNS)
        limit = look.paint(f"<= {LIMITS[precision]:.0e}", GRAY)
        name, _, subset = precision.partition(", ")
        rows.append(f"  {name}  {numbers}  {limit}{subset and ' of ' + subset}")
        further_error = f"; {errors.worst_more} {errors.more:.1e}" if errors.worst_more else ""
        parameters = f"gradient of {errors.worst_grad}, {errors.worst_weight}"
        rows.append(look.paint(f"        worst: {parameters}{further_error}", GRAY))
    return rows


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts the verdicts: "3 equal, 1 refused"."""
    counts = Counter(verdict.word for verdict in verdicts)
    return (
        ", ".join(f"{counts[outcome]} {outcome}" for outcome in COLOUR if counts[outcome])
        or "nothing to verify"
    )


# -------------------------------------------------------------------------------- docs/parity.md


def document(entries: Sequence[Entry], verdicts: dict[str, Verdict], versions: str) -> str:
    """Returns docs/parity.md: every cell with its measured errors, or the reason of its refusal."""
    blocks = [HEAD.format(**{f"{name}_limit": f"{LIMITS[name]:.0e}" for name in ALWAYS})]
    blocks += [
        f"Measured with {versions}: **{summary(list(verdicts.values()))}** of {len(entries)}"
        " cells.\n"
    ]
    largest = _largest(list(verdicts.values()))
    if largest:
        blocks += [f"Largest error of all equal cells: {largest}.\n"]
    blocks += [_models(), _techniques()]
    for section, title in SECTIONS.items():
        rows = [_row(entry, verdicts[entry.name]) for entry in entries if entry.section == section]
        if rows:
            blocks += [f"## {title}\n", *TABLE, *rows, ""]
    return "\n".join(blocks)


HEAD = """# Parity: every layout against one process

Each cell trains a small model for two optimizer steps on a layout of real processes (gloo, CPU),
and once in one process that consists of torch's own functions (autograd, `clip_grad_norm_`,
`AdamW`) on the same tokens, in float64. On every rank, the loss, the gradient of every parameter,
the norm before clipping and every weight after each step are compared, as the largest difference
over the largest element of the tensor. A layout in float64 must agree to {fp64_limit}, in fp32 to
{fp32_limit} (`trainer/verify/compare.py` has the rule for near-zero tensors). The techniques of the
papers with their cells are in [techniques.md](techniques.md).

Every sample masks a different share of its targets, so ranks and micro-batches have unequal numbers
of valid tokens. With "empty" masks, a third of the micro-batches have no target, never the same in
both steps. The column of micro-batches has their number on a replica times their samples; gradients
of micro-batches of one or three samples are clipped to a norm of 0.1. The vocabulary is 257, which
no tp divides. "packed" samples have three documents that must not see each other. Refused cells
name the rule that refuses them; `orch` refuses the same at start. Products in 8 bits are compared
in float64 alone (docs/precision.md).

Written by `orch verify --matrix full` (`make verify`); do not edit.
"""

TABLE = (
    (
        "| layout | ranks | model | buckets | micro-batches | text | masks "
        "| fp64 loss | grad | norm | weights | fp32 loss | grad | norm | weights | verdict |"
    ),
    "|---|--:|---|---|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
)


def read_equal(page: str, entries: Sequence[Entry], versions: str) -> dict[str, Verdict]:
    """Returns those of the cells that a page has as equal, by name, with their errors to one digit.
    A page that was measured with other versions has none."""
    rows = dict[tuple[str, ...], list[str]]()
    if f"\nMeasured with {versions}:" not in page:
        return {}
    for line in page.splitlines():
        columns = [column.strip() for column in line.strip().strip("|").split("|")]
        if columns[-1] == "equal":
            rows[tuple(columns[:CELL_COLUMNS])] = columns[CELL_COLUMNS:-1]
    verdicts = dict[str, Verdict]()
    for entry in entries:
        numbers = rows.get(tuple(_cell(entry)))
        if numbers is not None:
            verdicts[entry.name] = Verdict(name=entry.name, errors=_read_errors(numbers))
    return verdicts


def _read_errors(numbers: list[str]) -> dict[str, Errors]:
    """Reads the columns of errors of a row."""
    width = len(COLUMNS)
    errors = dict[str, Errors]()
    for precision, start in zip(ALWAYS, range(0, len(numbers), width), strict=True):
        shown = numbers[start : start + width]
        if all(shown):
            errors[precision] = Errors(
                loss=float(shown[0]),
                grad=float(shown[1]),
                norm=float(shown[2]),
                weight=float(shown[3]),
                worst_grad="",
                worst_weight="",
            )
    return errors


def _cell(entry: Entry) -> list[str]:
    """Returns the columns of a row that say which cell it is."""
    layout = (
        " + ".join(technique.name for technique in entry.techniques) or "one process, our engine"
    )
    model, buckets, *rest = entry.settings
    return [layout, str(entry.processes), model, buckets.split()[0], *rest]


def _row(entry: Entry, verdict: Verdict) -> str:
    cells = _cell(entry)
    for precision in ALWAYS:
        cells += _numbers(verdict.errors.get(precision))
    reason = verdict.refused or verdict.failed
    cells.append(f"{verdict.word}: {_escape(reason)}" if reason else verdict.word)
    return f"| {' | '.join(cells)} |"


def _numbers(errors: Errors | None) -> list[str]:
    return ["" if errors is None else f"{getattr(errors, name):.0e}" for name in COLUMNS]


def _escape(reason: str) -> str:
    return reason.replace("|", "\\|")


def _largest(verdicts: Sequence[Verdict]) -> str:
    equal = [verdict for verdict in verdicts if verdict.equal]
    return ", ".join(
        f"{precision} {max(errors):.0e} (limit {LIMITS[precision]:.0e})"
        for precision in ALWAYS
        if (errors := [v.errors[precision].largest for v in equal if precision in v.errors])
    )


def _models() -> str:
    rows = []
    for name, fields in MODELS.items():
        rest = [
            f"{key} {value}" for key, value in fields.items() if key not in ("vocab", "max_seq_len")
        ]
        rows.append(f"- `{name}`: {', '.join(rest)}")
    return (
        "Models (by default: RMSNorm, rotary positions, gated SiLU, no biases, untied):\n\n"
        + "\n".join(rows)
        + "\n"
    )


def _techniques() -> str:
    axes = {**AXES, "unequal replicas (the first takes one micro-batch more)": UNEQUAL}
    rows = [
        f"- {axis}: {', '.join(technique.name for technique in techniques)}"
        for axis, techniques in axes.items()
    ]
    return "Techniques (a cell has at most one per axis):\n\n" + "\n".join(rows) + "\n"
