"""The measurements of a cluster, `<home>/bench/<cluster>-<key>.json`: `orch bench` writes them and
plans read them. The site's profile of the cost model's parameters is next to it, in
`<home>/profiles`.

The key is a hash of the cluster's description, so a cluster of other nodes or other links has a
file of its own, and a changed description is never mixed with older measurements.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from orchestrator.config.schema import ClusterSpec
from orchestrator.errors import OrchError
from orchestrator.plan.cluster import NVLINK, Operation
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.document import Cluster, Frozen, Host, Link, Measured, SwitchLevel
from orchestrator.plan.exits import Exit

SCHEMA = "orch.bench/1"

Described = TypeVar("Described", Link, SwitchLevel)


class Row(Struct, frozen=True):
    """One measurement: seconds of an operation over groups of `ranks`, all groups at once."""

    level: str
    operation: Operation
    ranks: int
    size: int  # bytes, as in `cost.time.collective`
    seconds: float


class Fit(Struct, frozen=True):
    """A tier as the planner's cost formulas see it. `error`: mean |predicted / measured - 1|
    over the rows."""

    bytes_per_s: float  # one GPU's share, for the fastest operation
    latency_s: float  # per hop
    stretch: dict[str, float]  # operation -> how much longer its bytes take
    error: float


class Record(Frozen):
    """The content of one file."""

    schema: str
    cluster: str
    key: str
    at: str  # UTC
    run: str  # handle of the run that measured
    links: dict[str, Fit]  # by tier
    measured: Measured
    rows: list[Row]
    compute: list[dict[str, Any]]  # as the workers reported it
    load: float  # load of the first node's machine while measuring, one-minute average
    host: Host | None = None  # memory and disk of a node; None in older records


def key_of(spec: ClusterSpec) -> str:
    described = structs.asdict(spec)
    for name in ("measured", "topology_file", "topology_name", "topology_nodes"):
        described.pop(name, None)
    return hashlib.sha256(msgspec.json.encode(described, order="deterministic")).hexdigest()[:12]


def path_of(spec: ClusterSpec, home: Path) -> Path:
    return home / "bench" / f"{spec.name}-{key_of(spec)}.json"


def site_profile_path(spec: ClusterSpec, home: Path) -> Path:
    """Returns the path of the site's own parameters for this cluster (`orch calibrate --from`).

    They are shares of what its GPUs and links could do, so a job on fewer of its nodes uses the
    same file.
    """
    levels = [structs.replace(level, nodes_per_switch=1) for level in spec.levels]
    key = key_of(structs.replace(spec, nodes=1, levels=levels))
    return home / "profiles" / f"{spec.name}-{key}.json"


def read(spec: ClusterSpec, home: Path) -> Record | None:
    """Returns what was measured on this cluster, None if nothing was. Raises OrchError (65) for
    a damaged file."""
    path = path_of(spec, home)
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *UNREADABLE) as error:
        hint = "remove it, measure again (orch bench), or cluster.measured=false"
        raise OrchError(f"{path}: {error}; {hint}", Exit.CONFIG) from None
    return record if record.schema == SCHEMA and record.key == key_of(spec) else None


def with_measured(cluster: Cluster, record: Record) -> Cluster:
    """Returns the cluster with measured links and cores in place of the described ones."""
    links = record.links
    source = record.measured.source

    def measured_tier(tier: str, described: Described) -> Described:
        if not (fit := links.get(tier)):
            return described
        return structs.replace(
            described,
            bytes_per_s=fit.bytes_per_s,
            latency_s=fit.latency_s,
            source=source,
        )

    nvlink = measured_tier(NVLINK, cluster.nvlink)
    levels = [measured_tier(level.name, level) for level in cluster.levels]
    host = cluster.host if record.host is None else record.host
    return structs.replace(
        cluster,
        nvlink=nvlink,
        levels=levels,
        measured=record.measured,
        host=host,
    )
