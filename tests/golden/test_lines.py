"""What command lines gave at e2cf075 they give today: exit code, plan hash, standard output,
standard error."""

from __future__ import annotations

import functools
import json
from collections import Counter

import pytest

from .lines import BACKENDS, Line, golden_file, lines, python_version, run, stored

HOW = (
    "see it in full: python -m tests.golden.lines --only TEXT --texts DIR, here and in a worktree"
    " of e2cf075 with these tests; where it is meant: python -m tests.golden.lines --write, and say"
    " so in the commit"
)


#: What these say comes of the planner; a backend adds where data lie and how metrics are served.
PLANNERS = ("plan", "tune", "whatif", "verify")


def asked() -> list:
    """All lines. Of each verb that only plans, Slurm and Kubernetes are asked the first two, with
    and without --json; the rest of theirs `make verify` asks: what was recorded for Slurm is what
    was recorded for local."""
    seen = Counter[tuple[str, str]]()
    found = []
    for line in lines():
        verb = line.text.partition(" ")[0]
        seen[line.backend, verb] += 1
        brother = (
            line.backend in ("slurm", "kubernetes")
            and verb in PLANNERS
            and seen[line.backend, verb] > 2
        )
        found.append(pytest.param(line, marks=pytest.mark.full if brother else ()))
    return found


@functools.cache
def golden(backend: str) -> dict:
    return json.loads(golden_file(backend).read_text())


@pytest.mark.parametrize("line", asked(), ids=lambda line: f"{line.backend}: {line.text}"[:150])
def test_a_line_gives_what_it_gave(line: Line):
    taken = golden(line.backend)
    if "--help" in line.text and taken["python"] != python_version():
        pytest.skip(f"argparse of Python {taken['python']} was recorded")
    wanted = taken["lines"][line.name]
    found = stored(line, run(line))
    if wanted == found:
        return
    said = [
        f"{part}: was {wanted.get(part)!r}, is {found.get(part)!r}"
        for part in found
        if part in wanted
    ]
    said = [
        one for one, part in zip(said, found, strict=False) if wanted.get(part) != found.get(part)
    ]
    about = " (marked `may change`)" if line.may_change else ""
    pytest.fail("\n".join([f"{line.name}{about}", *said, HOW]), pytrace=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_stored_line_is_still_asked(backend):
    asked = {line.name for line in lines() if line.backend == backend}
    assert set(golden(backend)["lines"]) == asked
    assert len(asked) >= 40
