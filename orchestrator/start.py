"""`python -P PATH/orchestrator/start.py MODULE ARGUMENTS...`: runs a module of ours from the folder of this file.

Started by name (`python -m trainer`), a package called `trainer` on PYTHONPATH or in the working folder would run in
its place. Only the names of our own packages are looked up here first: other imports are as the user's paths have them.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_FILE = Path(__file__).resolve()
_OURS = ("orchestrator", "trainer")


class _OwnPackages:
    """A finder of `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_FILE.parents[1])]) if name in _OURS else None


def command(module: str, roots: Sequence[str] = ()) -> list[str]:
    """The words that start a module of ours under this interpreter: of the first of `roots` that holds our packages,
    else of the ones that run here. OrchError (65) for the trainer where torch is not installed."""
    if module.split(".")[0] == "trainer":
        from orchestrator.errors import (
            check_installed,  # not above: when this file is started, nothing of ours is found
        )

        check_installed("torch", "the bundled trainer")
    files = [file for root in roots if (file := Path(root, *_FILE.parts[-2:])).is_file()]
    return [sys.executable, "-P", str(next(iter(files), _FILE)), module]


def output(module: str, *arguments: str, stdin: str = "") -> str:
    """What a module of ours prints, run to its end. OrchError: its last line on stderr, with its exit code."""
    import subprocess

    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit

    done = subprocess.run([*command(module), *arguments], input=stdin, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        codes = {int(code): code for code in Exit}
        raise OrchError(said[0].removeprefix(f"{module}: "), codes.get(done.returncode, Exit.INTERNAL))
    return done.stdout


if __name__ == "__main__":
    sys.meta_path.insert(0, _OwnPackages)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
