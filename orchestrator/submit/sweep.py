"""Sweeps: a run for every combination of `parallel=a,b`. All runs are planned and checked before
the first is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from orchestrator.backends.base import ArraySubmission, Backend
from orchestrator.config.sweep import hint
from orchestrator.errors import OrchError
from orchestrator.run.folder import RunFolder, new_run_id
from orchestrator.run.variables import describe_dropped

from .program_python import python_messages
from .submission import (
    SizeCandidate,
    SubmitOptions,
    check,
    choose,
    job_name,
    prepare,
    program_name,
    rate_messages,
    registered,
    simulation_messages,
)

if TYPE_CHECKING:
    from orchestrator.config.schema import Config
    from orchestrator.config.sweep import Member
    from orchestrator.run.request import SubmissionBundle


class SweepRun(NamedTuple):
    candidate: SizeCandidate
    label: str  # the overrides that differ from the other runs
    messages: list[str]  # what the user should know about the run

    @property
    def bundle(self) -> SubmissionBundle:
        return self.candidate.bundle


def prepare_sweep(
    members: Sequence[Member],
    load: Callable[[list[str]], Config],
    options: SubmitOptions,
) -> tuple[Backend, list[SweepRun]]:
    """Plans and checks every run, and returns them with their backend. `load` reads the
    configuration of a member from its overrides.

    Raises an OrchError that names the combination which cannot be sent.
    """
    stem = options.run_id or new_run_id("sweep", time.time()).removeprefix("sweep")
    runs: list[SweepRun] = []
    backend: Backend | None = None
    for index, member in enumerate(members):
        label = " ".join(member.varied)
        try:
            config = load(member.words)
            run_id = (
                f"{stem}-{index}" if options.run_id else f"{_name(config, options)}{stem}-{index}"
            )
            submission = prepare(config, structs.replace(options, run_id=run_id))
            check(submission, structs.replace(options, dry_run=False))
            if backend is not None and type(submission.backend) is not type(backend):
                raise OrchError(
                    f"backends {submission.backend.name} and {backend.name}: all runs of a sweep"
                    " need the same backend"
                )
            backend = backend or submission.backend
            candidate, _ = choose(submission._replace(backend=backend), options)
            request = candidate.bundle.request
            breaks = rate_messages(candidate.plan, request, backend)
            messages = [
                *simulation_messages(request, backend),
                *describe_dropped(candidate.bundle.dropped),
                *python_messages(config, backend, options),
                *breaks,
            ]
            if not options.dry_run:
                backend.check(request)
        except OrchError as error:
            reason = f"{error.message}{hint(member.varied, error.message)}"
            raise OrchError(
                f"{label}: {reason}; none of the {len(members)} runs was sent", error.exit
            ) from None
        runs.append(SweepRun(_labelled(candidate, label), label, messages))
    assert backend is not None
    return backend, runs


def _name(config: Config, options: SubmitOptions) -> str:
    return program_name(config, options.command) if options.program else job_name(config)


def _labelled(candidate: SizeCandidate, label: str) -> SizeCandidate:
    """Adds the label of the run to its summary, for `orch list` and `orch status`."""
    request = candidate.bundle.request
    summary = {**request.summary, "sweep": label[:200]}
    request = structs.replace(request, summary=summary)
    return candidate._replace(bundle=structs.replace(candidate.bundle, request=request))


def send_sweep(
    backend: Backend,
    runs: Sequence[SweepRun],
    options: SubmitOptions,
) -> list[str]:
    """Sends all runs to a scheduler, together if it can take them so (Slurm: as one array), and
    returns their handles."""
    bundles = [run.bundle for run in runs]
    folders = [RunFolder(Path(bundle.request.run_dir)) for bundle in bundles]
    with registered(folders, options.home):
        if isinstance(backend, ArraySubmission):
            return backend.submit_all(bundles, options.environ)
        return [backend.submit(bundle, options.environ) for bundle in bundles]
