"""The user's own program: is it there? Asked while somebody still looks at the terminal, not hours later in a queue."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


def check_program(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, where: str = "") -> None:
    """OrchError (64) when the program, or the script that it is to interpret, is not found from `cwd`.

    `environ` is what the worker will have. `where` ends the message.
    """
    name = argv[0]
    if "/" in name:
        found = shutil.which(str(cwd / name))
    else:
        found = shutil.which(name, path=environ.get("PATH", ""))
    if found is None:
        known = "not executable" if (cwd / name).is_file() else "not on PATH" if "/" not in name else "not there"
        raise OrchError(f"program {name!r} is {known}{where}", Exit.USAGE)
    if _PYTHON.fullmatch(Path(name).name) and len(argv) > 1:
        script = argv[1]
        if script.endswith(".py") and not script.startswith("-") and not (cwd / script).is_file():
            raise OrchError(f"script {script!r} is not in {cwd}{where}", Exit.USAGE)
