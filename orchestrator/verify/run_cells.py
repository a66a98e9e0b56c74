"""Start `python -m trainer.verify` on cells, and read its verdicts as they come."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from orchestrator import start
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.parity import Cell, Verdict


def run_cells(cells: Sequence[Cell], together: int = 1) -> Iterator[Verdict]:
    """Verdicts in the order in which they become known. Raises OrchError if the trainer did not
    judge every cell."""
    if not cells:
        return
    with tempfile.TemporaryDirectory(prefix="orch-verify-") as folder:
        path = Path(folder) / "cells.jsonl"
        errors = Path(folder) / "stderr"
        path.write_bytes(b"".join(msgspec.json.encode(cell) + b"\n" for cell in cells))
        command = [*start.command("trainer.verify"), str(path), "--together", str(together)]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1"
        }  # the single process runs while other cells' ranks do
        remaining = len(cells)
        with running(command, errors, environment) as (lines, _):
            for line in lines:
                remaining -= 1
                yield msgspec.json.decode(line, type=Verdict)
        if remaining:
            raise OrchError(
                f"trainer.verify stopped with {remaining} cells to go: {last_line(errors)}",
                Exit.INTERNAL,
            )


@contextmanager
def running(
    command: Sequence[str], errors: Path, environment: Mapping[str, str]
) -> Iterator[tuple[Iterable[bytes], Callable[[], int]]]:
    """(lines that `command` prints, a function that waits for its exit code); stderr goes to the
    file `errors`.

    The process ends with the block, whatever ends that.
    """
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
    assert process.stdout
    try:
        yield process.stdout, process.wait
    finally:
        process.kill()  # ranks that it started die with it
        process.wait()
        process.stdout.close()


def last_line(errors: Path) -> str:
    """Of what a process wrote to its stderr."""
    written = errors.read_text(errors="replace").strip().splitlines()
    return written[-1] if written else "it printed nothing"
