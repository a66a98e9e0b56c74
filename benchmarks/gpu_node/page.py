"""The tables of docs/performance.md about a node of GPUs, from what has been measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.pages import filled

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
#: The rows about the node itself.
CEILINGS = ("ceilings", "NCCL")
SIDES = {"ours": "ours", "loop": "plain loop", "titan": "torchtitan"}


def line(row: dict[str, Any]) -> str:
    """One line for people."""
    if "ours" not in row:
        return _rates(row)
    parts = []
    for side, name in SIDES.items():
        if side in row:
            part = row[side]
            parts.append(
                f"{name} failed: {part['failed']}" if "failed" in part else f"{name} {_speed(part)}"
            )
    return ", ".join(parts)


def _speed(part: dict[str, Any]) -> str:
    return (
        f"{part['step_s']:.3f} s, {part['of_ceiling']:.0%} of the product,"
        f" {part['peak_gib']:.1f} GiB"
    )


def table(record: dict[str, Any]) -> str:
    """All cases, and what the node itself can do."""
    rows = [
        "| technique | words | step, s | planned | MFU | of the product | peak GiB | planned |"
        " exposed, s | beside |"
    ]
    rows += ["|---|---|---|---|---|---|---|---|---|---|"]
    cases = {name: row for name, row in record["rows"].items() if name not in CEILINGS}
    for name, row in cases.items():
        words = " ".join(f"`{word}`" for word in row.get("words", []))
        rows.append(f"| {name} | {words} | {_cells(row)} |")
    gpu = next((row["gpu"] for row in cases.values() if "gpu" in row), "?")
    rates = [_rates(record["rows"].get(name, {})) for name in CEILINGS]
    about = f"{record['gpus']} x {gpu}, all at once: {'; '.join(filter(None, rates))}."
    about += f" Commit {record['conditions']['commit'][:7]}, torch {record['conditions']['torch']}."
    return "\n".join([*rows, "", about])


def _rates(row: dict[str, Any]) -> str:
    """What the node itself can do, of a row of `CEILINGS`."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    rates = []
    if "matmul_flops" in row:
        rates.append(f"best bf16 product {row['matmul_flops'] / 1e12:.1f} TFLOP/s")
        rates.append(f"memory {row['triad_bytes_per_s'] / 1e9:.0f} GB/s (triad)")
    for name, sizes in row.get("nccl", {}).items():
        size = max(sizes, key=lambda size: sizes[size])
        rates.append(f"{name} {sizes[size] / 1e9:.0f} GB/s at {int(size) >> 20} MiB")
    return "; ".join(rates)


def _cells(row: dict[str, Any]) -> str:
    ours = row.get("ours", row)
    if "failed" in ours:
        return f"failed: {ours['failed']} | | | | | | | "
    mfu = f"{ours['mfu']:.1%}" if ours["mfu"] else "-"
    exposed = ", ".join(
        f"{axis} {seconds:.3f}" for axis, seconds in row["exposed_s"].items() if seconds > 5e-4
    )
    beside = ", ".join(
        f"{name}"
        f" {'failed' if 'failed' in row[side] else format(ours['step_s'] / row[side]['step_s'], '.2f')}"
        for side, name in SIDES.items()
        if side != "ours" and side in row
    )
    memory = f"{ours['peak_gib']:.1f} | {row['planned_gib']:.1f}"
    speed = f"{ours['step_s']:.3f} | {row['planned_s']:.3f} | {mfu} | {ours['of_ceiling']:.1%}"
    return f"{speed} | {memory} | {exposed or '-'} | {beside or '-'}"


def write(record: dict[str, Any], page: Path) -> None:
    """Puts the table in its place on the page."""
    page.write_text(filled(page.read_text(), "gpu node", table(record)))
