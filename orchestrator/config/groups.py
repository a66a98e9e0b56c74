"""Finds the files of each config group by listing folders, without Hydra, so that completion is
instant."""

from __future__ import annotations

from pathlib import Path

from orchestrator import bundled
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

#: Config groups, in the order in which people think of them. Each is a folder of `conf/` and a
#: field of the schema's `Config`.
GROUPS = (
    "cluster",
    "parallel",
    "model",
    "data",
    "optim",
    "train",
    "checkpoint",
    "metrics",
    "backend",
    "experiment",
)
#: The group that the primary file does not choose from: a published run, composed of files of the
#: other groups.
OPTIONAL = "experiment"
# conf/orch.yaml; not `config`, a name that a project's own conf folder probably uses
PRIMARY = "orch"

MARKS = (".orch", f"{PRIMARY}.yaml")


def shipped() -> Path:
    """Returns the `conf` folder that comes with orch."""
    return bundled.folder("conf")


def folders(config_dir: str | Path | None = None) -> list[Path]:
    """Lists the folders in which group files are searched, first match wins: the user's, then the
    shipped one.

    `config_dir` is the user's folder; without it `./conf` is, if it is marked as orch's by a
    file `.orch` or a primary file. A `conf` folder without a mark belongs to the user's own
    Hydra program. OrchError: 64 if it is not a folder, 65 for a pipe or a device in it.
    """
    shipped_folder = shipped()
    if config_dir is None:
        user_folder = Path.cwd() / "conf"
        if not any((user_folder / mark).is_file() for mark in MARKS):
            return [shipped_folder]
    else:
        user_folder = Path(config_dir)
        if not user_folder.is_dir():
            problem = "is not a folder" if user_folder.exists() else "does not exist"
            raise OrchError(f"--config-dir {str(config_dir)!r} {problem}", Exit.USAGE)
    user_folder = user_folder.resolve()
    for path in [
        user_folder / f"{PRIMARY}.yaml",
        *(path for group in GROUPS for path in (user_folder / group).rglob("*.yaml")),
    ]:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise OrchError(f"{path} is not a regular file", Exit.CONFIG)
    return [shipped_folder] if user_folder == shipped_folder else [user_folder, shipped_folder]


class Library:
    """The group files of some folders."""

    def __init__(self, folders: list[Path]):
        self.folders = folders

    def groups(self) -> list[str]:
        """Lists every group that has files, nested ones as `cluster/node`. Other folders belong
        to the user."""
        names = dict.fromkeys(
            path.parent.relative_to(folder).as_posix()
            for group in GROUPS
            for folder in self.folders
            for path in sorted((folder / group).rglob("*.yaml"))
        )
        return list(names)

    def unread(self, group: str, name: str) -> str:
        """Returns a hint for a choice that `./conf` has while it is not marked as orch's, else
        ""."""
        user = Path.cwd() / "conf"
        if user.resolve() in self.folders or name not in {
            path.stem for path in (user / group).glob("*.yaml")
        }:
            return ""
        advice = f"touch conf/{MARKS[0]}, or use --config-dir conf"
        return f"; ./conf has it, and is not marked as orch's: {advice}"

    def files(self, group: str) -> list[str]:
        """Lists the choices of one group, sorted."""
        names = {path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")}
        return sorted(names)

    def path(self, group: str, name: str) -> Path | None:
        """Returns the file of one choice: the user's before the shipped one."""
        for folder in self.folders:
            path = folder / group / f"{name}.yaml"
            if path.is_file():
                return path
        return None

    def show(self, path: Path) -> str:
        """Names a file as a person would: `conf/train/demo.yaml` for a shipped one, its path for
        the user's."""
        ours = shipped()
        if path.is_relative_to(ours):
            return f"conf/{path.relative_to(ours).as_posix()}"
        return str(path)
