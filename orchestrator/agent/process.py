"""One agent process: the agent of its node, and the coordinator if this node has to lead."""

from __future__ import annotations

import asyncio

from orchestrator.plan import Exit, load_plan
from orchestrator.run.epoch_lease import EpochLease
from orchestrator.run.folder import RunFolder
from orchestrator.run.registry import Discovery
from orchestrator.run.request import LaunchRequest

from .leader.context import Context
from .leader.coordinator import Coordinator
from .leader.election import LeaderElection
from .leader.state_writer import StateWriter
from .leader.world_sizes import ScaleUpPolicy, WorldSizes
from .node.agent import Agent
from .node.connection import Connector, FixedCoordinator
from .node.recorder import Recorder


class AgentProcess:
    """Runs the agent of a node, and the coordinator if this node leads.

    `listen_address` is the address and port of a coordinator in this process; port 0: any free one.
    """

    def __init__(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        node: str,
        key: bytes,
        recorder: Recorder,
        listen_address: tuple[str, int],
    ):
        self._folder = folder
        self._request = request
        self._node = node
        self._key = key
        self._recorder = recorder
        self._listen_address = listen_address
        self._coordinator: Coordinator | None = None
        self._coordinator_task: asyncio.Task | None = None
        self._lead_started = asyncio.Event()

    def connector(self, scale_up: ScaleUpPolicy | None) -> Connector:
        """Returns the connector by which this process finds the coordinator.

        `scale_up` is set in an elastic run, in which this process may become the coordinator.
        """
        if scale_up is None:
            join_s = self._request.policy.join_timeout_s
            return FixedCoordinator(self._folder, self._node, self._key, join_s)

        def lead(lease: EpochLease) -> None:
            self._recorder.event("coordinates", epoch_claimed=lease.held)
            self.lead(WorldSizes.from_request(self._folder, self._request, scale_up), lease)

        return LeaderElection(
            self._folder,
            self._node,
            self._key,
            self._request.policy,
            lead,
        )

    def lead(self, sizes: WorldSizes, lease: EpochLease | None = None) -> None:
        """Starts the coordinator with the plan in force. Elastic runs need a `lease`."""
        plan = load_plan(self._folder.plan)
        discovery = Discovery(self._folder, self._request.discovery_dir)
        context = Context(
            self._folder,
            plan,
            self._request.policy,
            key=self._key,
            node=self._node,
            recorder=self._recorder,
            state_writer=StateWriter(self._folder, plan, self._node, discovery, lease),
            elastic=sizes.elastic,
        )
        self._coordinator = Coordinator(context, sizes)
        self._coordinator_task = asyncio.create_task(self._coordinator.run(*self._listen_address))
        self._lead_started.set()

    async def run(self, agent: Agent, elastic: bool) -> int:
        """Runs the agent, and the coordinator if there is one; returns the exit code."""
        agent_task = asyncio.create_task(agent.run())
        leading = asyncio.create_task(self._lead_started.wait())
        try:
            await asyncio.wait({agent_task, leading}, return_when=asyncio.FIRST_COMPLETED)
            if self._coordinator_task and self._coordinator:
                tasks = {agent_task, self._coordinator_task}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                await self._after_first_end(
                    agent, self._coordinator, self._coordinator_task, elastic
                )
            return await agent_task
        finally:
            started = [task for task in (agent_task, leading, self._coordinator_task) if task]
            for task in started:
                task.cancel()
            # The agent's workers are gone once its task has ended.
            await asyncio.gather(*started, return_exceptions=True)

    async def _after_first_end(
        self,
        agent: Agent,
        coordinator: Coordinator,
        task: asyncio.Task,
        elastic: bool,
    ) -> None:
        """Handles the end of the agent or of the coordinator, whichever is first.

        A coordinator of an elastic run whose own agent has to leave hands the run over to
        another node.
        """
        if task.done():
            # raises a bug's error, instead of leaving the agent waiting
            decision = task.result()
            is_fenced = decision.code == Exit.FENCED
            if elastic and (is_fenced or not coordinator.has_ended_the_run):
                agent.exit_with(decision.code, decision.reason)
        elif not elastic:
            coordinator.on_agent_exit()
            await task  # it still has to end the other agents, and to write how the run ended
        elif coordinator.has_ended_the_run:
            await task  # it still has to end the other agents
