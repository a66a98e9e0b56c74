"""Who becomes the coordinator of an elastic run, and when: what one agent sees, tick by tick."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent.leader import election
from orchestrator.agent.leader.election import CoordinatorMonitor, LeaderElection, turn_of
from orchestrator.agent.node.connection import CoordinatorAddress, NoCoordinator
from orchestrator.agent.protocol.channel import Refused, WrongKey, accept
from orchestrator.agent.protocol.messages import FromAgent
from orchestrator.plan import Exit, PlanError
from orchestrator.plan.worker import newest_lease
from orchestrator.run.epoch_lease import EpochLease
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.request import Policy
from orchestrator.run.state import read_state
from tests.beds.coordinated import make_folder

TIMEOUT = 12


def ticks(turn: int, sights, fresh: bool = False) -> int | None:
    """The first tick at which an agent claims. A sight: (newest claim, epoch of who is seen, beat,
    refused)."""
    monitor = CoordinatorMonitor(TIMEOUT)
    for index, (newest, epoch, beat, refused) in enumerate(sights):
        about = {"host": "h", "port": 1, "node": "node0", "heartbeats": beat}
        seen = None if epoch is None else CoordinatorAddress(epoch=epoch, **about)
        if monitor.tick(newest, seen, refused, fresh, turn):
            return index
    return None


def test_the_first_of_a_new_run_claims_at_once_and_the_others_give_it_time():
    nobody = [(-1, None, 0, False)] * 100
    assert ticks(0, nobody, fresh=True) == 0
    assert ticks(1, nobody, fresh=True) > TIMEOUT


def test_when_nobody_listens_any_more_they_claim_in_turn():
    dead = [(3, 3, 7, True)] * 100
    assert [ticks(turn, dead) for turn in range(3)] == [0, 4, 8]


def test_a_beat_that_stands_still_is_given_up_and_one_that_goes_on_never_is():
    frozen = [(3, 3, 7, False)] * 100
    assert [ticks(turn, frozen) for turn in range(2)] == [TIMEOUT, TIMEOUT + 4]
    alive = [(3, 3, tick // 4, False) for tick in range(200)]
    assert ticks(0, alive) is None


def test_who_has_claimed_gets_time_to_listen():
    """The file still names the dead one, whose port refuses: no reason to overtake who has just
    claimed."""
    claimed = [(4, 3, 7, True)] * 100
    assert ticks(0, claimed) == TIMEOUT


@given(st.integers(1, 40), st.integers(0, 5))
def test_any_news_starts_the_wait_again(when, turn):
    sights = [(3, 3, 7, False)] * when + [(3, 3, 8, False)] * 100
    first = ticks(turn, sights)
    wait = TIMEOUT + 4 * turn
    assert first == (wait if wait < when else when + wait)


def test_turns_go_by_the_plan_without_who_is_gone():
    order = ["node2", "node0", "node1"]
    assert [turn_of(node, order, lost_node="node2") for node in ("node0", "node1", "spare-0")] == [
        0,
        1,
        2,
    ]
    assert turn_of("node2", order, lost_node="") == 0


RULES = Policy(max_restarts=0, grace_s=1.0, heartbeat_timeout_s=60.0, join_timeout_s=60.0)


def without_coordinator(tmp_path, state: str) -> RunFolder:
    """A run whose coordinator, on node1, is gone: its port refuses."""
    folder = make_folder(tmp_path, state=state, epoch=2, writer="node0")
    EpochLease(folder, "node1").take(2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    lost_address = CoordinatorAddress(host="127.0.0.1", port=port, node="node1", epoch=2)
    write_private(folder.coordinator, msgspec.json.encode(lost_address))
    return folder


def test_who_wakes_after_the_end_of_the_run_does_not_start_it_again(tmp_path):
    """Its coordinator is gone and nobody listens, which would otherwise be the reason to claim."""
    folder = without_coordinator(tmp_path, "done")

    async def main():
        leader_election = LeaderElection(folder, "node0", b"k" * 32, RULES, lead=pytest.fail)
        await asyncio.wait_for(
            leader_election.connect(2, ["node0"], asyncio.get_running_loop().create_future()), 60
        )

    with pytest.raises(NoCoordinator, match="the run has ended meanwhile: done") as ended:
        asyncio.run(main())
    assert ended.value.code == Exit.FENCED
    assert EpochLease(folder, "node0").newest == 2


@pytest.mark.parametrize(
    "alive", [False, True], ids=["a stranger on its port", "the coordinator itself"]
)
def test_a_wrong_key_is_believed_of_a_coordinator_that_lives_and_of_nobody_else(tmp_path, alive):
    """Anybody may listen on the port of one that is gone, and say so; then the next one leads."""
    folder = without_coordinator(tmp_path, "running")
    led = []

    async def main():
        over = asyncio.get_running_loop().create_future()

        def lead(claims):
            led.append(claims.held)
            over.set_result(0)

        async def answer(reader, writer):
            with contextlib.suppress(Refused, ConnectionError):
                await accept(reader, writer, folder.run_id, b"o" * 32, FromAgent)
            writer.close()

        async def beat(address):
            while alive:
                await asyncio.sleep(0.1)
                address = msgspec.structs.replace(address, heartbeats=address.heartbeats + 1)
                write_private(folder.coordinator, msgspec.json.encode(address))

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        there = CoordinatorAddress(
            host="127.0.0.1", port=server.sockets[0].getsockname()[1], node="node1", epoch=2
        )
        write_private(folder.coordinator, msgspec.json.encode(there))
        beating = asyncio.create_task(beat(there))
        rules = msgspec.structs.replace(RULES, heartbeat_timeout_s=2.0)
        try:
            leader_election = LeaderElection(folder, "node0", b"k" * 32, rules, lead)
            await asyncio.wait_for(leader_election.connect(2, ["node1", "node0"], over), 60)
        finally:
            beating.cancel()
            server.close()

    with pytest.raises(WrongKey if alive else NoCoordinator):  # `over` is done
        asyncio.run(main())
    assert led == ([] if alive else [3])


def test_the_first_in_order_leads_when_the_port_refuses(tmp_path):
    folder = without_coordinator(tmp_path, "running")
    led = []

    async def main():
        over = asyncio.get_running_loop().create_future()

        def lead(claims):
            led.append(claims.held)
            over.set_result(0)

        leader_election = LeaderElection(folder, "node0", b"k" * 32, RULES, lead)
        await asyncio.wait_for(leader_election.connect(2, ["node1", "node0"], over), 60)

    with pytest.raises(NoCoordinator):  # `over` is done
        asyncio.run(main())
    assert led == [3] == [EpochLease(folder, "node0").newest]


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("record_name", ["state", "claims", "plan"])
def test_who_cannot_read_the_run_for_a_while_leads_it_afterwards(
    tmp_path, monkeypatch, record_name, number
):
    """Nothing is claimed while it is not known whether the run goes on; a claim that could not lead
    is followed."""
    folder = without_coordinator(tmp_path, "running")
    led = []
    refused = []
    monkeypatch.setattr(
        election, "read_state", lambda folder: refuse("state") or read_state(folder)
    )
    monkeypatch.setattr(
        EpochLease,
        "newest",
        property(lambda lease: refuse("claims") or newest_lease(lease._folder)),
    )

    def refuse(which):
        if which == record_name and len(refused) < 3:
            refused.append(which)
            raise OSError(number, "") if which != "plan" else PlanError("unreadable")

    async def main():
        over = asyncio.get_running_loop().create_future()

        def lead(claims):
            refuse("plan")
            led.append(claims.held)
            over.set_result(0)

        rules = msgspec.structs.replace(RULES, heartbeat_timeout_s=2.0)
        leader_election = LeaderElection(folder, "node0", b"k" * 32, rules, lead)
        await asyncio.wait_for(leader_election.connect(2, ["node1", "node0"], over), 60)

    with pytest.raises(NoCoordinator):  # `over` is done
        asyncio.run(main())
    assert len(refused) == 3 and led == [6 if record_name == "plan" else 3]
