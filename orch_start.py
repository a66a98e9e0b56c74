"""`python -P -m orch_start MODULE ARGUMENTS...`, or this file by its path: runs a module of the
orch that is installed beside this file.

With `python -m trainer`, another package called `trainer` on PYTHONPATH or in the working folder
would run in its place; no other package is called `orch_start`. Only orch's own packages are
searched beside this file first. Other imports follow the user's paths.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

_BESIDE = os.path.dirname(os.path.realpath(__file__))
_OURS = ("orchestrator", "trainer")


class _OwnPackages:
    """A finder for `sys.meta_path` that finds orch's packages beside this file."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_BESIDE]) if name in _OURS else None


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
