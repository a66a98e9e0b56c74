"""Configurations composed before, by what they were composed of: importing Hydra costs more than most of what follows.

A configuration is a pure function of the words, the files and this package, so their digest names it: nothing expires
and nothing is invalidated. Files lie in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`), not beside runs: a dry
run leaves no trace there. One that cannot be read is as good as none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from .groups import Library
from .schema import Config

MOST = 256  # configurations that are kept
OURS = ("config", "plan")  # parts of this package that decide what a configuration is


class Remembered:
    """Where one configuration is, or will be."""

    def __init__(self, library: Library, overrides: Sequence[str]):
        self.folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orch" / "config"
        self.file = self.folder / f"{_digest(library, overrides)}.json"

    def read(self) -> Config | None:
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=Config)
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return None

    def write(self, config: Config) -> None:
        """Whole or not at all; a home that cannot be written stays as it is. An environment is not written down: it may
        hold what nobody should read."""
        if config.backend.env:
            return
        import tempfile  # not for those who only read

        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, scratch = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".partial")
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(config))
            os.replace(scratch, self.file)
            self._forget()

    def _forget(self) -> None:
        """The oldest, when there are too many, and what a crash has left half written."""
        files = sorted(os.scandir(self.folder), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in files[MOST:]:
            os.unlink(entry.path)


def _digest(library: Library, overrides: Sequence[str]) -> str:
    found = sha256()
    for part in _parts(library, overrides):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def _parts(library: Library, overrides: Sequence[str]) -> Iterator[bytes]:
    """Everything that a configuration depends on, each part by itself."""
    for word in overrides:
        yield word.encode(errors="surrogatepass")
    for folder in library.folders:
        yield b"folder"
        for path in sorted(folder.rglob("*.yaml")):
            yield path.relative_to(folder).as_posix().encode(errors="surrogatepass")
            yield _content(path)
    package = Path(__file__).resolve().parents[1]
    for part in OURS:
        for path in sorted((package / part).glob("*.py")):
            yield _content(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a link to nowhere, a file that vanished: whoever needs it will say so
        return b"unreadable"
