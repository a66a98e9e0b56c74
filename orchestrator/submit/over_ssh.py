"""Preparing a job on another host (`backend.options.ssh`): the orch of that host plans it, with the
code and configuration that this machine sends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from orchestrator.backends.base import get_backend
from orchestrator.backends.ssh import ship, wire
from orchestrator.backends.ssh.backend import SshBackend, check_values, request_of
from orchestrator.backends.ssh.session import Session
from orchestrator.backends.ssh.sharing import sockets_folder
from orchestrator.config.groups import folders, shipped
from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan.codec import from_json
from orchestrator.plan.exits import Exit
from orchestrator.run.request import Code, SubmissionBundle, checked_command
from orchestrator.run.variables import (
    Dropped,
    Selection,
    describe_dropped,
    machine_names,
    select_variables,
)
from orchestrator.style import binary

from .submission import SizeCandidate, SubmitOptions

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend

_PYTHON = "python3"  # default interpreter of the host


class PreparedOnHost(NamedTuple):
    backend: Backend
    candidate: SizeCandidate
    cautions: list[str]
    messages: list[str]


def prepare_on_host(
    config: Config,
    overrides: Sequence[str],
    options: SubmitOptions,
    config_dir: str | Path | None,
) -> PreparedOnHost:
    """Lets the orch of the host plan and check a job, and sends it what it needs of this machine.

    Raises OrchError: the refusals of the host; 64 for `--in-place`, and for text that is not UTF-8;
    76 when the host does not answer.
    """
    command = checked_command(options.command)
    selection = _selected_variables(config, options)
    session = _session(config, options)
    code = _code_to_send(options)
    user_config = next((folder for folder in folders(config_dir) if folder != shipped()), None)
    is_sent = not options.dry_run or bool(get_backend(config.backend.name).most_code_bytes)
    packed = code if is_sent else Code(kind="none")
    payload = _pack(packed, user_config, session.host)
    question = wire.Prepare(
        words=list(overrides),
        command=command,
        env=list(options.env),
        program=options.program,
        code=code,
        after=list(options.after),
        run_id=options.run_id,
        dry_run=options.dry_run,
        conf=user_config is not None,
        variables={name: options.environ[name] for name in selection.passed},
    )
    prepared, raw = session.ask(question, payload)
    assert isinstance(prepared, wire.Prepared)
    request = request_of(prepared)
    bundle = SubmissionBundle(request=request, contents={"plan.json": raw})
    candidate = SizeCandidate(config, from_json(raw), bundle)
    backend = SshBackend(session, prepared, selection.passed)
    dropped = selection.dropped if options.command else Dropped()
    return PreparedOnHost(
        backend,
        candidate,
        cautions=describe_dropped(dropped),
        messages=prepared.messages,
    )


def _session(config: Config, options: SubmitOptions) -> Session:
    host = config.backend.options["ssh"]
    python = config.backend.options.get("ssh_python", _PYTHON)
    return Session(str(host), str(python), sockets_folder(options.home))


def _code_to_send(options: SubmitOptions) -> Code:
    """Returns the program's folder as it is copied to the host. OrchError (64) for `--in-place`."""
    from orchestrator.run.code.left_out import with_left_out
    from orchestrator.run.code.snapshot import find_code

    if options.in_place:
        raise OrchError(
            "--in-place: the host does not see this folder; leave it out, orch sends a copy",
            Exit.USAGE,
        )
    if not options.command:
        return Code(kind="none")
    code = with_left_out(find_code(options.cwd, runs_user_program=True))
    return structs.replace(code, holds_orch=False)


def _selected_variables(config: Config, options: SubmitOptions) -> Selection:
    """Selects the variables of this shell that the host gets: the host's own ones stay in force for
    the others. OrchError (64) for one that cannot be sent."""
    pass_env = config.backend.pass_env
    selection = select_variables(
        [*options.environ],
        in_full=[*options.env, *pass_env],
        patterns=[*config.backend.passed, *pass_env],
        of_this_machine=machine_names(options.environ),
    )
    check_values({name: options.environ[name] for name in selection.passed})
    return selection


def _pack(code: Code, user_config: Path | None, host: str) -> bytes:
    """Packs the code and the user's configuration for the host, and reports the size of the code.
    Returns nothing if there is neither."""
    if user_config is None and code.kind == "none":
        return b""
    payload, files, size = ship.pack(code, user_config)
    if code.kind != "none":
        amount = (
            f"{files} file{'s' * (files != 1)}, {binary(size)} ({binary(len(payload))} compressed)"
        )
        print(f"orch: sends {amount} of {code.root} to {host}", file=sys.stderr)
    return payload
