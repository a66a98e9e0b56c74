"""What a backend is: the one place that knows how agents get onto nodes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest, Parcel
from orchestrator.run.state import RunState
from orchestrator.suggest import did_you_mean

#: name -> "module:class". A new backend is one module and one line here.
BACKENDS: dict[str, str] = {
    "local": "orchestrator.backends.local.backend:LocalBackend",
    "slurm": "orchestrator.backends.slurm.backend:SlurmBackend",
    "kubernetes": "orchestrator.backends.kubernetes.backend:KubernetesBackend",
}


class Backend(Protocol):
    name: str
    agent_flags: tuple[str, ...]  # what this backend adds to every agent's command

    def check(self, request: LaunchRequest) -> None:
        """OrchError (76) when this backend can never run the request; says what it has instead."""

    def submit(self, parcel: Parcel, environ: Mapping[str, str]) -> str:
        """Make the run folder, start the run, return its handle at once. Sends exactly what the parcel holds."""

    def resume(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> str:
        """Start a run that has ended once more, in its folder."""

    def cancel(self, folder: RunFolder, force: bool) -> None:
        """Ask the run to end, after saving unless `force`. Returns when it has been asked."""

    def is_alive(self, folder: RunFolder) -> bool:
        """Whether anything of the run may still act."""

    def state(self, folder: RunFolder) -> RunState:
        """The run's state as it truly is, which may be fresher than what the run folder says."""


def get_backend(name: str) -> Backend:
    """The backend of that name. OrchError (64) lists the known ones."""
    if name not in BACKENDS:
        raise OrchError(f"unknown backend {name!r}; {did_you_mean(name, BACKENDS)}", Exit.USAGE)
    module, _, kind = BACKENDS[name].partition(":")
    return getattr(import_module(module), kind)()
