"""How runs are found: by people, with `local://<id>`, the id or the beginning of one that no other
run shares; by Prometheus, with a file.
"""

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
    """Every run that has a state, newest first."""
    found = []
    try:
        entries = list(os.scandir(runs_folder(home)))
    except OSError:
        return []
    for entry in entries:
        if RUN_ID.fullmatch(entry.name):
            try:
                found.append((os.lstat(os.path.join(entry.path, "request.json")).st_mtime, entry))
            except OSError:  # half made, or a link whose folder was removed
                continue
    return [
        RunFolder(Path(entry.path))
        for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)
    ]


def find_run(home: Path, name: str | None) -> RunFolder:
    """The run that `name` means; None: the newest. OrchError (64) with the nearest ids when there
    is none."""
    runs = all_runs(home)
    if not runs:
        raise OrchError(f"there are no runs in {runs_folder(home)}", Exit.USAGE)
    if name is None:
        return runs[0]
    wanted = name.partition("://")[2] if "://" in name else name
    ids = {run.run_id: run for run in runs}
    if wanted in ids:
        return ids[wanted]
    matching = [run_id for run_id in ids if wanted and run_id.startswith(wanted)]
    if len(matching) == 1:
        return ids[matching[0]]
    if matching:
        shown = ", ".join(matching[:8]) + (
            f", ... ({len(matching) - 8} more)" if len(matching) > 8 else ""
        )
        raise OrchError(f"{wanted!r} begins {len(matching)} runs: {shown}", Exit.USAGE)
    raise OrchError(
        f"no run {name!r} in {runs_folder(home)}; {did_you_mean(wanted, ids, limit=8)}", Exit.USAGE
    )


def register(home: Path, folder: RunFolder) -> None:
    """Makes a run in another folder (`run.dir`) findable by its id, by a link in the home's list.
    Before the run is started: a link to no run is not listed. OrchError (65) where the list has
    another run of that id, or takes no link.
    """
    link = _link(home, folder)
    if link is None:
        return
    make_private_folder(link.parent)
    try:
        if link.is_symlink() and not link.exists():  # of a run whose folder was removed
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
    """Takes `register` back where there is no such run after all."""
    link = _link(home, folder)
    if link is not None and not folder.request.exists():
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(folder.path):
                link.unlink()


def _link(home: Path, folder: RunFolder) -> Path | None:
    index = runs_folder(home)
    return None if folder.path.parent == index else index / folder.run_id


class Discovery:
    """How Prometheus finds a run: file_sd JSON, there until the run ends.

    Once in the run folder, and once in a folder that all runs of a user share, because Prometheus
    takes a `*` only in the last part of a path: one static `files: [<home>/metrics.sd/*.json]` then
    follows every run there ever is.
    """

    def __init__(self, folder: RunFolder, shared: str):
        self._run_id = folder.run_id
        self._files = [folder.discovery, Path(shared) / f"{folder.run_id}.json"]

    def publish(self, endpoints: dict[str, str]) -> None:
        """Node name -> host:port. A shared folder that cannot be written costs discovery, not the
        run."""
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
