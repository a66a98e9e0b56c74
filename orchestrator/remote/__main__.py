"""The other end of `orchestrator.backends.ssh`: answers questions on standard input until that is
closed.

It does for a person on another machine what `orch` does for one who is logged in here, with this
host's environment.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

import msgspec

from orchestrator import __version__, api
from orchestrator.backends.base import Rendering, Resizing
from orchestrator.backends.ssh import mirror, ship, wire
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import make_private_folder
from orchestrator.run.request import to_bytes

_SHIPPED = "shipped"  # folder of the user's home of orch: code on its way into a run's folder


class Host:
    """Answers one connection."""

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
                self._run(question.run).cancel(question.force, wait=False)
            case wire.Resume():
                self._run(question.run).resume(question.allow)
            case wire.Resize():
                self._resize(question)
            case wire.Remove():
                from orchestrator.run.removal import remove

                remove(self._run(question.run).folder)
        return wire.Done(), b""

    def close(self) -> None:
        """What was shipped is in the run's folder by now, or not needed."""
        if self._shipped:
            shutil.rmtree(self._shipped, ignore_errors=True)

    # ---------------------------------------------------------------------------------- a job

    def _prepare(self, asked: wire.Prepare, payload: bytes) -> tuple[wire.Prepared, bytes]:
        config_dir = None
        code = asked.code
        if payload:
            self._shipped = api.home() / _SHIPPED / os.urandom(8).hex()
            make_private_folder(self._shipped)
            ship.unpack(payload, self._shipped)
            config_dir = self._shipped / ship.CONF if asked.conf else None
            if code.kind != "none":
                held = self._shipped / ship.CODE
                held.mkdir(exist_ok=True, mode=0o700)
                code = msgspec.structs.replace(code, held_at=str(held))
        options = api.options_from_here(
            command=tuple(asked.command),
            env=tuple(asked.env),
            program=asked.program,
            run_id=asked.run_id,
            after=tuple(asked.after),
            dry_run=asked.dry_run,
            code=code,
        )
        job = api.prepare_job(asked.words, options, config_dir)
        self._job = job, options
        request = job.candidate.bundle.request
        plan = job.candidate.plan
        script = refusal = ""
        if asked.dry_run:
            try:
                job.backend.check(request)
                script = (
                    job.backend.script(request, plan) if isinstance(job.backend, Rendering) else ""
                )
            except OrchError as error:
                refusal = error.message
        answer = wire.Prepared(
            request=msgspec.Raw(to_bytes(request)),
            said=list(job.messages),
            script=script,
            refusal=refusal,
        )
        return answer, job.candidate.bundle.contents["plan.json"]

    def _send(self) -> wire.Handle:
        if self._job is None:
            raise OrchError("nothing was prepared", Exit.USAGE)
        (job, options), self._job = self._job, None
        try:
            return wire.Handle(handle=job.send(options).handle)
        finally:
            self.close()

    # ---------------------------------------------------------------------------------- runs

    def _run(self, run_id: str) -> api.Run:
        if run_id not in self._runs:
            found = api.Run.find(run_id)
            if found.id != run_id:
                raise OrchError(f"there is no run {run_id}", Exit.USAGE)
            self._runs[run_id] = found
        return self._runs[run_id]

    def _look(self, asked: wire.Look) -> tuple[wire.Looked, bytes]:
        run = self._run(asked.run)
        alive = run.backend.is_alive(
            run.folder
        )  # then its state, then its files: what comes later is newer
        state = run.state
        parts, payload, more = mirror.parts_of(run.folder, asked.known, asked.logs)
        return wire.Looked(alive=alive, state=state, parts=parts, more=more), payload

    def _resize(self, asked: wire.Resize) -> None:
        run = self._run(asked.run)
        if not isinstance(run.backend, Resizing):
            raise OrchError(f"{run.backend.name} has no resize by hand", Exit.USAGE)
        run.backend.resize(run.folder, api.request_of_run(run.folder), asked.nodes, os.environ)


def serve(asks: BinaryIO, answers: BinaryIO) -> None:
    """Until the other side has gone."""
    host = Host()
    answers.write(f"\n{wire.GREETING.decode()}{wire.VERSION} {__version__}\n".encode())
    answers.flush()
    try:
        while found := wire.read_question(asks):
            try:
                answer, payload = host.answer(*found)
            except OrchError as error:
                answer = wire.Refused(message=error.message, exit=int(error.exit))
                payload = b""
            except Exception as error:  # a bug of ours ends no connection
                text = f"internal error: {type(error).__name__}: {error}"
                answer = wire.Refused(message=text, exit=int(Exit.INTERNAL))
                payload = b""
            wire.write(answers, answer, payload)
    except BrokenPipeError:
        pass
    finally:
        host.close()


if __name__ == "__main__":
    os.umask(0o077)
    talk = os.fdopen(os.dup(1), "wb")
    os.dup2(
        2, 1
    )  # what a backend or a program of it says goes to the person, not between the messages
    serve(os.fdopen(0, "rb"), talk)
