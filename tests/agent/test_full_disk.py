"""A run folder without room, or that fails: news wait, epochs do not begin, and nothing that runs
is ended for it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.agent.__main__ import main as agent_main
from orchestrator.agent.leader import state_writer as run_record
from orchestrator.agent.node.agent import Agent, NodeFacts
from orchestrator.agent.node.recorder import Recorder
from orchestrator.agent.node.workers import Workers
from orchestrator.agent.protocol.messages import (
    Assign,
    CoordinatorAlive,
    Done,
    Prepare,
    RankAssignment,
    Ready,
    Started,
    WorkerExit,
)
from orchestrator.backends.base import read_record
from orchestrator.backends.local.backend import CANCEL, LocalBackend, LocalRecord
from orchestrator.plan import to_json
from orchestrator.run import folder as run_folder
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.intent import ask
from orchestrator.run.request import read_request, to_bytes
from orchestrator.run.state import read_state
from tests.agent.conftest import options
from tests.agent.test_elastic import cancel, running, start
from tests.beds.bundles import make_bundle, refusal, submit, wait_end, wait_for
from tests.beds.coordinated import PLAN, make_folder
from tests.beds.failing_disk import failing, without_descriptors
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

REAL = run_record.write_state


class Disk:
    """`full`: every write of the state is refused."""

    def __init__(self, monkeypatch, number=errno.ENOSPC):
        self.full = False
        self.refused = 0
        self._number = number
        monkeypatch.setattr(run_record, "write_state", self.write)

    def write(self, folder, state):
        if self.full:
            self.refused += 1
            raise OSError(self._number, os.strerror(self._number))
        REAL(folder, state)


async def test_news_wait_for_room_and_the_run_goes_on(w, monkeypatch):
    disk = Disk(monkeypatch)
    a = await w.join("node0")
    b = await w.join("node1")
    await a.hear(), await b.hear()
    disk.full = True
    for agent in (a, b):
        agent.epoch = 0
        agent.say(Ready(port=1))
    for agent in (a, b):
        await agent.hear()
        agent.say(Started())
    while not disk.refused:
        await asyncio.sleep(0.01)
    assert w.state().state == "starting", "as it was written last"
    disk.full = False
    while w.state().state != "running":  # told again at the next heartbeat
        await asyncio.sleep(0.05)
    for agent in (a, b):
        agent.workers_end(0, 0)
    for agent in (a, b):
        await agent.hear()
        await agent.channel.close()
    assert (await w.end()).code == 0 and w.state().state == "done"


@options(max_restarts=3)
async def test_an_epoch_that_cannot_be_written_down_does_not_begin(w, monkeypatch):
    disk = Disk(monkeypatch)
    monkeypatch.setattr(run_folder, "RECORD_S", 1.0)
    a, b = await w.started()
    disk.full = True
    b.say(WorkerExit(rank=3, code=1, asked=False, step=7, tail=[]))
    a.workers_end(75, 75, stop_asked=True)
    b.workers_end(75, 1)
    decision = await w.end()
    assert (decision.state, decision.code, decision.cause.kind) == ("stopped", 75, "disk_full")
    assert read_state(w.folder).epoch == 0


@pytest.mark.process
async def test_a_worker_whose_log_cannot_be_written_runs(tmp_path):
    """/dev/full takes no byte."""
    ended = asyncio.get_running_loop().create_future()
    workers = Workers(lambda *end: ended.set_result(end), lambda: None, lambda *_: None)
    try:
        workers.start(
            0, ["sh", "-c", "echo to nobody; exit 3"], {}, "/", "/dev/full", banner="--- hello\n"
        )
        assert await asyncio.wait_for(ended, 120) == (0, 3, False)
    finally:
        workers.close()


@options(max_restarts=3)
async def test_an_epoch_waits_for_room_to_be_written_down(w, monkeypatch):
    disk = Disk(monkeypatch)
    a, b = await w.started()
    disk.full = True
    b.say(WorkerExit(rank=3, code=1, asked=False, step=7, tail=[]))
    a.workers_end(75, 75, stop_asked=True)
    b.workers_end(75, 1)
    refused = disk.refused
    while disk.refused < refused + 3:
        await asyncio.sleep(0.01)
    disk.full = False
    for agent in (a, b):
        while not isinstance((await agent.hear())[1], Prepare):
            pass
    assert read_state(w.folder).epoch == 1, "on disk before anybody heard of it"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_the_end_of_a_run_waits_for_a_disk_that_takes_it(w, monkeypatch, number):
    disk = Disk(monkeypatch, number)
    a, b = await w.started()
    disk.full = True
    for agent in (a, b):
        agent.workers_end(0, 0)
    for agent in (a, b):
        while not isinstance((await agent.hear())[1], Done):
            pass
        await agent.channel.close()
    refused = disk.refused
    while disk.refused < refused + 2:
        await asyncio.sleep(0.01)
    assert not w.task.done() and w.state().state != "done"
    disk.full = False
    assert (await w.end()).code == 0 and w.state().state == "done"


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EROFS, errno.EPERM, errno.ESTALE, errno.EMFILE]
)
async def test_the_heart_beats_on_whatever_the_disk_says(w, monkeypatch, number):
    disk = Disk(monkeypatch, number)
    a, _ = await w.started()
    disk.full = True
    w.context.state_writer.record_stragglers({"node1": 3.0})
    while disk.refused < 3:
        assert isinstance((await a.channel.receive())[1], CoordinatorAlive)
    disk.full = False
    while not w.state().slow:
        await asyncio.sleep(0.01)


def log_of(folder: RunFolder, name: str) -> str:
    return (folder.logs / f"{name}.log").read_text()


@pytest.mark.process
@pytest.mark.parametrize("fault", ["records", "descriptors"])
@pytest.mark.parametrize("sizes", [(3, 2), (3,)], ids=["elastic", "fixed"])
def test_records_that_fail_for_a_while_end_no_healthy_run(runs, sizes, fault):
    folder = (
        start(runs, *sizes)
        if len(sizes) > 1
        else submit(make_plan(dp=3, nodes=3), runs, STEPS=9, HOLD=1, SAVE=1)
    )
    first = running(folder, "node0", "node1", "node2")
    record = read_record(folder, LocalRecord)
    pids = [record.supervisor[0], *record.agents.values()]
    fails = (
        failing(folder.state, folder.coordinator)
        if fault == "records"
        else without_descriptors(pids)
    )

    def noticed():
        assert folder.is_alive(), log_of(folder, "supervisor")
        beats = len(sizes) == 1 or "heartbeat cannot be written" in log_of(
            folder, f"agent-{first.writer}"
        )
        return beats and "state.json cannot be read" in log_of(folder, "supervisor")

    with fails:
        wait_for(noticed, what="records that fail")
    if len(sizes) > 1:
        beat = json.loads(folder.coordinator.read_text())["beat"]
        wait_for(
            lambda: json.loads(folder.coordinator.read_text())["beat"] > beat + 2, what="heartbeats"
        )
    assert running(folder, "node0", "node1", "node2").epoch == first.epoch
    assert read_record(folder, LocalRecord) == record, "the same processes"
    assert cancel(folder).state == "cancelled"


class Played:
    """The channel to a coordinator, and the way to it."""

    moves = True

    def __init__(self):
        self.said = []

    def send(self, epoch, message):
        self.said.append(message)

    def workers_started(self, order):
        self.said.append("started")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["unreadable", "old", "no socket"])
async def test_an_agent_waits_for_a_plan_that_its_disk_does_not_show_yet(runs, monkeypatch, kind):
    old = make_plan(dp=2, nodes=2)
    new = make_plan(dp=2, nodes=1)
    bundle = make_bundle(old, runs, STEPS=1)
    folder = RunFolder(runs / "test-run")
    folder.create()
    write_private(folder.plan, to_json(old))
    recorder = Recorder(folder, "node0", old)
    played = Played()
    facts = NodeFacts("h", "127.0.0.1", 1, 2, 0)
    agent = Agent(folder, old, bundle.request, "node0", facts, recorder, None, played)
    agent._channel = played
    try:
        with contextlib.ExitStack() as fault:
            if kind == "unreadable":
                fault.enter_context(failing(folder.plan))
            elif kind == "no socket":
                fault.enter_context(without_descriptors([os.getpid()]))
            agent._handle(1, Prepare())
            ranks = [RankAssignment(rank.rank, rank.gpu) for rank in new.ranks]
            about = {
                "node_rank": 0,
                "world_size": 2,
                "master_address": "127.0.0.1",
                "master_port": 1,
                "peers": [],
            }
            if kind != "no socket":
                agent._handle(1, Assign(plan_hash=new.hash, ranks=ranks, **about))
            await asyncio.sleep(1.2)  # more than two looks
            assert not agent._result.done() and "started" not in played.said
        write_private(folder.plan, to_json(new))
        while kind != "no socket" and "started" not in played.said:
            await asyncio.sleep(0.02)
        while not any(isinstance(message, Ready) for message in played.said):
            await asyncio.sleep(0.02)
        assert not agent._result.done()
    finally:
        agent._control.close()
        recorder.close()


@pytest.mark.parametrize("name", ["key", "request", "plan"])
@pytest.mark.parametrize(
    ("number", "refusals", "code"),
    [
        (errno.EMFILE, 2, 65),
        (errno.ESTALE, 2, 65),
        *((number, 1000, 74) for number in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)),
        (errno.EACCES, 1000, 0),
        (errno.ENOENT, 1000, 0),
    ],
)
def test_an_agent_reads_again_what_a_failing_machine_refuses_at_its_start(
    tmp_path, monkeypatch, capfd, name, number, refusals, code
):
    """Once it has read all, it refuses a node that the plan does not know."""
    folder = make_folder(tmp_path)
    write_private(folder.request, to_bytes(make_bundle(PLAN, tmp_path / "runs").request))
    write_private(folder.key, b"ff" * 32)
    write_private(folder.plan, to_json(PLAN))
    monkeypatch.setattr(run_folder, "RECORD_S", 0.5)
    monkeypatch.setattr(run_folder, "RECORD_AGAIN_S", 0.01)
    opened = os.open
    attempts = []

    def refuse(path, *open_args, **named):
        if path == getattr(folder, name) and len(attempts) < refusals:
            attempts.append(path)
            raise OSError(number, os.strerror(number))
        return opened(path, *open_args, **named)

    monkeypatch.setattr(os, "open", refuse)
    code = code or (78 if name == "key" else 65)  # of the user's
    assert agent_main(["--run-dir", str(folder.path), "--node", "stranger"]) == code
    last = capfd.readouterr().err.splitlines()[-1]
    if refusals < 1000:
        assert "the plan gives no rank to node 'stranger'" in last and len(attempts) == refusals
    else:
        assert os.strerror(number) in last and (len(attempts) > 1) == (code == 74)


@pytest.mark.process
@pytest.mark.parametrize(
    ("argv", "files", "code"), [("true", 3, 1), ("true", 64, 0), ("/etc/passwd", 64, 64)]
)
def test_a_worker_that_finds_no_descriptor_is_started_again(argv, files, code):
    there = (
        "import os, resource; from orchestrator.agent.node.worker_supervisor import"
        " _become_worker; "
    )
    there += f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, 64)); "
    there += (
        f"_become_worker(os.getppid(), {{'argv': [{argv!r}], 'cores': []}}, dict(os.environ), 1, 2,"
        " None)"
    )
    assert subprocess.run([sys.executable, "-c", there], check=False).returncode == code


@pytest.mark.process
@pytest.mark.parametrize(("signum", "state"), [(CANCEL, "cancelled"), (signal.SIGTERM, "stopped")])
def test_a_resize_that_waits_for_its_disk_can_be_ended(runs, signum, state):
    folder = start(runs, 2, 1)
    running(folder, "node0", "node1")
    with failing(folder.plan):
        ask(folder, "run", nodes=1)
        wait_for(lambda: "a record cannot be" in log_of(folder, "supervisor"), what="a refusal")
        os.kill(read_record(folder, LocalRecord).supervisor[0], signum)
        assert (wait_end(folder).state, wait_end(folder).exit_code) == (state, 75)


@pytest.mark.process
def test_a_resize_waits_for_a_disk_that_takes_the_next_plan(runs):
    folder = start(runs, 2, 1)
    running(folder, "node0", "node1")
    with ThreadPoolExecutor(1) as pool:
        with failing(folder.plan):
            answer = pool.submit(LocalBackend().resize, folder, read_request(folder), 1, os.environ)
            wait_for(
                lambda: "a record cannot be" in log_of(folder, "supervisor") or answer.done(),
                what="a refusal",
            )
        assert answer.result(PATIENCE_S).endswith(folder.run_id)
    running(folder, "node0")
    assert cancel(folder).state == "cancelled"
    with (
        failing(folder.plan),
        refusal("cannot be recorded.*the request stays", 76),
    ):  # nothing of it lives
        LocalBackend().resize(folder, read_request(folder), 2, os.environ)
    LocalBackend().resume(folder, read_request(folder), os.environ)  # which takes the request up
    running(folder, "node0", "node1")
    assert cancel(folder).state == "cancelled"
