"""Decides which variables of the submitting shell a run gets, and which values are fixed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan

from .environment import Environment
from .variables import (
    Dropped,
    Selection,
    all_names,
    is_name,
    is_secret_name,
    select_variables,
)

if TYPE_CHECKING:
    from orchestrator.config.schema import Config

    from .request import Site


def run_environment(
    config: Config,
    plan: Plan,
    site: Site,
    keep: Collection[str],
    *,
    python_path: list[str],
    is_program: bool,
) -> tuple[Environment, Dropped]:
    """Returns the environment of a run, and what a user's program does not get of the shell.
    `keep`: names of `--env`; `python_path`: folders with orch's code, for PYTHONPATH.

    OrchError: 64 for a bad name of `--env`, 65 for one of `backend.env`, 78 for a secret in
    `backend.env`.
    """
    _check_names(config, keep)
    variables = _selected_variables(config, site, keep, is_program)
    environment = Environment(
        names=sorted({*variables.passed, *keep}),
        values=_fixed_values(config, plan, is_program),
        path_first=[str(Path(site.program_python or site.python).parent)],
        python_path_first=python_path,
        defaults=_default_values(plan, is_program),
        required=sorted(_names_in_full(config, keep) & {*site.environment_names}),
    )
    return environment, variables.dropped if is_program else Dropped()


def _check_names(config: Config, keep: Iterable[str]) -> None:
    """OrchError: 64 for a bad name of `--env`, 65 for one of `backend.env`, 78 for a secret in
    `backend.env`."""
    for name in keep:
        if not is_name(name):
            rule = "not the name of a variable (A-Z a-z 0-9 _)"
            raise OrchError(f"--env {name!r} is {rule}: its value is never written down")
    for name in config.backend.env:
        if not is_name(name):
            raise OrchError(
                f"backend.env.{name} is not the name of a variable (A-Z a-z 0-9 _)", Exit.CONFIG
            )
        if is_secret_name(name):
            advice = f"export it and pass it by name, --env {name}"
            raise OrchError(
                f"backend.env.{name} looks like a secret, which would be written down: {advice}",
                Exit.SECURITY,
            )


def _names_in_full(config: Config, keep: Iterable[str]) -> set[str]:
    """Returns the names that the user wrote; patterns of `backend.pass_env` are no names."""
    return {*keep, *filter(is_name, config.backend.pass_env)}


def _selected_variables(
    config: Config, site: Site, keep: Iterable[str], is_program: bool
) -> Selection:
    """Selects the variables of the shell that reach a run. A program on this machine gets all."""
    in_full = _names_in_full(config, keep)
    shell_names = site.environment_names
    if is_program and site.passes_all:
        names = {*all_names(shell_names), *in_full.intersection(shell_names)}
        return Selection(passed=sorted(names), dropped=Dropped())
    return select_variables(
        shell_names,
        in_full=in_full,
        patterns=[*config.backend.passed, *config.backend.pass_env],
        of_this_machine=site.machine_names,
    )


def _fixed_values(config: Config, plan: Plan, is_program: bool) -> dict[str, str]:
    """Returns the variables that no shell changes."""
    values = dict(config.backend.env)
    if plan.cluster.device == "cpu" and not is_program:
        values.setdefault("OMP_NUM_THREADS", "1")  # all ranks share this machine's cores
    return values


def _default_values(plan: Plan, is_program: bool) -> dict[str, str]:
    """Returns the variables of a run unless the user has set them. Those of a program are the ones
    that torchrun sets; output that Python does not hold back is the only one of orch's own."""
    values = {"PYTHONUNBUFFERED": "1"}
    if not is_program:
        return values
    values["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    values["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    if min(plan.parallel.world_size, plan.cluster.gpus_per_node) > 1:
        values["OMP_NUM_THREADS"] = "1"
    return values
