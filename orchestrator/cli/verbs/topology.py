"""`orch topology show|import|diff`: shows, imports and compares descriptions of a network."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.cluster.model import Topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "import", "diff"))
    files_help = (
        "Slurm topology.conf or .yaml, `scontrol show topology` or `nodes`, `kubectl get nodes -o"
        " json`, ibnetdiscover"
    )
    files_help += ", or orch's own format; several files describe one cluster (diff: exactly two)"
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=files_help,
    )
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="format of the files, if orch does not recognise it",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        help="the topology of a file with several; for import the name to give",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        default="auto",
        help="family of Kubernetes labels",
    )
    parser.add_argument(
        "--levels",
        metavar="T=LABEL,...",
        help="your own Kubernetes labels, coarse to fine",
    )
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        help="output format: conf, yaml, block (Slurm), orch, svg or text",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write to this file, not to standard output",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cluster.read import merge

    if args.action == "diff":
        return _diff(args)
    topology = merge([_read(args, path) for path in args.files])
    if args.json:
        _write(args, _as_json(topology))
        return Exit.DONE
    from orchestrator.cluster.export import FORMATS, export
    from orchestrator.errors import did_you_mean

    output_format = args.to or ("orch" if args.action == "import" else "text")
    if output_format not in FORMATS:
        raise OrchError(f"--to {output_format}: {did_you_mean(output_format, FORMATS)}", Exit.USAGE)
    document = export(topology, output_format)
    if args.action == "show" and output_format == "text":
        document = f"{summary(topology)}\n{document}"
    _write(args, document)
    return Exit.DONE


def _diff(args: argparse.Namespace) -> int:
    from orchestrator.cluster.diff import diff

    if len(args.files) != 2:
        raise OrchError("`orch topology diff` compares exactly two files", Exit.USAGE)
    lines = diff(*(_read(args, path) for path in args.files))
    if args.json:
        import json

        _write(args, json.dumps({"changes": lines}))
    else:
        _write(args, "\n".join(lines) or "no difference")
    return Exit.DONE


def _read(args: argparse.Namespace, path: Path) -> Topology:
    from orchestrator.cluster.importers.kubernetes import profile_of
    from orchestrator.cluster.read import read

    return read(
        path,
        args.format,
        args.name,
        profile_of(args.levels) if args.levels else args.profile,
    )


def summary(topology: Topology) -> str:
    """Returns one line: nodes, nodes out of service, tiers with their switches and sizes, GPUs per
    node."""
    nodes = topology.nodes
    phrases = [", ".join([f"{len(nodes)} nodes", *_not_free(topology)])]
    for tier in topology.tiers:
        sizes = sorted({len(members) for members in tier.switches.values()})
        span = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        rate = f", {tier.gbit_per_s:g} Gb/s" if tier.gbit_per_s else ""
        over = f", {tier.oversubscription:g}:1" if tier.oversubscription else ""
        phrases.append(f"{tier.name}: {len(tier.switches)} of {span} nodes{rate}{over}")
    machines = topology.machines.values()
    gpus = {machine.gpus for machine in machines} | {
        kind.gpus for machine in machines for kind in machine.other_gpus
    }
    gpus.discard(0)
    if gpus:
        phrases.append(f"{'/'.join(map(str, sorted(gpus)))} GPUs per node")
    return "; ".join(phrases)


def _not_free(topology: Topology) -> list[str]:
    """Counts the nodes that cannot take a job, by reason."""
    from orchestrator.cluster.model import GPU_REASONS

    reasons = (machine.reason for machine in topology.machines.values() if not machine.free)
    kinds = Counter(GPU_REASONS.get(reason, "out of service") for reason in reasons)
    return [f"{count} {kind}" for kind, count in sorted(kinds.items())]


def _as_json(topology: Topology) -> str:
    import msgspec

    return msgspec.json.encode(
        {
            "topology": topology,
            "nodes": topology.nodes,
            "free": topology.free,
        }
    ).decode()


def _write(args: argparse.Namespace, document: str) -> None:
    if args.out is None:
        print(document.rstrip("\n"))
        return
    from orchestrator.cli.terminal import write_file

    write_file(args.out, (document.rstrip("\n") + "\n").encode(), "--out")
