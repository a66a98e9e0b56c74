"""`orch render`: the run's folder, and the script that its scheduler takes, on standard output; nothing is submitted.

`orch render backend=slurm ... > job.sbatch && sbatch job.sbatch` gives the same run as `orch submit`.
"""

from __future__ import annotations

import argparse

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from . import submit

HELP = "write a run's folder and print its job script"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    submit.add_request_arguments(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import os
    import sys
    from pathlib import Path

    from orchestrator.backends.base import Rendering
    from orchestrator.run.folder import RunFolder, home_folder
    from orchestrator.run.registry import register
    from orchestrator.submit.candidates import preview

    home = home_folder(os.environ)
    backend, offers = submit.prepare(args, overrides, home)
    if not isinstance(backend, Rendering):
        raise OrchError(f"backend {backend.name} has no script to render: use orch submit", Exit.USAGE)
    offer, said = preview(offers, backend, os.environ) if len(offers) > 1 else (offers[0], [])
    bundle = offer.bundle
    os.umask(0o077)
    text = backend.render(bundle)
    register(home, RunFolder(Path(bundle.request.run_dir)))
    if args.json:
        import json

        found = {"handle": bundle.request.handle, "run_dir": bundle.request.run_dir, "script": text}
        print(json.dumps(found))
        return Exit.DONE
    print(text, end="")
    for line in said:
        print(f"orch: {line}", file=sys.stderr)
    print(f"run folder {bundle.request.run_dir}; follow it: orch status {bundle.request.run_id}", file=sys.stderr)
    return Exit.DONE
