"""Configurations composed before, by what they were composed of: importing Hydra costs more than most of what follows.

A configuration is a pure function of the words, the files and this package, so these are its key (`kept`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import msgspec

from orchestrator.cache import Kept, code, content

from .groups import Library
from .schema import Config

MOST = 256  # configurations that are kept


class Remembered:
    """Where one configuration is, or will be."""

    def __init__(self, library: Library, overrides: Sequence[str]):
        self._kept = Kept("config", _parts(library, overrides), MOST)

    def read(self) -> Config | None:
        raw = self._kept.read()
        try:
            return None if raw is None else msgspec.json.decode(raw, type=Config)
        except (msgspec.MsgspecError, UnicodeError):
            return None

    def write(self, config: Config) -> None:
        """An environment is not written down: it may hold what nobody should read."""
        if not config.backend.env:
            self._kept.write(msgspec.json.encode(config))


def _parts(library: Library, overrides: Sequence[str]) -> Iterator[bytes]:
    """Everything that a configuration depends on, each part by itself."""
    for word in overrides:
        yield word.encode(errors="surrogatepass")
    for folder in library.folders:
        yield b"folder"
        for path, name in sorted(_yaml(str(folder), "")):
            yield name.encode(errors="surrogatepass")
            yield content(path)
    yield from code("config", "plan")


def _yaml(folder: str, above: str) -> Iterator[tuple[str, str]]:
    """(path, name) of every YAML file below a folder."""
    try:
        entries = list(os.scandir(folder))
    except OSError:  # not ours to read
        return
    for entry in entries:
        if entry.name.endswith(".yaml"):
            yield entry.path, above + entry.name
        if entry.is_dir(follow_symlinks=not above):  # a group may lie elsewhere
            yield from _yaml(entry.path, f"{above}{entry.name}/")
