"""`python -m orchestrator.kubernetes.planner`: plans a TrainRun that is given in words, and prints
what was planned.

Standard input and output are JSON. What is refused is one line on standard error, with its exit
code.
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


class Asked(Struct):
    run_id: str
    namespace: str
    words: list[str]
    program: list[str] = []
    options: dict[str, Any] = {}


def plan(asked: Asked) -> Planned:
    """OrchError as `orch submit`: 64 for a word, 65 for what cannot run, 76 and 78 from the
    cluster."""
    from orchestrator.api import options_from_here
    from orchestrator.config.compose import load
    from orchestrator.submit.submission import check, names_model, prepare

    options = options_from_here(
        command=tuple(asked.program), run_id=asked.run_id, in_place=True, dry_run=True,
        program=bool(asked.program) and not names_model(asked.words),
    )  # fmt: skip
    options = structs.replace(options, environ={})
    words = (
        asked.words
        if any(word.partition("=")[0] == "backend" for word in asked.words)
        else ["backend=kubernetes"]
    )
    words = [*words, *(word for word in asked.words if word not in words)]
    config = load(words, None, ranges=True)
    if config.backend.name != "kubernetes":
        raise OrchError(
            f"backend.name={config.backend.name}: a TrainRun is for kubernetes", Exit.CONFIG
        )
    merged = {**config.backend.options, **asked.options, "namespace": asked.namespace}
    config = structs.replace(config, backend=structs.replace(config.backend, options=merged))
    submission = prepare(config, options)
    check(submission, structs.replace(options, dry_run=False))
    candidates = submission.candidates
    return planned(candidates[0].bundle, [one.plan for one in candidates])


def main() -> int:
    try:
        found = plan(msgspec.json.decode(sys.stdin.buffer.read(), type=Asked))
    except OrchError as error:
        print(f"orch: error: {error.message}", file=sys.stderr)
        return int(error.exit)
    except PlanError as error:
        print(f"orch: error: {error}", file=sys.stderr)
        return int(Exit.CONFIG)
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
