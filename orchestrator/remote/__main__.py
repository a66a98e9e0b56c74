"""The far end of `orchestrator.backends.ssh`: answers questions on standard input until that is
closed.

It does for a user on another machine what `orch` does for a user who is logged in here, in this
host's environment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from orchestrator import __version__, api
from orchestrator.backends.base import Rendering, Resizing
from orchestrator.backends.ssh import mirror, ship, wire
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import make_private_folder
from orchestrator.run.request import Code, to_bytes

#: The folder in the user's home of orch that holds code on its way into a run's folder.
_SHIPPED_FOLDER = "shipped"


class Host:
    """Answers the questions of one connection."""

    def __init__(self) -> None:
        self._job: tuple[api.PreparedJob, api.SubmitOptions] | None = None
        self._shipped: Path | None = None
        self._runs: dict[str, api.Run] = {}

    def answer(self, question: wire.Question, payload: bytes) -> tuple[wire.Answer, bytes]:
        match question:
            case wire.Prepare():
                return self._prepare(question, payload)
            case wire.Send():
                return self._send(), b""
            case wire.Look():
                return self._look(question)
            case wire.Cancel():
                run = self._run(question.run)
                run.cancel(question.force, wait=False)
            case wire.Resume():
                run = self._run(question.run)
                run.resume(question.allow, _shell(question.variables))
            case wire.Resize():
                self._resize(question)
            case wire.Remove():
                self._remove(question)
        return wire.Done(), b""

    def close(self) -> None:
        """Removes the shipped files: the run's folder has them by now, or nobody needs them."""
        if self._shipped:
            shutil.rmtree(self._shipped, ignore_errors=True)

    # ---------------------------------------------------------------------------------- a job

    def _prepare(self, question: wire.Prepare, payload: bytes) -> tuple[wire.Prepared, bytes]:
        code, config_dir = self._receive(question, payload)
        options = api.options_from_here(
            command=tuple(question.command),
            env=tuple(question.env),
            program=question.program,
            run_id=question.run_id,
            after=tuple(question.after),
            dry_run=question.dry_run,
            code=code,
            environ=_shell(question.variables),
        )
        job = api.prepare_job(question.words, options, config_dir)
        self._job = (job, options)
        request = job.candidate.bundle.request
        plan = job.candidate.plan
        script = ""
        refusal = ""
        if question.dry_run:
            try:
                job.backend.check(request)
                if isinstance(job.backend, Rendering):
                    script = job.backend.script(request, plan)
            except OrchError as error:
                refusal = error.message
        answer = wire.Prepared(
            request=msgspec.Raw(to_bytes(request)),
            messages=[*job.cautions, *job.messages],
            script=script,
            refusal=refusal,
        )
        return answer, job.candidate.bundle.contents["plan.json"]

    def _receive(
        self,
        question: wire.Prepare,
        payload: bytes,
    ) -> tuple[Code, Path | None]:
        """Unpacks the code and the group files of the other machine, if it has sent any. Returns
        the code with its folder here, and the folder of the group files."""
        code = question.code
        if not payload:
            return code, None
        folder_name = os.urandom(8).hex()
        self._shipped = api.home() / _SHIPPED_FOLDER / folder_name
        make_private_folder(self._shipped)
        ship.unpack(payload, self._shipped)
        if code.kind != "none":
            code_folder = self._shipped / ship.CODE
            code_folder.mkdir(exist_ok=True, mode=0o700)
            code = msgspec.structs.replace(
                code,
                held_at=str(code_folder),
            )
        if not question.conf:
            return code, None
        return code, self._shipped / ship.CONF

    def _send(self) -> wire.Handle:
        if self._job is None:
            raise OrchError("nothing was prepared", Exit.USAGE)
        job, options = self._job
        self._job = None
        try:
            return wire.Handle(handle=job.send(options).handle)
        finally:
            self.close()

    # ---------------------------------------------------------------------------------- runs

    def _run(self, run_id: str) -> api.Run:
        if run_id not in self._runs:
            run = api.Run.find(run_id)
            if run.id != run_id:
                raise OrchError(f"there is no run {run_id}", Exit.USAGE)
            self._runs[run_id] = run
        return self._runs[run_id]

    def _look(self, question: wire.Look) -> tuple[wire.Looked, bytes]:
        run = self._run(question.run)
        # in this order: liveness, state, files, so that each is newer than the one before
        alive = run.backend.is_alive(run.folder)
        state = run.state
        file_parts, payload, incomplete = mirror.parts_of(run.folder, question.known, question.logs)
        answer = wire.Looked(
            alive=alive,
            state=state,
            parts=file_parts,
            more=incomplete,
        )
        return answer, payload

    def _resize(self, question: wire.Resize) -> None:
        run = self._run(question.run)
        if not isinstance(run.backend, Resizing):
            raise OrchError(f"{run.backend.name} has no resize by hand", Exit.USAGE)
        request = api.request_of_run(run.folder)
        environ = _shell(question.variables)
        run.backend.resize(run.folder, request, question.nodes, environ)

    def _remove(self, question: wire.Remove) -> None:
        from orchestrator.run.removal import remove

        run = self._run(question.run)
        remove(run.folder)


def _shell(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job: of this host's shell, with the variables of the other machine's."""
    return {**os.environ, **variables}


def _refusal(message: str, code: int) -> bytes:
    """Encodes a refusal. What of its message is not UTF-8 is replaced."""
    shown = message.encode(errors="replace").decode()
    return wire.encode(wire.Refused(message=shown, exit=int(code)))


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answers questions until the other side closes the connection."""
    host = Host()
    greeting = f"{wire.GREETING.decode()}{wire.VERSION} {__version__}"
    answers.write(f"\n{greeting}\n".encode())
    answers.flush()
    try:
        while received := wire.read_question(questions):
            question, question_payload = received
            try:
                answer, payload = host.answer(question, question_payload)
                encoded = wire.encode(answer)
            except OrchError as error:
                encoded = _refusal(error.message, error.exit)
                payload = b""
            except Exception as error:  # a bug must not end the connection
                encoded = _refusal(
                    f"internal error: {type(error).__name__}: {error}", Exit.INTERNAL
                )
                payload = b""
            wire.write(answers, encoded, payload)
    except BrokenPipeError:
        pass
    finally:
        host.close()


if __name__ == "__main__":
    os.umask(0o077)
    talk = os.fdopen(os.dup(1), "wb")
    # output of a backend or its programs goes to the user, not between the messages
    os.dup2(2, 1)
    serve(os.fdopen(0, "rb"), talk)
