"""What the coordinator does with the state that only memories hold when a run ends, against agents
of the test."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from msgspec import structs

from orchestrator.agent.faults.policy import Budget, Decision
from orchestrator.agent.leader.final_checkpoint import is_due
from orchestrator.agent.leader.world_sizes import WorldSizes
from orchestrator.agent.protocol.messages import (
    Assign,
    Done,
    Prepare,
    Ready,
    Stop,
    Stopped,
    TerminationSignal,
    WorkerExit,
)
from orchestrator.plan import Exit
from orchestrator.run.folder import write_private
from orchestrator.run.request import Policy, to_bytes
from orchestrator.run.state import Cause
from tests.beds.bundles import make_bundle
from tests.beds.coordinated import coordinating, make_folder
from tests.beds.plans import make_plan

PLAN = make_plan(dp=3, nodes=3, copy_every_steps=1)


def prepared(tmp_path, command=()):
    folder = make_folder(tmp_path)
    write_private(
        folder.request, to_bytes(make_bundle(PLAN, tmp_path / "elsewhere", command=command).request)
    )
    return folder


@contextlib.asynccontextmanager
async def two_left(tmp_path, grace_s=30.0):
    """A run of three nodes that has lost the third: the world, and the agents of the others."""
    folder = prepared(tmp_path)
    rules = Policy(max_restarts=0, grace_s=grace_s, heartbeat_timeout_s=60.0, join_timeout_s=60.0)
    async with coordinating(folder, PLAN, rules, WorldSizes.fixed(PLAN)) as world:
        agents = [
            await world.join(f"node{number}", gpus=1, plan_hash=PLAN.hash) for number in range(3)
        ]
        await asyncio.gather(*(agent.follow() for agent in agents))
        *remaining_agents, lost = agents
        lost.channel.abort()
        for agent in remaining_agents:
            assert isinstance((await agent.hear())[1], Stop)
            agent.say(Stopped())
        yield world, remaining_agents


async def assigned(agents, epoch: int) -> None:
    """All are told to flush, in an epoch of its own."""
    for agent in agents:
        assert await agent.hear() == (epoch, Prepare())
        agent.epoch = epoch
        agent.say(Ready(port=4000 + epoch))
    for index, agent in enumerate(agents):
        heard, assign = await agent.hear()
        assert (
            isinstance(assign, Assign)
            and assign.final_checkpoint
            and heard == epoch
            and assign.plan_hash == PLAN.hash
        )
        assert (assign.node_rank, assign.world_size, assign.master_port) == (
            index,
            len(agents),
            4000 + epoch,
        )
        assert [(rank.rank, rank.gpu) for rank in assign.ranks] == [(index, 0)]


def says(agent, rank: int, code: int, step: int | None = None, error: str = "") -> None:
    agent.say(WorkerExit(rank=rank, code=code, asked=False, step=step, tail=[], error=error))
    agent.say(Stopped())


async def released(world, *agents):
    """The decision, of which they are told last."""
    for agent in agents:
        done = (await agent.hear())[1]
        assert isinstance(done, Done) and done.code == Exit.CAPACITY
        agent.channel.abort()
    return await world.end()


async def test_the_state_in_memory_is_saved_before_the_nodes_are_released(tmp_path):
    async with two_left(tmp_path) as (world, (a, b)):
        await assigned((a, b), 1)
        assert world.state().state == "stopping", "not over yet"
        says(a, 0, 0, step=7)
        says(b, 1, 0)
        over = await released(world, a, b)
        assert over.code == Exit.CAPACITY and over.cause.kind == "node_lost"
        assert over.reason.endswith("; the state after step 7 was saved from the nodes' memories")
        lost, flush = world.state().epochs
        assert (lost.cause.kind, flush.cause, flush.outcome) == (
            "node_lost",
            None,
            "saved",
        ) and flush.ended_at
        assert world.state().reason == over.reason and world.events("flush_ended")[0]["step"] == 7


async def test_a_node_that_is_lost_while_saving_leaves_it_to_the_others_who_say_what_they_lack(
    tmp_path,
):
    async with two_left(tmp_path) as (world, (a, b)):
        await assigned((a, b), 1)
        b.channel.abort()
        says(a, 0, int(Exit.RESTART), error="a peer is gone or silent")
        await assigned((a,), 2)
        says(a, 0, 1, error="replica of step 7: 1 of 3 files were lost with their nodes")
        over = await released(world, a)
        assert over.code == Exit.CAPACITY
        assert over.reason.endswith(
            "; the state in the nodes' memories was not saved: replica of step 7: 1 of 3 files were"
            " lost with their nodes"
        )
        assert [epoch.outcome for epoch in world.state().epochs] == [
            "failed",
            "not saved",
            "not saved",
        ]


async def test_nothing_to_save_is_no_word_in_the_reason(tmp_path):
    async with two_left(tmp_path) as (world, (a, b)):
        await assigned((a, b), 1)
        says(a, 0, 0)
        says(b, 1, 0)
        over = await released(world, a, b)
        assert (
            "memories" not in over.reason and world.state().epochs[1].outcome == "nothing to save"
        )


@pytest.mark.parametrize("hurry", [False, True], ids=["grace", "forced"])
async def test_saving_is_bounded_by_the_grace_and_by_whoever_will_not_wait(tmp_path, hurry):
    async with two_left(tmp_path, grace_s=60.0 if hurry else 0.5) as (world, (a, b)):
        if hurry:
            await assigned((a, b), 1)
            b.say(TerminationSignal(reason="out", signal="SIGTERM", force=True))
        else:  # they do not even answer
            for agent in (a, b):
                assert await agent.hear() == (1, Prepare())
                agent.epoch = 1
        if hurry:
            for agent in (a, b):
                assert (await agent.hear())[1].signal == "SIGKILL"
                agent.say(Stopped())
        over = await released(world, a, b)
        assert "was not saved" in over.reason


def test_it_is_due_where_the_newest_state_may_be_in_memory_alone(tmp_path):
    lost = Cause(kind="node_lost", text="gone", epoch=0)
    full = structs.replace(lost, kind="disk_full")
    died = structs.replace(lost, kind="worker_exit")
    base = Decision(False, "failed", "", Budget(0))
    cases = [
        (Exit.CAPACITY, lost, True),
        (Exit.CAPACITY, None, True),  # found too few after the coordinator had moved
        (Exit.RESTART, None, False),  # all have saved
        (Exit.RESTART, died, True),  # told to end, and not all have
        (Exit.RESTART, full, False),
        (Exit.USER, died, True),  # restarts are used up
        (Exit.CONFIG, died, False),  # the data's fault: somebody may want to go back further
        (Exit.SECURITY, died, False),
        (Exit.DONE, None, False),
    ]
    folder = prepared(tmp_path)
    for code, cause, due in cases:
        assert is_due(folder, PLAN, replace(base, code=int(code), cause=cause)) is due, (
            code,
            cause,
        )
    ended = replace(base, code=int(Exit.CAPACITY))
    assert not is_due(folder, make_plan(dp=3, nodes=3), ended), "there are no copies"
    write_private(
        folder.request, to_bytes(make_bundle(PLAN, tmp_path / "x", command=("prog",)).request)
    )
    assert not is_due(folder, PLAN, ended), "a program of the user's keeps none"
