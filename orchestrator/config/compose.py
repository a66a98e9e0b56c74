"""From command-line words and YAML files to one typed, frozen `Config`: `load`, which every verb calls."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import OrchError

from .cached import Remembered
from .groups import Library, folders
from .schema import Config


def load(overrides: list[str], config_dir: str | Path | None = None, ranges: bool = False) -> Config:
    """Compose, resolve and check. Raises OrchError: 64 for the command line, 65 for a file, 78 for code or secrets.

    `config_dir` is searched before the shipped files; without it `./conf` is, when it exists. `ranges`: the caller
    takes a range of sizes (`nodes=4..8`), which most have no use for. What was composed before of the same words and
    files is read back, without Hydra. Not for use from several threads at once: Hydra keeps its state in the process.
    """
    library = Library(folders(config_dir))
    before = Remembered(library, overrides)
    config = before.read()
    if config is None:
        from .hydra_compose import compose  # Hydra: a third of a second

        config = compose(overrides, library)
        before.write(config)
    if config.nodes is not None and not ranges:
        raise OrchError(f"nodes={config.nodes} is for orch plan, submit and render; here it is cluster.nodes=N")
    return config
