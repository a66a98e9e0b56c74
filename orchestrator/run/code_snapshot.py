"""Freezes the code of a run at submission: the tracked files as they are now, and new files that
are not ignored.

A run may wait in a queue for hours; it still runs what its user saw. Nothing of git's store is
copied.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.style import binary

from .folder import RunFolder, make_private_folder, write_private
from .request import Code

MOST_BYTES = 256 << 20
MOST_FILES = 20_000
_GIT_S = 60.0
_CHANGED = ("status", "--porcelain=v1", "--untracked-files=all")
#: Folders that are left out where git does not say what belongs to the program.
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", "env", "build", "dist"}


def find_code(cwd: Path, runs_user_program: bool) -> Code:
    """Finds where the code of a run comes from. `runs_user_program`: the run starts the user's own
    program, so its folder is copied in any case.

    The bundled trainer comes from the installed package, and nothing needs to be copied, unless
    the user is in a checkout that the package is installed from.
    """
    cwd = cwd.absolute()
    package_root = Path(__file__).resolve().parents[2]
    git_root = None
    if runs_user_program or cwd.resolve().is_relative_to(package_root):
        git_root = _git(cwd, "rev-parse", "--show-toplevel")
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


def copy(code: Code, folder: RunFolder) -> None:
    """Fills the run's `code` folder and lists its content in code.json. OrchError (65) if there
    is too much."""
    if code.kind == "none":
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
        files = [
            os.path.relpath(os.path.join(parent, name), root)
            for parent, _, names in os.walk(root)
            for name in names
        ]
        files += [
            os.path.relpath(path, root)
            for path in root.rglob("*")
            if path.is_symlink() and path.is_dir()
        ]
    else:
        files = _listed_by_git(root) if code.kind == "git" else _listed_by_walking(root, run)
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
    for name in dict.fromkeys(filter(None, listing.split("\0"))):
        path = root / name
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


def is_skipped(folder: Path) -> bool:
    """Tells whether a folder is left out where git does not say what belongs to the program."""
    return (
        folder.name.startswith(".")
        or folder.name in _SKIPPED_FOLDERS
        or (folder / "pyvenv.cfg").exists()
    )


def _listed_by_walking(root: Path, run: Path | None) -> list[str]:
    """Lists all files but hidden ones, caches, environments, and the run folder itself."""
    files = []
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if not is_skipped(Path(parent, name))
            and not (run and run.is_relative_to(Path(parent, name)))
        )
        files += [
            os.path.relpath(os.path.join(parent, name), root)
            for name in sorted(names)
            if not name.startswith(".")
        ]
        if len(files) > MOST_FILES:
            break
    return [name for name in files if (root / name).is_symlink() or (root / name).is_file()]


def _check_size(root: Path, files: list[str]) -> int:
    sizes = {name: (root / name).lstat().st_size for name in files}
    total = sum(sizes.values())
    advice = "ignore it in .gitignore, or run with --in-place"
    if len(files) > MOST_FILES:
        raise OrchError(
            f"snapshot of {root} has more than {MOST_FILES} files: {advice}", Exit.CONFIG
        )
    if total > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        excess = f"{binary(total)}, over {binary(MOST_BYTES)}"
        example = f"largest is {largest} ({binary(sizes[largest])})"
        raise OrchError(f"snapshot of {root} has {excess}; {example}: {advice}", Exit.CONFIG)
    return total
