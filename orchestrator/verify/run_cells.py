"""Runs `python -m trainer.verify` on cells, and reads its verdicts as they come."""

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
    """Yields the verdicts in the order in which they become known. Raises OrchError if the trainer
    did not judge every cell."""
    if not cells:
        return
    with tempfile.TemporaryDirectory(prefix="orch-verify-") as folder:
        path = Path(folder) / "cells.jsonl"
        errors = Path(folder) / "stderr"
        documents = [msgspec.json.encode(cell) for cell in cells]
        path.write_bytes(b"".join(document + b"\n" for document in documents))
        command = [
            *start.command("trainer.verify"),
            str(path),
            "--together",
            str(together),
        ]
        # One thread: the single process of a cell runs beside the ranks of other cells.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        remaining = len(cells)
        with running(command, errors, environment) as (lines, _):
            for line in lines:
                remaining -= 1
                yield msgspec.json.decode(line, type=Verdict)
        if remaining:
            raise OrchError(
                f"trainer.verify stopped before the last {remaining} cells: {last_line(errors)}",
                Exit.INTERNAL,
            )


@contextmanager
def running(
    command: Sequence[str],
    errors: Path,
    environment: Mapping[str, str],
) -> Iterator[tuple[Iterable[bytes], Callable[[], int]]]:
    """Runs `command` during the block, and yields the lines that it prints and a function that
    waits for its exit code. Its stderr goes to the file `errors`.

    The process is killed at the end of the block.
    """
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )
    assert process.stdout
    try:
        yield process.stdout, process.wait
    finally:
        process.kill()  # the ranks that it started end with it
        process.wait()
        process.stdout.close()


def last_line(errors: Path) -> str:
    """Returns the last line that a process wrote to its stderr."""
    lines = errors.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
