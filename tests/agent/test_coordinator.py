"""The coordinator against agents that the test plays itself: membership, epochs, fencing,
refusals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from orchestrator.agent.leader import coordinator
from orchestrator.agent.leader.context import Context
from orchestrator.agent.node.connection import FixedCoordinator
from orchestrator.agent.protocol import messages
from orchestrator.agent.protocol.channel import Refused
from orchestrator.plan import to_json
from orchestrator.run.folder import RunFolder, read_secret, write_private
from orchestrator.run.request import to_bytes
from tests.agent.conftest import options
from tests.beds.bundles import make_bundle
from tests.beds.coordinated import KEY, PLAN
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S


async def test_the_rank_map_reaches_each_node_and_the_epoch_is_on_disk_first(w):
    a = await w.join("node0")
    b = await w.join("node1")
    assert await a.hear() == (0, messages.Prepare())
    assert w.state().epoch == 0  # durable before anybody heard of it
    a.epoch = 0
    a.say(messages.Ready(port=4711))
    assert await b.hear() == (0, messages.Prepare())
    b.epoch = 0
    b.say(messages.Ready(port=4712))
    for agent, index in ((a, 0), (b, 1)):
        assign = (await agent.hear())[1]
        assert [(rank.rank, rank.gpu) for rank in assign.ranks] == [
            (2 * index, 0),
            (2 * index + 1, 1),
        ]
        assert (assign.node_rank, assign.world_size, assign.master_port) == (index, 4, 4711)
        agent.say(messages.Started())
    for agent in (a, b):
        agent.workers_end(0, 0)
    for agent in (a, b):
        assert await agent.hear() == (0, messages.Done(code=0, reason="all workers are done"))
        await agent.channel.close()
    assert (await w.end()).code == 0
    assert w.state().state == "done"


@options(max_restarts=1)
async def test_a_failure_stops_everybody_and_the_next_epoch_is_higher(w):
    a, b = await w.started()
    b.say(messages.WorkerExit(rank=3, code=-9, asked=False, step=7, tail=["last words"]))
    for agent in (a, b):
        stop = (await agent.hear())[1]
        assert (
            isinstance(stop, messages.Stop)
            and "rank 3 on node1: killed by SIGKILL after step 7" in stop.reason
        )
    a.workers_end(75, 75, stop_asked=True)
    b.say(messages.WorkerExit(rank=2, code=75, asked=True, step=7, tail=[]))
    b.say(messages.Stopped())
    await asyncio.gather(a.follow(1), b.follow(1))
    state = w.state()
    assert state.epoch == 1 and state.restarts == 1
    assert (state.epochs[0].cause.rank, state.epochs[0].cause.tail) == (3, ["last words"])


@options(max_restarts=1)
async def test_a_late_answer_of_the_last_epoch_does_not_count_for_the_next(w):
    """Found with a killed worker supervisor: Stopped came twice, and the second one ended the next
    epoch at once."""
    a, b = await w.started()
    a.workers_end(1, 1)
    a.say(messages.Stopped())
    a.say(messages.Stopped())
    b.workers_end(75, 75, stop_asked=True)
    b.say(messages.Stopped())
    for agent in (a, b):
        assert isinstance((await agent.hear())[1], messages.Stop)
    await asyncio.gather(a.follow(1), b.follow(1))
    a.workers_end(0, 0), b.workers_end(0, 0)
    assert (await a.hear())[1] == messages.Done(code=0, reason="all workers are done")


@options(epoch=4)
async def test_epochs_go_on_where_an_earlier_attempt_ended(w):
    _kept = await w.started(5)


async def test_an_agent_of_an_old_epoch_is_fenced(w):
    a, b = await w.started()
    late = await w.join("node1", epoch=0)  # the same node again, back from a partition
    epoch, message = await late.hear()
    assert epoch == 0 and isinstance(message, messages.Fenced)
    assert await late.hear() is None
    a.workers_end(0, 0), b.workers_end(0, 0)  # the run does not notice
    assert (await a.hear())[1] == messages.Done(code=0, reason="all workers are done")
    assert w.events("join_fenced")


@options(epoch=5)
async def test_a_member_that_speaks_for_an_old_epoch_is_fenced_and_lost(w):
    a, b = await w.started(6)
    b.say(messages.AgentAlive(step=3), epoch=5)
    assert isinstance((await b.hear())[1], messages.Fenced)
    assert isinstance((await a.hear())[1], messages.Stop)
    a.workers_end(75, 75, stop_asked=True)
    done = (await a.hear())[1]
    assert done.code == 76 and "spoke for epoch 5" in done.reason


async def test_an_epoch_that_was_never_issued_is_refused(w):
    a, b = await w.started()
    b.say(messages.AgentAlive(step=3), epoch=9)
    assert await b.hear() is None
    assert isinstance((await a.hear())[1], messages.Stop)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"node": "node7"}, 65, "gives no rank to node 'node7'"),
        ({"node": "node1", "plan_hash": "0" * 64}, 65, "holds plan 000000000000, not"),
        ({"node": "node1", "gpus": 1}, 74, "has 1 of 2 GPUs"),
    ],
)
async def test_a_node_that_does_not_fit_is_told_why(w, fields, code, reason):
    agent = await w.join(**fields)
    done = (await agent.hear())[1]
    assert isinstance(done, messages.Done) and done.code == code and reason in done.reason


async def test_an_unfit_node_of_the_plan_ends_the_run_but_a_stranger_does_not(w):
    joined = await w.join("stranger"), await w.join("node1", gpus=1)
    decision = await w.end()
    assert len(joined) == 2
    assert (decision.state, decision.code, decision.cause.node) == ("failed", 74, "node1")


async def test_nobody_joins_under_another_name_than_it_proved(w):
    agent = await w.join("node1", name="node0")
    assert await agent.hear() is None
    assert "joined as 'node0'" in w.events("connection_refused")[0]["reason"]


async def test_noise_on_the_port_is_noted_and_changes_nothing(w):
    a, b = await w.started()
    where = json.loads(w.folder.coordinator.read_text())
    _, writer = await asyncio.open_connection(where["host"], where["port"])
    writer.write(b"\x16\x03\x01 hello\n")
    with pytest.raises(Refused):
        await w.join("node1", key=b"x" * 32)
    a.workers_end(0, 0), b.workers_end(0, 0)
    assert (await b.hear())[1].code == 0
    assert len(w.events("connection_refused")) == 2
    writer.close()


async def test_a_lost_connection_is_a_lost_node(w):
    a, b = await w.started()
    b.channel.abort()
    stop = (await a.hear())[1]
    assert isinstance(stop, messages.Stop) and stop.reason == "node node1 is lost"
    a.workers_end(75, 75, stop_asked=True)
    assert (await a.hear())[1].code == 76
    await a.channel.close()
    await w.end()
    assert w.state().nodes["node1"].state == "lost"
    assert w.state().cause.kind == "node_lost"


@options(heartbeat_s=2.0)
async def test_silence_is_a_lost_node_and_a_late_riser_is_fenced(w):
    a, b = await w.started()

    async def alive():
        while True:
            a.say(messages.AgentAlive(step=None))
            await asyncio.sleep(0.2)

    task = asyncio.create_task(alive())
    stop = (await a.hear())[1]  # b says nothing
    assert isinstance(stop, messages.Stop) and stop.reason == "node node1 is lost"
    assert isinstance((await b.hear())[1], messages.Fenced)  # waits in its socket until it wakes up
    task.cancel()


async def test_missing_nodes_are_named(w, monkeypatch):
    joined = await w.join("node0")  # or it is collected, and its connection closes
    while "node0" not in w.context.members:
        await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + PATIENCE_S)
    decision = await w.end()
    assert joined and (decision.code, decision.reason) == (76, "node1 did not join within 300 s")


async def test_a_notice_before_the_start_ends_the_run(w):
    agent = await w.join("node0")
    agent.say(
        messages.TerminationSignal(reason="node0: got SIGTERM", signal="SIGTERM", force=False)
    )
    assert (await agent.hear())[1].code == 75
    assert w.state().state == "stopped"


async def test_discovery_names_every_endpoint_while_the_run_lives(w):
    a, b = await w.started()
    endpoints = json.loads(w.folder.discovery.read_text())
    shared = w.folder.path.parents[1] / "metrics.sd" / "test-run.json"
    assert shared.read_bytes() == w.folder.discovery.read_bytes()
    assert [entry["labels"]["node"] for entry in endpoints] == ["node0", "node1"]
    assert all(entry["targets"] == ["127.0.0.1:1"] for entry in endpoints)
    a.workers_end(0, 0), b.workers_end(0, 0)
    await a.hear()
    assert not w.folder.discovery.exists() and not shared.exists()


@pytest.mark.process
async def test_an_agent_with_the_wrong_key_leaves_with_78(w, tmp_path):
    """A real agent process, pointed at a live coordinator of the same run with another key."""
    bundle = make_bundle(PLAN, tmp_path / "elsewhere")
    foreign_folder = RunFolder(tmp_path / "elsewhere" / "test-run")
    foreign_folder.create()
    request = msgspec.structs.replace(bundle.request, plan_hash=PLAN.hash)
    write_private(foreign_folder.request, to_bytes(request))
    write_private(foreign_folder.plan, to_json(PLAN))
    write_private(foreign_folder.key, b"ff" * 32)
    write_private(foreign_folder.coordinator, w.folder.coordinator.read_bytes())
    argv = [
        sys.executable,
        "-m",
        "orchestrator.agent",
        "--run-dir",
        str(foreign_folder.path),
        "--node",
        "node1",
    ]
    agent = await asyncio.create_subprocess_exec(
        *argv, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    _, stderr = await asyncio.wait_for(agent.communicate(), PATIENCE_S)
    assert agent.returncode == 78
    assert b"security: the coordinator refused this node: wrong key" in stderr
    assert "does not hold this run's key" in w.events("connection_refused")[0]["reason"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("spoil", "code", "complaint"),
    [
        (lambda f: f.key.chmod(0o640), 78, "must belong to you alone (0600), found mode 0640"),
        (lambda f: write_private(f.key, b"short"), 78, "does not hold a 32-byte key"),
        (
            lambda f: f.plan.write_bytes(
                f.plan.read_bytes().replace(b'"seed":1234', b'"seed":9999', 1)
            ),
            65,
            "does not match",
        ),
        (lambda f: f.plan.write_bytes(to_json(make_plan(dp=2))), 65, "the request names"),
        (lambda f: f.request.write_bytes(b"{}"), 65, "request: Object missing required field"),
    ],
)
def test_a_spoiled_run_folder_is_refused(tmp_path, spoil, code, complaint):
    folder = RunFolder(tmp_path / "runs" / "test-run")
    folder.create()
    write_private(folder.request, to_bytes(make_bundle(PLAN, tmp_path / "runs").request))
    write_private(folder.plan, to_json(PLAN))
    write_private(folder.key, b"ff" * 32)
    assert len(read_secret(folder.key)) == 32
    spoil(folder)
    argv = [
        sys.executable,
        "-m",
        "orchestrator.agent",
        "--run-dir",
        str(folder.path),
        "--node",
        "node1",
    ]
    agent = subprocess.run(argv, capture_output=True, timeout=PATIENCE_S, text=True)
    assert agent.returncode == code
    assert complaint in agent.stderr and "Traceback" not in agent.stderr


async def test_heartbeats_go_on_while_a_bad_node_is_written_down(w, monkeypatch):
    """The memory of bad nodes is the user's, and other runs may keep it locked."""
    begun = threading.Event()
    free = threading.Event()
    monkeypatch.setattr(coordinator, "remember", lambda *_: begun.set() or free.wait(PATIENCE_S))
    a, b = await w.started()
    b.say(messages.WorkerExit(rank=3, code=74, asked=False, step=7, tail=[]))
    a.workers_end(75, 75, stop_asked=True)
    b.workers_end(75, 74)
    while not begun.is_set():
        await asyncio.sleep(0.01)
    beats = 0
    while beats < 3:
        beats += isinstance(
            (await asyncio.wait_for(a.channel.receive(), PATIENCE_S))[1], messages.CoordinatorAlive
        )
    assert not w.task.done()
    free.set()
    for agent in (a, b):
        while not isinstance((await agent.hear())[1], messages.Done):
            pass
        await agent.channel.close()
    assert (await w.end()).code == 74


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOENT])
async def test_an_agent_asks_again_where_the_coordinator_is(w, monkeypatch, number):
    refused = []

    def failing_once(method):
        def called(path, *arguments):
            if path == w.folder.coordinator and refused.count(method) < 2:
                refused.append(method)
                raise OSError(number, os.strerror(number))
            return method(path, *arguments)

        return called

    for name in ("read_bytes", "stat"):
        monkeypatch.setattr(Path, name, failing_once(getattr(Path, name)))
    lookup = FixedCoordinator(w.folder, "node0", KEY, PATIENCE_S)
    channel = await lookup.connect(-1, ["node0"], asyncio.get_running_loop().create_future())
    assert len(refused) >= 2
    await channel.close()


async def test_a_bug_in_the_heartbeat_is_seen_and_silences_nobody(w, monkeypatch):
    agents = await w.started()

    def asked(_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Context, "end_intent", property(asked))
    with pytest.raises(ZeroDivisionError):
        await w.end()
    assert len(agents) == 2, "which have not left"
