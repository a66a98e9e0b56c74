"""The Python API, which the command line uses, too.

    from orchestrator import api as orch

    plan = orch.plan("cluster=h100x64", "parallel=tp8_pp4_zero1")
    with orch.submit("nproc=2", command=["python", "train.py"]) as run:
        run.wait(step=100)
        print(run.status().live.loss)
    print(run.state.state, run.report()["steps"])

Overrides (`key=value`) are those of the command line. Refusals raise `orch.OrchError` with
`message` and `exit`.

The functions can be called from any thread, also at the same time. They leave the process of the
caller as it is: its umask, working folder, environment, warning filters and signal handlers. (While
a job is sent from the main thread, signals that would end the process are held back; they take
effect when the function returns.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchError

from .jobs import (
    PreparedJob,
    options_from_here,
    plan,
    plan_all_sizes,
    prepare_job,
    submit,
)
from .run import Run, Status, home, plan_of_run, request_of_run

if TYPE_CHECKING:
    from orchestrator.observe.updates import EndUpdate, FaultUpdate, StateUpdate, StepUpdate, Update

__all__ = [
    "EndUpdate",
    "FaultUpdate",
    "OrchError",
    "PreparedJob",
    "Run",
    "StateUpdate",
    "Status",
    "StepUpdate",
    "Update",
    "home",
    "options_from_here",
    "plan",
    "plan_all_sizes",
    "plan_of_run",
    "prepare_job",
    "request_of_run",
    "submit",
]


def __getattr__(name: str) -> Any:
    """Imports the types of `Run.follow` when they are first used: not every verb needs them."""
    if not name.endswith("Update"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestrator.observe import updates

    return getattr(updates, name)
