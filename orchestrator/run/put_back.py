"""What a start of a run changes in its folder comes back where the start is refused."""

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
    """Where the body raises, these files are afterwards as they were before it, also on a disk
    without room.

    The body removes them or replaces them as `write_private` does: a second name keeps what was
    there.
    """
    kept: dict[Path, Path] = {}
    try:
        for path in paths:
            second = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
            with contextlib.suppress(FileNotFoundError):
                os.link(path, second)
                kept[path] = second
        yield
    except BaseException:
        for path, second in kept.items():
            second.replace(path)
        raise
    finally:
        for second in kept.values():
            second.unlink(missing_ok=True)


def check_allowed(names: Iterable[str]) -> None:
    """OrchError (64) for a name that `orch resume --allow` does not know."""
    for name in names:
        if name not in PINS:
            raise OrchError(
                f"resume: it cannot allow {name!r}; {did_you_mean(name, PINS)}", Exit.USAGE
            )


@contextlib.contextmanager
def without_pins(folder: RunFolder, allow: Iterable[str]) -> Iterator[None]:
    """The run that the body starts finds no pins of these names, as `orch resume --allow` wants
    it."""
    pins = [pin_file(folder.path, PINS[name]) for name in allow]
    with put_back(pins):
        for pin in pins:
            pin.unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def asked_to_resume(folder: RunFolder, *removed: Path) -> Iterator[None]:
    """The run is `pending` again while the body sends it, and without the files that are to be
    `removed`."""
    before = newest(folder)
    asked = ask(folder, "run", began_with=read_state(folder).intent)
    try:
        with put_back([folder.state, *removed]):
            prepare_resume(folder, intent=asked.number)
            for path in removed:
                path.unlink(missing_ok=True)
            yield
    except BaseException:
        if before is None or before.number < asked.number:
            withdraw(folder, asked)
        raise
