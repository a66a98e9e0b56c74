"""The code of a run, frozen at submission: what is tracked, as it is now, and what is new and not
ignored.

A run may wait in a queue for hours; what it then runs is what its user saw. Nothing of git's store
is copied.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.style import binary

from .folder import RunFolder, write_private
from .request import Code

MOST_BYTES = 256 << 20
MOST_FILES = 20_000
_GIT_S = 60.0
_CHANGED = ("status", "--porcelain=v1", "--untracked-files=all")
#: Left out where no git says what belongs to the program.
_NEVER = {"__pycache__", "node_modules", "venv", "env", "build", "dist"}


def find_code(cwd: Path, wanted: bool) -> Code:
    """Where the code of a run comes from. `wanted`: the user's own program runs, so its folder is
    copied in any case.

    The bundled trainer comes from the installed package, and then nothing needs to be copied,
    unless the user stands in a checkout that it is installed from.
    """
    cwd = cwd.absolute()
    ours = Path(__file__).resolve().parents[2]
    root = (
        _git(cwd, "rev-parse", "--show-toplevel")
        if wanted or cwd.resolve().is_relative_to(ours)
        else None
    )
    if root:
        top = Path(root)
        holds_orch = ours == top.resolve()
        if wanted or holds_orch:
            return Code(
                kind="git",
                root=str(top),
                subfolder=os.path.relpath(cwd.resolve(), top.resolve()),
                commit=_git(cwd, "rev-parse", "--verify", "--quiet", "HEAD"),
                holds_orch=holds_orch,
            )
    return Code(kind="folder", root=str(cwd)) if wanted else Code(kind="none")


def copy(code: Code, folder: RunFolder) -> None:
    """Fill the run's `code` folder and say in code.json what it holds. OrchError (65) when it is
    too much."""
    if code.kind == "none":
        return
    import shutil

    root = Path(code.held_at or code.root)
    files, size = listed(code, folder.path)
    for name in files:
        source = root / name
        target = folder.code / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            shutil.copyfile(source, target)
            target.chmod(0o700 if os.access(source, os.X_OK) else 0o600)
    Path(folder.code, code.subfolder).mkdir(parents=True, exist_ok=True, mode=0o700)
    changed = "" if code.held_at or code.kind != "git" else _git(root, *_CHANGED)
    found = {
        **msgspec.to_builtins(code),
        "files": len(files),
        "bytes": size,
        "uncommitted": [line[3:] for line in (changed or "").splitlines()],
    }
    write_private(
        folder.snapshot,
        msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n",
        durable=False,
    )


def listed(code: Code, run: Path | None = None) -> tuple[list[str], int]:
    """The files of a copy, relative to its root, and their bytes. `run`: a folder in it that is
    none of the code.

    OrchError (65) when it is too much.
    """
    if code.kind == "none":
        return [], 0
    root = Path(code.held_at or code.root)
    if code.held_at:  # chosen where it was shipped
        files = [
            os.path.relpath(os.path.join(at, name), root)
            for at, _, names in os.walk(root)
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


def _git(cwd: Path, *words: str) -> str | None:
    """What git prints, without the last line end; None when there is no git here."""
    import subprocess

    try:
        argv = [
            "git",
            "-c",
            "core.fsmonitor=false",
            *words,
        ]  # reading must not start a program the repository names
        found = subprocess.run(
            argv, cwd=cwd, capture_output=True, timeout=_GIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(found.stdout).removesuffix("\n") if found.returncode == 0 else None


def _listed_by_git(root: Path) -> list[str]:
    """Tracked and untracked-but-not-ignored files that exist, submodules opened."""
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
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
    """Files and whole folders (with a slash at the end) that git ignores; nothing below a folder
    that is named."""
    words = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    found: list[str] = []
    for name in sorted(filter(None, (_git(root, *words) or "").split("\0"))):
        if not (found and found[-1].endswith("/") and name.startswith(found[-1])):
            found.append(name)
    return found


def is_skipped(folder: Path) -> bool:
    """Whether a folder is left out where no git says what belongs to the program."""
    return folder.name.startswith(".") or folder.name in _NEVER or (folder / "pyvenv.cfg").exists()


def _listed_by_walking(root: Path, run: Path | None) -> list[str]:
    """All files but hidden ones, caches, environments, and the run folder itself."""
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
        much = (
            f"{binary(total)}, over {binary(MOST_BYTES)}; largest is {largest}"
            f" ({binary(sizes[largest])})"
        )
        raise OrchError(f"snapshot of {root} has {much}: {advice}", Exit.CONFIG)
    return total
