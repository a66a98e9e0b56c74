"""Lists what a copy of a program's folder lacks before the start, and names it when the program
misses it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from orchestrator.style import binary

from ..request import Code, LeftOut
from . import ignore_rules
from .snapshot import by_rules, ignored_by_git, is_skipped, read_rules, walk

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
    if code.has_rules:
        names = _skipped(root, by_rules(root, read_rules(root)))
    elif code.kind == "git":
        names = ignored_by_git(root)
    else:
        names = _skipped(root, is_skipped(root))
    program_files = [name for name in names if not _is_cache(root / name)]
    budget = _MAX_COUNTED_FILES
    left_out = []
    for name in program_files:
        size, seen = _size(root / name, budget)
        budget -= seen
        left_out.append(LeftOut(name=in_utf8(name), bytes=size))
    left_out.sort(key=lambda file: (-file.bytes, file.name))
    return structs.replace(code, left_out=left_out[:_MAX_RECORDED]) if left_out else code


def describe_copy(code: Code) -> list[str]:
    """Returns lines for people about a copy of a program's folder: its size if it is known, and
    what it lacks. None for a program that runs in place."""
    lines = []
    if code.files:
        amount = f"{code.files} file{'s' * (code.files != 1)}, {binary(code.bytes or 0)}"
        if code.packed:
            amount += f" ({binary(code.packed.bytes)} compressed)"
        lines.append(f"the copy of {code.root} has {amount}")
    if left_out := code.left_out or []:
        shown = ", ".join(f"{file.name} ({binary(file.bytes)})" for file in left_out[:_SHOWN])
        rest = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        missing = f"the copy of {code.root} leaves out {shown}{rest}, {_chooser(code)}"
        lines.append(f"{missing}: {_advice(code, 'them')}")
    if code.packed and (links := code.packed.outside_links):
        shown = ", ".join(links[:_SHOWN])
        rest = f" and {len(links) - _SHOWN} more" if len(links) > _SHOWN else ""
        lines.append(f"the copy of {code.root} leaves out links to elsewhere: {shown}{rest}")
    return lines


def _chooser(code: Code) -> str:
    """Says by which rule files were left out."""
    if code.has_rules:
        return f"by {ignore_rules.NAME}"
    return "which git ignores" if code.kind == "git" else "by their names"


def _advice(code: Code, pronoun: str) -> str:
    """Says how the program gets the files that its copy lacks. `pronoun`: that of the files."""
    if code.packed or code.held_at:  # the folder itself is not there
        article = "another" if code.has_rules else "an"
        return f"{article} {ignore_rules.NAME} can include {pronoun}"
    return f"--in-place runs the program with {pronoun}"


def explain(code: Code, cwd: Path, lines: Sequence[str]) -> str | None:
    """Explains why a program did not find a file or module that its last `lines` mention, if the
    copy is the cause. cwd: the folder in the copy where the program was started."""
    if code.kind == "none":
        return None
    root = Path(code.root)
    copied = Path(str(cwd).removesuffix(f"/{code.subfolder}"))
    left_out = {file.name.rstrip("/") for file in code.left_out or []}
    for name in _missing(copied, cwd, lines):
        ancestors = [name, *map(str, Path(name).parents)][:-1]  # without "."
        parent = ancestors[1] if len(ancestors) > 1 else None
        if code.packed and any(path in code.packed.outside_links for path in ancestors):
            reason = "it is a link that leads out of the copied folder"
        elif any(path in left_out for path in ancestors):
            reason = _reason(code)
        elif name.startswith(".."):
            reason = "it is outside the copied folder"
        elif os.path.lexists(root / name):
            reason = "it did not exist when the run was submitted, or is of a kind not copied"
        elif parent and (root / parent).is_dir() and not (copied / parent).is_dir():
            name = f"{parent}/"
            is_git = code.kind == "git"
            reason = "git stores no empty folders" if is_git else "it is not copied"
        else:
            continue
        missing = f"{name} is not in the copy of {root} that the program runs in"
        return f"{missing}: {reason}; {_advice(code, 'it')}"
    return None


def _reason(code: Code) -> str:
    """Says why a file is among those that were left out."""
    if code.has_rules:
        return f"{ignore_rules.NAME} leaves it out"
    if code.kind == "git":
        return "git ignores it"
    return "its name marks it as something else than code"


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


def in_utf8(name: str) -> str:
    """Returns a file's name for people and JSON, whatever its bytes are."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _skipped(root: Path, leaves_out: Callable[[str, bool], bool]) -> list[str]:
    skipped = (name for name, is_left_out in walk(root, leaves_out) if is_left_out)
    return list(islice(skipped, _MAX_COUNTED_FILES))


def _is_cache(path: Path) -> bool:
    """Tells whether a path is something that no program misses: compiled Python, hidden folders
    of tools, environments."""
    hidden_folder = path.name.startswith(".") and path.is_dir()
    built = path.name == "__pycache__" or path.name.endswith((".pyc", ".egg-info"))
    return hidden_folder or built or os.path.exists(path / "pyvenv.cfg")


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
