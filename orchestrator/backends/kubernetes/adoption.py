"""Runs that this machine has not submitted: found by their TrainRuns, and given a folder here."""

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
    """Every TrainRun that this user may see. OrchError where no cluster answers; none where it has
    no controller."""
    if not cluster.has(API_VERSION):
        return []
    found = []
    for run in read_all(cluster):
        status = run.status
        live = Live(step=status.step, steps=status.steps, loss=status.loss)
        found.append(FoundRun(state_of(run, _first_state(run)), live, run.metadata.namespace))
    return found


def _first_state(run: TrainRun) -> RunState:
    """What can be said of a run whose request was not read."""
    born = seconds_of(run.metadata.creation_timestamp) or time.time()
    words = dict(word.split("=", 1) for word in run.spec.words if "=" in word)
    summary: dict[str, str | int] = {
        name: words[name] for name in ("cluster", "model", "parallel") if name in words
    }
    return RunState(
        schema=SCHEMA, run_id=run.metadata.name, state="pending", created_at=born, updated_at=born, writer="backend",
        backend="kubernetes", plan_hash=run.status.plan_hash, summary=summary,
    )  # fmt: skip


def adopt(cluster: Cluster, name: str, home: Path, backend: str) -> RunFolder | None:
    """`name`: of a TrainRun, or `namespace/name`. None where no cluster is configured or has none
    of that name.

    OrchError: 64 for one that several namespaces have, 65 for one that is not planned yet, 76
    without an answer.
    """
    namespace, _, bare = name.rpartition("/")
    try:
        if not cluster.has(API_VERSION):
            return None
        found = _find(cluster.within(namespace) if namespace else cluster, bare, bool(namespace))
    except OrchError as error:
        if (
            getattr(error, "status", None) is None
            and "no Kubernetes cluster is configured" in error.message
        ):
            return None
        raise
    if found is None:
        return None
    space = cluster.within(found.metadata.namespace)
    return _folder(space, found, _bundle(space, found), home, backend)


def _find(cluster: Cluster, name: str, here_only: bool) -> TrainRun | None:
    if (run := read(cluster, name)) is not None or here_only:
        return run
    others = [run for run in read_all(cluster) if run.metadata.name == name]
    if len(others) > 1:
        spaces = ", ".join(f"{run.metadata.namespace}/{name}" for run in others)
        raise OrchError(f"several namespaces have a run {name}: say which, {spaces}", Exit.USAGE)
    return others[0] if others else None


def _bundle(space: Cluster, run: TrainRun) -> Bundle:
    found = run.spec.planned
    if found is None:
        body = space.get("ConfigMap", f"{run.metadata.name}-plan")
        if body is None:
            raise OrchError(
                f"run {run.metadata.name} is not planned yet: {run.status.reason}", Exit.CONFIG
            )
        found = msgspec.json.decode(body["data"]["planned"], type=Planned)
    return unpacked(found)


def _folder(space: Cluster, run: TrainRun, bundle: Bundle, home: Path, backend: str) -> RunFolder:
    folder = RunFolder(runs_folder(home) / run.metadata.name)
    if folder.path.exists():
        text = (
            f"another run {run.metadata.name} is known here already: remove it (orch rm), or use"
            " another ORCH_HOME"
        )
        raise OrchError(text, Exit.CONFIG)
    folder.create()
    plan = next(
        (one for one in bundle.plans.values() if one.hash == run.status.plan_hash), bundle.largest
    )
    request = structs.replace(
        at_size(bundle.request, plan), run_id=run.metadata.name, run_dir=str(folder.path)
    )
    write_private(folder.plan, to_json(plan, indent=1) + b"\n")
    for nodes, sized in bundle.plans.items() if len(bundle.plans) > 1 else ():
        write_private(folder.sized_plan(nodes), to_json(sized, indent=1) + b"\n")
    write_private(folder.config, bundle.config)
    options = read_options({**request.backend_options, **run.spec.options})
    write_record(folder, record(request, options, run.metadata.namespace), durable=True)
    born = seconds_of(run.metadata.creation_timestamp) or time.time()
    write_state(folder, state_of(run, structs.replace(accepted(request, backend), created_at=born)))
    write_private(folder.request, to_bytes(request))  # last: from now on the run is found
    return folder
