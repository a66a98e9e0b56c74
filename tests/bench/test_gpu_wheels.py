"""A machine with a card and no registry runs every check with what travels beside its own torch."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

from benchmarks import gpu_wheels
from tests.bench.dry_runs import ROOT
from tests.patience import PATIENCE_S

PROGRAMS = (
    "benchmarks.gpu_parity.__main__",
    "benchmarks.gpu_single",
    "benchmarks.gpu_node.__main__",
    "benchmarks.gpu_run",
    "benchmarks.gpu_wheels",
    "orchestrator.cli.main",
    "orchestrator.agent.node",
    "trainer.__main__",
)
#: Imports modules while those of other distributions than the allowed ones cannot be found.
IMPORTS = """
import importlib, importlib.metadata, json, re, sys
allowed, programs = json.loads(sys.argv[1])
owners = importlib.metadata.packages_distributions()

finders = list(sys.meta_path)

class Allowed:
    def find_spec(self, name, path=None, target=None):
        names = {re.sub("[-_.]+", "-", owner).lower() for owner in owners.get(name, ())}
        if names and not names & set(allowed):
            return None
        specs = (finder.find_spec(name, path, target) for finder in finders)
        return next(filter(None, specs), None)

sys.meta_path[:] = [Allowed()]
for name in programs:
    importlib.import_module(name)
"""


def closure(names) -> list[str]:
    """Distributions with all that they need here, by their normalised names."""
    names_here = set()
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        try:
            requirements = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        if name not in names_here:
            names_here.add(name)
            todo += [gpu_wheels.name_of(one) for one in requirements if "extra ==" not in one]
    return sorted(names_here)


def imported(allowed, programs) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-c", IMPORTS, json.dumps([allowed, programs])]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.process
def test_the_programs_for_a_card_import_nothing_but_what_is_there_and_what_travels():
    allowed = closure([*gpu_wheels.PRESENT, *gpu_wheels.TRAVELLING])
    allowed.append("orch-train")
    ended = imported(allowed, PROGRAMS)
    assert ended.returncode == 0, ended.stderr
    fewer = imported(
        [name for name in allowed if name != "msgspec"], ["orchestrator.plan.document"]
    )
    assert "No module named 'msgspec'" in fewer.stderr, "a package that does not travel is missed"


def test_every_requirement_is_there_or_travels():
    names = [gpu_wheels.name_of(line) for line in gpu_wheels.requirements()]
    assert sorted(names) == sorted(gpu_wheels.TRAVELLING)
    assert gpu_wheels.missing(gpu_wheels.PRESENT | gpu_wheels.TRAVELLING) == []


def test_one_line_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_wheels, "TRAVELLING", {"a-package": "no_such_module"})
    monkeypatch.setattr(gpu_wheels, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_wheels, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(gpu_wheels, "PACKAGES", tmp_path / "packages")
    assert gpu_wheels.install() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("missing: a-package; run `make gpu-wheels`") and "copy wheels" in line
    monkeypatch.setattr(gpu_wheels, "PRESENT", {"a-torch": "no_such_torch"})
    assert gpu_wheels.install() == 1
    assert capsys.readouterr().out == "missing: a-torch; this Python's image must bring them\n"


@pytest.mark.full
@pytest.mark.process
def test_the_wheels_hold_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_wheels, "WHEELS", ROOT / "build" / "gpu-wheels")
    assert gpu_wheels.build("", titan=False) == 0
    names = {path.name.partition("-")[0] for path in gpu_wheels.WHEELS.glob("*.whl")}
    needed = {name.replace("-", "_") for name in closure(gpu_wheels.TRAVELLING)}
    assert names == {"orch_train", *needed}
