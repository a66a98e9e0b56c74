"""A job's configuration, with the shape of this machine where a program runs here and nobody gave one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.compose import load

from .submission import SubmitOptions

if TYPE_CHECKING:
    from orchestrator.config.schema import Config

_SHAPE = ("cluster.nodes", "cluster.gpus_per_node", "nodes")


def load_job(words: Sequence[str], options: SubmitOptions, config_dir: str | Path | None) -> Config:
    """`load`. The shipped cluster `local` simulates two nodes of four processes; a program on a machine with GPUs gets
    one node with these instead. OrchError as `load`."""
    config = load(list(words), config_dir, ranges=True)
    given = {word.lstrip("+").partition("=")[0] for word in words}
    ours = (config.backend.name, config.cluster.name) == ("local", "local")
    if not ours or not options.program or given.intersection(_SHAPE) or config.backend.options.get("ssh"):
        return config
    from orchestrator.backends.local.gpus import visible_gpus

    gpus = visible_gpus({**options.environ, **config.backend.env})
    if not gpus:
        return config
    shape = ["cluster.nodes=1", f"cluster.gpus_per_node={len(gpus)}"]
    return load([*words, *shape], config_dir, ranges=True)
