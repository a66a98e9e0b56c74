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
    params = []
    for line in lines():
        verb = line.text.partition(" ")[0]
        seen[line.backend, verb] += 1
        brother = (
            line.backend in ("slurm", "kubernetes")
            and verb in PLANNERS
            and seen[line.backend, verb] > 2
        )
        params.append(pytest.param(line, marks=pytest.mark.full if brother else ()))
    return params


@functools.cache
def golden(backend: str) -> dict:
    return json.loads(golden_file(backend).read_text())


@pytest.mark.parametrize("line", asked(), ids=lambda line: f"{line.backend}: {line.text}"[:150])
def test_a_line_gives_what_it_gave(line: Line):
    recording = golden(line.backend)
    if "--help" in line.text and recording["python"] != python_version():
        pytest.skip(f"argparse of Python {recording['python']} was recorded")
    recorded = recording["lines"][line.name]
    current = stored(line, run(line))
    if recorded == current:
        return
    differences = [
        f"{key}: was {recorded.get(key)!r}, is {current.get(key)!r}"
        for key in current
        if key in recorded
    ]
    differences = [
        difference
        for difference, key in zip(differences, current, strict=False)
        if recorded.get(key) != current.get(key)
    ]
    about = " (marked `may change`)" if line.may_change else ""
    pytest.fail("\n".join([f"{line.name}{about}", *differences, HOW]), pytrace=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_stored_line_is_still_asked(backend):
    line_names = {line.name for line in lines() if line.backend == backend}
    assert set(golden(backend)["lines"]) == line_names
    assert len(line_names) >= 40
