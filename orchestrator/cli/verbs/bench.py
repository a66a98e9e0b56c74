"""`orch bench`: measures links and GPUs of a cluster, for later plans of that cluster."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.cluster.measured import Record
    from orchestrator.plan import Plan
    from orchestrator.style import Style


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-keep",
        action="store_true",
        help="show the measurements without saving them",
    )
    run_id_help = "id of the run (default: bench-<cluster>-<time>-<random>)"
    parser.add_argument("--run-id", metavar="ID", help=run_id_help)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import msgspec

    from orchestrator.bench import run as bench
    from orchestrator.cli.session import options_from_here
    from orchestrator.cli.streams import announce
    from orchestrator.cli.terminal import style
    from orchestrator.config.compose import load
    from orchestrator.run.folder import RunFolder, new_run_id
    from orchestrator.run.held_signals import HeldSignals
    from orchestrator.submit.submission import prepare, send

    config = bench.config_of(load(overrides, args.config_dir))
    run_id = args.run_id or new_run_id(f"bench-{config.cluster.name}", time.time())
    options = options_from_here(
        command=(sys.executable, "-P", "-m", bench.PROGRAM),
        in_place=True,
        run_id=run_id,
    )
    backend, [(config, plan, bundle)] = prepare(config, options)
    out = sys.stderr if args.json else sys.stdout
    look = style()
    with HeldSignals():
        handle = send(bundle, backend, options)
        announce(handle, out)
    events = bench.watch(
        RunFolder(Path(bundle.request.run_dir)),
        plan,
        backend,
        _Progress(out, look),
    )
    record = bench.record_of(config, handle, events)
    record_file = None if args.no_keep else bench.keep(config, record, options.home)
    if args.json:
        import json

        print(json.dumps({**msgspec.to_builtins(record), "file": record_file}))
    else:
        print(page(plan, record, record_file, look))
    return Exit.DONE


class _Progress:
    """Shows progress: on a terminal a bar that is overwritten, elsewhere one line per tenth."""

    def __init__(self, out: TextIO, look: Style):
        self._out = out
        self._look = look
        self._tenth = -1

    def __call__(self, done: int, total: int, label: str) -> None:
        from orchestrator.style import GREEN

        line = f"{self._look.bar(done / max(total, 1), 20, GREEN)} {done}/{total}  {label}"
        if self._out.isatty():
            self._out.write(f"\r\033[K{line}" + ("\n" if done == total else ""))
            self._out.flush()
        elif done * 10 // max(total, 1) > self._tenth:
            self._tenth = done * 10 // max(total, 1)
            print(line, file=self._out, flush=True)


def page(plan: Plan, record: Record, record_file: str | None, look: Style) -> str:
    """Returns the page of a measurement: measured and assumed rates, and seconds by message
    size."""
    from orchestrator.style import seconds, si

    described = {"nvlink": plan.cluster.nvlink} | {
        level.name: level for level in plan.cluster.levels
    }
    lines = ["", look.title("Links, one GPU's share")]
    lines.append(
        f"{'tier':<10}{'rate':>12}{'described':>14}{'latency':>10}{'described':>14}{'off by':>8}"
    )
    for name, link in record.links.items():
        expected = described[name]
        lines.append(
            f"{name:<10}{si(link.bytes_per_s, 'B/s'):>12}{si(expected.bytes_per_s, 'B/s'):>14}"
            f"{seconds(link.latency_s):>10}{seconds(expected.latency_s):>14}{link.error:>8.0%}"
        )
    lines += ["", look.title("Operations, slowest rank"), _table(record)]
    lines += ["", look.title("One GPU while all compute")]
    for row in record.compute:
        name = f"{row['precision']:<10}"
        lines.append(
            f"{name}{si(row['matmul_flops'], 'FLOP/s')} matmul,"
            f" {si(row['attention_flops'], 'FLOP/s')} attention"
        )
    memory = record.measured.memory_bytes_per_s
    launch = record.measured.launch_s
    lines.append(f"{'memory':<10}{si(memory, 'B/s')}, {seconds(launch)} per small operator")
    if host := record.host:
        lines += ["", look.title("The host of a node, for offloading")]
        lines.append(
            f"{'memory':<10}{si(host.memory_bytes_per_s, 'B/s')} of AdamW,"
            f" {host.memory_bytes / 2**30:,.0f} GiB"
        )
        lines.append(f"{'link':<10}{si(host.link_bytes_per_s, 'B/s')} between a GPU and the host")
        lines.append(
            f"{'disk':<10}{si(host.disk_bytes_per_s, 'B/s')}, {host.disk_bytes / 2**30:,.0f} GiB"
            " free"
        )
    lines.append("")
    if record_file:
        lines.append(f"saved in {record_file}")
        lines.append("plans of this cluster use it; cluster.measured=false plans without it")
    else:
        lines.append("not saved: later plans do not use it")
    return "\n".join(lines)


def _table(record: Record) -> str:
    from orchestrator.style import seconds

    sizes = sorted({row.size for row in record.rows})
    lines = [f"{'':<34}" + "".join(f"{size / 1024:>9,.0f}K" for size in sizes)]
    cells = {(row.level, row.operation, row.ranks, row.size): row.seconds for row in record.rows}
    for level, operation, ranks in dict.fromkeys(
        (row.level, row.operation, row.ranks) for row in record.rows
    ):
        durations = (cells.get((level, operation, ranks, size)) for size in sizes)
        columns = "".join(
            f"{seconds(duration) if duration is not None else '-':>10}" for duration in durations
        )
        lines.append(f"{level:<10}{operation:<16}{ranks:>3} ranks{columns}")
    return "\n".join(lines)
