"""`orch export [run] --out DIR`: writes the weights of a checkpoint as one safetensors file with
full names."""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        help="handle, id, or the beginning of one (default: the newest run)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder for model.safetensors",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="step of the checkpoint (default: the newest that verifies)",
    )
    dtypes = ("fp64", "fp32", "bf16", "fp16")
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        help="dtype of the weights (default: exactly as saved)",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import json
    import sys

    from orchestrator import start
    from orchestrator.cli.session import find_run, plan_of_run
    from orchestrator.plan.worker import checkpoint_dir

    folder = find_run(args.run)
    checkpoints = checkpoint_dir(plan_of_run(folder).job.checkpoint.dir, str(folder.path))
    step = [] if args.step is None else ["--step", str(args.step)]
    dtype = ["--dtype", args.dtype] if args.dtype else []
    output = start.output(
        "trainer.export",
        str(checkpoints),
        str(args.out),
        *dtype,
        *step,
    )
    if args.json:
        print(output.strip())
        return Exit.DONE
    export = json.loads(output)
    for problem in export["rejected"]:
        print(f"warning: skipped {problem}", file=sys.stderr)
    print(
        f"{export['file']}: {export['parameters']:,} parameters in {export['tensors']} tensors,"
        f" {export['dtype']}, {export['bytes']:,} bytes, step {export['step']} of"
        f" {export['run_id']}"
    )
    return Exit.DONE
