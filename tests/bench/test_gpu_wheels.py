"""A machine with a card and no registry runs every check with what travels beside its own torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import zipfile

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


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders of wheels and packages that are nobody's; returns both."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    packages = tmp_path / "packages"
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(gpu_wheels, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_wheels, "WHEELS", wheels)
    monkeypatch.setattr(gpu_wheels, "PACKAGES", packages)
    return wheels, packages


def wheel(folder, name: str, tags: str = "py3-none-any", needs: tuple[str, ...] = ()) -> None:
    """A wheel of one module that says its own name."""
    with zipfile.ZipFile(folder / f"{name}-1.0-{tags}.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"NAME = {name!r}\n")
        lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in needs)]
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines))


def test_one_line_says_what_is_missing(folders, monkeypatch, capsys):
    monkeypatch.setattr(gpu_wheels, "TRAVELLING", {"a-package": "no_such_module"})
    assert gpu_wheels.install() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("missing: a-package; run `make gpu-wheels`") and "copy wheels" in line
    monkeypatch.setattr(gpu_wheels, "PRESENT", {"a-torch": "no_such_torch"})
    assert gpu_wheels.install() == 1
    assert capsys.readouterr().out == "missing: a-torch; this Python's image must bring them\n"


def test_what_is_missing_is_unpacked_with_what_it_needs(folders, monkeypatch, capsys):
    wheels, packages = folders
    travelling = {"absent_one": "absent_one", "msgspec": "msgspec"}
    monkeypatch.setattr(gpu_wheels, "TRAVELLING", travelling)
    monkeypatch.setenv("PIP_USER", "1")
    wheel(wheels, "absent_one", needs=("needed.one>=1", 'unneeded; extra == "all"'))
    for name in ("needed_one", "msgspec", "unneeded", "orch_train"):
        wheel(wheels, name)
    earlier = packages / "absent_one-0.9.dist-info"
    earlier.mkdir(parents=True)
    assert gpu_wheels.install() == 0, capsys.readouterr().out
    modules = {path.stem for path in packages.glob("*.py")}
    assert modules == {"absent_one", "needed_one", "orch_train"}, "the image keeps its msgspec"
    assert not earlier.exists(), "a package has one version"
    monkeypatch.syspath_prepend(str(packages))
    assert importlib.import_module("absent_one").NAME == "absent_one"
    assert importlib.metadata.version("needed_one") == "1.0"
    assert gpu_wheels.install() == 0 and gpu_wheels.missing(travelling) == []


@pytest.mark.parametrize("python", ["cp39-cp39", "cp399-abi3"])
def test_a_wheel_for_another_python_is_named(folders, monkeypatch, capsys, python):
    wheels, packages = folders
    monkeypatch.setattr(gpu_wheels, "TRAVELLING", {"other": "no_such_module"})
    wheel(wheels, "other", tags=f"{python}-manylinux_2_17_{platform.machine()}")
    assert gpu_wheels.install() == 1 and not packages.exists()
    (line,) = capsys.readouterr().out.splitlines()
    assert "this is Python 3." in line and line.endswith(
        f"other-1.0-{python.partition('-')[0]} is for another Python or machine"
    )


@pytest.mark.parametrize(
    ("name", "version", "is_allowed"),
    [
        ("torch", "2.10.0+cu128", False),
        ("torch", "2.9.1", False),
        ("torch", "2.11.0a0+nv26.2", True),
        ("torch", "2.12.0", True),
        ("msgspec", "0.18.6", False),
        ("hydra-core", "1.3.2", True),
        ("hydra-core", "1.4.0.dev1", False),
    ],
)
def test_a_version_that_is_too_old_is_told(name, version, is_allowed, monkeypatch, capsys):
    own = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda asked: version if asked == name else own(asked)
    )
    modules = gpu_wheels.PRESENT | gpu_wheels.TRAVELLING
    (line, *others) = gpu_wheels.missing(modules) or [""]
    assert (line == "") is is_allowed and not others
    assert is_allowed or line.startswith(f"{name} ({version} is not ")
    if name == "torch" and not is_allowed:
        assert gpu_wheels.install() == 1
        assert capsys.readouterr().out.startswith(f"missing: torch ({version} is not >=2.11);")


def test_an_old_python_is_told_in_one_line():
    program = """
import runpy, sys
sys.modules["tomllib"] = None
sys.version_info = (3, 10, 12, "final", 0)
sys.argv = ["gpu_wheels", "--install"]
runpy.run_module("benchmarks.gpu_wheels", run_name="__main__")
"""
    argv = [sys.executable, "-c", program]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1 and ended.stderr == ""
    assert ended.stdout == "orch needs Python 3.11 or later; this is 3.10\n"


def test_what_triton_needs_is_told(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(gpu_wheels.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu_wheels", "--install"])
    assert gpu_wheels.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "a C compiler" in line and "Python.h" in line


def test_single_cases_of_a_node_have_the_wheels():
    argv = ["make", "-n", "--no-print-directory", "gpu-node", "PY=python3"]
    argv.append("ONLY='TP + SP' experts")
    # Under `make test` these would make it a make within another.
    outer = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    ended = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    (line,) = [line for line in ended.stdout.splitlines() if "gpu_node" in line]
    assert "build/gpu-packages" in line and line.endswith("--only 'TP + SP' experts")


def test_torchtitan_travels_in_the_versions_that_were_tried():
    assert all("==" in line for line in gpu_wheels.TITAN)


@pytest.mark.full
@pytest.mark.process
def test_the_wheels_hold_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_wheels, "WHEELS", tmp_path / "gpu-wheels")
    assert gpu_wheels.build("", titan=False) == 0
    names = {path.name.partition("-")[0] for path in gpu_wheels.WHEELS.glob("*.whl")}
    needed = {name.replace("-", "_") for name in closure(gpu_wheels.TRAVELLING)}
    assert names == {"orch_train", *needed}
