"""The environment of a run's agents and workers: from the names and values in its request, and the
variables of the shell that starts it."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.plan.document import Frozen

from .variables import machine_names


class Environment(Frozen, omit_defaults=True, kw_only=True):
    """The variables of agents and workers: which pass from the shell, and which have fixed
    values."""

    names: list[str]  # taken from the shell that submits or resumes, if they are set there
    values: dict[str, str]
    #: put in front of PATH, so that `python` is the interpreter that was chosen for the program
    path_first: list[str]
    python_path_first: list[str]
    #: values for variables that the shell does not set: those that torchrun gives its workers
    defaults: dict[str, str] = {}
    #: the `names` that were requested by name and set at submission: a later start needs them too
    required: list[str] = []


def values_elsewhere(environment: Environment, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `environ` that a run gets on machines that share no folders with
    this one.

    The values are judged once more, since another shell may resume the run: what means something
    on this machine only passes if its name was written in full.
    """
    local = machine_names(environ) - {*environment.required}
    return {
        name: environ[name] for name in environment.names if name in environ and name not in local
    }


def compose_environment(environment: Environment, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of agents, and of workers but for their ranks: allowed names of
    `environ`, then fixed values."""
    composed = environment.defaults | {
        name: environ[name] for name in environment.names if name in environ
    }
    composed |= environment.values
    for variable, prefix in (
        ("PATH", environment.path_first),
        ("PYTHONPATH", environment.python_path_first),
    ):
        paths = [*prefix, *filter(None, composed.get(variable, "").split(":"))]
        if paths:
            composed[variable] = ":".join(dict.fromkeys(paths))
    return composed
