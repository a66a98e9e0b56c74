"""python -m benchmarks.vs_torch.page: put the tables of measured ratios into docs/performance.md,
from the results.

Only what lies between a pair of markers is replaced; the words around it are written by hand.
"""

from __future__ import annotations

import json

from benchmarks.pages import filled

from .harness import ROOT

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"


def techniques() -> str:
    cases = json.loads((RESULTS / "vs_torch.json").read_text())["cases"]
    lines = [
        (
            "| size | ours | torch's | wall, median | min–max | best of each | processor time |"
            " ours, s | loss differs |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in cases.items():
        size, _, pair = name.partition(": ")
        ours, _, native = pair.partition(" / ")
        spread = f"{row['ratio_min']:.2f}–{row['ratio_max']:.2f}"
        numbers = (
            f"**{row['ratio']:.2f}** | {spread} | {row['best_ratio']:.2f} | {row['cpu_ratio']:.2f}"
        )
        lines.append(
            f"| {size} | {ours} | {native} | {numbers} | {row['ours_s']:.2f} |"
            f" {row['loss_difference']:.0e} |"
        )
    met = [row["conditions"] for row in cases.values()]
    loads = [one["load_average"][0] for one in met]
    commits = sorted({one["commit"][:7] for one in met})
    rounds = sorted({one["settings"]["rounds"] for one in met})
    first = met[0]
    where = (
        f"{first['cores']} cores ({first['cpu']}), torch {first['torch']}, Python {first['python']}"
    )
    lines += [
        "",
        (
            f"Measured on {where}, at commit {', '.join(commits)}; {' or '.join(map(str, rounds))}"
            f" rounds a case; load average {min(loads):.0f} to {max(loads):.0f} while it"
            f" ran{_priority(met)}."
        ),
    ]
    return "\n".join(lines)


def _priority(met: list[dict]) -> str:
    many = sum(1 for one in met if one["realtime"])
    return f", {many} of {len(met)} cases at real-time priority" if many else ""


def collectives() -> str:
    record = json.loads((RESULTS / "collectives.json").read_text())
    sizes = sorted({int(kib) for row in record["collectives"].values() for kib in row})
    head = " | ".join(f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB" for kib in sizes)
    lines = [f"| | {head} |", "|---|" + "---|" * len(sizes)]
    for name, row in record["collectives"].items():
        lines.append(
            f"| {name} | " + " | ".join(f"{row[str(kib)]['ratio']:.2f}" for kib in sizes) + " |"
        )
    met = record["conditions"]
    lines += [
        "",
        f"Commit {met['commit'][:7]}, load average {met['load_average'][0]:.0f}{_priority([met])}.",
    ]
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text()
    for name, make in (("techniques", techniques), ("collectives", collectives)):
        text = filled(text, name, make())
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
