"""Preparing a job on another host (`backend.options.ssh`): it is planned there, with what is
shipped from here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from orchestrator.backends.ssh import ship, wire
from orchestrator.backends.ssh.backend import SshBackend, request_of
from orchestrator.backends.ssh.session import Session
from orchestrator.config.groups import folders, shipped
from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan.codec import from_json
from orchestrator.plan.exits import Exit
from orchestrator.run.request import Code, SubmissionBundle
from orchestrator.style import binary

from .submission import SizeCandidate, SubmitOptions

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend

_PYTHON = "python3"  # there


class PreparedThere(NamedTuple):
    backend: Backend
    candidate: SizeCandidate
    said: list[str]


def prepare_there(
    config: Config, words: Sequence[str], options: SubmitOptions, config_dir: str | Path | None
) -> PreparedThere:
    """The job as the orch of the host has planned and checked it. Everything it needs of this
    machine is shipped.

    OrchError: what the host refuses; 64 for `--in-place`; 76 when the host does not answer.
    """
    from orchestrator.run.code_snapshot import find_code
    from orchestrator.run.left_out import with_left_out

    if options.in_place:
        raise OrchError(
            "--in-place: the host does not see this folder, so its copy is shipped", Exit.USAGE
        )
    host = config.backend.options["ssh"]
    python = config.backend.options.get("ssh_python", _PYTHON)
    session = Session(str(host), str(python))
    code = Code(kind="none")
    if options.command:
        code = structs.replace(
            with_left_out(find_code(options.cwd, runs_user_program=True)), holds_orch=False
        )
    own = [folder for folder in folders(config_dir) if folder != shipped()]
    payload = b""
    if own or (code.kind != "none" and not options.dry_run):
        packed = Code(kind="none") if options.dry_run else code
        payload, files, size = ship.pack(packed, own[0] if own else None)
        if packed.kind != "none":
            much = (
                f"{files} file{'s' * (files != 1)}, {binary(size)} ({binary(len(payload))} on the"
                " wire)"
            )
            print(f"orch: ships {much} of {code.root} to {host}", file=sys.stderr)
    question = wire.Prepare(
        words=list(words),
        command=list(options.command),
        env=list(options.env),
        program=options.program,
        code=code,
        after=list(options.after),
        run_id=options.run_id,
        dry_run=options.dry_run,
        conf=bool(own),
    )
    prepared, raw = session.ask(question, payload)
    assert isinstance(prepared, wire.Prepared)
    request = request_of(prepared)
    bundle = SubmissionBundle(request=request, contents={"plan.json": raw})
    return PreparedThere(
        SshBackend(session, prepared), SizeCandidate(config, from_json(raw), bundle), prepared.said
    )
