"""The next attempt of a run: which plan and request it has, by what was asked for."""

from __future__ import annotations

from orchestrator.errors import OrchError
from orchestrator.plan import Plan, load_plan, to_json

from .folder import RunFolder, write_private
from .intent import Intent, ask, due, newest
from .request import LaunchRequest, at_size, to_bytes
from .state import prepare_resume, read_state


def begin_attempt(
    folder: RunFolder, request: LaunchRequest, asked: Intent | None
) -> tuple[LaunchRequest, Plan]:
    """Puts the next attempt's plan and request in force, then its state: what breaks off before
    that is done again. Returns both.

    `asked`: what it obeys; None: a size that was asked for and is not there yet, else a resume. The
    caller holds the run's lock. OrchError (65): no plan of that size.
    """
    began_with = read_state(folder).intent
    if asked is None:
        asked = due(folder, began_with)
        if asked is None or asked.want == "end":
            asked = ask(folder, "run", began_with=began_with)
    plan = load_plan(folder.sized_plan(asked.nodes)) if asked.nodes else None
    if plan:
        request = at_size(request, plan)
        write_private(folder.plan, to_json(plan, indent=1) + b"\n")
        write_private(folder.request, to_bytes(request))
    prepare_resume(folder, plan, asked.number)
    return request, plan or load_plan(folder.plan)


def check_newest(folder: RunFolder, asked: Intent | None) -> None:
    """OrchError (64) when there is a newer request than this one."""
    last = newest(folder)
    if asked and last and last.number > asked.number:
        raise OrchError(f"run {folder.run_id} was asked for something else meanwhile: {last.text}")
