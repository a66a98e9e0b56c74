"""`orch paths [run]`: lists every folder and file that orch reads or writes for this user, or for
one run."""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        help="handle, id, or the beginning of one (default: paths of no run)",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    paths = _of_run(args.run) if args.run else _of_user()
    if args.json:
        import json

        print(json.dumps({name: str(path) for name, path in paths.items()}))
        return Exit.DONE
    width = max(map(len, paths))
    for name, path in paths.items():
        print(f"{name:<{width}}  {path}{'' if path.exists() else '  (does not exist)'}")
    return Exit.DONE


def _of_user() -> dict[str, Path]:
    from orchestrator import start
    from orchestrator.cache import folder
    from orchestrator.cli.session import home
    from orchestrator.config.groups import folders
    from orchestrator.run.registry import runs_folder

    user, *_ = folders()
    return {
        "home": home(),
        "runs": runs_folder(home()),
        "metrics.sd": home() / "metrics.sd",
        "cache": Path(folder()),
        "configuration": user,
        "shipped configuration": folders()[-1],
        "packages": Path(start.__file__).parents[1],
    }


def _of_run(name: str) -> dict[str, Path]:
    from orchestrator.cli.session import find_run, plan_of_run
    from orchestrator.plan.worker import checkpoint_dir

    folder = find_run(name)
    plan = plan_of_run(folder)
    return {
        "run": folder.path.resolve(),
        "plan": folder.plan,
        "request": folder.request,
        "state": folder.state,
        "logs": folder.logs,
        "metrics": folder.path / "metrics",
        "events": folder.path / "events",
        "requests of people": folder.intents,
        "checkpoints": checkpoint_dir(plan.job.checkpoint.dir, str(folder.path)),
        "report": folder.report,
    }
