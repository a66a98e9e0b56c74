"""`python docs/make_pictures.py` draws docs/plan.svg, the picture of README.md, from the command
below it.

tests/docs/test_pictures.py draws it again and fails when the picture shows something else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMAND = ("plan", "cluster=h100x64", "parallel=tp8_pp4_zero1", "--plot")


def draw(path: Path) -> None:
    """Draws the picture as a user without own measurements gets it. Raises CalledProcessError."""
    # A plan names the user's data folder, and its hash covers the name: this one is everywhere.
    environment = {**os.environ, "ORCH_HOME": os.devnull, "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as folder:  # without a ./conf
        subprocess.run(
            [sys.executable, "-m", "orchestrator", *COMMAND, str(path.absolute())],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    draw(HERE / "plan.svg")
