"""Measures a cluster: a run of `python -m trainer.bench` on all of it, under the usual agents of
the usual backend."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from orchestrator.backends.base import Backend
from orchestrator.cluster.measured import SCHEMA, Record, Row, key_of, path_of
from orchestrator.config.schema import Config, ParallelSpec
from orchestrator.config.validate import with_defaults
from orchestrator.errors import OrchError
from orchestrator.observe.timeline import last_events
from orchestrator.plan import Plan
from orchestrator.plan.document import Host, Measured
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder, make_private_folder, write_private

from .fit import fit

PROGRAM = "trainer.bench"
_LOOK_S = 0.25
_EVENTS_BYTES = 1 << 24

Tell = Callable[[int, int, str], None]  # measurements done, their total, a description of the last


def config_of(config: Config) -> Config:
    """Returns a configuration in which every GPU of the described cluster is a replica of its
    own: only the places of ranks matter."""
    cluster = config.cluster
    world = cluster.nodes * cluster.gpus_per_node
    parallel = with_defaults(ParallelSpec(dp=None if cluster.topology_file else world))
    sizes = {
        "global_batch_samples": world,
        "global_batch_tokens": None,
        "batch_ramp": None,
        "recompute": "none",
    }
    return msgspec.structs.replace(
        config,
        cluster=msgspec.structs.replace(cluster, measured=False),
        parallel=parallel,
        train=msgspec.structs.replace(config.train, **sizes),
        backend=msgspec.structs.replace(config.backend, max_restarts=0),
    )


def watch(
    folder: RunFolder,
    plan: Plan,
    backend: Backend,
    tell: Tell,
) -> list[dict[str, Any]]:
    """Returns every report of the run, calling `tell` for each as it comes. Raises OrchError
    with the run's code if it fails."""
    path = folder.events(plan.ranks[0].node)
    seen = 0
    while True:
        # The state is read before the events, so the events of a final state are complete.
        state = backend.state(folder)
        reports: list[dict[str, Any]] = [
            {"name": event.name, **event.fields}
            for event in last_events(path, _EVENTS_BYTES)
            if event.name.startswith("bench_")
        ]
        total = next(
            (int(event["total"]) for event in reports if event["name"] == "bench_total"),
            0,
        )
        steps = [event for event in reports if event["name"] != "bench_total"]
        for done in range(seen, len(steps)):
            tell(done + 1, total, _words(steps[done]))
        seen = len(steps)
        if state.is_final:
            break
        time.sleep(_LOOK_S)
    if state.exit_code:
        raise OrchError(
            f"{folder.run_id}: {state.reason}; its logs: orch logs {folder.run_id}", state.exit_code
        )
    if not total or seen < total:
        raise OrchError(
            f"{folder.run_id}: {seen} of {total} measurements were reported", Exit.INTERNAL
        )
    return steps


def _words(event: dict[str, Any]) -> str:
    if event["name"] == "bench_host":
        return "memory and disk of a node"
    if event["name"] == "bench_compute":
        return f"{event['precision']} on one GPU"
    return f"{event['operation']} of {event['size'] / 1024:,.0f} KiB on {event['level']}"


#: Fields of a measured host.
_HOST: dict[str, Any] = {"memory_bytes": int, "disk_bytes": int}
_HOST |= {f"{what}_bytes_per_s": float for what in ("memory", "link", "disk")}


def record_of(config: Config, handle: str, events: list[dict[str, Any]]) -> Record:
    """Fits the measurements with the planner's formulas."""
    rows = [
        Row(**{name: event[name] for name in Row.__struct_fields__})
        for event in events
        if event["name"] == "bench_link"
    ]
    compute = [event for event in events if event["name"] == "bench_compute"]
    if not compute:
        raise OrchError("nothing was measured on a GPU", Exit.INTERNAL)
    hosts = [event for event in events if event["name"] == "bench_host"]
    sizes = {name: kind(hosts[0][name]) for name, kind in _HOST.items()} if hosts else {}
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    main = compute[0]
    links = fit(rows)
    measured = Measured(
        source=f"measured by orch bench, {at}, {handle}",
        matmul_flops={event["precision"]: event["matmul_flops"] for event in compute},
        attention_flops={event["precision"]: event["attention_flops"] for event in compute},
        memory_bytes_per_s=main["memory_bytes_per_s"],
        launch_s=main["launch_s"],
        stretch={level: link.stretch for level, link in links.items()},
    )
    return Record(
        schema=SCHEMA,
        cluster=config.cluster.name,
        key=key_of(config.cluster),
        at=at,
        run=handle,
        links=links,
        measured=measured,
        rows=rows,
        compute=compute,
        load=round(os.getloadavg()[0], 2),
        host=Host(**sizes, source=measured.source) if hosts else None,
    )


def keep(config: Config, record: Record, home: Any) -> str:
    """Writes the record to where plans of this cluster find it, and returns the path."""
    path = path_of(config.cluster, home)
    make_private_folder(path.parent)
    write_private(
        path,
        msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n",
    )
    return str(path)
