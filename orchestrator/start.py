"""How modules of ours are started: by location, with the file `orch_start.py` beside our
packages."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from orchestrator import __version__
from orchestrator.errors import OrchError, check_installed
from orchestrator.plan.exits import Exit

#: What starts a module by its name where no location is known: after `python -P`. Nobody else has
#: this name.
BY_NAME = ("-m", "orch_start")
FILE = Path(__file__).resolve().parents[1] / "orch_start.py"


@cache
def code_version() -> str:
    """The version of our packages and a digest of their code, which tells two states of one version
    apart."""
    packages = [FILE.with_name("orchestrator"), FILE.with_name("trainer")]
    digest = hashlib.sha256()
    for file in sorted(path for package in packages for path in package.rglob("*.py")):
        digest.update(f"{file.relative_to(FILE.parent)}\0".encode() + file.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()[:12]}"


def command(module: str, roots: Sequence[str] = ()) -> list[str]:
    """The words that start a module of ours under this interpreter: of the first of `roots` that
    holds our packages, else of the ones that run here. OrchError (65) for the trainer where torch
    is not installed."""
    if module.split(".")[0] == "trainer":
        check_installed("torch", "the bundled trainer")
    files = [file for root in roots if (file := Path(root, FILE.name)).is_file()]
    return [sys.executable, "-P", str(next(iter(files), FILE)), module]


def output(module: str, *arguments: str, stdin: str = "") -> str:
    """What a module of ours prints, run to its end. OrchError: its last line on stderr, with its
    exit code."""
    process = subprocess.run(
        [*command(module), *arguments], input=stdin, capture_output=True, text=True
    )
    if process.returncode:
        error_lines = process.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        codes = {int(code): code for code in Exit}
        raise OrchError(
            error_lines[0].removeprefix(f"{module}: "), codes.get(process.returncode, Exit.INTERNAL)
        )
    return process.stdout
