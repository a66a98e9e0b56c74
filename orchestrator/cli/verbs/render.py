"""`orch render`: writes the folder of a run and prints the script for its scheduler, without
submitting it.

`orch render backend=slurm ... > job.sbatch && sbatch job.sbatch` starts the same run as `orch
submit`.
"""

from __future__ import annotations

import argparse

from orchestrator.cli.session import add_request_arguments, submit_options
from orchestrator.cli.terminal import print_messages
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import sys

    from orchestrator.backends.base import Rendering
    from orchestrator.config.compose import load
    from orchestrator.run.code.left_out import describe_copy
    from orchestrator.run.variables import describe_dropped
    from orchestrator.submit.submission import check, choose, prepare, render

    # A dry run: nothing is sent to the scheduler, whose refusals do not matter here.
    options = submit_options(args, True, overrides)
    submission = prepare(load(overrides, args.config_dir, ranges=True), options)
    backend, candidates = submission
    if not isinstance(backend, Rendering):
        raise OrchError(f"backend {backend.name} has no job script: use orch submit", Exit.USAGE)
    check(submission, options)
    candidate, messages = (
        choose(submission, options) if len(candidates) > 1 else (candidates[0], [])
    )
    bundle = candidate.bundle
    print_messages(describe_copy(bundle.request.code))
    print_messages(describe_dropped(bundle.dropped))
    script = render(bundle, backend, options)
    if args.json:
        import json

        document = {
            "handle": bundle.request.handle,
            "run_dir": bundle.request.run_dir,
            "script": script,
        }
        print(json.dumps(document))
        return Exit.DONE
    print(script, end="")
    print_messages(messages)
    print(
        f"run folder {bundle.request.run_dir}; see it: orch status {bundle.request.run_id}",
        file=sys.stderr,
    )
    return Exit.DONE
