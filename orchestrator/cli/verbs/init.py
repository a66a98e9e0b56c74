"""`orch init slurm|kubernetes [FOLDER]`: writes Slurm profiles or the Helm chart as a starting
point."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


class Template(NamedTuple):
    source: str  # folder of the files (orchestrator/bundled.py)
    folder: str  # the default folder to write to
    next: str  # the command to run afterwards


TEMPLATES = {
    "slurm": Template(
        "slurm",
        "slurm",
        "orch submit --config-dir {folder} backend=PROFILE cluster=... parallel=...",
    ),
    "kubernetes": Template(
        "charts/orch",
        "chart",
        "helm install NAME {folder} --set image.repository=...,cluster=...,parallel=...",
    ),
}

_NOT_FOR_SITES = ("README.md", "testbed.yaml")  # files for this repository alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=sorted(TEMPLATES),
        help="write Slurm profiles, or the Helm chart",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="folder to write to (default: ./slurm or ./chart)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    template = TEMPLATES[args.what]
    source = _source(template)
    folder = args.folder or Path(template.folder)
    names = sorted(
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and path.name not in _NOT_FOR_SITES and path.suffix != ".pyc"
    )
    existing = [name for name in names if os.path.lexists(folder / name)]
    if existing and not args.force:
        further = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise OrchError(
            f"{folder / existing[0]}{further} would be overwritten; --force overwrites", Exit.USAGE
        )
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
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
    print(f"adapt the files to your site, then: {next_command}")
    return Exit.DONE


def _source(template: Template) -> Path:
    """Returns the folder of the files that come with orch. Raises OrchError (65) if there is
    none."""
    from orchestrator import bundled

    source = bundled.folder(template.source)
    if source.is_dir():
        return source
    raise OrchError(
        f"this installation has no {template.source}: a complete one has it in {source}",
        Exit.CONFIG,
    )
