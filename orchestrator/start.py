"""Starting modules of orch by location, with the file `orch_start.py` beside the packages."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from orchestrator import __version__, bundled
from orchestrator.errors import OrchError, check_installed
from orchestrator.plan.exits import Exit

#: Arguments after `python -P` that start a module by name, where no location is known. No other
#: package has this name.
BY_NAME = ("-m", "orch_start")
FILE = Path(__file__).resolve().parents[1] / "orch_start.py"


@cache
def code_version() -> str:
    """Returns the version of orch and a digest of its code, which distinguishes two states of one
    version."""
    orchestrator = FILE.with_name("orchestrator")
    trainer = bundled.folder("trainer", orchestrator)
    digest = hashlib.sha256()
    for package in (orchestrator, trainer):
        for file in sorted(package.rglob("*.py")):
            name = file.relative_to(package.parent)
            if bundled.INSIDE in name.parts:
                continue  # the trainer of a wheel, which has its own turn
            digest.update(f"{name}\0".encode())
            digest.update(file.read_bytes())
            digest.update(b"\0")
    return f"{__version__}+{digest.hexdigest()[:12]}"


def command(module: str, roots: Sequence[str] = ()) -> list[str]:
    """Returns the command that starts a module of orch under this interpreter, from the first of
    `roots` that has orch's packages, else from the running ones. Raises OrchError (65) for the
    trainer if torch is not installed."""
    if module.split(".")[0] == "trainer":
        check_installed("torch", "the bundled trainer")
    files = (Path(root, FILE.name) for root in roots)
    starter = next(filter(Path.is_file, files), FILE)
    return [sys.executable, "-P", str(starter), module]


def output(module: str, *arguments: str, stdin: str = "") -> str:
    """Runs a module of orch to its end and returns its output. Raises OrchError with the last line
    of its stderr and its exit code if it fails."""
    process = subprocess.run(
        [*command(module), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        error_lines = process.stderr.strip().splitlines() or ["it printed nothing"]
        message = error_lines[-1].removeprefix(f"{module}: ")
        codes = {int(code): code for code in Exit}
        raise OrchError(message, codes.get(process.returncode, Exit.INTERNAL))
    return process.stdout
