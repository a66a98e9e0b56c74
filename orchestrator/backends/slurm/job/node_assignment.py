"""Assigns the ranks of a run to the nodes that Slurm granted, inside the allocation and before any
agent starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from orchestrator.backends.base import read_record, write_record
from orchestrator.backends.slurm.record import (
    SlurmRecord,
    exclude,
    submitted_path,
    submitted_plan,
    submitted_request,
)
from orchestrator.backends.slurm.script.fixed import MARK
from orchestrator.cluster.hostlist import expand, natural_key
from orchestrator.cluster.importers.slurm import from_addresses
from orchestrator.cluster.nodes import choose_nodes, with_nodes
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan, to_json
from orchestrator.plan.document import Frozen
from orchestrator.planner.elastic.next_plan import legal_size
from orchestrator.planner.elastic.replan import difference, replan
from orchestrator.planner.placement.rank_assignment import used_node_count
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.intent import wants_end
from orchestrator.run.request import LaunchRequest, at_size, on_nodes, to_bytes
from orchestrator.run.state import pending_again, read_state, write_state


class NodeAssignment(Frozen):
    """The plan on the nodes of this attempt, as slurm/placement.json holds it."""

    job_id: str
    attempt: int = msgspec.field(name="life")  # SLURM_RESTART_COUNT
    nodes: list[str]  # in rank order
    addresses: dict[str, str]  # node -> SLURM_TOPOLOGY_ADDR
    planned_hash: str
    plan_hash: str
    summary: str  # one line: the difference from the plan and its predicted cost
    moved_ranks: int
    worst_levels: dict[str, list[str]]  # axis -> [planned, real] where they differ
    step_s: list[float]  # [planned, real]
    after_epoch: int = -1  # the last epoch of the workers before this attempt


def read_assignment(folder: RunFolder) -> NodeAssignment | None:
    """The last attempt's assignment, None before the first."""
    try:
        return msgspec.json.decode(
            Path(folder.path, "slurm", "placement.json").read_bytes(),
            type=NodeAssignment,
        )
    except FileNotFoundError:
        return None


def read_probe(output: str) -> dict[str, str]:
    """Node -> address, from the probe's output. OrchError (74) when a node answered twice."""
    addresses: dict[str, str] = {}
    for _, node, address, *_ in _answers(output):
        if node in addresses:
            raise OrchError(f"node {node} answered twice", Exit.NODE)
        addresses[node] = address
    return addresses


def lacking(output: str) -> dict[str, str]:
    """Node -> what it lacks, from the probe's output."""
    return {node: ", ".join(lacks) for _, node, _, *lacks in _answers(output) if lacks}


def _answers(output: str) -> list[list[str]]:
    """The fields `<node id> <name> <address> [<missing item> ...]` of each line that the probe has
    marked as its own.

    Other lines, which a TaskProlog or a shell's start files print, are skipped.
    """
    lines = [line.split() for line in output.split("\n")]
    return [
        fields[1:]
        for fields in lines
        if fields[:1] == [MARK] and len(fields) > 3 and fields[1].isdigit()
    ]


def assign_nodes(
    folder: RunFolder,
    probe: str,
    environ: Mapping[str, str],
) -> NodeAssignment:
    """Assigns the run's ranks to the nodes of this allocation, and writes the plan and request that
    agents read.

    `probe`: the output of the script's first step, for `read_probe`. OrchError: 65 for a damaged
    plan, 74 when a node did not answer, 75 when the run was cancelled meanwhile, 76 when the nodes
    are too few.
    """
    addresses = _fit_nodes(folder, probe, environ)
    request = submitted_request(folder)
    planned = _submitted_plan(folder, request.sizes, len(addresses))
    topology = from_addresses(addresses)
    names: Sequence[str] = list(addresses)
    if request.sizes:
        names = choose_nodes(addresses, topology, used_node_count(planned))
    plan = replan(planned, with_nodes(planned.cluster, names, topology))
    changes = difference(planned, plan)
    summary = changes.text
    if request.sizes:
        sizes = ", ".join(map(str, request.sizes))
        summary = f"{used_node_count(plan)} nodes of the sizes {sizes}; {summary}"
        full_plan = plan
        if len(addresses) > len(names):  # there are spare nodes
            full_plan = replan(planned, with_nodes(planned.cluster, addresses, topology))
        request = _elastic_request(folder, request, full_plan, list(addresses))
    assignment = NodeAssignment(
        job_id=current_job_id(environ),
        attempt=int(environ.get("SLURM_RESTART_COUNT") or 0),
        nodes=changes.nodes,
        addresses=dict(sorted(addresses.items(), key=lambda item: natural_key(item[0]))),
        planned_hash=planned.hash,
        plan_hash=plan.hash,
        summary=summary,
        moved_ranks=changes.moved_ranks,
        worst_levels=changes.worst_levels,
        step_s=changes.step_s,
        after_epoch=read_state(folder).epoch,
    )
    _write_files(folder, request, plan, assignment)
    return assignment


def _fit_nodes(folder: RunFolder, probe: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Node -> address of the nodes that lack nothing; the next attempt excludes the others."""
    addresses = read_probe(probe)
    _check_nodes(folder, addresses, environ)
    missing_by_node = lacking(probe)
    exclude(folder, missing_by_node)
    if wants_end(folder):
        raise OrchError("the run was cancelled before it had started", Exit.RESTART)
    fit = {node: address for node, address in addresses.items() if node not in missing_by_node}
    if missing_by_node and legal_size(submitted_request(folder).sizes, len(fit)) is None:
        problems = [
            f"node {node} lacks: {items}" for node, items in sorted(missing_by_node.items())
        ]
        raise OrchError("; ".join(problems), Exit.NODE)
    return fit


def _check_nodes(
    folder: RunFolder,
    addresses: Mapping[str, str],
    environ: Mapping[str, str],
) -> None:
    """Raises OrchError (74) unless exactly the nodes that Slurm granted have answered.

    The next attempt excludes the silent ones. If no node has answered, none is to blame.
    """
    granted = set(expand(environ.get("SLURM_JOB_NODELIST", "")))
    silent = granted - set(addresses)
    foreign = set(addresses) - granted
    if silent:
        exclude(folder, silent if addresses else ())
        raise OrchError(
            f"no answer from {', '.join(sorted(silent, key=natural_key)[:8])}", Exit.NODE
        )
    if foreign:
        raise OrchError(
            f"answers from nodes that are not the job's: {', '.join(sorted(foreign)[:8])}",
            Exit.NODE,
        )


def current_job_id(environ: Mapping[str, str]) -> str:
    """This job's id for Slurm's commands: `7`, or `7_2` for a member of an array."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


def _submitted_plan(folder: RunFolder, sizes: Sequence[int], granted_nodes: int) -> Plan:
    """The plan as submitted; of several sizes the largest that `granted_nodes` nodes can hold.

    Keeps a copy of plan.json.
    """
    if sizes:
        size = legal_size(sizes, granted_nodes)
        if size is None:
            raise OrchError(
                f"{granted_nodes} nodes are fewer than the smallest size of this run, {min(sizes)}",
                Exit.CAPACITY,
            )
        return load_plan(submitted_plan(folder, size))
    submitted = submitted_path(folder.plan)
    plan = load_plan(submitted if submitted.exists() else folder.plan)
    if not submitted.exists():
        write_private(submitted, to_json(plan, indent=1) + b"\n")
    return plan


def _elastic_request(
    folder: RunFolder,
    request: LaunchRequest,
    full_plan: Plan,
    nodes: Sequence[str],
) -> LaunchRequest:
    """The request for this attempt: the sizes that its nodes can hold, and an agent on every node,
    spares included.

    `full_plan`: the plan of the largest such size on a cluster of all the nodes, which tells
    coordinators about the network.
    """
    size = used_node_count(full_plan)
    for path in (folder.request, folder.sized_plan(size)):
        if not submitted_path(path).exists():
            write_private(submitted_path(path), path.read_bytes())
    write_private(folder.sized_plan(size), to_json(full_plan, indent=1) + b"\n")
    agents = on_nodes(request, nodes)
    return structs.replace(
        request,
        agents=agents,
        sizes=[legal for legal in request.sizes if legal <= size],
    )


def _write_files(
    folder: RunFolder,
    request: LaunchRequest,
    plan: Plan,
    assignment: NodeAssignment,
) -> None:
    if request.sizes:
        request = structs.replace(
            request,
            plan_hash=plan.hash,
            nodes=len(request.agents),
        )
    else:
        request = at_size(request, plan)
    folder.coordinator.unlink(missing_ok=True)  # of an earlier attempt
    write_private(folder.plan, to_json(plan, indent=1) + b"\n")
    write_private(folder.request, to_bytes(request))
    raw = msgspec.json.format(msgspec.json.encode(assignment), indent=1) + b"\n"
    slurm = Path(folder.path, "slurm")
    slurm.mkdir(mode=0o700, exist_ok=True)
    write_private(slurm / f"{assignment.job_id}.{assignment.attempt}.placement.json", raw)
    write_private(slurm / "placement.json", raw)
    for name in ("over", "ended"):  # files of an earlier attempt
        (slurm / name).unlink(missing_ok=True)
    now = time.time()
    record = read_record(folder, SlurmRecord)
    # a script that was submitted by hand has no record yet
    submitted = record.submitted_at if record else now
    write_record(
        folder,
        SlurmRecord(
            job_id=assignment.job_id,
            submitted_at=submitted,
            attempt=assignment.attempt,
        ),
    )
    write_state(folder, pending_again(read_state(folder), plan_hash=plan.hash))
