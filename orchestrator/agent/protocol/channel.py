"""The control channel: JSON lines over TCP, every line authenticated with the run's key.
docs/protocol.md.

Both sides prove that they hold the key without sending it (a nonce each, HMAC-SHA256 over the whole
greeting), then derive one key a direction. A line is
`{"mac":"<hex>","body":{"seq":n,"epoch":e,"message":{...}}}`; the mac covers the exact bytes of the
body. So a line of another connection, direction or run, a changed, repeated, dropped or reordered
one is refused, and a connection that sent one is closed: there is no way to go on from it. Never
pickle, never eval.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from typing import Any

import msgspec

from orchestrator.plan.codec import UNREADABLE

PROTOCOL = "orch.control/1"
LONGEST_LINE = 1 << 20  # bytes
READ_LIMIT = (
    1 << 16
)  # bytes that a connection may have buffered here, twice; also one that has not proven itself
_LONGEST_GREETING = 4096
_GREETING_S = 10.0
# for a name and a connection, as a resolver waits for one answer; a kernel tries for two minutes
_REACH_S = 5.0
_MOST_UNSENT = 8 << 20  # bytes waiting for a peer that does not read
_CLOSE_S = 1.0


class Refused(Exception):
    """A peer that does not keep to the protocol; the text says how."""


class WrongKey(Refused):
    """A peer that does not hold this run's key."""


class _Hello(msgspec.Struct, forbid_unknown_fields=True):
    protocol: str
    run: str
    nonce: str


class _Proof(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    nonce: str
    mac: str


class _Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    mac: str = ""
    refused: str = ""


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    seq: int
    epoch: int
    message: msgspec.Raw


class _Frame(msgspec.Struct, forbid_unknown_fields=True):
    mac: str
    body: msgspec.Raw


def _mac(key: bytes, label: str, content: bytes) -> bytes:
    """HMAC-SHA256 with the purpose in front, so that no value made for one purpose serves
    another."""
    return hmac.digest(key, label.encode() + b"\0" + content, "sha256")


def _mac_matches(hex_mac: str, expected: bytes) -> bool:
    return hmac.compare_digest(hex_mac.encode(errors="replace"), expected.hex().encode())


class Channel:
    """One authenticated connection. `peer` is the node name of the agent, or "coordinator"."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        send_key: bytes,
        receive_key: bytes,
        message_type: Any,
        peer: str,
    ):
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._send_key = send_key
        self._receive_key = receive_key
        self._decode = msgspec.json.Decoder(message_type).decode
        self._sent = self._received = 0

    def send(self, epoch: int, message: msgspec.Struct) -> None:
        """Queue one message. Never blocks: a peer that has stopped reading is cut off instead."""
        if self._writer.is_closing():
            return
        self._sent += 1
        body = msgspec.json.encode(
            _Body(seq=self._sent, epoch=epoch, message=msgspec.Raw(msgspec.json.encode(message)))
        )
        mac = _mac(self._send_key, "line", body).hex().encode()
        self._writer.write(b'{"mac":"' + mac + b'","body":' + body + b"}\n")
        if self._writer.transport.get_write_buffer_size() > _MOST_UNSENT:
            self._writer.transport.abort()

    async def receive(self) -> tuple[int, Any] | None:
        """The next (epoch, message), None when the peer has closed. Refused: a line that cannot be
        trusted."""
        line = await _read_line(self._reader, LONGEST_LINE)
        if line is None:
            return None
        try:
            frame = msgspec.json.decode(line, type=_Frame)
            raw = bytes(frame.body)
            if not _mac_matches(frame.mac, _mac(self._receive_key, "line", raw)):
                raise Refused("a line with a wrong mac")
            body = msgspec.json.decode(raw, type=_Body)
            if body.seq != self._received + 1:
                raise Refused(
                    f"line {body.seq} where {self._received + 1} was due (repeated, lost or"
                    " reordered)"
                )
            self._received = body.seq
            return body.epoch, self._decode(body.message)
        except UNREADABLE as error:
            raise Refused(f"a line that is no message: {error}") from None

    @property
    def address(self) -> str:
        """The IP address that the peer's connection comes from; "" if it is closed."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else ""

    async def close(self) -> None:
        """Send what is queued, within a second, and close."""
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), _CLOSE_S)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), _CLOSE_S)

    def abort(self) -> None:
        self._writer.transport.abort()


async def _read_line(reader: asyncio.StreamReader, longest: int) -> bytes | None:
    """One line without its end; None at the end of the stream, also inside a line (the peer died
    while writing)."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            line += await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return None
        except (
            asyncio.LimitOverrunError
        ) as error:  # longer than the reader's limit: it is read in parts
            line += await reader.readexactly(error.consumed)
        except OSError:  # connection reset: the peer is gone
            return None
        if len(line) > longest:
            raise Refused(f"a line longer than {longest} bytes")
    return line[:-1]


async def _read_greeting(reader: asyncio.StreamReader, kind: Any) -> Any:
    try:
        line = await asyncio.wait_for(_read_line(reader, _LONGEST_GREETING), _GREETING_S)
    except TimeoutError:
        raise Refused(f"no greeting within {_GREETING_S:g} s") from None
    if line is None:
        raise Refused("closed during the greeting")
    try:
        return msgspec.json.decode(line, type=kind)
    except UNREADABLE as error:
        raise Refused(f"not a greeting of {PROTOCOL}: {error}") from None


def _transcript(run: str, node: str, ours: str, theirs: str) -> bytes:
    """Everything both sides have said, in a form that can be read in one way only."""
    return msgspec.json.encode([PROTOCOL, run, node, ours, theirs])


def _write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    run: str,
    key: bytes,
    message_type: Any,
) -> Channel:
    """The coordinator's side of the greeting. Raises WrongKey or Refused; the caller closes."""
    nonce = secrets.token_hex(16)
    _write(writer, _Hello(protocol=PROTOCOL, run=run, nonce=nonce))
    proof: _Proof = await _read_greeting(reader, _Proof)
    transcript = _transcript(run, proof.node, nonce, proof.nonce)
    if not _mac_matches(proof.mac, _mac(key, "agent", transcript)):
        _write(writer, _Answer(refused="wrong key"))
        raise WrongKey(f"node {proof.node[:200]!r} does not hold this run's key")
    _write(writer, _Answer(mac=_mac(key, "coordinator", transcript).hex()))
    send_key = _mac(key, "to agent", transcript)
    receive_key = _mac(key, "to coordinator", transcript)
    return Channel(reader, writer, send_key, receive_key, message_type, proof.node)


async def connect(
    host: str, port: int, run: str, node: str, key: bytes, message_type: Any
) -> Channel:
    """The agent's side. OSError: nobody there. Refused: somebody else is. WrongKey: a coordinator
    with another key."""
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, port, limit=READ_LIMIT), _REACH_S
        )
    except TimeoutError:
        raise OSError(f"{host} could not be reached within {_REACH_S:g} s") from None
    try:
        hello: _Hello = await _read_greeting(reader, _Hello)
        if hello.protocol != PROTOCOL or hello.run != run:
            raise Refused(f"it coordinates run {hello.run[:100]!r} with {hello.protocol[:100]!r}")
        nonce = secrets.token_hex(16)
        transcript = _transcript(run, node, hello.nonce, nonce)
        _write(writer, _Proof(node=node, nonce=nonce, mac=_mac(key, "agent", transcript).hex()))
        answer: _Answer = await _read_greeting(reader, _Answer)
        if answer.refused:
            raise WrongKey(f"the coordinator refused this node: {answer.refused[:200]}")
        if not _mac_matches(answer.mac, _mac(key, "coordinator", transcript)):
            raise WrongKey("the coordinator does not hold this run's key")
    except BaseException:
        writer.transport.abort()
        raise
    return Channel(
        reader,
        writer,
        _mac(key, "to coordinator", transcript),
        _mac(key, "to agent", transcript),
        message_type,
        "coordinator",
    )
