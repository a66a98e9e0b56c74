"""From a bundle to a run folder that holds everything the run needs: what every backend does before it starts a run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from orchestrator.plan.exits import Exit

from . import code_snapshot as snapshot
from .folder import RunFolder, write_private
from .request import LaunchRequest, SubmissionBundle, check_contents, to_bytes
from .state import SCHEMA, RunState, write_state


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
            content = bundle.contents.get(file.path) if file.sha256 else os.urandom(32).hex().encode() + b"\n"
            write_private(folder.path / file.path, content, int(file.mode, 8), durable=False)
        snapshot.copy(request.code, folder)
        write_private(folder.request, to_bytes(request), durable=False)
        write_state(folder, state)
        yield folder
    except BaseException as error:
        reason = getattr(error, "message", None) or f"submitting failed: {type(error).__name__}: {error}"
        code = int(getattr(error, "exit", Exit.INTERNAL))
        final = {"state": "failed", "exit_code": code, "reason": reason, "ended_at": time.time()}
        write_state(folder, msgspec.structs.replace(state, **final))
        raise
