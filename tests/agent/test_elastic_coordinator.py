"""The coordinator of an elastic run against agents that the test plays itself."""

from __future__ import annotations

import asyncio
import time

import pytest

from orchestrator.agent.leader.world_sizes import ScaleUpPolicy, WorldSizes
from orchestrator.agent.protocol.messages import (
    Assign,
    Prepare,
    Ready,
    Started,
    Stop,
    Stopped,
    TerminationSignal,
    Warm,
)
from orchestrator.plan import Exit, load_plan, to_json
from orchestrator.run.epoch_lease import EpochLease
from orchestrator.run.folder import write_private
from orchestrator.run.request import Policy
from orchestrator.run.state import read_state
from tests.beds.bundles import make_bundle
from tests.beds.coordinated import PLAN, coordinating, make_folder
from tests.beds.plans import make_plan


def coordinated(tmp_path, heartbeat_s=30.0, least=1, **limits):
    """An elastic coordinator of two nodes or one, on node0, and the world that plays its agents."""
    sizes = {
        nodes: plan
        for nodes, plan in {2: PLAN, 1: make_plan(dp=2, nodes=1)}.items()
        if nodes >= least
    }
    folder = make_folder(tmp_path)
    for nodes, plan in sizes.items():
        write_private(folder.sized_plan(nodes), to_json(plan))
    write_private(folder.plan, to_json(PLAN))
    request = make_bundle(PLAN, tmp_path / "elsewhere", sizes=sizes).request
    rules = Policy(
        max_restarts=0, grace_s=5.0, heartbeat_timeout_s=heartbeat_s, join_timeout_s=30.0, **limits
    )
    lease = EpochLease(folder, "node0")
    lease.take(0)
    return coordinating(
        folder, PLAN, rules, WorldSizes.from_request(folder, request, ScaleUpPolicy()), lease
    )


async def test_a_node_that_is_lost_and_back_before_the_others_have_stopped_is_not_waited_for(
    tmp_path,
):
    """Found on a busy machine: its agent had given up the connection, ended its workers and come
    again within the same epoch, and the run waited for its `stopped` as long as for workers that
    cannot be killed.
    """
    async with coordinated(tmp_path) as world:
        a, b = await world.started()
        b.channel.abort()
        assert isinstance((await a.hear())[1], Stop)
        again = await world.join("node1", epoch=0)
        assert await again.hear() == (0, Prepare())
        again.epoch = 0
        again.say(Ready(port=4321))
        a.say(Stopped())
        for assigned in await asyncio.gather(
            a.follow(1), again.follow(1)
        ):  # and it has its seat back
            assert (
                len(assigned.ranks) == 2
                and assigned.plan_hash == PLAN.hash == load_plan(world.folder.plan).hash
            )


@pytest.mark.parametrize("spare", [False, True])
async def test_a_run_whose_seated_nodes_must_all_leave_goes_on_where_others_stand_by(
    tmp_path, spare
):
    async with coordinated(tmp_path) as world:
        a, b = await world.started()
        if spare:
            c = await world.join("node2", epoch=0)
            assert await c.hear() == (0, Prepare())
        for agent in (a, b):
            agent.say(
                TerminationSignal(reason=f"{agent.node} is drained", signal="SIGTERM", force=False)
            )
        for agent in (a, b):
            assert isinstance((await agent.hear())[1], Stop)
            agent.say(Stopped())
        over = await world.task
        assert over.code == Exit.RESTART
        # with a spare the coordinator only leaves it to that: node0 has to go
        assert read_state(world.folder).state == ("restarting" if spare else "stopped")


async def test_a_node_that_still_imports_is_not_waited_for_where_others_suffice(tmp_path):
    """Found in trials: a node that came back at once had its seat again, and all waited for its
    `import torch`."""

    async def lose(world, lost, *there):
        """The nodes that have ranks after `lost` is gone, as the plan in force says; those that are
        there follow."""
        lost.channel.abort()
        epoch = lost.epoch + 1
        for agent in there:
            message = (await agent.hear())[1]
            if isinstance(message, Stop):
                agent.say(Stopped())
                message = (await agent.hear())[1]
            assert message == Prepare()
            agent.epoch = epoch
            agent.say(Ready(port=1))
        while not (plan := load_plan(world.folder.plan)) or world.state().epoch < epoch:
            await asyncio.sleep(0.01)
        seated = dict.fromkeys(rank.node for rank in plan.ranks)
        for agent in there:
            if agent.node in seated:
                assert isinstance((await agent.hear())[1], Assign)
                agent.say(Started())
        return list(seated)

    async with coordinated(tmp_path) as world:
        a = await world.join("node0", warm=False)
        b = await world.join("node1", warm=False)
        await asyncio.gather(
            a.follow(), b.follow()
        )  # at the beginning all import, and are waited for
        cold = await world.join("cold", epoch=0, warm=False)
        assert await cold.hear() == (0, Prepare())
        cold.epoch = 0
        spare = await world.join("spare", epoch=0)
        assert await spare.hear() == (0, Prepare())
        spare.epoch = 0
        assert await lose(world, b, a, cold, spare) == ["node0", "spare"]
        assert await lose(world, spare, a, cold) == ["node0"]  # rather smaller than later
        cold.say(Warm())
        back = await world.join("node1", epoch=2, warm=False)
        assert await back.hear() == (2, Prepare())
        back.epoch = 2
        assert await lose(world, a, cold, back) == ["cold"]


async def test_a_coordinator_that_was_frozen_does_not_take_those_who_hung_up_for_dead(tmp_path):
    """Found by a drill: it woke before anybody had claimed, saw every connection closed, and ended
    the run with 76."""
    async with coordinated(tmp_path) as world:
        a, b = await world.started()
        await asyncio.sleep(1.1)  # a tick
        time.sleep(2.5)  # the coordinator's loop is this one
        for agent in (a, b):
            agent.channel.abort()
        while not world.events("stepped_back"):
            assert not world.task.done(), world.task.result()
            await asyncio.sleep(0.05)
        again = await world.join("node1", epoch=0)
        assigned = await again.follow(1)
        assert assigned.world_size == 2 and world.events("was_away")


async def test_a_coordinator_that_hardly_runs_fences_nobody(tmp_path):
    """Found on a starved machine: it had three ticks of five seconds and no turn to read, and
    fenced its own agent."""
    async with coordinated(tmp_path, heartbeat_s=2.0) as world:
        _kept = await world.started()
        for _ in range(
            3
        ):  # neither says a word, and all this time the coordinator has only these three ticks
            time.sleep(2.2)
            await asyncio.sleep(0)
        assert world.events("was_away") and not world.events("epoch_stops")
        while not world.events("epoch_stops"):  # it runs again, and they are silent
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("then", "state", "code"),
    [
        ("comes back", "", None),
        ("stays away", "failed", Exit.CAPACITY),
        ("told to end", "stopped", Exit.RESTART),
    ],
)
async def test_too_few_nodes_wait_for_those_that_may_be_on_their_way_back(
    tmp_path, then, state, code
):
    held = 0.3 if then == "stays away" else 60.0
    async with coordinated(tmp_path, least=2, min_nodes_grace_s=held) as world:
        a, b = await world.started()
        b.channel.abort()
        assert isinstance((await a.hear())[1], Stop)
        a.say(Stopped())
        while not world.events("awaits_nodes"):
            await asyncio.sleep(0.01)
        if then == "comes back":
            again = await world.join("node1", epoch=0)
            for assigned in await asyncio.gather(a.follow(1), again.follow(1)):
                assert len(assigned.ranks) == 2 and assigned.plan_hash == PLAN.hash
            return
        if then == "told to end":
            a.say(TerminationSignal(reason="drained", signal="SIGTERM", force=False))
        assert (await a.hear())[1].code == code
        a.channel.abort()
        over = await world.task
        assert (over.state, over.code) == (state, code) and "1 nodes are left" in over.reason
