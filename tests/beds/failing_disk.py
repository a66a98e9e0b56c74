"""A disk that fails for a while, without a disk of one's own."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def failing(*records: Path) -> Iterator[None]:
    """Puts folders in the places of the records, which can neither be read as files nor be replaced
    by files."""
    held = [record.with_name(f"{record.name}.held") for record in records]
    for record, away in zip(records, held, strict=True):
        with contextlib.suppress(FileNotFoundError):
            os.replace(record, away)
        while not record.is_dir():
            with contextlib.suppress(FileExistsError):
                record.mkdir()
    try:
        yield
    finally:
        for record, away in zip(records, held, strict=True):
            record.rmdir()
            with contextlib.suppress(
                FileNotFoundError, FileExistsError
            ):  # it is written anew already
                os.link(away, record)


@contextlib.contextmanager
def without_descriptors(pids: Iterable[int]) -> Iterator[None]:
    """Lets none of these processes open anything: EMFILE."""
    with _limited(pids, resource.RLIMIT_NOFILE, 3):
        yield


@contextlib.contextmanager
def without_room(pids: Iterable[int]) -> Iterator[None]:
    """Lets none of these processes write a byte to a file: EFBIG."""
    with _limited(pids, resource.RLIMIT_FSIZE, 0):
        yield


@contextlib.contextmanager
def _limited(pids: Iterable[int], limit_kind: int, soft_limit: int) -> Iterator[None]:
    before = {pid: resource.prlimit(pid, limit_kind) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, limit_kind, (soft_limit, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, limit_kind, limits)
