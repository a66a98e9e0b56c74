"""What an elastic run may become: its plans by size, as submitted, and the one in force, as files."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module

from orchestrator.plan import Plan, load_plan, to_json
from orchestrator.planner.elastic.next_plan import larger_plan, legal_size, next_plan, pays
from orchestrator.planner.placement.rank_assignment import used_nodes
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.request import LaunchRequest

PLANNER = "orchestrator.planner.elastic.replan"  # with what it needs, half a second of processor time


@dataclass(frozen=True)
class ScaleUpPolicy:
    """When a run that nothing ails stops to go on larger."""

    dwell_s: float = 60.0  # not before it has been as it is for this long
    cost_s: float = 10.0  # of saving, stopping and starting again, until this run has shown its own


class Sizes:
    def __init__(self, folder: RunFolder, request: LaunchRequest, scale_up: ScaleUpPolicy):
        self._folder, self.scale_up = folder, scale_up
        self._loading: asyncio.Task | None = None
        self.nodes = [agent.node for agent in request.agents]  # those that are started with the run
        self.plans = {nodes: load_plan(folder.sized_plan(nodes)) for nodes in request.sizes}

    @property
    def least(self) -> int:
        return min(self.plans)

    @property
    def most(self) -> int:
        return max(self.plans)

    async def next(self, current: Plan, healthy: Collection[str]) -> Plan | None:
        """By `planner.elastic.next_plan`. In a thread: heartbeats go on while a large cluster is planned."""
        held = used_nodes(current)
        if legal_size(self.plans, len(healthy)) == len(held) and set(held) <= set(healthy):
            return current
        return await asyncio.to_thread(next_plan, current, self.plans, healthy)

    def prepare(self) -> None:
        """Load what planning needs now, beside the running workers, so that a lost node does not wait for it."""
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(import_module, PLANNER))

    def larger(self, current: Plan, nodes: int) -> Plan | None:
        return larger_plan(current, self.plans, nodes)

    def worth(
        self, current: Plan, nodes: int, *, stable_s: float, cost_s: float | None, horizon_s: float
    ) -> Plan | None:
        """The larger plan that it pays to stop for, by `planner.elastic.pays`; None for none."""
        larger = self.larger(current, nodes)
        times = {"stable_s": stable_s, "dwell_s": self.scale_up.dwell_s, "horizon_s": horizon_s}
        cost_s = self.scale_up.cost_s if cost_s is None else cost_s
        return larger if larger is not None and pays(current, larger, **times, cost_s=cost_s) else None

    def put_in_force(self, plan: Plan) -> None:
        """What workers of the next epoch will read. All of the last one are gone."""
        write_private(self._folder.plan, to_json(plan, indent=1) + b"\n")
