"""The legal sizes of a run, and the decision to grow a healthy run to a larger one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from orchestrator.plan import Plan, load_plan
from orchestrator.planner.elastic.next_plan import (
    horizon_s,
    larger_plan,
    legal_size,
    next_plan,
    pays,
)
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest, used_nodes

from .context import Context
from .election import PLANNER

_RECONSIDER_S = 1.0  # between two decisions about scaling up


@dataclass(frozen=True)
class ScaleUpPolicy:
    """The conditions under which a healthy run stops to continue with more nodes."""

    dwell_s: float = 60.0  # the nodes must have been the same for this long
    #: Seconds for saving, stopping and restarting, until this run has measured its own.
    cost_s: float = 10.0


class WorldSizes:
    """The legal sizes of a run: node count -> plan as submitted.

    `nodes` are the nodes that are started with the run.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        plans: Mapping[int, Plan],
        elastic: bool,
        policy: ScaleUpPolicy = ScaleUpPolicy(),
    ):
        self.nodes = list(nodes)
        self.plans = dict(plans)
        self.elastic = elastic
        self.policy = policy
        self._loading: asyncio.Task | None = None

    @classmethod
    def fixed(cls, plan: Plan) -> WorldSizes:
        """Returns the one size of a run with fixed nodes."""
        nodes = used_nodes(plan)
        return cls(nodes, {len(nodes): plan}, elastic=False)

    @classmethod
    def from_request(
        cls,
        folder: RunFolder,
        request: LaunchRequest,
        policy: ScaleUpPolicy,
    ) -> WorldSizes:
        """Returns the sizes of an elastic run."""
        plans = {
            node_count: load_plan(folder.sized_plan(node_count)) for node_count in request.sizes
        }
        return cls(
            [agent.node for agent in request.agents],
            plans,
            elastic=True,
            policy=policy,
        )

    @property
    def smallest(self) -> int:
        return min(self.plans)

    async def plan_for(self, current: Plan, healthy: Collection[str]) -> Plan | None:
        """Returns the plan for the healthy nodes, or None if they are too few.

        The planner runs in a thread, so that heartbeats continue.
        """
        ranked = used_nodes(current)
        if legal_size(self.plans, len(healthy)) == len(ranked) and set(ranked) <= set(healthy):
            return current
        return await asyncio.to_thread(next_plan, current, self.plans, healthy)

    def preload(self) -> None:
        """Imports the planner while the workers run, so that a recovery does not wait for it."""
        if self.elastic and self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(import_module, PLANNER))


class ScaleUp:
    """Decides when a healthy run stops at a step boundary to continue with more nodes."""

    def __init__(self, context: Context, sizes: WorldSizes):
        self._context = context
        self._sizes = sizes
        self._time = asyncio.get_running_loop().time
        self._started_at = self._time()  # loop time at which this coordinator began
        self.nodes_changed_at = self._started_at
        self._stopped_at: float | None = None
        #: Seconds of the last restart, from the request to stop to the workers' start.
        self._cost_s: float | None = None
        self.faults = 0
        self.check_at: float | None = None  # loop time of the next decision

    def on_stop(self, first: bool) -> None:
        """Handles a request to the workers to stop. `first` marks the first one of an epoch."""
        self.check_at = None
        if first:
            self._stopped_at = self._time()

    def on_workers_started(self) -> None:
        """Measures the cost of a restart, once all workers have started."""
        if self._stopped_at is not None:
            self._cost_s = self._time() - self._stopped_at

    def consider(self, ready_nodes: int) -> Plan | None:
        """Returns a larger plan if switching to it pays, else None.

        Sets `check_at` if there is a larger plan that does not pay yet.
        """
        context = self._context
        sizes = self._sizes
        self.check_at = None
        larger = larger_plan(context.plan, sizes.plans, ready_nodes)
        if larger is None:
            return None
        now = self._time()
        stable_s = now - self.nodes_changed_at
        running_s = now - self._started_at
        furthest_step = max(context.furthest_step, reported_step(context))
        if context.plan.program:
            # Its end is unknown: a program that has run for an hour is expected to run for another.
            remaining_s = running_s
        else:
            steps = context.plan.job.train.steps - furthest_step
            remaining_s = steps * context.plan.time.step_s
        horizon = horizon_s(remaining_s, running_s, self.faults, stable_s)
        cost_s = sizes.policy.cost_s if self._cost_s is None else self._cost_s
        dwell_s = sizes.policy.dwell_s
        if not pays(
            context.plan,
            larger,
            stable_s=stable_s,
            dwell_s=dwell_s,
            horizon_s=horizon,
            cost_s=cost_s,
        ):
            self.check_at = now + max(_RECONSIDER_S, dwell_s - stable_s)
            return None
        nodes = len(used_nodes(larger))
        context.record_event(
            "growing",
            nodes=nodes,
            horizon_s=round(horizon, 1),
            cost_s=self._cost_s,
        )
        return larger


def reported_step(context: Context) -> int:
    """Returns the furthest step that a worker of a member has reported, or 0."""
    steps = [member.step for member in context.members.values() if member.step is not None]
    return max(steps, default=0)
