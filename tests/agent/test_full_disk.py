"""A run folder without room: news wait, epochs do not begin, and nothing that runs is ended for it."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from orchestrator.agent.leader import state_writer as run_record
from orchestrator.agent.node.workers import Workers
from orchestrator.agent.protocol.messages import Ready, Started, WorkerExit
from orchestrator.run.state import read_state
from tests.agent.conftest import options

REAL = run_record.write_state


class Disk:
    """`full`: every write of the state is refused."""

    def __init__(self, monkeypatch):
        self.full, self.refused = False, 0
        monkeypatch.setattr(run_record, "write_state", self.write)

    def write(self, folder, state):
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        REAL(folder, state)


async def test_news_wait_for_room_and_the_run_goes_on(w, monkeypatch):
    disk = Disk(monkeypatch)
    a, b = await w.join("node0"), await w.join("node1")
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
    a, b = await w.started()
    disk.full = True
    b.say(WorkerExit(rank=3, code=1, asked=False, step=7, tail=[]))
    a.workers_end(75, 75, asked=True)
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
        workers.start(0, ["sh", "-c", "echo to nobody; exit 3"], {}, "/", "/dev/full", banner="--- hello\n")
        assert await asyncio.wait_for(ended, 120) == (0, 3, False)
    finally:
        workers.close()
