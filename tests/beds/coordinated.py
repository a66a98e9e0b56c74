"""A coordinator in this process, and agents that the test plays itself."""

from __future__ import annotations

import asyncio
import contextlib
import json

from orchestrator.agent.leader.context import Context
from orchestrator.agent.leader.coordinator import Coordinator
from orchestrator.agent.leader.state_writer import StateWriter
from orchestrator.agent.leader.world_sizes import WorldSizes
from orchestrator.agent.node.recorder import Recorder
from orchestrator.agent.protocol import messages
from orchestrator.agent.protocol.channel import connect
from orchestrator.plan import Plan
from orchestrator.run.epoch_lease import EpochLease
from orchestrator.run.folder import RunFolder
from orchestrator.run.registry import Discovery
from orchestrator.run.request import Policy
from orchestrator.run.state import SCHEMA, RunState, read_state, write_state
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

PLAN = make_plan(dp=4, nodes=2)
KEY = bytes(range(32))


class FakeAgent:
    """An agent in the test's hands."""

    def __init__(self, channel, node):
        self.channel = channel
        self.node = node
        self.epoch = -1

    async def hear(self):
        """The next message that is no heartbeat: (epoch, message), None at the end."""
        while True:
            heard = await asyncio.wait_for(self.channel.receive(), PATIENCE_S)
            if heard is None or not isinstance(heard[1], messages.CoordinatorAlive):
                return heard

    def say(self, message, epoch=None):
        self.channel.send(self.epoch if epoch is None else epoch, message)

    async def follow(self, epoch=0):
        """Through Prepare, Ready, Assign, Started."""
        assert await self.hear() == (epoch, messages.Prepare())
        self.epoch = epoch
        self.say(messages.Ready(port=1234))
        assigned = (await self.hear())[1]
        assert isinstance(assigned, messages.Assign)
        self.say(messages.Started())
        return assigned

    def workers_end(self, *codes: int, stop_asked=False):
        ranks = [rank.rank for rank in PLAN.ranks if rank.node == self.node]
        for rank, code in zip(ranks, codes, strict=True):
            self.say(
                messages.WorkerExit(rank=rank, code=code, asked=stop_asked, step=None, tail=[])
            )
        self.say(messages.Stopped())


class World:
    """A coordinator that runs, and a way to join it."""

    def __init__(self, context: Context, task: asyncio.Task):
        self.context = context
        self.folder = context.folder
        self.task = task

    async def join(
        self, node, epoch=-1, gpus=2, plan_hash=PLAN.hash, key=KEY, name=None, warm=True
    ) -> FakeAgent:
        where = json.loads(self.folder.coordinator.read_text())
        arguments = self.folder.run_id, node, key, messages.FromCoordinator
        agent = FakeAgent(await connect(where["host"], where["port"], *arguments), node)
        join = messages.Join(
            node=name or node,
            host="h",
            address="127.0.0.1",
            pid=1,
            gpus=gpus,
            nics=0,
            plan_hash=plan_hash,
            metrics="127.0.0.1:1",
            warm=warm,
        )
        agent.say(join, epoch)
        return agent

    async def started(self, epoch=0) -> tuple[FakeAgent, FakeAgent]:
        """Both nodes, whose workers run in that epoch."""
        a = await self.join("node0")
        b = await self.join("node1")
        await asyncio.gather(a.follow(epoch), b.follow(epoch))
        return a, b

    async def end(self):
        return await asyncio.wait_for(self.task, PATIENCE_S)

    def state(self) -> RunState:
        return read_state(self.folder)

    def events(self, name: str) -> list[dict]:
        lines = map(json.loads, self.folder.events("node0").read_text().splitlines())
        return [line for line in lines if line["name"] == name]


def make_folder(tmp_path, **fields) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "test-run")
    folder.create()
    fields = {
        "created_at": 1.0,
        "updated_at": 1.0,
        "writer": "backend",
        "state": "pending",
        **fields,
    }
    write_state(
        folder,
        RunState(schema=SCHEMA, run_id="test-run", backend="local", plan_hash=PLAN.hash, **fields),
    )
    return folder


@contextlib.asynccontextmanager
async def coordinating(
    folder: RunFolder, plan: Plan, rules: Policy, sizes: WorldSizes, lease: EpochLease | None = None
):
    """The world of a coordinator on node0 that can be joined; it ends with the block."""
    recorder = Recorder(folder, "node0", plan)
    record = StateWriter(
        folder, plan, "node0", Discovery(folder, str(folder.path.parents[1] / "metrics.sd")), lease
    )
    context = Context(folder, plan, rules, KEY, "node0", recorder, record, sizes.elastic)
    task = asyncio.create_task(Coordinator(context, sizes).run("127.0.0.1"))
    while not folder.coordinator.exists():
        await asyncio.sleep(0.01)
    try:
        yield World(context, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        recorder.close()


def coordinated(tmp_path, max_restarts=0, join_s=PATIENCE_S, heartbeat_s=PATIENCE_S, epoch=-1):
    """A coordinator of a run with two fixed nodes."""
    rules = Policy(
        max_restarts=max_restarts,
        grace_s=1.0,
        heartbeat_timeout_s=heartbeat_s,
        join_timeout_s=join_s,
    )
    return coordinating(make_folder(tmp_path, epoch=epoch), PLAN, rules, WorldSizes.fixed(PLAN))
