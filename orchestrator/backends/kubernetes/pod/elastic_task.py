"""A pod of an elastic run: comes together with the others, or joins the run that they are at, and
is one of its nodes.

A notice to this pod (a drain, an eviction) takes one node from the run, which goes on; so does its
loss. The pod that comes in its place is a spare, and gets ranks at a step boundary when that pays.
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


def run_elastic(folder: RunFolder, pod: Pod, given: Input) -> tuple[int, str]:
    """(exit code of the pod, why). OrchError (76) when too few pods come."""
    options = read_options(given.request.backend_options)
    request = given.request
    shared = given.planned.cluster.device == "cpu"
    together = os.environ.get("ORCH_TOGETHER", "")
    count = int(together) if together.isdigit() else len(request.agents)
    own = Waiting(index=pod.index, node=pod.node, address=pod.address, pod=pod.name, together=count)

    def begin(members: list[Join]) -> str:
        return _write_attempt(folder, given, members, shared)

    come_together(
        folder,
        own,
        min(given.sizes),
        request.policy.heartbeat_timeout_s,
        options.rendezvous_timeout_s,
        begin,
    )
    node = node_name(own.join, shared)
    status_lines = ElasticStatusLineWriter(folder, node)
    more = ("--elastic", "--grow-after-s", str(options.grow_after_s))
    return run_agent(folder, pod, given, node, status_lines, "elsewhere", *more)


def _write_attempt(folder: RunFolder, given: Input, members: list[Join], shared: bool) -> str:
    """What the agents of an attempt read, by the pod that begins it; the hash of its plan."""
    topology = unpack_topology(given.topology) if given.topology else None
    found = map_elastic(given.sizes, members, topology, shared)
    real = found.mapping.plan
    log.info(
        "%d of %d pods: %s", len(members), len(given.request.agents), found.mapping.difference.text
    )
    folder.coordinator.unlink(missing_ok=True)
    for size, plan in found.plans.items():
        write_private(folder.sized_plan(size), to_json(plan, indent=1) + b"\n")
    write_private(folder.plan, to_json(real, indent=1) + b"\n")
    agents = [AgentCommand(node=node, argv=[]) for node in found.names]
    request = structs.replace(given.request, plan_hash=real.hash, agents=agents, nodes=len(agents))
    write_private(folder.request, to_bytes(request))
    write_private(folder.config, given.config)
    write_placement(folder, given, members, found.names, found.mapping)
    write_state(folder, fresh_state(folder, given, found.mapping))
    return real.hash
