"""What pure functions gave before, by the digest of all that it follows from: nothing expires, nothing is invalidated.

Files lie in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`), not beside runs: a dry run leaves no trace there.
One that cannot be read is as good as none, and a home that cannot be written stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


class Kept:
    """Where one result is, or will be. `parts`: everything it depends on. Of a kind the newest stay: `most` of them, in
    `most_bytes` together."""

    def __init__(self, kind: str, parts: Iterable[bytes], most: int = 256, most_bytes: int = 64 << 20):
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.folder = os.path.join(home, "orch", kind)
        self.file = os.path.join(self.folder, f"{_digest(parts)}.json")
        self._most, self._most_bytes = most, most_bytes

    def read(self) -> bytes | None:
        try:
            with open(self.file, "rb") as file:
                return file.read()
        except OSError:
            return None

    def write(self, content: bytes) -> None:
        """Whole or not at all."""
        if not os.path.isabs(self.folder):  # nobody's home
            return
        import tempfile  # not for those who only read

        with contextlib.suppress(OSError):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            descriptor, scratch = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".partial")
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(scratch, self.file)
            self._forget()

    def _forget(self) -> None:
        """The oldest, when there are too many, and what a crash has left half written."""
        newest = lambda entry: (entry.path == self.file, entry.stat().st_mtime_ns)  # noqa: E731
        found = sorted(os.scandir(self.folder), key=newest, reverse=True)
        size = 0
        for count, entry in enumerate(found):
            size += entry.stat().st_size
            if count and (count >= self._most or size > self._most_bytes):
                os.unlink(entry.path)


def code(*parts: str) -> Iterator[bytes]:
    """What decides how these parts of this package compute: the interpreter, and each module as Python itself knows
    whether it has changed, by its time and size."""
    yield sys.version.encode()
    for part in parts:
        yield from stamps(os.path.join(_PACKAGE, part))


def stamps(folder: str) -> Iterator[bytes]:
    """Of every module below a folder, in order."""
    inside = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            found = entry.stat()
            yield f"{entry.name} {found.st_size} {found.st_mtime_ns}".encode()
        elif entry.is_dir() and not entry.name.startswith(("_", ".")):
            inside.append(entry)
    for entry in inside:
        yield entry.name.encode()
        yield from stamps(entry.path)


def content(path: str | os.PathLike[str]) -> bytes:
    """Of a file that a result depends on."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # a link to nowhere, a file that vanished: whoever needs it will say so
        return b"unreadable"


def _digest(parts: Iterable[bytes]) -> str:
    found = sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()
