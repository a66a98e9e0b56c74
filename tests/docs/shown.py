"""Runs the commands that a page shows, and compares what they print with what it shows.

A block ```console has commands (`$ ...`), each with its output below it; `…` stands for anything
within a line, a line `...` for any lines. A block ```python file=NAME is that file. A block
```console bed is for a test cluster, and its tests alone play it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.run.files import described
from tests.house.rooms import ROOT

_BLOCK = re.compile(r"^```(\w+(?: bed)?)(?: file=(\S+))?\n(.*?)^```$", re.M | re.S)


class Command(NamedTuple):
    line: str
    shown: list[str]


class File(NamedTuple):
    name: str
    text: str


def steps(page: str, kind_played: str = "console") -> Iterator[Command | File]:
    """The commands of blocks of a kind and all files that the page shows, in its order."""
    for kind, name, body in _BLOCK.findall(page):
        if name:
            yield File(name, body)
        elif kind == kind_played:
            command: Command | None = None
            for line in body.splitlines():
                if line.startswith("$ "):
                    if command:
                        yield command
                    command = Command(line[2:], [])
                else:
                    assert command, f"output before the first command: {line!r}"
                    command.shown.append(line)
            if command:
                yield command


def matches(lines: list[str], shown: list[str]) -> bool:
    """Whether lines are as they are shown."""
    if not shown:
        return not lines
    if shown[0] == "...":
        return any(matches(lines[skip:], shown[1:]) for skip in range(len(lines) + 1))
    if not lines:
        return False
    pattern = ".*".join(map(re.escape, shown[0].rstrip().split("…")))
    return re.fullmatch(pattern, lines[0].rstrip()) is not None and matches(lines[1:], shown[1:])


def login(variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """The environment of somebody on a test cluster, whose variables are given: `orch` on PATH, a
    home of their own, a terminal of 80 columns."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ORCH")}
    return {
        **own,
        **variables,
        "ORCH_HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
    }


def undescribed_files(runs: Path) -> list[str]:
    """The files in run folders that the reference does not describe. AssertionError if there are no
    files."""
    files = [path.relative_to(runs).parts[1:] for path in runs.rglob("*") if path.is_file()]
    assert files
    return [name for name in map("/".join, files) if not described(name)]


def play(
    page: str,
    folder: Path,
    environ: Mapping[str, str],
    kind_played: str = "console",
    limit_s: float = 600,
    enter: Sequence[str] = (),
) -> None:
    """Everything that the page shows, in a folder. AssertionError with what was printed in place of
    what is shown. `enter`: the words before a command that runs it on another machine."""
    for step in steps(page, kind_played):
        if isinstance(step, File):
            (folder / step.name).write_text(step.text)
            continue
        printed = _printed([*enter, "bash", "-c", step.line], folder, environ, limit_s)
        lines = printed.rstrip("\n").split("\n") if printed.strip() else []
        assert matches(lines, step.shown), (
            f"$ {step.line}\n{printed}\n--- is shown as\n" + "\n".join(step.shown)
        )


def _printed(
    argv: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    limit_s: float,
) -> str:
    """What a command prints, with a last line that says so if it had to be ended."""
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=dict(environ),
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.output or b"").decode(errors="replace")
        return f"{printed}\nended by the test after {limit_s:.0f} s"
    return done.stdout.decode(errors="replace")
