"""The flags of sbatch and srun for a plan and a site's options, in a fixed order. Pure.

Sources: sbatch(1) and srun(1) of 22.05 to 25.11; observed behaviour in docs/slurm.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path

from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.cluster.hostlist import expand, slurm_list
from orchestrator.errors import OrchError
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import (
    block_size,
    leaf_switches,
    used_node_count,
    whole_unit,
)

from .quoting import check_text, file_pattern

Flags = dict[str, str | int | bool]

#: sbatch flags that only orch sets; a profile may not.
RESERVED = frozenset(
    {
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "output",
        "error",
        "open-mode",
        "export",
        "export-file",
        "job-name",
        "chdir",
    }
    | {
        "signal",
        "requeue",
        "no-requeue",
        "no-kill",
        "array",
        "wrap",
        "parsable",
        "test-only",
        "wait",
        "exclude",
    }
    | {"het-group"}
)
#: srun flags that only orch sets.
RESERVED_SRUN = frozenset(
    {
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "output",
        "error",
        "export",
        "no-kill",
        "kill-on-bad-exit",
        "wait",
    }
)


def job_flags(
    plan: Plan,
    options: SlurmOptions,
    run_id: str,
    run_dir: str,
    export: Iterable[str],
    elastic: bool = False,
) -> Flags:
    """sbatch's flags for a run.

    `export`: names of the environment variables that enter the job. `elastic`: the job survives the
    loss of a node. OrchError: 65 when the options contradict the plan, 78 for a control character.
    """
    nodes = used_node_count(plan)
    flags: Flags = {
        "job-name": f"orch-{run_id}",
        "chdir": run_dir,
        "output": file_pattern(str(Path(run_dir, "logs"))) + "/slurm-%j.log",
        "open-mode": "append",  # a requeued job keeps the log of its earlier attempts
        "export": ",".join(sorted(export)) or "HOME",  # the default, ALL, would export every secret
        **_nodes_and_partition(options),
        "nodes": nodes,
        "ntasks-per-node": 1,  # one agent per node
        **_resources(plan, options),
        **network_flags(plan, options),
        **_lifecycle(options, elastic),
        **_labels(options),
    }
    return _merge(flags, options.sbatch, RESERVED | flags.keys(), "sbatch")


def step_flags(plan: Plan, options: SlurmOptions, elastic: bool = False) -> Flags:
    """srun's flags for a step with one task per node; srun does not inherit all of sbatch's.

    An `elastic` job's flags lack the number of nodes, which the script knows only when it runs.
    """
    flags: Flags = {
        **({} if elastic else {"nodes": used_node_count(plan)}),
        "ntasks-per-node": 1,
        "export": "ALL",  # of the batch script's environment, which holds only the exported names
    }
    if options.cpus_per_node:
        flags["cpus-per-task"] = options.cpus_per_node  # not inherited by srun in 22.05 to 23.02
    else:
        # srun could bind the agent to a part of the node; the agent binds its workers itself
        flags["cpu-bind"] = "none"
    if options.no_kill or elastic:
        flags["no-kill"] = True
    flags["kill-on-bad-exit"] = 0  # the coordinator decides what the end of an agent means
    # seconds after the first agent's end: an agent that runs longer is on a lost node
    flags["wait"] = 60
    return _merge(flags, options.srun, RESERVED_SRUN, "srun")


def _merge(flags: Flags, user_flags: Flags, reserved: Set[str], command: str) -> Flags:
    """Adds the user's flags, where False removes a flag. OrchError (65) for one in `reserved`."""
    for name in user_flags:
        if name in reserved:
            orch_flag = f"{command} --{name}={flags.get(name, '')}"
            raise OrchError(
                f"backend.options.{command}.{name} is set by orch ({orch_flag})", Exit.CONFIG
            )
    merged = {**flags, **user_flags}
    for name, value in merged.items():
        check_text(str(value), f"{command} --{name}")
    return {name: value for name, value in merged.items() if value is not False}


def as_argv(flags: Flags) -> list[str]:
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]


def _nodes_and_partition(options: SlurmOptions) -> Flags:
    flags: Flags = {}
    for name in ("partition", "account", "qos", "reservation", "constraint"):
        value = getattr(options, name)
        if value is not None:
            flags[name] = value
    if options.nodelist:
        if options.topology == "block":
            raise OrchError(
                "backend.options.nodelist cannot be met on a block topology: use exclude",
                Exit.CONFIG,
            )
        flags["nodelist"] = slurm_list(_names(options.nodelist))
    if options.without:
        flags["exclude"] = slurm_list(_names(options.without))
    return flags


def _names(lists: Iterable[str]) -> list[str]:
    return [name for hosts in lists for name in expand(hosts)]


def _resources(plan: Plan, options: SlurmOptions) -> Flags:
    flags: Flags = {}
    gpus = plan.cluster.gpus_per_node
    typed = f"{options.gpu_type}:{gpus}" if options.gpu_type else str(gpus)
    if options.gpu_request == "gpus-per-node":  # excludes --gres=gpu
        flags["gpus-per-node"] = typed
    elif options.gpu_request == "gres":
        flags["gres"] = f"gpu:{typed}"
    if options.cpus_per_node:
        flags["cpus-per-task"] = options.cpus_per_node
    flags["mem"] = options.memory  # exclusive alone grants the partition's default memory
    if options.exclusive:
        flags["exclusive"] = True
    return flags


def network_flags(plan: Plan, options: SlurmOptions) -> Flags:
    """The flags that keep the allocation as close together as the plan assumes."""
    if options.topology == "tree":
        return {"switches": f"{leaf_switches(plan)}@{options.switches_wait}"}
    if options.topology == "block":
        segment = options.segment or whole_unit(plan, block_size(plan))
        nodes = used_node_count(plan)
        if nodes % segment:
            raise OrchError(
                f"backend.options.segment {segment} does not divide the plan's {nodes} nodes",
                Exit.CONFIG,
            )
        return {
            "segment": segment,
            **({"spread-segments": True} if options.spread_segments else {}),
        }
    return {}


def _lifecycle(options: SlurmOptions, elastic: bool) -> Flags:
    flags: Flags = {}
    if options.time is not None:
        flags["time"] = options.time
    if options.begin is not None:
        flags["begin"] = options.begin
    if options.dependency is not None:
        flags["dependency"] = options.dependency
        flags["kill-on-invalid-dep"] = "yes"  # else it would wait for ever
    if options.notice_s:
        # B: the signal goes to the script alone, which forwards it to the agents
        flags["signal"] = f"B:USR1@{options.notice_s}"
    flags["requeue" if options.requeue else "no-requeue"] = True
    if options.no_kill or elastic:
        flags["no-kill"] = True
    flags["wait-all-nodes"] = 1
    return flags


def _labels(options: SlurmOptions) -> Flags:
    pairs = {
        "comment": options.comment,
        "wckey": options.wckey,
        "mail-user": options.mail_user,
        "mail-type": options.mail_type,
    }
    return {name: value for name, value in pairs.items() if value is not None}
