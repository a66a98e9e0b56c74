"""Starts the next attempt of a run: chooses its plan and its request by the newest intent."""

from __future__ import annotations

from orchestrator.errors import OrchError
from orchestrator.plan import Plan, load_plan, to_json

from .folder import RunFolder, write_private
from .intent import Intent, ask, due, newest
from .request import LaunchRequest, at_size, to_bytes
from .state import prepare_resume, read_state


def begin_attempt(
    folder: RunFolder,
    request: LaunchRequest,
    intent: Intent | None,
) -> tuple[LaunchRequest, Plan]:
    """Puts the plan and the request of the next attempt in force, then writes its state, and
    returns request and plan. If this is interrupted, the next call repeats it.

    `intent`: what the attempt obeys; None: a resize that was requested and not yet carried out,
    else a plain resume. The caller holds the run's lock. OrchError (65): there is no plan of
    that size.
    """
    previous_intent = read_state(folder).intent
    if intent is None:
        intent = due(folder, previous_intent)
        if intent is None or intent.want == "end":
            intent = ask(folder, "run", began_with=previous_intent)
    plan = None
    if intent.nodes:
        plan = load_plan(folder.sized_plan(intent.nodes))
    if plan:
        request = at_size(request, plan)
        write_private(folder.plan, to_json(plan, indent=1) + b"\n")
        write_private(folder.request, to_bytes(request))
    prepare_resume(folder, plan, intent.number)
    return request, plan or load_plan(folder.plan)


def check_newest(folder: RunFolder, intent: Intent | None) -> None:
    """Raises OrchError (64) if a newer intent than this one has been recorded."""
    latest = newest(folder)
    if intent and latest and latest.number > intent.number:
        raise OrchError(f"run {folder.run_id} has received a newer request: {latest.text}")
