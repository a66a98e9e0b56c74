"""orch: from "this model, this cluster" to a running, observed training job.

Data walks one way: conf -> plan -> launch request -> agent -> trainer -> metrics.
Nothing in this package imports torch.

`plan_job`, `submit_job`, `Run` and OrchError are the Python API (docs/programs.md,
orchestrator/api.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Run as Run
    from orchestrator.api import plan_job as plan_job
    from orchestrator.api import submit_job as submit_job
    from orchestrator.errors import OrchError as OrchError

__version__ = "0.2.0.dev0"  # the one place; tags are `v0.2.0` and the like

_WHERE = {"Run": "api", "plan_job": "api", "submit_job": "api", "OrchError": "errors"}


def __getattr__(name: str) -> Any:
    """The API, imported when it is first used: every process of a run imports this package."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
