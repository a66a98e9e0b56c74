"""From a bundle to a run folder that holds everything the run needs: what every backend does before it starts a run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from . import code_snapshot as snapshot
from .folder import RunFolder, write_private
from .request import LaunchRequest, SubmissionBundle, check_contents, to_bytes
from .state import SCHEMA, RunState, finish, write_state

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


def accepted(request: LaunchRequest, backend: str) -> RunState:
    """The first state of a run, from the clock of this host."""
    now = time.time()
    return RunState(
        schema=SCHEMA,
        run_id=request.run_id,
        state="pending",
        created_at=now,
        updated_at=now,
        writer="backend",
        backend=backend,
        plan_hash=request.plan_hash,
        summary=request.summary,
        max_restarts=request.policy.max_restarts,
    )


@contextlib.contextmanager
def create_run_folder(bundle: SubmissionBundle, backend: str) -> Iterator[RunFolder]:
    """The run's folder, made, filled and `pending`. When the body fails to start the run, its state says so."""
    request = bundle.request
    check_contents(bundle)
    folder = RunFolder(Path(request.run_dir))
    folder.create()
    state = accepted(request, backend)
    try:
        for file in request.files:
            content = bundle.contents[file.path] if file.sha256 else os.urandom(32).hex().encode() + b"\n"
            write_private(folder.path / file.path, content, int(file.mode, 8), durable=False)
        snapshot.copy(request.code, folder)
        write_private(folder.request, to_bytes(request), durable=False)
        write_state(folder, state)
        yield folder
    except BaseException as error:
        if isinstance(error, OrchError):
            code, reason = error.exit, error.message
        else:
            code, reason = Exit.INTERNAL, f"submitting failed: {type(error).__name__}: {error}"
        write_state(folder, finish(state, "failed", code, reason, at=time.time()))
        raise


def check_program(argv: Sequence[str], environ: Mapping[str, str], cwd: Path, where: str = "") -> None:
    """OrchError (64) when the program, or the script that it is to interpret, is not found from `cwd`.

    `environ` is what the worker will have. `where` ends the message.
    """
    name = argv[0]
    if "/" in name:
        found = shutil.which(str(cwd / name))
    else:
        found = shutil.which(name, path=environ.get("PATH", ""))
    if found is None:
        known = "not executable" if (cwd / name).is_file() else "not on PATH" if "/" not in name else "not there"
        raise OrchError(f"program {name!r} is {known}{where}", Exit.USAGE)
    if _PYTHON.fullmatch(Path(name).name) and len(argv) > 1:
        script = argv[1]
        if script.endswith(".py") and not script.startswith("-") and not (cwd / script).is_file():
            raise OrchError(f"script {script!r} is not in {cwd}{where}", Exit.USAGE)
