"""The backend of runs on another host. A run's folder here mirrors the relevant files of the folder
on the host, so that everything that reads runs reads these too."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from orchestrator.backends.base import (
    Backend,
    Elsewhere,
    LogMirroring,
    Rendering,
    Resizing,
    read_record,
    write_record,
)
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit
from orchestrator.run.create import accepted, disk_refusals
from orchestrator.run.environment import values_elsewhere
from orchestrator.run.folder import RunFolder, home_folder, write_private
from orchestrator.run.held_signals import HeldSignals
from orchestrator.run.registry import runs_folder
from orchestrator.run.request import LaunchRequest, SubmissionBundle, read_request, to_bytes
from orchestrator.run.state import RunState, finish, read_state, write_state
from orchestrator.run.variables import is_utf8

from . import mirror, wire
from .session import ConnectionLost, Session
from .sharing import sockets_folder

_FRESH_S = 0.5  # how long an answer of the host is reused


class SshRecord(Frozen):
    """The host of a run, as backend.json holds it."""

    host: str
    python: str
    run_dir: str  # on the host
    variables: list[str] = []  # names of those of this machine's shell that the run has


class _Snapshot(NamedTuple):
    """The host's last answer about a run."""

    at: float  # monotonic time of the answer
    alive: bool
    state: RunState
    exists: bool = True  # the host has a folder of the run


class SshBackend(Backend, Elsewhere, LogMirroring, Rendering, Resizing):
    """Runs on another host.

    `session`: the connection in which the job to submit was prepared. `variables`: the names of
    those of this machine's shell that it has.
    """

    name = "ssh"
    shares_folders = False

    def __init__(
        self,
        session: Session | None = None,
        prepared: wire.Prepared | None = None,
        variables: Sequence[str] = (),
    ) -> None:
        self._session = session
        self._prepared = prepared
        self._variables = list(variables)
        self._sessions: dict[tuple[str, str], Session] = {}
        self._seen: dict[str, _Snapshot] = {}
        self._runs_with_logs: set[str] = set()

    # ---------------------------------------------------------------------- a prepared job

    def check(self, request: LaunchRequest) -> None:
        if self._prepared is None:
            raise OrchError(
                "the backend ssh is chosen by backend.options.ssh=HOST, not by its name", Exit.USAGE
            )
        if self._prepared.refusal:
            raise OrchError(self._prepared.refusal, Exit.CAPACITY)

    def script(self, request: LaunchRequest, plan: Plan) -> str:
        return self._prepared.script if self._prepared else ""

    def render(self, bundle: SubmissionBundle) -> str:
        raise OrchError(
            "scripts are rendered on the host itself: log in and use orch render there", Exit.USAGE
        )

    def folder_of(self, request: LaunchRequest, home: Path) -> RunFolder:
        return RunFolder(runs_folder(home) / request.run_id)

    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        self.check(bundle.request)
        assert self._session is not None
        session = self._session
        folder = self.folder_of(bundle.request, home_folder(environ))
        if folder.path.exists():
            raise OrchError(
                f"run {folder.run_id} exists already in {folder.path.parent}", Exit.CONFIG
            )
        record = SshRecord(
            host=session.host,
            python=session.python,
            run_dir=bundle.request.run_dir,
            variables=self._variables,
        )
        with HeldSignals(), disk_refusals(folder):
            folder.create()
            try:
                write_private(folder.request, to_bytes(bundle.request), durable=False)
                write_record(folder, record, durable=True)
                write_state(folder, accepted(bundle.request, self.name))
                session.ask(wire.Send())  # last, so that a run on the host is always known here
            except ConnectionLost as error:
                message = (
                    f"{error.message}; run {folder.run_id} may have been started there: orch status"
                    f" {folder.run_id}"
                )
                raise OrchError(message, Exit.CAPACITY) from None
            except BaseException:
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
        self._sessions[session.host, session.python] = session
        with contextlib.suppress(OrchError):  # the run has started; its state can wait
            self._look(folder)
        return f"{self.name}://{folder.run_id}"

    # ---------------------------------------------------------------------------------- runs

    def resume(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        environ: Mapping[str, str],
    ) -> str:
        return self.resume_there(folder, (), environ)

    def resize(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        nodes: int,
        environ: Mapping[str, str],
    ) -> str:
        question = wire.Resize(
            run=folder.run_id,
            nodes=nodes,
            variables=self._values(folder, environ),
        )
        return self._restart(folder, question)

    def cancel(self, folder: RunFolder, force: bool) -> None:
        self._ask(folder, wire.Cancel(run=folder.run_id, force=force))
        self._seen.pop(folder.run_id, None)

    def remove_there(self, folder: RunFolder) -> None:
        if self._look(folder).exists:
            self._ask(folder, wire.Remove(run=folder.run_id))

    def resume_there(
        self,
        folder: RunFolder,
        allow: Sequence[str],
        environ: Mapping[str, str],
    ) -> str:
        question = wire.Resume(
            run=folder.run_id,
            allow=list(allow),
            variables=self._values(folder, environ),
        )
        return self._restart(folder, question)

    def is_alive(self, folder: RunFolder) -> bool:
        return self._look(folder).alive

    def state(self, folder: RunFolder) -> RunState:
        """The state that the host reports.

        If the host does not answer, it is the state last seen, and the reason says so.
        """
        try:
            return self._look(folder).state
        except OrchError as error:
            if error.exit != Exit.CAPACITY:
                raise
            state = read_state(folder)
            if state.is_final:
                return state
            seen_at = time.strftime("%H:%M:%S", time.localtime(state.updated_at))
            return replace(state, reason=f"as of {seen_at}: {error.message}")

    @contextlib.contextmanager
    def mirror(self, folder: RunFolder, follow: bool) -> Iterator[None]:
        """Copies the logs at once, and with each look while the context is open."""
        self._runs_with_logs.add(folder.run_id)
        self._seen.pop(folder.run_id, None)
        try:
            self._look(folder)
            yield
        finally:
            self._runs_with_logs.discard(folder.run_id)

    # ---------------------------------------------------------------------------------- parts

    def _restart(self, folder: RunFolder, question: wire.Question) -> str:
        self._ask(folder, question)
        self._seen.pop(folder.run_id, None)
        self._look(folder)
        return f"{self.name}://{folder.run_id}"

    def _look(self, folder: RunFolder) -> _Snapshot:
        seen = self._seen.get(folder.run_id)
        if seen and time.monotonic() - seen.at < _FRESH_S:
            return seen
        logs = folder.run_id in self._runs_with_logs
        while True:
            look = wire.Look(
                run=folder.run_id,
                known=mirror.known(folder),
                logs=logs,
            )
            try:
                answer, payload = self._ask(folder, look)
            except OrchError as error:
                if error.exit != Exit.USAGE:
                    raise
                return self._missing_run(folder, error.message)
            assert isinstance(answer, wire.Looked)
            mirror.write_parts(folder, answer.parts, payload)
            if not answer.more:
                break
        state = replace(answer.state, backend=self.name)
        write_state(folder, state)
        seen = self._seen[folder.run_id] = _Snapshot(time.monotonic(), answer.alive, state)
        return seen

    def _missing_run(self, folder: RunFolder, error: str) -> _Snapshot:
        """A snapshot of a run that the host does not know: it never arrived, or was removed there.

        It is not written to the folder here, because the host may be about to create its folder.
        """
        state = read_state(folder)
        if not state.is_final:
            state = finish(
                state,
                "failed",
                Exit.CAPACITY,
                f"not on the host: {error}",
                at=time.time(),
            )
        seen = self._seen[folder.run_id] = _Snapshot(
            time.monotonic(),
            alive=False,
            state=state,
            exists=False,
        )
        return seen

    def _values(self, folder: RunFolder, environ: Mapping[str, str]) -> dict[str, str]:
        """The values that this shell gives the variables with which the run was submitted, judged
        once more. OrchError (64) for one that is not UTF-8."""
        environment = replace(
            read_request(folder).environment,
            names=self._record(folder).variables,
        )
        values = values_elsewhere(environment, environ)
        check_values(values)
        return values

    def _record(self, folder: RunFolder) -> SshRecord:
        record = read_record(folder, SshRecord)
        if record is None:
            raise OrchError(
                f"run {folder.run_id} was not sent: there is no {folder.backend.name}", Exit.CONFIG
            )
        return record

    def _ask(self, folder: RunFolder, question: wire.Question) -> tuple[wire.Answer, bytes]:
        record = self._record(folder)
        key = record.host, record.python
        if key not in self._sessions:
            home = folder.path.parent.parent  # as in `folder_of`
            self._sessions[key] = Session(*key, sockets_folder(home))
        return self._sessions[key].ask(question)


def check_values(variables: Mapping[str, str]) -> None:
    """Raises OrchError (64) if values of variables are not UTF-8, and so cannot be sent. It tells
    their names, since a value may be a secret."""
    names = [name for name, value in variables.items() if not is_utf8(value)]
    if names:
        raise OrchError(
            f"values that are not UTF-8 cannot be sent over ssh: unset {', '.join(names)}",
            Exit.USAGE,
        )


def request_of(prepared: wire.Prepared) -> LaunchRequest:
    return msgspec.json.decode(prepared.request, type=LaunchRequest)
