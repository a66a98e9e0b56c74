"""Restores what a start of a run changes in its folder if the start is refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit
from orchestrator.plan.worker import PINS, pin_file

from .folder import RunFolder
from .intent import ask, newest, withdraw
from .state import prepare_resume, read_state


@contextlib.contextmanager
def put_back(paths: Iterable[Path]) -> Iterator[None]:
    """Restores these files to their present content if the body raises, also on a full disk.

    The body removes them, or replaces them as `write_private` does; a second hard link keeps the
    old content.
    """
    backups: dict[Path, Path] = {}
    try:
        for path in paths:
            backup = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
            with contextlib.suppress(FileNotFoundError):
                os.link(path, backup)
                backups[path] = backup
        yield
    except BaseException:
        for path, backup in backups.items():
            backup.replace(path)
        raise
    finally:
        for backup in backups.values():
            backup.unlink(missing_ok=True)


def check_allowed(names: Iterable[str]) -> None:
    """Raises OrchError (64) for a name that `orch resume --allow` does not know."""
    for name in names:
        if name not in PINS:
            raise OrchError(
                f"resume: it cannot allow {name!r}; {did_you_mean(name, PINS)}", Exit.USAGE
            )


@contextlib.contextmanager
def without_pins(folder: RunFolder, allow: Iterable[str]) -> Iterator[None]:
    """Removes the pins of these names for the run that the body starts, as `orch resume --allow`
    requests."""
    pins = [pin_file(folder.path, PINS[name]) for name in allow]
    with put_back(pins):
        for pin in pins:
            pin.unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def asked_to_resume(folder: RunFolder, *removed: Path) -> Iterator[None]:
    """Makes the run `pending` while the body submits it, without the files in `removed`."""
    previous = newest(folder)
    intent = ask(folder, "run", began_with=read_state(folder).intent)
    try:
        with put_back([folder.state, *removed]):
            prepare_resume(folder, intent=intent.number)
            for path in removed:
                path.unlink(missing_ok=True)
            yield
    except BaseException:
        if previous is None or previous.number < intent.number:
            withdraw(folder, intent)
        raise
