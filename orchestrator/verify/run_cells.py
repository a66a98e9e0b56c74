"""Start `python -m trainer.verify` on cells, and read its verdicts as they come."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.parity import Cell, Verdict


def run_cells(cells: Sequence[Cell], together: int = 1) -> Iterator[Verdict]:
    """Verdicts in the order in which they become known. Raises OrchError if the trainer did not judge every cell."""
    if not cells:
        return
    with tempfile.TemporaryDirectory(prefix="orch-verify-") as folder:
        path, errors = Path(folder) / "cells.jsonl", Path(folder) / "stderr"
        path.write_bytes(b"".join(msgspec.json.encode(cell) + b"\n" for cell in cells))
        command = [sys.executable, "-m", "trainer.verify", str(path), "--together", str(together)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # the single process runs while other cells' ranks do
        with errors.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
        assert process.stdout
        left = len(cells)
        try:
            for line in process.stdout:
                left -= 1
                yield msgspec.json.decode(line, type=Verdict)
        finally:
            process.kill()  # its ranks die with it
            process.wait()
            process.stdout.close()
        if left:
            last = errors.read_text(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
            raise OrchError(f"trainer.verify stopped with {left} cells to go: {last[0]}", Exit.INTERNAL)
