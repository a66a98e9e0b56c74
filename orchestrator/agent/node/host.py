"""One process of an elastic run: the agent of its node, and beside it the coordinator whenever that falls to it."""

from __future__ import annotations

import asyncio

from orchestrator.agent.leader.elastic import ElasticCoordinator
from orchestrator.agent.leader.election import LeaderElection
from orchestrator.agent.leader.state_writer import StateWriter
from orchestrator.agent.leader.world_sizes import ScaleUpPolicy, Sizes
from orchestrator.plan import Exit, load_plan
from orchestrator.run.discovery import Discovery
from orchestrator.run.epoch_lease import EpochLease
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest
from orchestrator.run.state import read_state

from .agent import Agent
from .recorder import Recorder


class Host:
    def __init__(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        node: str,
        key: bytes,
        recorder: Recorder,
        discovery: Discovery,
        grow_after_s: float,
    ):
        self._folder, self._request, self._node, self._key = folder, request, node, key
        self._recorder, self._discovery, self._scale_up = recorder, discovery, ScaleUpPolicy(dwell_s=grow_after_s)
        self._address: tuple[str, int] = "127.0.0.1", 0
        self._lead: asyncio.Task | None = None
        self._called = asyncio.Event()
        self.election = LeaderElection(folder, node, key, request.policy, self._coordinate)

    def listens_at(self, address: str, port: int) -> None:
        """Where a coordinator of this process is to listen; port 0: any free one."""
        self._address = address, port

    def _coordinate(self, claims: EpochLease) -> None:
        """From now on, by right of `claims`, with the plan that was in force last."""
        self._recorder.event("coordinates", epoch_claimed=claims.held)
        plan, sizes = load_plan(self._folder.plan), Sizes(self._folder, self._request, self._scale_up)
        record = StateWriter(self._folder, plan, self._node, self._discovery, claims)
        coordinator = ElasticCoordinator(
            self._folder,
            plan,
            self._request.policy,
            self._key,
            self._node,
            self._recorder,
            record,
            sizes=sizes,
        )
        self._lead = asyncio.create_task(coordinator.run(*self._address))
        self._called.set()

    async def until_over(self, agent: Agent) -> int:
        """The exit code of this process. A coordinator whose own agent has to leave gives the run into other hands."""
        work, called = asyncio.create_task(agent.run()), asyncio.create_task(self._called.wait())
        try:
            await asyncio.wait({work, called}, return_when=asyncio.FIRST_COMPLETED)
            if self._lead:
                await asyncio.wait({work, self._lead}, return_when=asyncio.FIRST_COMPLETED)
                if self._lead.done():
                    decision = self._lead.result()  # a bug in it must be seen
                    if decision.code == Exit.FENCED or not read_state(self._folder).is_final:
                        agent.dismiss(decision.code, decision.reason)
                elif read_state(self._folder).is_final:
                    await self._lead  # it tells the other agents
            return await work
        finally:
            tasks = [task for task in (work, called, self._lead) if task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # the agent's workers are gone then
