"""How runs are found: by people, with `local://<id>`, the id, or the beginning of an id that no
other run shares; by Prometheus, with a file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

from .folder import RUN_ID, RunFolder, make_private_folder, write_private


def runs_folder(home: Path) -> Path:
    return home / "runs"


def all_runs(home: Path) -> list[RunFolder]:
    """Lists every run that has a state, newest first."""
    dated = []
    try:
        entries = list(os.scandir(runs_folder(home)))
    except OSError:
        return []
    for entry in entries:
        if RUN_ID.fullmatch(entry.name):
            try:
                dated.append((os.lstat(os.path.join(entry.path, "request.json")).st_mtime, entry))
            except OSError:  # incomplete, or a link whose folder was removed
                continue
    dated.sort(key=lambda pair: pair[0], reverse=True)
    return [RunFolder(Path(entry.path)) for _, entry in dated]


def find_run(home: Path, name: str | None) -> RunFolder:
    """Returns the run that `name` means; None: the newest. OrchError (64) with the nearest ids
    if there is none."""
    runs = all_runs(home)
    if not runs:
        raise OrchError(f"there are no runs in {runs_folder(home)}", Exit.USAGE)
    if name is None:
        return runs[0]
    prefix = name.partition("://")[2] if "://" in name else name
    ids = {run.run_id: run for run in runs}
    if prefix in ids:
        return ids[prefix]
    matching = [run_id for run_id in ids if prefix and run_id.startswith(prefix)]
    if len(matching) == 1:
        return ids[matching[0]]
    if matching:
        shown = ", ".join(matching[:8])
        if len(matching) > 8:
            shown += f", ... ({len(matching) - 8} more)"
        raise OrchError(f"{prefix!r} begins {len(matching)} runs: {shown}", Exit.USAGE)
    hint = did_you_mean(prefix, ids, limit=8)
    raise OrchError(f"no run {name!r} in {runs_folder(home)}; {hint}", Exit.USAGE)


def register(home: Path, folder: RunFolder) -> None:
    """Makes a run in another folder (`run.dir`) findable by its id, through a link in the home's
    list.

    Call it before the run is started: a link to no run is not listed. OrchError (65) if the list
    has another run of that id, or refuses the link.
    """
    link = _link(home, folder)
    if link is None:
        return
    make_private_folder(link.parent)
    try:
        if link.is_symlink() and not link.exists():  # the folder of that run was removed
            link.unlink()
        link.symlink_to(folder.path)
    except FileExistsError:
        raise OrchError(
            f"run {folder.run_id} exists already in {link.parent}", Exit.CONFIG
        ) from None
    except OSError as error:
        raise OrchError(
            f"{link.parent} takes no more runs: {error.strerror}", Exit.CONFIG
        ) from None


def forget(home: Path, folder: RunFolder) -> None:
    """Undoes `register` if the run was not created after all."""
    link = _link(home, folder)
    if link is not None and not folder.request.exists():
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(folder.path):
                link.unlink()


def _link(home: Path, folder: RunFolder) -> Path | None:
    index = runs_folder(home)
    return None if folder.path.parent == index else index / folder.run_id


class Discovery:
    """Tells Prometheus how to reach a run, with file_sd JSON that exists until the run ends.

    The file is written twice: into the run folder, and into a folder that all runs of a user
    share, because Prometheus allows a `*` only in the last part of a path. One static `files:
    [<home>/metrics.sd/*.json]` then follows every run.
    """

    def __init__(self, folder: RunFolder, shared: str):
        self._run_id = folder.run_id
        self._files = [folder.discovery, Path(shared) / f"{folder.run_id}.json"]

    def publish(self, endpoints: dict[str, str]) -> None:
        """Writes the endpoints, node name -> host:port. A shared folder that cannot be written
        costs discovery, not the run."""
        targets = [
            {"targets": [address], "labels": {"run": self._run_id, "node": node}}
            for node, address in endpoints.items()
        ]
        raw = msgspec.json.format(msgspec.json.encode(targets), indent=1) + b"\n"
        for file in self._files:
            with contextlib.suppress(OSError, OrchError):
                make_private_folder(file.parent)
                write_private(file, raw, durable=False)

    def withdraw(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.unlink()
