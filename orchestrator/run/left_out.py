"""What a copy of a program's folder lacks: listed before the start, and named when the program
misses it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.style import binary

from .code_snapshot import ignored_by_git, is_skipped
from .request import Code, LeftOut

_MOST_LOOKED_AT = 20_000  # files whose sizes are added up
_MOST_KEPT = 50
_SHOWN = 5
#: How programs say that a file is not there; the group is its path, or the module.
_MISSING = (
    re.compile(r"No such file or directory: b?['\"]([^'\"]+)['\"]"),
    re.compile(
        r"(?:can't open file|cannot open|cannot access|cannot stat|Unable to open)"
        r" ['\"]([^'\"]+)['\"]"
    ),
    re.compile(r"(?:^|[\s:])([^\s:'\"]+): No such file or directory"),
)
_NO_MODULE = re.compile(r"No module named ['\"]([\w.]+)['\"]")


def with_left_out(code: Code) -> Code:
    """The same code with what its copy will lack, the largest first; caches and environments are
    not worth a word."""
    from msgspec import structs

    root = Path(code.root)
    names = ignored_by_git(root) if code.kind == "git" else _skipped(root)
    kept = [name for name in names if not _is_cache(root / name)]
    left = _MOST_LOOKED_AT
    found = []
    for name in kept:
        size, seen = _size(root / name, left)
        left -= seen
        found.append(LeftOut(name=name, bytes=size))
    found.sort(key=lambda one: (-one.bytes, one.name))
    return structs.replace(code, left_out=found[:_MOST_KEPT]) if found else code


def said_of(code: Code) -> list[str]:
    """One line on what the copy lacks, for people; none where it lacks nothing."""
    found = code.left_out or []
    if not found:
        return []
    shown = ", ".join(f"{one.name} ({binary(one.bytes)})" for one in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    why = "which git ignores" if code.kind == "git" else "by their names"
    return [
        f"the copy of {code.root} leaves out {shown}{more}, {why}: --in-place runs the program with"
        " them"
    ]


def explain(code: Code, copied: Path, cwd: Path, lines: Sequence[str]) -> str | None:
    """Why a program did not find a file or module of which its last words (`lines`) speak, if the
    copy is to blame.

    copied: the run's `code` folder. cwd: where the program was started in it.
    """
    if code.kind == "none":
        return None
    root = Path(code.root)
    lost = {one.name.rstrip("/") for one in code.left_out or []}
    for name in _missing(copied, cwd, lines):
        above = [name, *map(str, Path(name).parents)][:-1]  # without "."
        if any(path in lost for path in above):
            why = "git ignores it" if code.kind == "git" else "its name says that it is no code"
        elif name.startswith(".."):
            why = "it lies outside the folder that is copied"
        elif os.path.lexists(root / name):
            why = "it was not there when the run was submitted, or is nothing that is copied"
        elif len(above) > 1 and (root / above[1]).is_dir() and not (copied / above[1]).is_dir():
            name = f"{above[1]}/"
            why = "git knows no empty folders" if code.kind == "git" else "it is not copied"
        else:
            continue
        return (
            f"{name} is not in the copy of {root} that the program runs in: {why}; --in-place runs"
            " it there"
        )
    return None


def _missing(copied: Path, cwd: Path, lines: Sequence[str]) -> Iterable[str]:
    """Paths, relative to the copied folder, that the lines call missing; the last words first."""
    for line in reversed(lines):
        paths = [match for pattern in _MISSING for match in pattern.findall(line)]
        for module in _NO_MODULE.findall(line):
            inner = module.replace(".", "/")
            paths += [inner, f"{inner}.py"]
        for path in paths:
            whole = os.path.normpath(cwd / path)
            if Path(whole).is_relative_to(copied) or not os.path.isabs(path):
                yield os.path.relpath(whole, copied)


def _skipped(root: Path) -> list[str]:
    found = []
    for parent, folders, names in os.walk(root):
        gone = [name for name in folders if is_skipped(Path(parent, name))]
        folders[:] = [name for name in folders if name not in gone]
        found += [os.path.relpath(os.path.join(parent, name), root) + "/" for name in gone]
        found += [
            os.path.relpath(os.path.join(parent, name), root)
            for name in names
            if name.startswith(".")
        ]
        if len(found) > _MOST_LOOKED_AT:
            break
    return found


def _is_cache(path: Path) -> bool:
    """What no program misses: compiled Python, hidden folders of tools, environments."""
    hidden_folder = path.name.startswith(".") and path.is_dir()
    built = path.name == "__pycache__" or path.name.endswith((".pyc", ".egg-info"))
    return hidden_folder or built or (path / "pyvenv.cfg").exists()


def _size(path: Path, most: int) -> tuple[int, int]:
    """Bytes below a path, and how many files were looked at, at most so many."""
    if not path.is_dir() or path.is_symlink():
        return (path.lstat().st_size if os.path.lexists(path) else 0), 1
    total = seen = 0
    for parent, _, names in os.walk(path):
        for name in names[: most - seen]:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
            seen += 1
        if seen >= most:
            break
    return total, seen
