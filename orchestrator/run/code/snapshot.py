"""Freezes the code of a run at submission: what `.orchignore` does not leave out; without that file
the tracked files as they are now, and new files that git does not ignore.

A run may wait in a queue for hours; it still runs what its user saw. Nothing of git's store is
copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import structs

from orchestrator import start
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.style import binary

from ..folder import RunFolder, make_private_folder, write_private
from ..request import Code
from . import ignore_rules
from .ignore_rules import IgnoreRules

MOST_BYTES = 256 << 20
MOST_FILES = 20_000
_GIT_S = 60.0
_CHANGED = ("status", "--porcelain=v1", "--untracked-files=all")
_LARGEST = 3  # files that a refusal names
ADVICE = f"leave files out by {ignore_rules.NAME}"  # the way out of a refusal
#: Folders that are left out where neither `.orchignore` nor git says what belongs to the program.
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", "env", "build", "dist"}


def find_code(cwd: Path, runs_user_program: bool) -> Code:
    """Finds where the code of a run comes from. `runs_user_program`: the run starts the user's own
    program, so its folder is copied in any case: the nearest one, up to git's top folder, that has
    an `.orchignore`, else git's top folder, else `cwd`.

    The bundled trainer comes from the installed package, and nothing needs to be copied, unless
    the user is in a checkout that the package is installed from.
    """
    cwd = cwd.absolute()
    package_root = start.FILE.parent
    git_root = None
    if runs_user_program or cwd.resolve().is_relative_to(package_root):
        git_root = _git(cwd, "rev-parse", "--show-toplevel")
    if runs_user_program and (code := _with_rules(cwd, git_root)):
        return code
    if git_root:
        top = Path(git_root)
        holds_orch = package_root == top.resolve()
        if runs_user_program or holds_orch:
            return Code(
                kind="git",
                root=str(top),
                subfolder=os.path.relpath(cwd.resolve(), top.resolve()),
                commit=_git(cwd, "rev-parse", "--verify", "--quiet", "HEAD"),
                holds_orch=holds_orch,
            )
    return Code(kind="folder", root=str(cwd)) if runs_user_program else Code(kind="none")


def _with_rules(cwd: Path, git_root: str | None) -> Code | None:
    """Returns the code below the nearest folder with an `.orchignore`; None if there is none."""
    cwd = cwd.resolve()
    top = Path(git_root).resolve() if git_root else cwd
    for folder in (cwd, *cwd.parents):
        if (folder / ignore_rules.NAME).is_file():
            return Code(
                kind="folder",
                root=str(folder),
                subfolder=os.path.relpath(cwd, folder),
                commit=_git(folder, "rev-parse", "--verify", "--quiet", "HEAD"),
                has_rules=True,
            )
        if folder == top:
            break
    return None


def counted(code: Code) -> Code:
    """Returns the same code with the number and the size of the files that a copy has. OrchError
    (65) if there is too much."""
    if code.kind == "none":
        return code
    files, size = listed(code)
    return structs.replace(code, files=len(files), bytes=size)


def copy(code: Code, folder: RunFolder) -> None:
    """Fills the run's `code` folder and lists its content in code.json. OrchError (65) if there
    is too much. Packed code lies in the run folder already."""
    if code.kind == "none" or code.packed:
        return
    import shutil

    root = Path(code.held_at or code.root)
    files, size = listed(code, folder.path)
    for name in files:
        source = root / name
        target = folder.code / name
        make_private_folder(target.parent)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            shutil.copyfile(source, target)
            target.chmod(0o700 if os.access(source, os.X_OK) else 0o600)
    make_private_folder(Path(folder.code, code.subfolder))
    changed = "" if code.held_at or code.kind != "git" else _git(root, *_CHANGED)
    listing = {
        **msgspec.to_builtins(code),
        "files": len(files),
        "bytes": size,
        "uncommitted": [line[3:] for line in (changed or "").splitlines()],
    }
    write_private(
        folder.snapshot,
        msgspec.json.format(msgspec.json.encode(listing), indent=1) + b"\n",
        durable=False,
    )


def listed(code: Code, run: Path | None = None) -> tuple[list[str], int]:
    """Lists the files of a copy, relative to its root, and counts their bytes. `run`: a run folder
    inside the root, which is not part of the code.

    OrchError (65) if there is too much.
    """
    if code.kind == "none":
        return [], 0
    root = Path(code.held_at or code.root)
    if code.held_at:  # the machine that shipped the files has chosen them
        files = [name for name, _ in walk(root, lambda *_: False)]
    elif code.has_rules:
        files = files_by_rules(root, read_rules(root), run)
    elif code.kind == "git":
        files = _listed_by_git(root)
    else:
        files = _copied(walk(root, is_skipped(root), run))
    return files, _check_size(root, files)


def _git(cwd: Path, *arguments: str) -> str | None:
    """Returns what git prints, without the last line end; None where there is no git."""
    import subprocess

    # Reading a repository must not start a program that the repository names.
    argv = ["git", "-c", "core.fsmonitor=false", *arguments]
    try:
        process = subprocess.run(
            argv,
            cwd=cwd,
            capture_output=True,
            timeout=_GIT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(process.stdout).removesuffix("\n") if process.returncode == 0 else None


def _listed_by_git(root: Path) -> list[str]:
    """Lists tracked files, and untracked ones that are not ignored, if they exist; submodules
    are entered."""
    kinds = ["--cached", "--others", "--exclude-standard"]
    listing = _git(root, "ls-files", "-z", *kinds)
    if listing is None:
        raise OrchError(f"git cannot list the files of {root}", Exit.CONFIG)
    files = []
    links: dict[Path, bool] = {root: False}  # folder -> whether it is a link, or below one

    def is_below_link(folder: Path) -> bool:
        if folder not in links:
            links[folder] = folder.is_symlink() or is_below_link(folder.parent)
        return links[folder]

    for name in dict.fromkeys(filter(None, listing.split("\0"))):
        path = root / name
        if is_below_link(path.parent):
            continue  # for git it is deleted: a link has taken the place of its folder
        if path.is_symlink() or path.is_file():
            files.append(name)
        elif path.is_dir():  # a submodule, or a repository inside
            files += (
                [os.path.join(name, inner) for inner in _listed_by_git(path)]
                if (path / ".git").exists()
                else []
            )
    return files


def ignored_by_git(root: Path) -> list[str]:
    """Lists the files and whole folders (with a slash at the end) that git ignores; nothing
    below a listed folder."""
    options = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    ignored: list[str] = []
    for name in sorted(filter(None, (_git(root, *options) or "").split("\0"))):
        if not (ignored and ignored[-1].endswith("/") and name.startswith(ignored[-1])):
            ignored.append(name)
    return ignored


def read_rules(root: Path) -> IgnoreRules:
    return IgnoreRules((root / ignore_rules.NAME).read_bytes())


def files_by_rules(root: Path, rules: IgnoreRules, run: Path | None = None) -> list[str]:
    """Lists the files that an `.orchignore` in this folder does not leave out, without those that
    nobody can use elsewhere."""
    return _copied(walk(root, by_rules(root, rules), run))


def by_rules(root: Path, rules: IgnoreRules) -> Callable[[str, bool], bool]:
    """Returns a test for `walk`: what the rules leave out, git's store, Python's caches, and
    environments, which work only where they were made."""

    def leaves_out(path: str, is_folder: bool) -> bool:
        return (is_folder and is_of_a_tool(root / path)) or rules.leaves_out(path, is_folder)

    return leaves_out


def is_of_a_tool(folder: Path) -> bool:
    """Tells whether a folder is git's, a cache of Python, or an environment."""
    return folder.name in (".git", "__pycache__") or os.path.exists(folder / "pyvenv.cfg")


def is_skipped(root: Path) -> Callable[[str, bool], bool]:
    """Returns a test for `walk` where neither `.orchignore` nor git says what belongs to the
    program: hidden files, caches and environments do not."""

    def leaves_out(path: str, is_folder: bool) -> bool:
        name = os.path.basename(path)
        if name.startswith("."):
            return True
        return is_folder and (name in _SKIPPED_FOLDERS or is_of_a_tool(root / path))

    return leaves_out


def walk(
    root: Path,
    leaves_out: Callable[[str, bool], bool],
    run: Path | None = None,
) -> Iterator[tuple[str, bool]]:
    """Yields each file and link below the root, by its path from there, and whether it is left out.
    A folder that is left out, or that this user may not read, is yielded in place of its files,
    with a slash at the end.

    leaves_out: tells it for a path and whether that is a folder. run: a folder that is not entered.
    """
    folders = [""]
    while folders:
        parent = folders.pop()
        inner_folders = []
        try:
            entries = sorted(os.scandir(root / parent), key=lambda entry: entry.name)
        except PermissionError:
            if not parent:
                raise
            yield f"{parent}/", True
            continue
        for entry in entries:
            path = os.path.join(parent, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and run and run.is_relative_to(root / path):
                continue
            if leaves_out(path, is_folder):
                yield f"{path}/" if is_folder else path, True
            elif is_folder:
                inner_folders.append(path)
            elif entry.is_symlink() or entry.is_file():
                yield path, False
        folders += reversed(inner_folders)


def _copied(walked: Iterator[tuple[str, bool]]) -> list[str]:
    files = []
    for name, is_left_out in walked:
        if not is_left_out:
            files.append(name)
        if len(files) > MOST_FILES:
            break
    return files


def _check_size(root: Path, files: list[str]) -> int:
    """Returns the bytes of the files. OrchError (65) if there are too many of either."""
    if len(files) > MOST_FILES:
        message = (
            f"the copy of {root} has more than {MOST_FILES} files: {ADVICE}, or run with --in-place"
        )
        raise OrchError(message, Exit.CONFIG)
    total = sum((root / name).lstat().st_size for name in files)
    if total > MOST_BYTES:
        message = (
            f"the copy of {root} has {binary(total)}, over {binary(MOST_BYTES)}"
            f" ({largest(root, files)}): {ADVICE}, or run with --in-place"
        )
        raise OrchError(message, Exit.CONFIG)
    return total


def largest(root: Path, files: list[str]) -> str:
    """Names the largest of these files with their sizes, for a refusal."""
    sizes = {name: (root / name).lstat().st_size for name in files}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:_LARGEST]
    return "largest: " + ", ".join(f"{name} {binary(sizes[name])}" for name in names)
