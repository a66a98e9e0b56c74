"""Packs plan and topology: a ConfigMap holds 1 MiB, and `kubectl apply` writes it a second time
into 256 KiB.

Ranks and groups follow from degrees, nesting order and nodes, so they are left out and recomputed
when unpacking. The plan's own hash then proves that nothing was lost. 16,384 ranks: 2.3 MB of JSON,
19 KB packed.
"""

from __future__ import annotations

import zlib

import msgspec
from msgspec import structs

from orchestrator.cluster.model import Topology
from orchestrator.plan import Plan, PlanError, from_json, to_json
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.ranks import all_groups, coords, degrees
from orchestrator.planner.placement.rank_assignment import assign_ranks

_MOST_BYTES = 1 << 28  # unpacked; no plan is that large


def pack_plan(plan: Plan) -> bytes:
    """Packs a plan as zlib-compressed JSON, the same bytes for the same plan."""
    if _derived(plan) == plan:
        plan = structs.replace(plan, ranks=[], groups={})
    return zlib.compress(to_json(plan), 9)


def unpack_plan(raw: bytes) -> Plan:
    """Unpacks a plan and checks its hash. PlanError for anything else."""
    try:
        content = zlib.decompressobj().decompress(raw, _MOST_BYTES)
        plan = msgspec.json.decode(content, type=Plan)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise PlanError(f"not a packed plan: {error}") from None
    return from_json(to_json(plan if plan.ranks else _derived(plan)))


def _derived(plan: Plan) -> Plan:
    coordinates = coords(plan.parallel.order, degrees(plan.parallel))
    ranks = assign_ranks(plan.cluster, coordinates)
    groups = all_groups(coordinates, plan.parallel.pp)
    return structs.replace(plan, ranks=ranks, groups=groups)


def pack_topology(topology: Topology) -> bytes:
    """Packs names and switches alone: the machines' state would be out of date when pods read
    it."""
    network = structs.replace(topology, machines={})
    return zlib.compress(msgspec.json.encode(network, order="deterministic"), 9)


def unpack_topology(raw: bytes) -> Topology | None:
    """Returns None if the payload is not a topology; runs do not need one."""
    try:
        content = zlib.decompressobj().decompress(raw, _MOST_BYTES)
        return msgspec.json.decode(content, type=Topology)
    except (zlib.error, *UNREADABLE):
        return None
