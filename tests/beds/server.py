"""`python -m tests.beds.server BACKEND`: runs `orch` lines, each in a child of one process that has
imported it all.

A tier of a hundred command lines would spend minutes of this machine's two cores on imports. One
JSON line in (argv, env, cwd, out, err: files, seconds), one out: the exit code, -9 where it took
too long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib import import_module

from orchestrator.cli.main import main as orch

#: What the verbs import inside their functions.
IMPORTED = (
    *(
        f"cli.verbs.{verb}"
        for verb in ("plan", "submit", "render", "status", "list", "cancel", "resume")
    ),
    "config.compose",
    "planner.elastic.sizes",
    "submit.sweep",
    "cli.session",
    "observe.pages.request_page",
    "observe.pages.run_page",
)
#: What a backend imports so.
OF_BACKEND = {
    "slurm": ("backend", "submission"),
    "kubernetes": (
        "backend",
        "submission",
        "direct_runs",
        "observer",
        "cluster_view",
        "log_mirror",
        "adoption",
        "api.transport",
        "api.access",
        "objects.render",
        "objects.payload",
    ),
}


def serve(backend: str) -> None:
    import_module("hydra.core.override_parser.overrides_parser")
    for name in (*IMPORTED, *(f"backends.{backend}.{name}" for name in OF_BACKEND[backend])):
        import_module(f"orchestrator.{name}")
    for line in sys.stdin:
        wish = json.loads(line)
        child = os.fork()
        if not child:
            _run(wish)
        print(_wait(child, wish["seconds"]), flush=True)


def _run(wish: dict) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(wish["cwd"])
        os.environ.clear()
        os.environ.update(wish["env"])
        for number, name in ((0, os.devnull), (1, wish["out"]), (2, wish["err"])):
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
            os.close(file)
        code = orch(wish["argv"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


if __name__ == "__main__":
    serve(sys.argv[1])
