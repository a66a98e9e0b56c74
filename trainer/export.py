"""`python -m trainer.export CHECKPOINTS OUT` writes the weights of a checkpoint as one file. `orch
export` starts it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from orchestrator.plan import Exit

from .errors import TrainerError, exit_code


def main(argv: list[str] | None = None) -> int:
    """Describes the written file as one JSON object; an error is one line on stderr and the exit
    code of the contract."""
    parser = argparse.ArgumentParser(
        "python -m trainer.export", description="A checkpoint's weights as one file."
    )
    parser.add_argument("checkpoints", type=Path, help="the folder that holds step-... folders")
    parser.add_argument("out", type=Path, help="folder for model.safetensors")
    parser.add_argument("--step", type=int, help="of this step (default: the newest that verifies)")
    parser.add_argument(
        "--dtype",
        choices=("fp64", "fp32", "bf16", "fp16"),
        help="default: as saved",
    )
    args = parser.parse_args(argv)

    # After parsing: wrong arguments are refused before a second of imports.
    from .checkpoint.export import export
    from .checkpoint.load import at_step, newest

    rejected: list[str] = []
    try:
        if args.step is None:
            checkpoint = newest(
                args.checkpoints,
                0,
                lambda path, problem: rejected.append(f"{path.name}: {problem}"),
            )
        else:
            checkpoint = at_step(args.checkpoints, args.step, rank=0)
        if checkpoint is None:
            print(f"trainer.export: no checkpoint in {args.checkpoints}", file=sys.stderr)
            return Exit.CONFIG
        exported = export(checkpoint, args.out, args.dtype, rejected)
    except (TrainerError, OSError) as error:
        print(f"trainer.export: {error}", file=sys.stderr)
        return exit_code(error)
    print(msgspec.json.encode(exported).decode())
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
