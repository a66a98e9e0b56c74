"""`python -m orchestrator.cli.plan_train_run`: plans a TrainRun that is given in words, and prints
its plans.

Standard input and output are JSON. A refusal is one line on standard error, with its exit code. The
controller of TrainRuns starts it (orchestrator/backends/kubernetes/controller/planning.py).
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from msgspec import Struct, structs

from orchestrator.backends.kubernetes.train_run import Planned, planned
from orchestrator.errors import OrchError
from orchestrator.plan import PlanError
from orchestrator.plan.exits import Exit


class PlanRequest(Struct):
    """The words of a TrainRun, on standard input."""

    run_id: str
    namespace: str
    words: list[str]
    program: list[str] = []
    options: dict[str, Any] = {}


def plan(request: PlanRequest) -> Planned:
    """Plans the run. OrchError as in `orch submit`: 64 for a word, 65 for a run that is not
    possible, 76 and 78 from the cluster."""
    from orchestrator.api import options_from_here
    from orchestrator.config.compose import load
    from orchestrator.submit.submission import check, names_model, prepare

    options = options_from_here(
        command=tuple(request.program),
        run_id=request.run_id,
        in_place=True,
        dry_run=True,
        program=bool(request.program) and not names_model(request.words),
    )
    options = structs.replace(options, environ={})
    config = load(_config_words(request.words), None, ranges=True)
    if config.backend.name != "kubernetes":
        message = f"backend.name={config.backend.name}: a TrainRun is for kubernetes"
        raise OrchError(message, Exit.CONFIG)
    merged = {
        **config.backend.options,
        **request.options,
        "namespace": request.namespace,
    }
    config = structs.replace(config, backend=structs.replace(config.backend, options=merged))
    submission = prepare(config, options)
    check(submission, structs.replace(options, dry_run=False))
    candidates = submission.candidates
    return planned(candidates[0].bundle, [candidate.plan for candidate in candidates])


def _config_words(settings: list[str]) -> list[str]:
    """Adds the backend if the words do not name one."""
    if any(setting.partition("=")[0] == "backend" for setting in settings):
        return settings
    return ["backend=kubernetes", *settings]


def main() -> int:
    try:
        plans = plan(msgspec.json.decode(sys.stdin.buffer.read(), type=PlanRequest))
    except OrchError as error:
        print(f"orch: error: {error.message}", file=sys.stderr)
        return int(error.exit)
    except PlanError as error:
        print(f"orch: error: {error}", file=sys.stderr)
        return int(Exit.CONFIG)
    sys.stdout.buffer.write(msgspec.json.encode(plans))
    return 0


if __name__ == "__main__":
    sys.exit(main())
