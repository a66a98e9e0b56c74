"""docs/reliability.md's table, from the lines of benchmarks/results/reliability.jsonl. Pure but for
the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.pages import filled
from orchestrator.drill.trial import quantile


def table(lines: list[dict]) -> str:
    groups: dict[tuple[str, str, str], dict[str, list[dict]]] = {}
    for line in lines:
        groups.setdefault((line["workers"], line["fault"], line["position"]), {}).setdefault(
            line["system"], []
        ).append(line)
    head = [
        "ranks",
        "fault",
        "victim",
        "orch",
        "noticed p50 / p95",
        "steps p50 / p95",
        "lost",
        "torchrun",
        "steps p50 / p95",
        "lost",
    ]
    text = [
        "| " + " | ".join(head) + " |",
        "|" + "|".join("---" if i < 3 else "--:" for i in range(len(head))) + "|",
    ]
    for (workers, fault, position), systems in sorted(groups.items()):
        ours = systems.get("orch", [])
        theirs = systems.get("torchrun", [])
        cells = [
            workers,
            fault,
            position,
            _rate(ours),
            _pair(ours, "noticed_s"),
            _pair(ours, "stepping_s"),
            _lost(ours),
        ]
        cells += [_rate(theirs), _pair(theirs, "stepping_s"), _lost(theirs)]
        text.append("| " + " | ".join(cells) + " |")
    ours = [line for line in lines if line["system"] == "orch"]
    theirs = [line for line in lines if line["system"] == "torchrun"]
    text += ["", f"All together: orch {_rate(ours)}, torchrun {_rate(theirs)}."]
    text += [f"Machine: {line}." for line in sorted({line["machine"] for line in lines})]
    commits = ", ".join(
        f"{commit} ({n})" for commit, n in Counter(line["commit"] for line in lines).items()
    )
    loads = sorted(line["load"] for line in lines)
    if loads:
        text += [
            f"Commits (trials): {commits}. Load average {loads[0]} to {loads[-1]}, median"
            f" {quantile(loads, 0.5)}."
        ]
    seen = [line for line in ours if "two_writers" in line]
    wrong = sum(bool(line["two_writers"] or line["samples_wrong"]) for line in seen)
    text += [
        f"Two writers of an epoch, or a sample not trained on once: {wrong} of {len(seen)} trials"
        " under orch."
    ]
    flips = [line for line in ours if line["fault"] == "bit_flip" and line["ok"]]
    if flips:
        found = sum(bool(line.get("rejected")) for line in flips)
        text += [
            f"Of {len(flips)} flipped bits {found} were met at a resume and named; the others a"
            " newer save replaced."
        ]
    bad = Counter(
        f"{line['system']}, {line['fault']}, {line['position']}: {line['problem']}"
        for line in lines
        if not line["ok"]
    )
    text += (
        ["", "What did not go on:", "", *(f"- {n} x {what}" for what, n in sorted(bad.items()))]
        if bad
        else []
    )
    return "\n".join(text)


def write(lines: list[dict], page: Path) -> None:
    """Puts the table in its place on the page."""
    page.write_text(filled(page.read_text(), "trials", table(lines)))


def _rate(lines: list[dict]) -> str:
    return f"{sum(line['ok'] for line in lines)} of {len(lines)}" if lines else "-"


def _pair(lines: list[dict], name: str) -> str:
    values = [line[name] for line in lines if line["ok"] and line.get(name) is not None]
    return f"{quantile(values, 0.5):.2f} / {quantile(values, 0.95):.2f} s" if values else "-"


def _lost(lines: list[dict]) -> str:
    values = [
        line["lost_steps"] for line in lines if line["ok"] and line.get("lost_steps") is not None
    ]
    return str(max(values)) if values else "-"
