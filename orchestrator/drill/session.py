"""A drill: checks whether the run may be drilled, runs one trial after the other, and records
each in a line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec

from orchestrator.backends.base import Backend, get_backend
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest, read_request
from orchestrator.run.state import read_state
from orchestrator.style import GRAY, GREEN, RED, Style, seconds

from .faults import KINDS, POSITIONS, Injection, refusal, restarts_left
from .targets import Targets, targets_of
from .trial import DrilledRun, Trial


def open_drill(
    folder: RunFolder,
    faults: Sequence[str],
    position: str,
    limit_s: float,
) -> tuple[DrilledRun, Targets]:
    """Opens a drill, and refuses what is known to fail before the first injection: OrchError 64
    or 76; 78 if the run belongs to somebody else."""
    owner = folder.path.stat().st_uid
    if owner != os.geteuid():
        problem = f"run {folder.run_id} belongs to uid {owner}, you are {os.geteuid()}"
        raise OrchError(f"{problem}: only its owner may drill it", Exit.SECURITY)
    state = read_state(folder)
    backend = get_backend(state.backend)
    state = backend.state(folder)
    if state.is_final:
        raise OrchError(f"run {folder.run_id} has ended: {state.state}", Exit.USAGE)
    if position not in POSITIONS and position not in state.nodes:
        raise OrchError(
            f"--victim: {did_you_mean(position, [*POSITIONS, *state.nodes])}", Exit.USAGE
        )
    request = read_request(folder)
    check_allowed(request, backend)
    targets = targets_of(backend, folder, request, limit_s)
    drilled = DrilledRun(folder, backend, request, limit_s)
    for fault in faults:
        budget = restarts_left(
            fault,
            state.max_restarts,
            request.policy.max_restarts_by_cause,
            0,
            {},
        )
        never = refusal(
            fault,
            restarts_left=budget,
            elastic=drilled.survives_lost_nodes,
            spare_nodes=1,
        )
        if never or (
            len(request.sizes) == 1
            and KINDS[fault].takes == "node"
            and not drilled.replaces_lost_nodes
        ):
            raise OrchError(never or f"{fault} takes a node, and this run has one size", Exit.USAGE)
        if fault != "bit_flip":  # there may be checkpoints by then
            targets.check(fault)
    return drilled, targets


def check_allowed(request: LaunchRequest, backend: Backend) -> None:
    """Raises OrchError (78) for a run that may not be drilled: on a cluster this must be allowed
    when it is submitted."""
    allowed = request.policy.allow_drills
    if allowed or (allowed is None and backend.on_this_machine):
        return
    reason = "is on a cluster and does not allow drills"
    if allowed is False:
        reason = "forbids drills (backend.allow_drills=false)"
    advice = "to drill a run, submit it with backend.allow_drills=true"
    raise OrchError(f"run {request.run_id} {reason}: {advice}", Exit.SECURITY)


def session(
    drilled: DrilledRun,
    targets: Targets,
    plan: Sequence[Injection],
    for_s: float,
    every_s: float,
    say: Callable[[str], None],
    style: Style,
) -> tuple[list[Trial], str]:
    """Runs one trial after the other. Returns the trials that were made, and why there are not more
    ("" if there are all).

    `say` gets a line for each trial. Each is also a line of drills.jsonl in the run folder once
    it is over.
    """
    trials: list[Trial] = []
    if not drilled.request.worker.pattern and (untold := drilled.untold()):
        wait = f"waits up to {drilled.limit_s:g} s for the first"
        say(style.paint(f"run {drilled.folder.run_id}: {untold}; {wait}", GRAY))
    for index, injection in enumerate(plan):
        if trials and every_s:
            time.sleep(max(0.0, trials[-1].at + every_s - time.time()))
        try:
            trial = drilled.run_trial(injection, targets, for_s)
        except OrchError as error:
            say(
                style.paint(
                    f"{index + 1:>4} of {len(plan)}  {injection.fault}: {error.message}", RED
                )
            )
            return trials, error.message
        trials.append(trial)
        _record(drilled.folder, trial)
        say(f"{style.paint(f'{index + 1:>4} of {len(plan)}', GRAY)}  {trial_line(trial, style)}")
        if drilled.state().is_final:
            return trials, trial.problem
    return trials, ""


def trial_line(trial: Trial, style: Style) -> str:
    """What a trial did, to whom, and what came of it."""
    where = f"{trial.fault} rank {trial.rank} on {trial.node}"
    if not trial.ok:
        return f"{where}  {style.paint(trial.problem, RED)}"
    noticed = "not noticed"
    if trial.noticed_s is not None:
        noticed = f"noticed after {seconds(trial.noticed_s)}"
    stepping = "in the same attempt"
    if trial.stepping_s is not None:
        stepping = f"steps after {seconds(trial.stepping_s)}"
    phrases = [style.paint("goes on", GREEN), noticed, stepping]
    if trial.lost_steps is not None:
        phrases.append(f"{trial.lost_steps} done again")
    return f"{where}  {', '.join(phrases)}"


def _record(folder: RunFolder, trial: Trial) -> None:
    path = folder.path / "drills.jsonl"
    fd = os.open(
        path,
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
        0o600,
    )
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(trial) + b"\n")
