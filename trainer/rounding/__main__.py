"""`python -m trainer.rounding REQUEST` reads a file with one request and prints answers, one JSON
object per line. `orch precision` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from orchestrator.plan import Exit
from orchestrator.plan.rounding.measurement import Request
from trainer.errors import TrainerError, exit_code


def main(request_file: str) -> int:
    """Runs the program; an error is one line on stderr and the exit code of the contract."""
    try:
        request = msgspec.json.decode(Path(request_file).read_bytes(), type=Request)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"trainer.rounding: {request_file}: {error}", file=sys.stderr)
        return Exit.CONFIG

    from .measure import measure  # a bad file is refused before a second of imports

    try:
        for answer in measure(request):
            print(msgspec.json.encode(answer).decode(), flush=True)
    except (TrainerError, OSError, MemoryError) as error:
        print(f"trainer.rounding: {error}", file=sys.stderr)
        return exit_code(error)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
