"""Composes one typed, frozen `Config` from the words of the command line and YAML files: `load`,
which every verb calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from orchestrator.cache import cached, code, content
from orchestrator.errors import OrchError

from .groups import Library, folders
from .schema import Config

#: Hydra keeps its state in the process, so one thread at a time composes.
_HYDRA_LOCK = threading.Lock()


def load(
    overrides: list[str],
    config_dir: str | Path | None = None,
    ranges: bool = False,
) -> Config:
    """Composes, resolves and checks a configuration. OrchError: 64 for the command line, 65 for a
    file, 78 for code or secrets.

    `config_dir` is searched before the shipped files; without it `./conf` is, if it exists.
    `ranges`: the caller accepts a range of sizes (`nodes=4..8`); most callers do not. A
    configuration of the same words and files is read from the cache, without importing Hydra (a
    third of a second).
    """
    library = Library(folders(config_dir))

    def compose() -> Config:
        with _HYDRA_LOCK:
            from . import hydra_compose

            return hydra_compose.compose(overrides, library)

    inputs = _inputs(library, overrides)
    config = cached(
        "config",
        inputs,
        compose,
        _encoded,
        lambda raw: msgspec.json.decode(raw, type=Config),
    )
    if config.nodes is not None and not ranges:
        raise OrchError(
            f"nodes={config.nodes} is for orch plan, submit and render; here it is cluster.nodes=N"
        )
    return config


def _encoded(config: Config) -> bytes | None:
    """Returns None for a configuration with an environment, which may hold what nobody should
    read."""
    return None if config.backend.env else msgspec.json.encode(config)


def _inputs(library: Library, overrides: Sequence[str]) -> Iterator[bytes]:
    """Yields everything that a configuration depends on: words, files, and the code that reads
    them."""
    for override in overrides:
        yield override.encode(errors="surrogatepass")
    for folder in library.folders:
        yield b"folder"
        for path, name in sorted(_yaml(str(folder), "")):
            yield name.encode(errors="surrogatepass")
            yield content(path)
    yield from code("config", "plan")


def _yaml(folder: str, above: str) -> Iterator[tuple[str, str]]:
    """Yields (path, name) of every YAML file below a folder."""
    try:
        entries = list(os.scandir(folder))
    except OSError:  # this user may not read it
        return
    for entry in entries:
        if entry.name.endswith(".yaml"):
            yield entry.path, above + entry.name
        if entry.is_dir(follow_symlinks=not above):  # a group may be a link to another folder
            yield from _yaml(entry.path, f"{above}{entry.name}/")
