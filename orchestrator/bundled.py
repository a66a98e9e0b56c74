"""Finds the files that come with orch and are no modules of this package: trainer, configuration
groups, Slurm profiles, Helm chart.

An installed wheel has them in a folder of this package (setup.py), so that site-packages gets no
general names; a checkout has them beside it. `orch_start.py` finds the trainer by the same rule.
"""

from __future__ import annotations

from pathlib import Path

#: Folder of the package that a wheel has and a checkout has not.
INSIDE = "_bundled"
_PACKAGE = Path(__file__).resolve().parent


def folder(name: str, package: Path = _PACKAGE) -> Path:
    """Returns the folder of this name, such as `conf`, that comes with the package."""
    inside = package / INSIDE
    return inside / name if inside.is_dir() else package.parent / name
