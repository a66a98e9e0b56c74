"""Strangers at the coordinator's port: hundreds who say nothing, lie or shout keep no node out and fill no log."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from orchestrator.agent.protocol.admission import MOST, RefusalLog
from orchestrator.agent.protocol.messages import WorkerExit

from .test_control import pair

LIE = json.dumps({"node": "nobody", "nonce": "0" * 32, "mac": "0" * 64}).encode() + b"\n"


async def _stranger(host: str, port: int, says: bytes, count: list[int]) -> None:
    """Connects, says it, and again as soon as it is shown out."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            count[0] += 1
            writer.write(says)
            await reader.read()
            writer.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize("says", [b"", LIE, b"x" * (1 << 18)], ids=["silent", "wrong key", "noise"])
async def test_hundreds_of_strangers_delay_no_node_and_are_noted_once(w, says):
    where = json.loads(w.folder.coordinator.read_text())
    count = [0]
    strangers = [asyncio.create_task(_stranger(where["host"], where["port"], says, count)) for _ in range(MOST + 50)]
    while count[0] < MOST + 50:
        await asyncio.sleep(0.01)
    a, b = await asyncio.wait_for(w.started(), 60)
    a.workers_end(0, 0), b.workers_end(0, 0)
    assert (await a.hear())[1].code == (await b.hear())[1].code == 0
    for task in strangers:
        task.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)
    assert len(w.events("connection_refused")) <= 2


async def test_what_was_refused_is_kept_for_a_second_and_closed(w):
    """So a stranger who tries again as soon as it can does so once a second."""
    where = json.loads(w.folder.coordinator.read_text())
    clock = asyncio.get_running_loop().time
    reader, writer = await asyncio.open_connection(where["host"], where["port"])
    writer.write(LIE)
    await reader.readline()
    began = clock()
    assert b"wrong key" in await reader.readline()
    assert clock() - began < 0.5, "the answer of a node with another key does not wait"
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 30) == b""
    assert clock() - began > 0.9
    writer.close()


def test_refusals_are_one_line_a_minute_and_kind_with_a_count():
    now, lines = [100.0], []
    log = RefusalLog(lambda *said: lines.append(said), lambda: now[0])
    for _ in range(1000):
        log.refused("stranger", "peer", "x" * 5000)
        now[0] += 0.05
    log.refused("wrong key", "other", "wrong key")
    assert [(peer, len(reason), count) for peer, reason, count in lines] == [("peer", 300, 1), ("other", 9, 1)]
    now[0] += 20
    log.flush()
    assert [count for _, _, count in lines] == [1, 1, 999]
    log.refused("stranger", "late", "x")
    log.flush()
    assert len(lines) == 3
    log.flush(everything=True)
    assert lines[3] == ("late", "x", 1)


async def test_a_line_longer_than_what_is_buffered_is_read_whole():
    both = await pair()
    said = WorkerExit(rank=0, code=1, asked=False, step=None, tail=["ü" * 100_000] * 4)
    both.agent.send(1, said)
    assert await both.server.receive() == (1, said)
