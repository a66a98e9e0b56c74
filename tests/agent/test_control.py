"""The control channel between real sockets, with a peer that lies, repeats, shouts and babbles."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent.protocol import channel as control
from orchestrator.agent.protocol.channel import (
    LONGEST_LINE,
    READ_LIMIT,
    Refused,
    WrongKey,
    accept,
    connect,
)
from orchestrator.agent.protocol.messages import AgentAlive, Done, FromAgent, FromCoordinator, Ready

KEY = b"k" * 32
OTHER = b"o" * 32


class Pair:
    """A coordinator's end and an agent's end of one connection, and the raw writer below the
    agent's."""

    def __init__(self, server, agent, errors):
        self.server = server
        self.agent = agent
        self.errors = errors

    @property
    def raw(self) -> asyncio.StreamWriter:
        return self.agent._writer


async def pair(key=KEY, run="run", server_key=KEY, server_run="run") -> Pair:
    accepted: asyncio.Future = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        try:
            accepted.set_result(await accept(reader, writer, server_run, server_key, FromAgent))
        except Refused as error:
            accepted.set_exception(error)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=READ_LIMIT)
    port = server.sockets[0].getsockname()[1]
    try:
        agent = await connect("127.0.0.1", port, run, "node0", key, FromCoordinator)
        return Pair(await accepted, agent, accepted)
    except Refused:
        accepted.exception() if accepted.done() else accepted.cancel()
        raise
    finally:
        server.close()


async def test_messages_pass_both_ways_in_order():
    both = await pair()
    for port in range(3):
        both.agent.send(4, Ready(port=port))
    both.server.send(5, Done(code=0, reason="ü\n\"'"))
    assert [await both.server.receive() for _ in range(3)] == [
        (4, Ready(port=port)) for port in range(3)
    ]
    assert await both.agent.receive() == (5, Done(code=0, reason="ü\n\"'"))
    assert both.server.peer == "node0"
    await both.agent.close()
    assert await both.server.receive() is None


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"key": OTHER}, WrongKey, "refused this node: wrong key"),
        ({"server_run": "other"}, Refused, "run 'other'"),
    ],
)
def test_an_agent_of_another_key_or_run_is_refused_and_knows_why(options, error, reason):
    with pytest.raises(error, match=reason):
        asyncio.run(pair(**options))


async def test_a_coordinator_without_the_key_is_not_believed():
    """It lets anybody in; the agent notices that its answer proves nothing."""

    async def impostor(reader, writer):
        control._write(writer, control._Hello(protocol=control.PROTOCOL, run="run", nonce="n" * 32))
        await reader.readline()
        control._write(writer, control._Answer(mac="0" * 64))

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    with pytest.raises(WrongKey, match="coordinator does not hold"):
        await connect(
            "127.0.0.1", server.sockets[0].getsockname()[1], "run", "node0", KEY, FromCoordinator
        )
    server.close()


async def _record() -> tuple[Pair, bytes]:
    """A pair, and the bytes of one line that the agent has sent and the server has read."""
    both = await pair()
    lines = []
    write = both.raw.write
    both.raw.write = lambda data: (lines.append(data), write(data))
    both.agent.send(1, AgentAlive(step=1))
    both.raw.write = write
    await both.server.receive()
    return both, lines[0]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("replayed", "line 1 where 2 was due"),
        ("another connection", "wrong mac"),
        ("reflected", "wrong mac"),
    ],
)
async def test_a_line_that_was_sent_once_is_refused_anywhere_else(where, reason):
    both, line = await _record()
    fresh = await pair() if where == "another connection" else both
    writer, reader = (
        (both.server._writer, both.agent) if where == "reflected" else (fresh.raw, fresh.server)
    )
    writer.write(line)
    with pytest.raises(Refused, match=reason):
        await reader.receive()


async def test_a_dropped_line_is_noticed():
    both = await pair()
    write = both.raw.write
    both.raw.write = lambda data: None
    both.agent.send(1, AgentAlive(step=1))
    both.raw.write = write
    both.agent.send(1, AgentAlive(step=2))
    with pytest.raises(Refused, match="line 2 where 1 was due"):
        await both.server.receive()


GARBAGE = [
    b"garbage",
    b"{}",
    b"",
    b"null",
    b'{"mac":"","body":{}}',
    b'{"mac":1}',
    b"\xff\xfe",
    b"[" * 5000,
]


@pytest.mark.parametrize(
    ("line", "reason"),
    [*((line, None) for line in GARBAGE), (b"x" * (LONGEST_LINE + 1), "longer than")],
)
async def test_garbage_and_a_line_without_end_are_refused(line, reason):
    both = await pair()
    both.raw.write(line + (b"x" if reason else b"\n"))
    with pytest.raises(Refused, match=reason):
        await both.server.receive()


@pytest.mark.parametrize(
    "greeting", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * 10_000 + b"\n", b'{"node":"n"}\n', b""]
)
async def test_a_stranger_gets_no_further_than_the_greeting_and_a_silent_one_is_shown_the_door(
    greeting, monkeypatch
):
    if not greeting:
        monkeypatch.setattr(control, "_GREETING_S", 0.1)
    problem = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        try:
            await accept(reader, writer, "run", KEY, FromAgent)
        except Refused as error:
            problem.set_result(error)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=READ_LIMIT)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(greeting)
    refused = await asyncio.wait_for(problem, 60)
    assert isinstance(refused, Refused) and ("no greeting" in str(refused)) == (not greeting)
    writer.close()
    server.close()


async def test_a_peer_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(control, "_MOST_UNSENT", 1 << 16)
    both = await pair()
    for _ in range(2000):
        both.server.send(1, Done(code=0, reason="x" * 10_000))
    assert both.server._writer.is_closing()


@given(st.binary(max_size=300))
def test_no_bytes_are_ever_taken_for_a_message(noise):
    async def main():
        reader = asyncio.StreamReader(limit=READ_LIMIT)
        reader.feed_data(noise + b"\n")
        reader.feed_eof()
        channel = control.Channel(reader, None, KEY, KEY, FromAgent, "node0")
        with pytest.raises(Refused):
            await channel.receive()

    asyncio.run(main())


@given(st.integers(0, 10**6), st.data())
def test_one_changed_byte_is_noticed(step, data):
    body = json.dumps(
        {"seq": 1, "epoch": 1, "message": {"kind": "agent_alive", "step": step}}
    ).encode()
    line = b'{"mac":"' + control._mac(KEY, "line", body).hex().encode() + b'","body":' + body + b"}"
    at = data.draw(st.integers(0, len(line) - 1))
    changed = line[:at] + bytes([line[at] ^ data.draw(st.integers(1, 255))]) + line[at + 1 :]

    async def receive(content: bytes):
        reader = asyncio.StreamReader(limit=READ_LIMIT)
        reader.feed_data(content + b"\n")
        reader.feed_eof()
        return await control.Channel(reader, None, KEY, KEY, FromAgent, "node0").receive()

    assert asyncio.run(receive(line)) == (1, AgentAlive(step=step))
    with pytest.raises(Refused):
        asyncio.run(receive(changed))
