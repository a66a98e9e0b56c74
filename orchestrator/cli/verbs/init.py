"""`orch init slurm|kubernetes|controller|report [FOLDER]`: writes Slurm profiles or a Helm chart as
a starting point, or the file that a program imports to report its progress."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


class Template(NamedTuple):
    source: str  # folder (orchestrator/bundled.py) or module of the files
    folder: str  # the default folder to write to
    next: str  # the command to run afterwards
    advice: str = "adapt the files to your site"  # what to do before that


TEMPLATES = {
    "slurm": Template(
        "slurm",
        "slurm",
        "orch submit --config-dir {folder} backend=PROFILE cluster=... parallel=...",
    ),
    "kubernetes": Template(
        "charts/orch",
        "chart",
        "helm install NAME {folder} --set"
        " image.repository=...,image.tag=...,cluster=...,parallel=...",
    ),
    "controller": Template(
        "charts/orch-controller",
        "controller-chart",
        "helm install orch-controller {folder} --set image.repository=...,image.tag=...",
    ),
    "report": Template("orch_report", ".", "orch run train.py", "import it in your program"),
}

_NOT_FOR_SITES = ("README.md", "testbed.yaml")  # files for this repository alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=sorted(TEMPLATES),
        help="write Slurm profiles, the Helm chart of a run or of the controller, or orch_report.py"
        " for an environment that lacks orch",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="folder to write to (default: ./slurm, ./chart, ./controller-chart or .)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    template = TEMPLATES[args.what]
    sources = _sources(template)
    folder = args.folder or Path(template.folder)
    names = sorted(sources)
    existing = [name for name in names if os.path.lexists(folder / name)]
    if existing and not args.force:
        further = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise OrchError(
            f"{folder / existing[0]}{further} would be overwritten; --force overwrites", Exit.USAGE
        )
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(sources[name], folder / name)
    except OSError as error:
        raise OrchError(f"{folder} cannot be written: {error}", Exit.CONFIG) from None
    next_command = template.next.format(folder=folder)
    if args.json:
        import json

        print(
            json.dumps(
                {
                    "folder": str(folder.absolute()),
                    "files": names,
                    "next": next_command,
                }
            )
        )
        return Exit.DONE
    for name in names:
        print(f"wrote  {folder / name}")
    print(f"{template.advice}, then: {next_command}")
    return Exit.DONE


def _sources(template: Template) -> dict[str, Path]:
    """Returns the files that come with orch: name to write -> file. Raises OrchError (65) if there
    are none."""
    from orchestrator import bundled

    if template.source == "orch_report":
        import orch_report

        return {"orch_report.py": Path(orch_report.__file__)}
    source = bundled.folder(template.source)
    if not source.is_dir():
        raise OrchError(
            f"this installation has no {template.source}: a complete one has it in {source}",
            Exit.CONFIG,
        )
    return {
        str(path.relative_to(source)): path
        for path in source.rglob("*")
        if path.is_file() and path.name not in _NOT_FOR_SITES and path.suffix != ".pyc"
    }
