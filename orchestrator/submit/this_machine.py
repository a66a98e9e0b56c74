"""The influence of this machine on a job: the default shape of programs that run here, and the
Python interpreter."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.compose import load

from .submission import SubmitOptions

if TYPE_CHECKING:
    from orchestrator.config.schema import Config
    from orchestrator.run.request import LaunchRequest

_SHAPE = ("cluster.nodes", "cluster.gpus_per_node", "nodes")


def load_job(
    overrides: Sequence[str],
    options: SubmitOptions,
    config_dir: str | Path | None,
) -> Config:
    """Loads the configuration of a job. The shipped cluster `local` simulates two nodes of four
    processes; a program on a machine with GPUs gets one node with these GPUs instead. Raises
    OrchError as `load` does."""
    config = load(list(overrides), config_dir, ranges=True)
    if not options.program or config.backend.options.get("ssh"):
        return config
    if config.backend.name != "local" or config.cluster.name != "local":
        return config
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    if keys.intersection(_SHAPE):
        return config
    from orchestrator.backends.local.gpus import visible_gpus

    gpus = visible_gpus({**options.environ, **config.backend.env})
    if not gpus:
        return config
    shape = ["cluster.nodes=1", f"cluster.gpus_per_node={len(gpus)}"]
    return load([*overrides, *shape], config_dir, ranges=True)


_PYTHON = re.compile(r"python[0-9.]*")


def interpreter(request: LaunchRequest, options: SubmitOptions) -> list[str]:
    """Returns a message if the bare `python` of a command is orch's interpreter and not that of the
    shell: the PATH of a run begins with orch's folder, whose Python may lack the user's packages
    (orch installed by pipx or uv tool)."""
    name = options.command[0] if options.command else ""
    if not _PYTHON.fullmatch(name):
        return []
    ours = shutil.which(name, path=":".join(request.environment.path_first))
    if not ours:
        return []
    remedy = "give an absolute path for another one"
    return other_python(ours, options.environ.get("PATH", ""), remedy)


def other_python(ours: str, path: str, remedy: str) -> list[str]:
    """Returns a message if the search path finds a Python in another folder than that of `ours`.
    `remedy`: how to select that one."""
    names = (Path(ours).name, "python3")
    shell_python = next(
        filter(None, (shutil.which(name, path=path) for name in names)),
        None,
    )
    if shell_python is None or Path(shell_python).parent == Path(ours).parent:
        return []
    return [
        f"the program's python is {ours}, which runs orch, not {shell_python} of this shell;"
        f" {remedy}"
    ]
