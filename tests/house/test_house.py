"""The rules of the house, checked on the source itself: who may import whom, what is never called, file lengths."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("orchestrator", "trainer")
TOP_LEVEL = {
    *("orchestrator", "trainer", "charts", "slurm", "conf", "tests", "benchmarks", "docs"),
    *("pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md", ".ci", ".gitignore"),
}


def tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return listing.stdout.splitlines()


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the packages."""
    result = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            result[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return result


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(name: str, top_only: bool = False) -> set[str]:
    """Absolute dotted names that a module imports; `from a import b` gives a.b where that is a module of ours."""
    tree, is_package = TREES[name], MODULES[name].name == "__init__.py"
    skip: set[ast.AST] = set()
    if top_only:  # imports inside functions and under TYPE_CHECKING do not run at import time
        for node in ast.walk(tree):
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if inner or typing_only:
                skip.update(ast.walk(node))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skip:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".") if is_package else name.split(".")[:-1]
            prefix = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*prefix, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.add(full if full in MODULES else source)
    return found


@pytest.mark.parametrize("name", [m for m in MODULES if m.startswith("orchestrator")])
def test_orchestrator_never_imports_torch_or_trainer(name):
    bad = {i for i in imports(name) if i.split(".")[0] in ("torch", "trainer")}
    assert not bad


@pytest.mark.parametrize("name", [m for m in MODULES if m.startswith("trainer")])
def test_trainer_imports_only_the_plan_module(name):
    bad = {i for i in imports(name) if i.startswith("orchestrator") and not (i + ".").startswith("orchestrator.plan.")}
    assert not bad


@pytest.mark.parametrize("name", [m for m in MODULES if m.startswith("trainer.model")])
def test_model_knows_nothing_of_distribution(name):
    inside = {i for i in imports(name) if i.startswith("trainer.") and not i.startswith("trainer.model")}
    assert not {i for i in imports(name) if i.startswith("torch.distributed")}
    assert not {i for i in inside if i.startswith(("trainer.parallel", "trainer.pipeline"))}


@pytest.mark.parametrize("name", [m for m in MODULES if m.startswith("trainer") and m != "trainer.compat"])
def test_private_torch_only_in_compat(name):
    private = {i for i in imports(name) if i.startswith("torch") and any(p.startswith("_") for p in i.split("."))}
    assert not private
    chains = {ast.unparse(n) for n in ast.walk(TREES[name]) if isinstance(n, ast.Attribute)}
    assert not {c for c in chains if c.startswith(("torch._", "dist._", "torch.distributed._"))}


def test_no_import_cycles():
    graph = {name: {i for i in imports(name, top_only=True) if i in MODULES and i != name} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for child in sorted(graph[name]):
                # a package's __init__ handing on its own submodules is no circle
                if not (name + ".").startswith(child + "."):
                    visit(child, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])


@pytest.mark.parametrize("name", list(MODULES))
def test_file_is_under_400_lines(name):
    assert len(MODULES[name].read_text().splitlines()) < 400


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = (
    "torch.load",
    "torch.save",
    "hydra.utils.instantiate",
    "instantiate",
    "os.system",
    "os.popen",
    "eval",
)


@pytest.mark.parametrize("name", list(MODULES))
def test_no_pickle_no_shell_no_instantiate(name):
    assert not {i for i in imports(name) if i.split(".")[0] in FORBIDDEN_MODULES}
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS, f"line {node.lineno}"
            shell = [k for k in node.keywords if k.arg == "shell" and ast.unparse(k.value) != "False"]
            assert not shell, f"line {node.lineno}"


def test_top_level_is_exactly_the_house():
    assert {path.split("/")[0] for path in tracked()} == TOP_LEVEL


@pytest.mark.process
def test_importing_every_orchestrator_module_loads_no_torch():
    names = [m for m in MODULES if m.startswith("orchestrator") and not m.endswith("__main__")]
    code = f"import importlib, sys\nfor m in {names!r}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.stdout.strip() == "False", result.stderr


@pytest.mark.process
def test_wheel_ships_orchestrator_trainer_and_conf(tmp_path):
    """Built from a copy of the tracked files, as a release would be."""
    import shutil
    import zipfile

    for path in tracked():
        if (ROOT / path).is_file():
            target = tmp_path / "src" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, target)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "src", capture_output=True, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = {p for p in tracked() if p.startswith(("orchestrator/", "trainer/", "conf/")) and "/README" not in p}
    assert shipped <= inside, sorted(shipped - inside)[:5]
    assert {name.split("/")[0] for name in inside if ".dist-info" not in name} == {"orchestrator", "trainer", "conf"}
