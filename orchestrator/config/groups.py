"""Which files each config group has, by listing folders: no Hydra, so that completion is
instant."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

#: In the order in which people think of them: one folder of `conf/` each, one field of the schema's
#: `Config`.
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
#: Of these, the one that the primary file does not choose from: a published run, composed of files
#: of the others.
OPTIONAL = "experiment"
# conf/orch.yaml; not `config`, which a project's own conf folder probably has for itself
PRIMARY = "orch"

MARKS = (".orch", f"{PRIMARY}.yaml")


def shipped() -> Path:
    """The `conf` folder next to the package: in a checkout and in an installed wheel alike."""
    return Path(__file__).resolve().parents[2] / "conf"


def folders(config_dir: str | Path | None = None) -> list[Path]:
    """Where group files are looked for, first match wins: the user's folder, then the shipped one.

    `config_dir` is the user's; without it `./conf` when it is marked as orch's, by a file `.orch`
    or a primary file. A `conf` folder without a mark belongs to the user's own Hydra program.
    OrchError: 64 when it is not a folder, 65 for a pipe or a device in it.
    """
    ours = shipped()
    if config_dir is None:
        user = Path.cwd() / "conf"
        if not any((user / mark).is_file() for mark in MARKS):
            return [ours]
    else:
        user = Path(config_dir)
        if not user.is_dir():
            what = "is not a folder" if user.exists() else "does not exist"
            raise OrchError(f"--config-dir {str(config_dir)!r} {what}", Exit.USAGE)
    user = user.resolve()
    for path in [
        user / f"{PRIMARY}.yaml",
        *(path for group in GROUPS for path in (user / group).rglob("*.yaml")),
    ]:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise OrchError(f"{path} is no regular file", Exit.CONFIG)
    return [ours] if user == ours else [user, ours]


class Library:
    """The group files of some folders."""

    def __init__(self, folders: list[Path]):
        self.folders = folders

    def groups(self) -> list[str]:
        """Every group that has files, nested ones as `cluster/node`. Other folders are not ours."""
        found = dict.fromkeys(
            path.parent.relative_to(folder).as_posix()
            for group in GROUPS
            for folder in self.folders
            for path in sorted((folder / group).rglob("*.yaml"))
        )
        return list(found)

    def unread(self, group: str, name: str) -> str:
        """What to do for this choice where `./conf` has it and is not marked as orch's, else ""."""
        user = Path.cwd() / "conf"
        if user.resolve() in self.folders or name not in {
            path.stem for path in (user / group).glob("*.yaml")
        }:
            return ""
        return (
            f"; ./conf has it, and is not marked as orch's: touch conf/{MARKS[0]}, or use"
            " --config-dir conf"
        )

    def files(self, group: str) -> list[str]:
        """The choices of one group, sorted."""
        names = {path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")}
        return sorted(names)

    def path(self, group: str, name: str) -> Path | None:
        """The file behind one choice: the user's before the shipped one."""
        for folder in self.folders:
            path = folder / group / f"{name}.yaml"
            if path.is_file():
                return path
        return None

    def show(self, path: Path) -> str:
        """A file as a person would name it: `conf/train/demo.yaml` for ours, its path for the
        user's."""
        ours = shipped()
        if path.is_relative_to(ours):
            return f"conf/{path.relative_to(ours).as_posix()}"
        return str(path)
