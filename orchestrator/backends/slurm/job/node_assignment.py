"""Inside the allocation, before any agent: which nodes Slurm gave, and which rank goes where on them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from orchestrator.backends.base import read_record, write_record
from orchestrator.backends.slurm.record import (
    SlurmRecord,
    kept,
    submitted_plan,
    submitted_request,
)
from orchestrator.backends.slurm.script.flags import used_node_count
from orchestrator.cluster.hostlist import expand, natural_key
from orchestrator.cluster.importers.slurm import from_addresses
from orchestrator.cluster.nodes import choose_nodes, with_nodes
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan, to_json
from orchestrator.plan.document import Frozen
from orchestrator.planner.elastic.next_plan import legal_size
from orchestrator.planner.elastic.replan import difference, replan
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.request import LaunchRequest, at_size, on_nodes, to_bytes
from orchestrator.run.state import pending_again, read_state, write_state


class Placement(Frozen):
    """slurm/placement.json: what the plan became in this life of the job."""

    job_id: str
    life: int
    nodes: list[str]  # in rank order
    addresses: dict[str, str]  # node -> SLURM_TOPOLOGY_ADDR
    planned_hash: str
    plan_hash: str
    summary: str  # one line: where it differs from the plan, and at what predicted cost
    moved_ranks: int
    worst_levels: dict[str, list[str]]  # axis -> [planned, real] where they differ
    step_s: list[float]  # [planned, real]
    after_epoch: int = -1  # the last epoch of the workers before this life


def read_placement(folder: RunFolder) -> Placement | None:
    """Of the life that was placed last; None before the first."""
    try:
        return msgspec.json.decode(Path(folder.path, "slurm", "placement.json").read_bytes(), type=Placement)
    except FileNotFoundError:
        return None


def read_probe(text: str) -> dict[str, str]:
    """Node -> address, from the tasks' lines `<node id> <name> <address>`. OrchError (74) when they are unusable."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) != 3 or not words[0].isdigit():
            raise OrchError(f"a node answered {line[:80]!r}", Exit.NODE)
        if words[1] in found:
            raise OrchError(f"node {words[1]} answered twice", Exit.NODE)
        found[words[1]] = words[2]
    return found


def place(folder: RunFolder, probe: str, environ: Mapping[str, str]) -> Placement:
    """Put the run's ranks on the nodes of this allocation and write what agents and workers will read.

    OrchError: 65 for a damaged plan, 74 when a node did not answer, 75 when the run was cancelled in between, 76 when
    the nodes are too few.
    """
    job_id, life = own_job(environ), int(environ.get("SLURM_RESTART_COUNT") or 0)
    addresses = read_probe(probe)
    _check_nodes(addresses, environ)
    if folder.cancel.exists():
        raise OrchError("the run was cancelled before it had started", Exit.RESTART)
    request = submitted_request(folder)
    planned = _planned(folder, request.sizes, len(addresses))
    topology = from_addresses(addresses)
    names = choose_nodes(addresses, topology, used_node_count(planned)) if request.sizes else addresses
    real = replan(planned, with_nodes(planned.cluster, names, topology))
    found = difference(planned, real)
    sizes = ""
    if request.sizes:
        sizes = f"{used_node_count(real)} nodes of the sizes {', '.join(map(str, request.sizes))}; "
        spares = len(addresses) > len(names)
        whole = replan(planned, with_nodes(planned.cluster, addresses, topology)) if spares else real
        request = _elastic(folder, request, whole, list(addresses))
    placement = Placement(
        job_id=job_id,
        life=life,
        nodes=found.nodes,
        addresses=dict(sorted(addresses.items(), key=lambda item: natural_key(item[0]))),
        planned_hash=planned.hash,
        plan_hash=real.hash,
        summary=sizes + found.text,
        moved_ranks=found.moved_ranks,
        worst_levels=found.worst_levels,
        step_s=found.step_s,
        after_epoch=read_state(folder).epoch,
    )
    _write(folder, request, real, placement)
    return placement


def _check_nodes(addresses: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """The tasks' answers against the scheduler's own list."""
    granted = set(expand(environ.get("SLURM_JOB_NODELIST", "")))
    silent, strange = granted - set(addresses), set(addresses) - granted
    if silent:
        raise OrchError(f"no answer from {', '.join(sorted(silent, key=natural_key)[:8])}", Exit.NODE)
    if strange:
        raise OrchError(f"answers from nodes that are not the job's: {', '.join(sorted(strange)[:8])}", Exit.NODE)


def own_job(environ: Mapping[str, str]) -> str:
    """The id by which Slurm's commands know this job and no other: `7`, or `7_2` for a member of an array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


def _planned(folder: RunFolder, sizes: Sequence[int], given: int) -> Plan:
    """The plan as it was submitted, kept beside the one that is in force; of several sizes the largest that fits."""
    if sizes:
        size = legal_size(sizes, given)
        if size is None:
            raise OrchError(f"{given} nodes are fewer than the smallest size of this run, {min(sizes)}", Exit.CAPACITY)
        return load_plan(submitted_plan(folder, size))
    submitted = kept(folder.plan)
    plan = load_plan(submitted if submitted.exists() else folder.plan)
    if not submitted.exists():
        write_private(submitted, to_json(plan, indent=1) + b"\n")
    return plan


def _elastic(folder: RunFolder, request: LaunchRequest, whole: Plan, nodes: Sequence[str]) -> LaunchRequest:
    """What the agents of this life may become: the sizes that it can hold, an agent on every node, spares included.

    `whole`: the largest of these sizes, on a cluster of all the nodes: what coordinators know of the network.
    """
    size = used_node_count(whole)
    for path in (folder.request, folder.sized_plan(size)):
        if not kept(path).exists():
            write_private(kept(path), path.read_bytes())
    write_private(folder.sized_plan(size), to_json(whole, indent=1) + b"\n")
    agents = on_nodes(request, nodes)
    return structs.replace(request, agents=agents, sizes=[legal for legal in request.sizes if legal <= size])


def _write(folder: RunFolder, request: LaunchRequest, plan: Plan, placement: Placement) -> None:
    if request.sizes:
        request = structs.replace(request, plan_hash=plan.hash, nodes=len(request.agents))
    else:
        request = at_size(request, plan)
    folder.coordinator.unlink(missing_ok=True)  # of an earlier life
    write_private(folder.plan, to_json(plan, indent=1) + b"\n")
    write_private(folder.request, to_bytes(request))
    raw = msgspec.json.format(msgspec.json.encode(placement), indent=1) + b"\n"
    slurm = Path(folder.path, "slurm")
    slurm.mkdir(mode=0o700, exist_ok=True)
    write_private(slurm / f"{placement.job_id}.{placement.life}.placement.json", raw)
    write_private(slurm / "placement.json", raw)
    for name in ("over", "ended"):  # words of an earlier life
        (slurm / name).unlink(missing_ok=True)
    now, record = time.time(), read_record(folder, SlurmRecord)
    submitted = record.submitted_at if record else now  # a script submitted by hand has no record yet
    write_record(folder, SlurmRecord(job_id=placement.job_id, submitted_at=submitted, life=placement.life))
    write_state(folder, pending_again(read_state(folder), plan_hash=plan.hash))
