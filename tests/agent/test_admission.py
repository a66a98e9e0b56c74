"""Strangers at the coordinator's port: hundreds who say nothing, lie or shout keep no node out and
fill no log."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from orchestrator.agent.protocol import admission
from orchestrator.agent.protocol.admission import MAX_STRANGERS, RefusalLog
from orchestrator.agent.protocol.messages import WorkerExit
from tests.patience import PATIENCE_S

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
    clock = asyncio.get_running_loop().time
    began = clock()
    count = [0]
    strangers = [
        asyncio.create_task(_stranger(where["host"], where["port"], says, count))
        for _ in range(MAX_STRANGERS + 50)
    ]
    while count[0] < MAX_STRANGERS + 50:
        await asyncio.sleep(0.01)
    a, b = await asyncio.wait_for(w.started(), PATIENCE_S)
    a.workers_end(0, 0), b.workers_end(0, 0)
    assert (await a.hear())[1].code == (await b.hear())[1].code == 0
    for task in strangers:
        task.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)
    minutes = (clock() - began) // 60
    assert len(w.events("connection_refused")) <= 2 + minutes, "one at once, one at the end"


async def _refused(w) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has been told that it holds another key."""
    where = json.loads(w.folder.coordinator.read_text())
    reader, writer = await asyncio.open_connection(where["host"], where["port"])
    writer.write(LIE)
    await reader.readline()
    assert b"wrong key" in await asyncio.wait_for(reader.readline(), PATIENCE_S)
    return reader, writer


async def test_what_was_refused_is_told_at_once_and_kept_for_a_second_and_closed(w, monkeypatch):
    """So a stranger who tries again as soon as it can does so once a second."""
    clock = asyncio.get_running_loop().time
    began = clock()
    reader, writer = await _refused(w)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    assert clock() - began > 0.9
    writer.close()
    monkeypatch.setattr(admission, "_HOLD_S", 2 * PATIENCE_S)
    _reader, writer = await _refused(w)  # the answer of a node with another key does not wait
    writer.close()


def test_refusals_are_one_line_a_minute_and_kind_with_a_count():
    now = [100.0]
    lines = []
    log = RefusalLog(lambda *log_args: lines.append(log_args), lambda: now[0])
    for _ in range(1000):
        log.refused("stranger", "peer", "x" * 5000)
        now[0] += 0.05
    log.refused("wrong key", "other", "wrong key")
    assert [(peer, len(reason), count) for peer, reason, count in lines] == [
        ("peer", 300, 1),
        ("other", 9, 1),
    ]
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
    worker_exit = WorkerExit(rank=0, code=1, asked=False, step=None, tail=["ü" * 100_000] * 4)
    both.agent.send(1, worker_exit)
    assert await both.server.receive() == (1, worker_exit)
