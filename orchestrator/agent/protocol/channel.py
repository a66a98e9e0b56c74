"""The control channel: JSON lines over TCP, each authenticated with the run's key.
docs/protocol.md.

Both sides prove that they hold the key without sending it (a nonce each, HMAC-SHA256 over the whole
greeting), then derive one key per direction. A line is
`{"mac":"<hex>","body":{"seq":n,"epoch":e,"message":{...}}}`; the mac covers the exact bytes of the
body. Lines that were changed, repeated, dropped or reordered, or that belong to another connection,
direction or run, are refused, and the connection is closed: it cannot be resynchronized. Nothing is
unpickled or evaluated.
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
#: Half the bytes that asyncio buffers per connection, also for one that has not proven the key.
READ_LIMIT = 1 << 16
_LONGEST_GREETING = 4096  # bytes
_GREETING_S = 10.0
#: Seconds to resolve a name and connect: a resolver's wait for one answer. A kernel tries for two
#: minutes.
_REACH_S = 5.0
_MOST_UNSENT = 8 << 20  # bytes queued for a peer that does not read
_CLOSE_S = 1.0


class Refused(Exception):
    """A peer violates the protocol; the message says how."""


class WrongKey(Refused):
    """A peer does not hold this run's key."""


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
    """Returns an HMAC-SHA256 of a label and content, so that a mac serves one purpose only."""
    return hmac.digest(key, label.encode() + b"\0" + content, "sha256")


def _mac_matches(hex_mac: str, expected: bytes) -> bool:
    return hmac.compare_digest(hex_mac.encode(errors="replace"), expected.hex().encode())


class Channel:
    """One authenticated connection. `peer` is the agent's node name, or "coordinator"."""

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
        """Queues one message. Never blocks: a peer that has stopped reading is disconnected."""
        if self._writer.is_closing():
            return
        self._sent += 1
        raw = msgspec.Raw(msgspec.json.encode(message))
        body = msgspec.json.encode(_Body(seq=self._sent, epoch=epoch, message=raw))
        mac = _mac(self._send_key, "line", body).hex().encode()
        self._writer.write(b'{"mac":"' + mac + b'","body":' + body + b"}\n")
        if self._writer.transport.get_write_buffer_size() > _MOST_UNSENT:
            self._writer.transport.abort()

    async def receive(self) -> tuple[int, Any] | None:
        """Returns the next (epoch, message), or None when the peer has closed the connection.

        Raises Refused for a line that cannot be trusted.
        """
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
            raise Refused(f"a line that is not a message: {error}") from None

    @property
    def address(self) -> str:
        """The IP address of the peer; "" if the connection is closed."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else ""

    async def close(self) -> None:
        """Sends the queued messages, for at most a second, and closes the connection."""
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), _CLOSE_S)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), _CLOSE_S)

    def abort(self) -> None:
        self._writer.transport.abort()


async def _read_line(reader: asyncio.StreamReader, longest: int) -> bytes | None:
    """Returns one line without its newline, or None at the end of the stream.

    A stream that ends inside a line (the peer died while writing) also gives None.
    """
    line = b""
    while not line.endswith(b"\n"):
        try:
            line += await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError as error:
            # The line is longer than the reader's limit: it is read in parts.
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
    """Returns all that both sides have sent, in an unambiguous encoding."""
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
    """Greets an agent, on the coordinator's side.

    Raises WrongKey or Refused; the caller closes the connection.
    """
    nonce = secrets.token_hex(16)
    _write(
        writer,
        _Hello(protocol=PROTOCOL, run=run, nonce=nonce),
    )
    proof: _Proof = await _read_greeting(reader, _Proof)
    transcript = _transcript(run, proof.node, nonce, proof.nonce)
    if not _mac_matches(proof.mac, _mac(key, "agent", transcript)):
        _write(writer, _Answer(refused="wrong key"))
        raise WrongKey(f"node {proof.node[:200]!r} does not hold this run's key")
    _write(writer, _Answer(mac=_mac(key, "coordinator", transcript).hex()))
    send_key = _mac(key, "to agent", transcript)
    receive_key = _mac(key, "to coordinator", transcript)
    return Channel(
        reader,
        writer,
        send_key=send_key,
        receive_key=receive_key,
        message_type=message_type,
        peer=proof.node,
    )


async def connect(
    host: str,
    port: int,
    run: str,
    node: str,
    key: bytes,
    message_type: Any,
) -> Channel:
    """Connects and greets, on the agent's side.

    Raises OSError if nobody listens there, Refused if the listener is not this run's coordinator,
    and WrongKey if it is a coordinator with another key.
    """
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
        _write(
            writer,
            _Proof(
                node=node,
                nonce=nonce,
                mac=_mac(key, "agent", transcript).hex(),
            ),
        )
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
        send_key=_mac(key, "to coordinator", transcript),
        receive_key=_mac(key, "to agent", transcript),
        message_type=message_type,
        peer="coordinator",
    )
