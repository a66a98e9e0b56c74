"""`orch init slurm|kubernetes [FOLDER]`: Slurm profiles or the Helm chart, to start from."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


class Template(NamedTuple):
    source: str  # a folder of a checkout, and of what the package has installed
    folder: str  # where it is written unless a folder is named
    next: str  # what to do then


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

_NOT_FOR_SITES = ("README.md", "testbed.yaml")  # about this repository


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=sorted(TEMPLATES),
        help="what to write: profiles of sites, or the Helm chart",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where: ./slurm or ./chart if left out"
    )
    parser.add_argument("--force", action="store_true", help="also over files that are there")


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
            f"{folder / existing[0]}{further} would be overwritten: --force does it", Exit.USAGE
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

        print(json.dumps({"folder": str(folder.absolute()), "files": names, "next": next_command}))
        return Exit.DONE
    for name in names:
        print(f"wrote  {folder / name}")
    print(f"change what your site differs in, then: {next_command}")
    return Exit.DONE


def _source(template: Template) -> Path:
    """In a checkout its own folder; else what was installed under the prefix (`data-files` in
    pyproject.toml)."""
    from orchestrator import start

    beside, *_ = parents = start.FILE.parents
    roots = (
        [beside]
        if (beside / "pyproject.toml").is_file()
        else [p / "share" / "orch" for p in (*parents[3:4], beside)]
    )
    for root in roots:
        if (root / template.source).is_dir():
            return root / template.source
    raise OrchError(
        f"this installation has no {template.source}: it is in {roots[0]} of a whole one",
        Exit.CONFIG,
    )
