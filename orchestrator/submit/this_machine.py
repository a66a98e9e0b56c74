"""Jobs on this machine. A user's program gets it as it is: one node with the GPUs that are here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.compose import load
from orchestrator.config.node_range import node_range
from orchestrator.config.words import typed_values
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .submission import SubmitOptions

if TYPE_CHECKING:
    from orchestrator.config.schema import Config

#: The cluster that stands for this machine. Clusters with the prefix simulate several nodes on it.
_THIS_MACHINE = "local"
_SIMULATED_PREFIX = "local_"


def load_job(
    overrides: Sequence[str],
    options: SubmitOptions,
    config_dir: str | Path | None,
) -> Config:
    """Loads the configuration of a job. A program on this machine gets one node: the GPUs that it
    sees, or without GPUs as many processes as it asks for.

    Raises OrchError as `load` does, and 65 for a program on several nodes or on more GPUs than
    there are. The bundled trainer keeps the simulated nodes of the cluster `local`.
    """
    typed = typed_values(overrides)
    overrides = [*overrides, *_implied(typed, options)]
    config = load(overrides, config_dir, ranges=True)
    is_sent_elsewhere = config.backend.options.get("ssh") and options.code is None
    if not options.command or is_sent_elsewhere or not _is_one_machine(config):
        return config
    _check_one_node(config, has_typed_nodes=bool(typed.keys() & {"cluster.nodes", "nodes"}))
    if config.cluster.name != _THIS_MACHINE:
        return config
    shape = ["cluster.nodes=1"]
    if "cluster.gpus_per_node" not in typed:
        gpus = visible_to_program(config, options.environ)
        ranks = config.nproc or _ranks(config, options.program)
        if gpus:
            _check_gpus_suffice(ranks, len(gpus))
        size = len(gpus) or config.nproc or max(ranks, _described_size(config))
        shape.append(f"cluster.gpus_per_node={size}")
    return load([*overrides, *shape], config_dir, ranges=True)


def _implied(typed: Mapping[str, str], options: SubmitOptions) -> list[str]:
    """Returns the overrides that a user leaves out. A program has the layout that its user names,
    since that of a cluster's entry is for a model. A cluster of simulated nodes has as many as the
    user asks for."""
    implied = []
    if options.program and "parallel" not in typed:
        implied.append("parallel=default")
    is_simulated = typed.get("cluster", "").startswith(_SIMULATED_PREFIX)
    if is_simulated and "nodes" in typed and "cluster.nodes" not in typed:
        _, most_nodes = node_range(typed["nodes"])
        implied.append(f"cluster.nodes={most_nodes}")
    return implied


def is_here(config: Config) -> bool:
    """Whether the job runs on the machine whose user submits it."""
    return config.backend.name == "local" and not config.backend.options.get("ssh")


def workers_per_node(count: str, config: Config, environ: Mapping[str, str]) -> int | None:
    """Returns the number of workers on a node for torchrun's words `gpu`, `cpu` and `auto`. None:
    one for each GPU of the cluster's description.

    Raises OrchError (64) if there are no GPUs here, or the cores to count are on another machine.
    """
    if not is_here(config):
        if count == "cpu":
            raise OrchError(
                "--nproc-per-node cpu would count the cores of this machine, not those of cluster"
                f" {config.cluster.name}: give a number"
            )
        return None
    gpus = len(visible_to_program(config, environ))
    if count == "gpu" and not gpus:
        raise OrchError(
            "--nproc-per-node gpu: this machine has no GPU, or CUDA_VISIBLE_DEVICES hides all"
        )
    cores = len(os.sched_getaffinity(0))
    return cores if count == "cpu" else gpus or cores


def visible_to_program(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs of this machine that a program of this configuration sees."""
    from orchestrator.backends.local.gpus import visible_gpus

    return visible_gpus({**environ, **config.backend.env})


def _is_one_machine(config: Config) -> bool:
    """Whether the cluster is this machine without simulated nodes. Clusters of GPUs are left to the
    backend, which refuses those that this machine is not."""
    cluster = config.cluster
    is_simulated = cluster.name.startswith(_SIMULATED_PREFIX)
    return config.backend.name == "local" and cluster.device == "cpu" and not is_simulated


def _check_one_node(config: Config, has_typed_nodes: bool) -> None:
    """Raises OrchError (65) if the user asks for several nodes."""
    is_described = has_typed_nodes or config.cluster.name != _THIS_MACHINE
    nodes = config.cluster.nodes if is_described else 1
    if config.nodes is not None:
        nodes = node_range(config.nodes)[1]
    if nodes > 1:
        raise OrchError(
            f"a program on {nodes} nodes, but this machine is one: cluster=local_nodes simulates"
            " several nodes on it; for one node leave the number out",
            Exit.CONFIG,
        )


def _check_gpus_suffice(ranks: int, gpus: int) -> None:
    """Raises OrchError (65) for more ranks than GPUs."""
    if ranks > gpus:
        raise OrchError(
            f"{ranks} workers, but this machine has {gpus} GPUs for the program:"
            f" cluster.gpus_per_node={ranks} lets workers share them, and CUDA_VISIBLE_DEVICES="
            " is for a program that uses none",
            Exit.CONFIG,
        )


def _ranks(config: Config, program: bool) -> int:
    """Returns the number of ranks that the degrees ask for; what is left open counts as 1.
    `program`: the job has no model, so that `ep` is an axis of its own."""
    axes = ("tp", "cp", "pp", "dp", *(("ep",) if program else ()))
    degrees = (getattr(config.parallel, axis) for axis in axes)
    return prod(filter(None, degrees))


def _described_size(config: Config) -> int:
    return config.cluster.nodes * config.cluster.gpus_per_node
