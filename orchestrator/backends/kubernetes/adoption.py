"""Finds runs that another machine submitted, by their TrainRuns, and gives them a run folder
here."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from msgspec import structs

from orchestrator.backends.base import FoundRun, write_record
from orchestrator.errors import OrchError
from orchestrator.observe.live import Live
from orchestrator.plan import Exit, to_json
from orchestrator.run.create import accepted
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.registry import runs_folder
from orchestrator.run.request import at_size, to_bytes
from orchestrator.run.state import SCHEMA, RunState, write_state

from .api.client import Cluster
from .options import read_options
from .phases import seconds_of
from .train_run import API_VERSION, Bundle, Planned, TrainRun, unpacked
from .train_run_client import read, read_all, record, state_of


def everyone(cluster: Cluster) -> list[FoundRun]:
    """Returns every TrainRun that this user may list; [] if the cluster has no controller.
    OrchError if no cluster answers."""
    if not cluster.has(API_VERSION):
        return []
    runs = []
    for run in read_all(cluster):
        status = run.status
        live = Live(step=status.step, steps=status.steps, loss=status.loss)
        runs.append(
            FoundRun(
                state_of(run, _first_state(run)),
                live,
                run.metadata.namespace,
            )
        )
    return runs


def _first_state(run: TrainRun) -> RunState:
    """Builds a state from the TrainRun alone, while the run's request has not been read."""
    created_at = seconds_of(run.metadata.creation_timestamp) or time.time()
    settings = dict(setting.split("=", 1) for setting in run.spec.words if "=" in setting)
    summary: dict[str, str | int] = {
        name: settings[name] for name in ("cluster", "model", "parallel") if name in settings
    }
    return RunState(
        schema=SCHEMA,
        run_id=run.metadata.name,
        state="pending",
        created_at=created_at,
        updated_at=created_at,
        writer="backend",
        backend="kubernetes",
        plan_hash=run.status.plan_hash,
        summary=summary,
    )


def adopt(cluster: Cluster, name: str, home: Path, backend: str) -> RunFolder | None:
    """Gives the TrainRun `name`, or `namespace/name`, a run folder here. Returns None if no cluster
    is configured or the cluster has no such TrainRun.

    OrchError: 64 if several namespaces have a run of that name, 65 if it is not planned yet, 76 if
    the cluster does not answer.
    """
    namespace, _, run_name = name.rpartition("/")
    try:
        if not cluster.has(API_VERSION):
            return None
        searched = cluster.within(namespace) if namespace else cluster
        run = _find(searched, run_name, bool(namespace))
    except OrchError as error:
        unanswered = getattr(error, "status", None) is None
        if unanswered and "no Kubernetes cluster is configured" in error.message:
            return None
        raise
    if run is None:
        return None
    run_cluster = cluster.within(run.metadata.namespace)
    return _folder(
        run_cluster,
        run,
        _bundle(run_cluster, run),
        home,
        backend,
    )


def _find(cluster: Cluster, name: str, this_namespace_only: bool) -> TrainRun | None:
    if (run := read(cluster, name)) is not None or this_namespace_only:
        return run
    namesakes = [run for run in read_all(cluster) if run.metadata.name == name]
    if len(namesakes) > 1:
        candidates = ", ".join(f"{run.metadata.namespace}/{name}" for run in namesakes)
        raise OrchError(
            f"several namespaces have a run {name}: name one of {candidates}", Exit.USAGE
        )
    return namesakes[0] if namesakes else None


def _bundle(cluster: Cluster, run: TrainRun) -> Bundle:
    planned = run.spec.planned
    if planned is None:
        config_map = cluster.get("ConfigMap", f"{run.metadata.name}-plan")
        if config_map is None:
            raise OrchError(
                f"run {run.metadata.name} is not planned yet: {run.status.reason}", Exit.CONFIG
            )
        planned = msgspec.json.decode(config_map["data"]["planned"], type=Planned)
    return unpacked(planned)


def _folder(
    cluster: Cluster,
    run: TrainRun,
    bundle: Bundle,
    home: Path,
    backend: str,
) -> RunFolder:
    folder = RunFolder(runs_folder(home) / run.metadata.name)
    if folder.path.exists():
        message = (
            f"another run {run.metadata.name} is known here already: remove it (orch rm), or use"
            " another ORCH_HOME"
        )
        raise OrchError(message, Exit.CONFIG)
    folder.create()
    in_force = (plan for plan in bundle.plans.values() if plan.hash == run.status.plan_hash)
    plan = next(in_force, bundle.largest)
    request = structs.replace(
        at_size(bundle.request, plan),
        run_id=run.metadata.name,
        run_dir=str(folder.path),
    )
    write_private(folder.plan, to_json(plan, indent=1) + b"\n")
    if len(bundle.plans) > 1:
        for nodes, sized_plan in bundle.plans.items():
            write_private(folder.sized_plan(nodes), to_json(sized_plan, indent=1) + b"\n")
    write_private(folder.config, bundle.config)
    options = read_options({**request.backend_options, **run.spec.options})
    write_record(
        folder,
        record(request, options, run.metadata.namespace),
        durable=True,
    )
    created_at = seconds_of(run.metadata.creation_timestamp) or time.time()
    first_state = structs.replace(accepted(request, backend), created_at=created_at)
    write_state(folder, state_of(run, first_state))
    write_private(folder.request, to_bytes(request))  # last: a folder without it is not a run
    return folder
