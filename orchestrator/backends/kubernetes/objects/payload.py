"""Packs plan and topology: a ConfigMap holds 1 MiB, and `kubectl apply` writes it a second time
into 256 KiB.

Ranks and groups follow from degrees, nesting order and nodes; they are left out, and made again
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

_MOST = 1 << 28  # bytes unpacked; no plan is that large


def pack_plan(plan: Plan) -> bytes:
    """zlib-compressed JSON, the same bytes for the same plan."""
    if _derived(plan) == plan:
        plan = structs.replace(plan, ranks=[], groups={})
    return zlib.compress(to_json(plan), 9)


def unpack_plan(raw: bytes) -> Plan:
    """The plan that was packed, its hash checked. PlanError for anything else."""
    try:
        text = zlib.decompressobj().decompress(raw, _MOST)
        plan = msgspec.json.decode(text, type=Plan)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise PlanError(f"not a packed plan: {error}") from None
    return from_json(to_json(plan if plan.ranks else _derived(plan)))


def _derived(plan: Plan) -> Plan:
    places = coords(plan.parallel.order, degrees(plan.parallel))
    return structs.replace(
        plan, ranks=assign_ranks(plan.cluster, places), groups=all_groups(places, plan.parallel.pp)
    )


def pack_topology(topology: Topology) -> bytes:
    """Names and switches alone: what machines have and whether they are free is of yesterday when
    pods read it."""
    return zlib.compress(
        msgspec.json.encode(structs.replace(topology, machines={}), order="deterministic"), 9
    )


def unpack_topology(raw: bytes) -> Topology | None:
    """None for what is no topology: a run can do without."""
    try:
        return msgspec.json.decode(zlib.decompressobj().decompress(raw, _MOST), type=Topology)
    except (zlib.error, *UNREADABLE):
        return None
