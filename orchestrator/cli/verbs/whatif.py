"""`orch whatif`: compares plans, with the cost of training each on a number of tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from orchestrator.plan.interval import interval, plus_minus

if TYPE_CHECKING:
    from orchestrator.plan import Plan

GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from orchestrator.cli.parser import add_any

    parser.add_argument(
        "--case",
        metavar='"KEY=VALUE ..."',
        action="append",
        default=[],
        help="add a column with these overrides; repeatable",
    )
    add_any(parser)
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=float,
        help="tokens to train on, like 15e12 (default: those of train.steps)",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import shlex

    from orchestrator.cli.session import home
    from orchestrator.config.compose import load
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.build import build_plan
    from orchestrator.submit.cluster import ClusterResolver

    if args.tokens is not None and not 1 <= args.tokens <= 1e18:
        raise OrchError(f"--tokens {args.tokens:g}: must be 1 to 1e18", Exit.USAGE)
    plans = []
    resolve = ClusterResolver(home())
    for case in ["", *args.case]:
        try:
            case_overrides = shlex.split(case)
        except ValueError as error:
            raise OrchError(f"--case {case!r}: {error}", Exit.USAGE) from None
        config = load([*overrides, *case_overrides], args.config_dir)
        plan = build_plan(
            config,
            resolve(config.cluster),
            args.any,
            resolve.profile(config),
        )
        plans.append((case or "as given", plan))
    columns = [column(name, plan, args.tokens) for name, plan in plans]
    if args.json:
        import json

        print(json.dumps(columns))
    else:
        from orchestrator.cli.terminal import style

        print(page(columns, style().width))
    return Exit.DONE


def column(name: str, plan: Plan, tokens: float | None) -> dict[str, Any]:
    """Returns a plan as plain values: seconds, bytes, tokens, hours."""
    par = plan.parallel
    train = plan.job.train
    target = tokens or float(train.steps) * par.global_batch_tokens
    seconds = target / par.global_batch_tokens * plan.time.step_s
    low, high = interval(plan.time.step_s, plan.time.sd)
    degrees = [
        f"{axis}{getattr(par, axis)}"
        for axis in ("tp", "cp", "ep", "pp", "dp")
        if getattr(par, axis) > 1
    ]
    return {
        "case": name,
        "cluster": plan.cluster.name,
        "gpus": par.world_size,
        "layout": "_".join([*degrees, f"zero{par.zero}"]),
        "pipeline": (
            f"{par.schedule} x {par.micro_batches} of {par.micro_batch_size}, vpp {par.vpp}"
        ),
        "recompute": train.recompute,
        "seq_len": train.seq_len,
        "batch_tokens": par.global_batch_tokens,
        "step_s": plan.time.step_s,
        "step_low_s": low,
        "step_high_s": high,
        "step_sd": plan.time.sd,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "mfu": plan.mfu,
        "memory_bytes": plan.memory.total,
        "memory_sd": plan.memory.sd,
        "fits": plan.memory.total <= plan.memory.capacity,
        "limited_by": plan.time.limited_by.split(":")[0],
        "target_tokens": target,
        "days": seconds / 86400,
        "gpu_hours": seconds / 3600 * par.world_size,
    }


def page(columns: list[dict[str, Any]], width: int = 80) -> str:
    rows = [[label, *(show(column) for column in columns)] for label, show in ROWS]
    base = columns[0]
    for key, label in (
        ("step_s", "step against the first"),
        ("gpu_hours", "GPU-hours against the first"),
    ):
        if len(columns) > 1:
            rows.append(
                [label, *("" if c is base else f"{c[key] / base[key] - 1:+.1%}" for c in columns)]
            )
    # As many columns side by side as the width allows, then a further block below.
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    blocks = [[0]]
    room = width - widths[0]
    for index, column_width in enumerate(widths[1:], start=1):
        if room < column_width + 2 and len(blocks[-1]) > 1:
            blocks.append([0])
            room = width - widths[0]
        blocks[-1].append(index)
        room -= column_width + 2
    texts = [
        "\n".join("  ".join(row[i].ljust(widths[i]) for i in block).rstrip() for row in rows)
        for block in blocks
    ]
    return "\n\n".join(texts)


def _memory(plan_column: dict[str, Any]) -> str:
    size = f"{plan_column['memory_bytes'] / GIB:.3g} GiB{plus_minus(plan_column['memory_sd'])}"
    return size if plan_column["fits"] else f"{size}, DOES NOT FIT"


ROWS = (
    ("", lambda c: str(c["case"])),
    ("cluster", lambda c: f"{c['cluster']}, {c['gpus']:,} GPUs"),
    ("layout", lambda c: str(c["layout"])),
    ("pipeline", lambda c: str(c["pipeline"])),
    ("recompute", lambda c: str(c["recompute"])),
    ("sequence, batch", lambda c: f"{c['seq_len']:,}, {c['batch_tokens'] / 1e6:.3g} M tokens"),
    ("step", lambda c: f"{c['step_s']:.4g} s{plus_minus(c['step_sd'])}"),
    ("tokens/s/GPU, MFU", lambda c: f"{c['tokens_per_s_per_gpu']:,.0f}, {c['mfu']:.1%}"),
    ("memory", _memory),
    ("limited by", lambda c: str(c["limited_by"])),
    ("to", lambda c: f"{c['target_tokens'] / 1e9:,.6g} G tokens"),
    ("days", lambda c: f"{c['days']:,.1f}"),
    ("GPU-hours", lambda c: f"{c['gpu_hours']:,.0f}"),
)
