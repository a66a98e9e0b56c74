"""The rules of the house, checked on the source itself: who may import whom, what is never called,
sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.house.rooms import MODULES, PACKAGES, ROOT, edges, floors, imports, lines, nodes
from tests.patience import PATIENCE_S

TOP_LEVEL = {
    "orchestrator",
    "trainer",
    "charts",
    "slurm",
    "conf",
    "tests",
    "benchmarks",
    "docs",
    "orch_report.py",  # one file, for programs of others
    "orch_start.py",  # starts our modules, under a name that nobody else has
    "pyproject.toml",
    "setup.py",
    "README.md",
    "Makefile",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    ".ci",
    ".gitignore",
}


def tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return listing.stdout.splitlines()


#: Folders of a file a thing, where the things are more.
MOST_FILES = {
    "orchestrator/cli/verbs": 33,
    "orchestrator/plan": 23,
    "orchestrator/plan/schedules": 23,
    "trainer/model": 22,
}


#: Classes of more than 300 lines. May only shrink.
LONGER_CLASSES = {
    "orchestrator.agent.leader.elasticity.Elasticity",
    "orchestrator.agent.leader.epoch.Epoch",
    "orchestrator.agent.node.worker_control.WorkerControl",
    "orchestrator.backends.kubernetes.controller.reconcile.Reconciler",
    "orchestrator.backends.local.supervisor.Supervisor",
    "trainer.engine.Engine",
}


def ours(prefix: str) -> list[str]:
    module_names = [name for name in MODULES if name.startswith(prefix)]
    assert module_names, "a rule about nothing"
    return module_names


def chains(name: str) -> set[str]:
    """Every `a.b.c` of a module."""
    return {ast.unparse(node) for node in nodes(name) if isinstance(node, ast.Attribute)}


def broken(names: list[str], rule: Callable[[str], Iterable[str]]) -> list[str]:
    """`module: what it must not` for each thing that the rule finds in each of these modules."""
    return [f"{name}: {breach}" for name in names for breach in rule(name)]


def test_orchestrator_never_imports_torch_or_trainer():
    names = ours("orchestrator")
    assert (
        broken(
            names,
            lambda name: [i for i in imports(name) if i.split(".")[0] in ("torch", "trainer")],
        )
        == []
    )


def test_trainer_imports_only_the_plan_module():
    def rule(name: str) -> list[str]:
        of_it = [i for i in imports(name) if i.startswith("orchestrator")]
        return [i for i in of_it if not (i + ".").startswith("orchestrator.plan.")]

    assert broken(ours("trainer"), rule) == []


def test_model_knows_nothing_of_distribution():
    far = ("torch.distributed", "trainer.parallel", "trainer.pipeline")
    assert (
        broken(ours("trainer.model"), lambda name: [i for i in imports(name) if i.startswith(far)])
        == []
    )


def test_private_torch_only_in_compat():
    def rule(name: str) -> list[str]:
        private = [
            i
            for i in imports(name)
            if i.startswith("torch") and any(p.startswith("_") for p in i.split("."))
        ]
        return private + [
            c for c in chains(name) if c.startswith(("torch._", "dist._", "torch.distributed._"))
        ]

    assert broken([name for name in ours("trainer") if name != "trainer.compat"], rule) == []


def test_no_import_cycles():
    graph = {
        name: {i for i in imports(name, top_only=True) if i in MODULES and i != name}
        for name in MODULES
    }
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


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_only_lower_floors(package):
    """docs/architecture.md declares the floors; imports inside functions and for types alone count,
    too."""
    declared = [room for rooms in floors(package) for room in rooms]
    assert sorted(declared) == sorted(room for room in lines() if room.startswith(package)), (
        "docs/architecture.md"
    )
    level = {room: number for number, rooms in enumerate(floors(package)) for room in rooms}
    up = {
        ends: import_lines
        for ends, import_lines in edges().items()
        if ends[0] in level and ends[1] in level and level[ends[1]] >= level[ends[0]]
    }
    assert up == {}


def test_files_classes_and_folders_are_of_a_size_to_read():
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name for name, length in lengths.items() if length > 500} == set()
    classes = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name in MODULES
        for node in nodes(name)
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name, length in classes.items() if length > 300} == LONGER_CLASSES
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in MODULES.values())
    assert {
        folder: count for folder, count in folders.items() if count > MOST_FILES.get(folder, 21)
    } == {}


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


def test_no_pickle_no_shell_no_instantiate():
    def rule(name: str) -> Iterator[str]:
        yield from (i for i in imports(name) if i.split(".")[0] in FORBIDDEN_MODULES)
        for node in nodes(name):
            if isinstance(node, ast.Call):
                if (
                    isinstance(node.func, ast.Attribute | ast.Name)
                    and ast.unparse(node.func) in FORBIDDEN_CALLS
                ):
                    yield f"line {node.lineno}: {ast.unparse(node.func)}"
                if any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords):
                    yield f"line {node.lineno}: a shell"

    assert broken(list(MODULES), rule) == []


def test_top_level_is_exactly_the_house():
    assert {path.split("/")[0] for path in tracked()} == TOP_LEVEL


@pytest.mark.process
def test_importing_every_orchestrator_module_loads_no_torch():
    names = [m for m in MODULES if m.startswith("orchestrator") and not m.endswith("__main__")]
    code = (
        f"import importlib, sys\nfor m in {names!r}: importlib.import_module(m)\nprint('torch' in"
        " sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S
    )
    assert result.stdout.strip() == "False", result.stderr


@pytest.mark.parametrize(
    "page",
    [
        "CONTRIBUTING.md",
        "README.md",
        "docs/architecture.md",
        "docs/glossary.md",
        "docs/reading.md",
        *sorted(f"docs/decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md")),
    ],
)
def test_files_that_a_page_names_are_there(page):
    named = re.findall(
        r"`((?:orchestrator|trainer|tests|conf|docs|charts|slurm|benchmarks)/[\w./]*)`",
        (ROOT / page).read_text(),
    )
    assert [
        path for path in named if not re.search(r"[A-Z]{2}", path) and not (ROOT / path).exists()
    ] == []
