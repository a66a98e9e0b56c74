"""Creates a run folder that holds everything the run needs, from a submission bundle. Every
backend does this before it starts a run."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .code import snapshot
from .folder import NO_ROOM, RunFolder, write_private
from .held_signals import HeldSignals
from .python_line import is_python, started_by_python
from .request import LaunchRequest, SubmissionBundle, check_contents, to_bytes
from .state import SCHEMA, RunState, finish, write_state

_DISK_ERRORS = (*NO_ROOM, errno.EIO, errno.EROFS, errno.EFBIG)


def accepted(request: LaunchRequest, backend: str) -> RunState:
    """Returns the first state of a run, with times from the clock of this host."""
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
    """Creates the run's folder, fills it, marks the run `pending` and yields the folder. If the
    body fails to start the run, the run's state records that.

    Signals that would end this process take effect before the body, and then nothing is left, or
    after it. OrchError: 76 if the disk is full, 65 if it refuses the folder for another reason.
    """
    check_contents(bundle)
    folder = RunFolder(Path(bundle.request.run_dir))
    state = accepted(bundle.request, backend)
    with HeldSignals() as signals, disk_refusals(folder):
        folder.create()
        try:
            _fill(folder, bundle, state)
            signals.check()
        except BaseException:
            shutil.rmtree(folder.path, ignore_errors=True)  # nobody knows of this run yet
            signals.check()  # a signal may have ended a command of the copy
            raise
        try:
            yield folder
        except BaseException as error:
            if isinstance(error, OrchError):
                code = error.exit
                reason = error.message
            elif isinstance(error, OSError):
                code = Exit.CAPACITY
                reason = f"submitting failed: {error}"
            else:
                code = Exit.INTERNAL
                reason = f"submitting failed: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                write_state(folder, finish(state, "failed", code, reason, at=time.time()))
            raise


def _fill(folder: RunFolder, bundle: SubmissionBundle, state: RunState) -> None:
    request = bundle.request
    for file in request.files:
        content = (
            bundle.contents[file.path] if file.sha256 else os.urandom(32).hex().encode() + b"\n"
        )
        write_private(
            folder.path / file.path,
            content,
            int(file.mode, 8),
            durable=False,
        )
    snapshot.copy(request.code, folder)
    write_private(folder.request, to_bytes(request), durable=False)
    write_state(folder, state)


@contextlib.contextmanager
def disk_refusals(folder: RunFolder) -> Iterator[None]:
    """Turns the errors of a disk into OrchErrors."""
    try:
        yield
    except OSError as error:
        if not error.filename and error.errno not in _DISK_ERRORS:
            raise
        path = error.filename or folder.path
        reason = error.strerror or error
        code = Exit.CAPACITY if error.errno in NO_ROOM else Exit.CONFIG
        raise OrchError(f"run {folder.run_id} was not started: {path}: {reason}", code) from error


def check_program(
    argv: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path,
    context: str = "",
) -> None:
    """Raises OrchError (64) if the program, or the script that it is to interpret, is not found
    from `cwd`.

    `environ` is what the worker will have. `context` ends the message.
    """
    name = argv[0]
    if "/" in name:
        executable = shutil.which(str(cwd / name))
    else:
        executable = shutil.which(name, path=environ.get("PATH", ""))
    if executable is None:
        if (cwd / name).is_file():
            problem = "is not executable"
        elif "/" not in name:
            problem = "is not on PATH"
        else:
            problem = "does not exist"
        raise OrchError(f"program {name!r} {problem}{context}", Exit.USAGE)
    if is_python(name):
        started = started_by_python(argv[1:])
        script = "" if started.is_module else next(iter(started.arguments), "")
        if script.endswith(".py") and not (cwd / script).is_file():
            raise OrchError(f"script {script!r} is not in {cwd}{context}", Exit.USAGE)
