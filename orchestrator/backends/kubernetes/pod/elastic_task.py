"""A pod of an elastic run: it meets the other pods, or joins them in a running run, and is one of
the run's nodes.

A termination signal to this pod (a drain, an eviction) takes one node from the run, which
continues; so does its loss. The pod that replaces it is a spare, and gets ranks at a step boundary
when that pays.
"""

from __future__ import annotations

import os

from msgspec import structs

from orchestrator.backends.kubernetes.objects.payload import unpack_topology
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.plan import to_json
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.request import AgentCommand, to_bytes
from orchestrator.run.state import write_state

from .elastic import Waiting, come_together, map_elastic, node_name
from .rendezvous import Join
from .status_lines import ElasticStatusLineWriter
from .task import Input, Pod, fresh_state, log, run_agent, write_placement


def run_elastic(folder: RunFolder, pod: Pod, run_input: Input) -> tuple[int, str]:
    """Runs the pod: (exit code of the pod, why). OrchError (76) if too few pods come."""
    options = read_options(run_input.request.backend_options)
    request = run_input.request
    shared = run_input.planned.cluster.device == "cpu"
    together = os.environ.get("ORCH_TOGETHER", "")
    count = int(together) if together.isdigit() else len(request.agents)
    this_pod = Waiting(
        index=pod.index,
        node=pod.node,
        address=pod.address,
        pod=pod.name,
        together=count,
    )

    def begin(members: list[Join]) -> str:
        return _write_attempt(folder, run_input, members, shared)

    come_together(
        folder,
        this_pod,
        least=min(run_input.sizes),
        heartbeat_s=request.policy.heartbeat_timeout_s,
        timeout_s=options.rendezvous_timeout_s,
        begin=begin,
    )
    node = node_name(this_pod.join, shared)
    return run_agent(
        folder,
        pod,
        run_input,
        node,
        status_lines=ElasticStatusLineWriter(folder, node),
        coordinator="elsewhere",
        extra_argv=("--elastic", "--grow-after-s", str(options.grow_after_s)),
    )


def _write_attempt(
    folder: RunFolder,
    run_input: Input,
    members: list[Join],
    shared: bool,
) -> str:
    """Writes what the agents of an attempt read, in the pod that begins it. Returns the hash of the
    plan."""
    topology = unpack_topology(run_input.topology) if run_input.topology else None
    elastic_mapping = map_elastic(run_input.sizes, members, topology, shared)
    plan = elastic_mapping.mapping.plan
    log.info(
        "%d of %d pods: %s",
        len(members),
        len(run_input.request.agents),
        elastic_mapping.mapping.difference.text,
    )
    folder.coordinator.unlink(missing_ok=True)
    for size, sized_plan in elastic_mapping.plans.items():
        write_private(folder.sized_plan(size), to_json(sized_plan, indent=1) + b"\n")
    write_private(folder.plan, to_json(plan, indent=1) + b"\n")
    agents = [AgentCommand(node=node, argv=[]) for node in elastic_mapping.names]
    request = structs.replace(
        run_input.request,
        plan_hash=plan.hash,
        agents=agents,
        nodes=len(agents),
    )
    write_private(folder.request, to_bytes(request))
    write_private(folder.config, run_input.config)
    write_placement(folder, run_input, members, elastic_mapping.names, elastic_mapping.mapping)
    write_state(folder, fresh_state(folder, run_input, elastic_mapping.mapping))
    return plan.hash
