"""`python -P -m orch_start MODULE ARGUMENTS...`, or this file by its path: runs a module of the
orch that is installed beside this file.

With `python -m trainer`, another package called `trainer` on PYTHONPATH, in the working folder or
in site-packages would run in its place; no other package is called `orch_start`. Only orch's own
packages are searched by location first: `orchestrator` beside this file, and `trainer` inside it
in an installed wheel, else beside it too. Other imports follow the user's paths.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

_BESIDE = os.path.dirname(os.path.realpath(__file__))
_INSIDE = os.path.join(_BESIDE, "orchestrator", "_bundled")
#: Package of orch -> the folders that may contain it.
_FOLDERS = {"orchestrator": [_BESIDE], "trainer": [_INSIDE, _BESIDE]}


class _OwnPackages:
    """A finder for `sys.meta_path` that finds orch's packages by location."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, _FOLDERS[name]) if name in _FOLDERS else None


def main() -> int:
    """The command `orch`."""
    sys.meta_path.insert(0, _OwnPackages)
    try:
        from orchestrator.cli.main import main as orch

        return orch()
    except KeyboardInterrupt:  # in an import, or at the very end
        return 130


if __name__ == "__main__":
    import runpy

    sys.meta_path.insert(0, _OwnPackages)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
