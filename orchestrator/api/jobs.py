"""Plans and submits jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.errors import OrchError

from .run import Run, home

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.plan import Plan
    from orchestrator.planner.elastic.sizes import Sizes
    from orchestrator.submit.cluster import ClusterResolver
    from orchestrator.submit.submission import SizeCandidate, SubmitOptions


def plan(
    *overrides: str,
    command: Sequence[str | os.PathLike[str]] = (),
    config_dir: str | Path | None = None,
    any_layout: bool = False,
) -> Plan:
    """Returns the plan of a job, as `orch plan` shows it; for `nodes=A..B` the plan of the largest
    size. `command`: a program of one's own, whose plan is that of `orch submit --dry-run`; empty:
    the bundled trainer.

    any_layout: `parallel=auto` may also choose layouts that the bundled trainer does not run, as it
    may for a command. Raises OrchError: 64 for a wrong override, 65 when nothing can be planned, 76
    and 78 for errors of the cluster.
    """
    if command:
        options = _program_options(overrides, command, dry_run=True)
        return prepare_job(list(overrides), options, config_dir).candidate.plan
    sizes, _ = plan_all_sizes(list(overrides), config_dir, any_layout)
    return sizes.legal[0].plan


def plan_all_sizes(
    overrides: list[str],
    config_dir: str | Path | None,
    any_layout: bool,
    settle: bool = False,
) -> tuple[Sizes, ClusterResolver]:
    """Returns the plans of all sizes, the largest first. settle: replaces `parallel=auto` by the
    layout that it chooses, so that the layout can be explained."""
    from orchestrator.config.compose import load
    from orchestrator.planner.elastic.sizes import plan_sizes
    from orchestrator.submit.cluster import ClusterResolver, with_token_folder

    resolve = ClusterResolver(home())
    config = with_token_folder(load(overrides, config_dir, ranges=True), home())
    profile = resolve.profile(config)
    if settle and config.parallel.auto and config.nodes is None:
        from orchestrator.planner.search.auto import settled

        config = settled(config, resolve(config.cluster), any_layout, profile)
    sizes = plan_sizes(
        config,
        resolve,
        any_memory=True,
        any_layout=any_layout,
        profile=profile,
    )
    return sizes, resolve


class PreparedJob(NamedTuple):
    """A job that is ready to be sent: nothing has been started or written."""

    backend: Backend
    candidate: SizeCandidate
    cautions: list[str]  # what the user should know before the job starts
    messages: list[str]  # ... and afterwards, when nothing has refused it

    def send(self, options: SubmitOptions) -> Run:
        """Starts the job."""
        from orchestrator.submit.submission import send

        bundle = self.candidate.bundle
        send(bundle, self.backend, options)
        return Run(self.backend.folder_of(bundle.request, options.home), self.backend)


def prepare_job(
    overrides: list[str],
    options: SubmitOptions,
    config_dir: str | Path | None = None,
) -> PreparedJob:
    """Plans and checks a job, at the size that its scheduler would start. Raises OrchError as
    `submit` does."""
    from orchestrator.run.variables import describe_dropped
    from orchestrator.submit.program_python import python_messages
    from orchestrator.submit.submission import (
        check,
        choose,
        prepare,
        rate_messages,
        simulation_messages,
    )
    from orchestrator.submit.this_machine import load_job

    config = load_job(overrides, options, config_dir)
    if config.backend.options.get("ssh") and options.code is None:
        from orchestrator.submit.over_ssh import prepare_on_host

        return PreparedJob(*prepare_on_host(config, overrides, options, config_dir))
    submission = prepare(config, options)
    check(submission, options)
    candidate, scheduler_messages = choose(submission, options)
    request = candidate.bundle.request
    backend = submission.backend
    cautions = simulation_messages(request, backend)
    if options.code is None:  # the other machine, whose variables these are, reports them
        cautions += describe_dropped(candidate.bundle.dropped)
    cautions += python_messages(config, backend, options)
    rate_breaks = rate_messages(candidate.plan, request, backend)
    return PreparedJob(backend, candidate, cautions, [*scheduler_messages, *rate_breaks])


def submit(
    *overrides: str,
    command: Sequence[str | os.PathLike[str]] = (),
    config_dir: str | Path | None = None,
    env: Sequence[str] = (),
    in_place: bool | None = None,
    run_id: str | None = None,
    after: Sequence[str] = (),
) -> Run:
    """Plans a job and starts it, as `orch submit` does. `command`: a program of one's own; empty:
    the bundled trainer.

    env: names of further variables to pass to the program. in_place: run the program in the current
    folder and not in a copy (None: in the folder if nodes share folders). after: ids of runs to
    wait for, if the backend has a queue. The messages of the command line, for example about
    variables that are not passed on, become UserWarnings. Raises OrchError: 64 for wrong overrides
    and options, 65 for a job that cannot run, 76 and 78 for errors of the cluster.
    """
    import warnings

    from orchestrator.run.code.left_out import describe_copy

    options = _program_options(
        overrides,
        command,
        env=_texts("env", env),
        in_place=in_place,
        run_id=run_id,
        after=_texts("after", after),
    )
    job = prepare_job(list(overrides), options, config_dir)
    request = job.candidate.bundle.request
    for line in [*describe_copy(request.code), *job.cautions, *job.messages]:
        warnings.warn(line, stacklevel=2)
    return job.send(options)


def _texts(name: str, values: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Returns the texts of a list that the caller gives. OrchError (64) for a single text, whose
    letters would be taken for the list, and for what is neither text nor path."""
    if isinstance(values, str):
        raise OrchError(f"{name}={values!r} is one text: it must be a list of texts")
    for value in values:
        if not isinstance(value, str | os.PathLike):
            raise OrchError(f"{name}: {value!r} is not text: write str({value!r})")
    return tuple(os.fspath(value) for value in values)


def _program_options(
    overrides: Sequence[str],
    command: Sequence[str | os.PathLike[str]],
    **settings: Any,
) -> SubmitOptions:
    """Returns the options of a job that may run a program. The program is planned by the model or
    the training that the overrides name, if they do."""
    from orchestrator.submit.submission import names_model

    return options_from_here(
        command=_texts("command", command),
        program=bool(command) and not names_model(overrides),
        **settings,
    )


def options_from_here(**settings: Any) -> SubmitOptions:
    """Returns the options of a submission from this process, with its folder and environment.
    `settings`: the other fields."""
    from orchestrator.submit.submission import SubmitOptions

    settings.setdefault("environ", os.environ)
    return SubmitOptions(home=home(), cwd=Path.cwd(), python=sys.executable, **settings)
