"""`make rooms`: the rooms of the house, their sizes, and who imports whom. Measured from the source
at each call.

A room is a top-level folder or module of `orchestrator/` or `trainer/`. Imports inside functions
and for types alone count: a room that needs another one only now and then still needs it.
docs/architecture.md declares the floors.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("orchestrator", "trainer")


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the packages."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name_parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(name_parts[:-1] if name_parts[-1] == "__init__" else name_parts)] = path
    return files


MODULES = modules()


@functools.cache
def nodes(name: str) -> list[ast.AST]:
    """Every syntax node of a module."""
    return list(ast.walk(ast.parse(MODULES[name].read_text())))


@functools.cache
def imports(name: str, top_only: bool = False) -> set[str]:
    """Absolute dotted names that a module imports; `from a import b` gives a.b where that is a
    module of ours.

    `top_only`: without imports inside functions and under TYPE_CHECKING, which do not run at import
    time.
    """
    is_package = MODULES[name].name == "__init__.py"
    skip: set[ast.AST] = set()
    if top_only:
        for node in nodes(name):
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if inner or typing_only:
                skip.update(ast.walk(node))
    imported: set[str] = set()
    for node in nodes(name):
        if node in skip:
            continue
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".") if is_package else name.split(".")[:-1]
            prefix = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*prefix, *([node.module] if node.module else [])])
            for alias in node.names:
                dotted = f"{source}.{alias.name}"
                imported.add(dotted if dotted in MODULES else source)
    return imported


def room(module: str) -> str:
    """`orchestrator.plan.batch` -> `orchestrator.plan`. The package's own `__init__` belongs to no
    room."""
    return ".".join(module.split(".")[:2])


def edges() -> dict[tuple[str, str], list[str]]:
    """(room, room that it imports) -> `module -> module` of each import."""
    room_edges = defaultdict(list)
    for module in MODULES:
        for target in imports(module):
            ends = room(module), room(target)
            if (
                target in MODULES
                and ends[0] != ends[1]
                and module not in PACKAGES
                and target not in PACKAGES
            ):
                room_edges[ends].append(f"{module} -> {target}")
    return dict(room_edges)


def lines() -> dict[str, tuple[int, int]]:
    """Room -> (files, lines)."""
    sizes: dict[str, tuple[int, int]] = {}
    for module, path in MODULES.items():
        if module not in PACKAGES:
            files, total = sizes.get(room(module), (0, 0))
            sizes[room(module)] = files + 1, total + len(path.read_text().splitlines())
    return sizes


def floors(package: str) -> list[list[str]]:
    """The rooms of a package from the ground up, as docs/architecture.md declares them: `floor
    room  what it is`."""
    document = (ROOT / "docs" / "architecture.md").read_text()
    block = document.partition(f"```floors {package}\n")[2].partition("```")[0]
    rows = [line.split(maxsplit=2) for line in block.splitlines() if line.strip()[:1].isdigit()]
    floor_rooms = defaultdict(list)
    for number, name, *_ in rows:
        floor_rooms[int(number)].append(f"{package}.{name}")
    return [floor_rooms[number] for number in sorted(floor_rooms)]


def main() -> None:
    sizes = lines()
    between = edges()
    for package in PACKAGES:
        for number, rooms in reversed(list(enumerate(floors(package), 1))):
            for name in rooms:
                files, total = sizes[name]
                below = ", ".join(
                    sorted(
                        target.rpartition(".")[2] for source, target in between if source == name
                    )
                )
                print(
                    f"{number:>2}  {name:<24}{files:>4} files{total:>7} lines  ->"
                    f" {below or 'nothing of ours'}"
                )
        print()


if __name__ == "__main__":
    main()
