"""`orch render`: the run's folder, and the script that its scheduler takes, on standard output;
nothing is submitted.

`orch render backend=slurm ... > job.sbatch && sbatch job.sbatch` gives the same run as `orch
submit`.
"""

from __future__ import annotations

import argparse

from orchestrator.cli.session import add_request_arguments, submit_options
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import sys

    from orchestrator.backends.base import Rendering
    from orchestrator.config.compose import load
    from orchestrator.run.left_out import describe_left_out
    from orchestrator.submit.submission import check, choose, prepare, render

    options = submit_options(
        args, True, overrides
    )  # a scheduler's refusal is not ours: nothing is sent to it
    submission = prepare(load(overrides, args.config_dir, ranges=True), options)
    backend, candidates = submission
    if not isinstance(backend, Rendering):
        raise OrchError(
            f"backend {backend.name} has no script to render: use orch submit", Exit.USAGE
        )
    check(submission, options)
    candidate, said = choose(submission, options) if len(candidates) > 1 else (candidates[0], [])
    bundle = candidate.bundle
    for line in describe_left_out(bundle.request.code):
        print(f"orch: {line}", file=sys.stderr)
    text = render(bundle, backend, options)
    if args.json:
        import json

        found = {"handle": bundle.request.handle, "run_dir": bundle.request.run_dir, "script": text}
        print(json.dumps(found))
        return Exit.DONE
    print(text, end="")
    for line in said:
        print(f"orch: {line}", file=sys.stderr)
    print(
        f"run folder {bundle.request.run_dir}; follow it: orch status {bundle.request.run_id}",
        file=sys.stderr,
    )
    return Exit.DONE
