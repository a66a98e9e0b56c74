"""Lists what a copy of a program's folder lacks before the start, and names it when the program
misses it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.style import binary

from .code_snapshot import ignored_by_git, is_skipped
from .request import Code, LeftOut

_MAX_COUNTED_FILES = 20_000  # files whose sizes are added up
_MAX_RECORDED = 50
_SHOWN = 5
#: How programs report that a file is missing; the group is its path, or the module.
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
    """Returns the same code with what its copy will lack, the largest first; caches and
    environments are not listed."""
    from msgspec import structs

    root = Path(code.root)
    names = ignored_by_git(root) if code.kind == "git" else _skipped(root)
    program_files = [name for name in names if not _is_cache(root / name)]
    budget = _MAX_COUNTED_FILES
    left_out = []
    for name in program_files:
        size, seen = _size(root / name, budget)
        budget -= seen
        left_out.append(LeftOut(name=name, bytes=size))
    left_out.sort(key=lambda file: (-file.bytes, file.name))
    return structs.replace(code, left_out=left_out[:_MAX_RECORDED]) if left_out else code


def describe_left_out(code: Code) -> list[str]:
    """Returns one line about what the copy lacks, for people; none if it lacks nothing."""
    left_out = code.left_out or []
    if not left_out:
        return []
    shown = ", ".join(f"{file.name} ({binary(file.bytes)})" for file in left_out[:_SHOWN])
    rest = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
    reason = "which git ignores" if code.kind == "git" else "by their names"
    missing = f"the copy of {code.root} leaves out {shown}{rest}, {reason}"
    return [f"{missing}: --in-place runs the program with them"]


def explain(code: Code, copied: Path, cwd: Path, lines: Sequence[str]) -> str | None:
    """Explains why a program did not find a file or module that its last `lines` mention, if the
    copy is the cause.

    copied: the run's `code` folder. cwd: the folder in it where the program was started.
    """
    if code.kind == "none":
        return None
    root = Path(code.root)
    is_git = code.kind == "git"
    left_out = {file.name.rstrip("/") for file in code.left_out or []}
    for name in _missing(copied, cwd, lines):
        ancestors = [name, *map(str, Path(name).parents)][:-1]  # without "."
        parent = ancestors[1] if len(ancestors) > 1 else None
        if any(path in left_out for path in ancestors):
            reason = "git ignores it" if is_git else "its name marks it as something else than code"
        elif name.startswith(".."):
            reason = "it is outside the copied folder"
        elif os.path.lexists(root / name):
            reason = "it did not exist when the run was submitted, or is of a kind not copied"
        elif parent and (root / parent).is_dir() and not (copied / parent).is_dir():
            name = f"{parent}/"
            reason = "git stores no empty folders" if is_git else "it is not copied"
        else:
            continue
        missing = f"{name} is not in the copy of {root} that the program runs in"
        return f"{missing}: {reason}; --in-place runs it there"
    return None


def _missing(copied: Path, cwd: Path, lines: Sequence[str]) -> Iterable[str]:
    """Yields the paths, relative to the copied folder, that the lines call missing; the last
    line first."""
    for line in reversed(lines):
        paths = [match for pattern in _MISSING for match in pattern.findall(line)]
        for module in _NO_MODULE.findall(line):
            inner = module.replace(".", "/")
            paths += [inner, f"{inner}.py"]
        for path in paths:
            absolute = os.path.normpath(cwd / path)
            if Path(absolute).is_relative_to(copied) or not os.path.isabs(path):
                yield os.path.relpath(absolute, copied)


def _skipped(root: Path) -> list[str]:
    skipped = []
    for parent, folders, names in os.walk(root):
        skipped_folders = [name for name in folders if is_skipped(Path(parent, name))]
        folders[:] = [name for name in folders if name not in skipped_folders]
        skipped += [
            os.path.relpath(os.path.join(parent, name), root) + "/" for name in skipped_folders
        ]
        skipped += [
            os.path.relpath(os.path.join(parent, name), root)
            for name in names
            if name.startswith(".")
        ]
        if len(skipped) > _MAX_COUNTED_FILES:
            break
    return skipped


def _is_cache(path: Path) -> bool:
    """Tells whether a path is something that no program misses: compiled Python, hidden folders
    of tools, environments."""
    hidden_folder = path.name.startswith(".") and path.is_dir()
    built = path.name == "__pycache__" or path.name.endswith((".pyc", ".egg-info"))
    return hidden_folder or built or (path / "pyvenv.cfg").exists()


def _size(path: Path, max_files: int) -> tuple[int, int]:
    """Returns the bytes below a path, and how many files were counted, at most `max_files`."""
    if not path.is_dir() or path.is_symlink():
        size = path.lstat().st_size if os.path.lexists(path) else 0
        return size, 1
    total = 0
    files = 0
    for parent, _, names in os.walk(path):
        for name in names[: max_files - files]:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
            files += 1
        if files >= max_files:
            break
    return total, files
