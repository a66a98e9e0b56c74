"""A content-addressed cache of pure results: the key hashes every input, so nothing is invalidated.

Files are in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`): a dry run leaves no trace
in the folder of runs. The result of a file that cannot be read is recomputed; if the folder
cannot be written, nothing is stored.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import TypeVar

import msgspec

T = TypeVar("T")

MOST = 256  # results of one kind
MOST_BYTES = 64 << 20  # all results of one kind together
_PACKAGE = os.path.dirname(os.path.abspath(__file__))


def cached(
    kind: str,
    inputs: Iterable[bytes],
    compute: Callable[[], T],
    encode: Callable[[T], bytes | None],
    decode: Callable[[bytes], T],
) -> T:
    """Returns what `compute` returns, or has returned for the same `inputs`: everything that the
    result depends on.

    `encode` returns None for a result that must not be written down. Nothing is stored if
    `compute` raises.
    """
    entry = Entry(kind, inputs)
    raw = entry.read()
    if raw is not None:
        with contextlib.suppress(ValueError, msgspec.MsgspecError):  # damaged
            return decode(raw)
    result = compute()
    raw = encode(result)
    if raw is not None:
        entry.write(raw)
    return result


def folder() -> str:
    """Returns the cache folder of this user; relative if there is no home, and then nothing is
    stored."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "orch")


class Entry:
    """The file of one result. The newest results of a kind stay: `max_entries` of them, in
    `max_bytes` together."""

    def __init__(
        self,
        kind: str,
        inputs: Iterable[bytes],
        max_entries: int = MOST,
        max_bytes: int = MOST_BYTES,
    ):
        self.folder = os.path.join(folder(), kind)
        self.file = os.path.join(self.folder, f"{_digest(inputs)}.json")
        self._max_entries = max_entries
        self._max_bytes = max_bytes

    def read(self) -> bytes | None:
        try:
            with open(self.file, "rb") as file:
                return file.read()
        except OSError:
            return None

    def write(self, content: bytes) -> None:
        """Writes the whole file or nothing."""
        if not os.path.isabs(self.folder):  # the user has no home
            return
        with contextlib.suppress(OSError):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            scratch = os.path.join(self.folder, f".{os.urandom(8).hex()}.partial")
            with open(
                os.open(
                    scratch,
                    os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                    0o600,
                ),
                "wb",
            ) as file:
                file.write(content)
            os.replace(scratch, self.file)
            self._prune()

    def _prune(self) -> None:
        """Deletes the oldest results if there are too many, and with them what a crash has left
        incomplete."""
        newest = lambda entry: (entry.path == self.file, entry.stat().st_mtime_ns)  # noqa: E731
        entries = sorted(os.scandir(self.folder), key=newest, reverse=True)
        size = 0
        for count, entry in enumerate(entries):
            size += entry.stat().st_size
            if count and (count >= self._max_entries or size > self._max_bytes):
                os.unlink(entry.path)


def code(*rooms: str) -> Iterator[bytes]:
    """Yields inputs that stand for the code of these rooms: the interpreter, and size and time
    of every module, by which Python itself detects changes."""
    yield sys.version.encode()
    for room in rooms:
        yield from _stamps(os.path.join(_PACKAGE, room))


def _stamps(folder: str) -> Iterator[bytes]:
    """Yields name, size and time of every module below a folder, in order."""
    inside = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            status = entry.stat()
            yield f"{entry.name} {status.st_size} {status.st_mtime_ns}".encode()
        elif entry.is_dir() and not entry.name.startswith(("_", ".")):
            inside.append(entry)
    for entry in inside:
        yield entry.name.encode()
        yield from _stamps(entry.path)


def content(path: str | os.PathLike[str]) -> bytes:
    """Returns a file that a result depends on, as an input."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # a broken link, or a file that vanished: its reader will report it
        return b"unreadable"


def _digest(inputs: Iterable[bytes]) -> str:
    digest = sha256()
    for content in inputs:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
