"""The messages between this machine and the orch of another host, over the standard streams of ssh.

A message is a JSON object, followed by as many bytes as its `payload` says. This side asks, the
other side answers each question.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from orchestrator.plan.document import Frozen
from orchestrator.run.request import Code
from orchestrator.run.state import RunState

VERSION = 3
#: The beginning of the other side's first line. A login shell may print other lines before it.
GREETING = b"@orch-remote "
#: The module that is started on the host by name, because its place there is not known.
MODULE = "orchestrator.remote"

_LENGTH = struct.Struct(">QQ")
_LONGEST_JSON = 64 << 20


class Prepare(Frozen, tag=True, kw_only=True):
    """Plans a job and keeps it. The payload is a tar of `code/...` and `conf/...`."""

    words: list[str]
    command: list[str]
    env: list[str]
    program: bool
    code: Code  # on this machine; the payload has its files
    after: list[str] = []
    run_id: str | None = None
    dry_run: bool = False
    conf: bool = False  # the payload has the user's group files
    variables: dict[str, str] = {}  # of this machine's shell; neither side writes them down


class Send(Frozen, tag=True):
    """Starts the job that was prepared last."""


class Look(Frozen, tag=True):
    """Asks for a run's state and for the files that this machine lacks."""

    run: str
    known: dict[str, int] = {}  # bytes that this machine has of the files that only grow
    logs: bool = False


class Cancel(Frozen, tag=True):
    run: str
    force: bool


class Resume(Frozen, tag=True):
    run: str
    allow: list[str] = []  # settings that `orch resume --allow` names
    variables: dict[str, str] = {}


class Resize(Frozen, tag=True):
    run: str
    nodes: int
    variables: dict[str, str] = {}


class Remove(Frozen, tag=True):
    run: str


Question = Prepare | Send | Look | Cancel | Resume | Resize | Remove


class Refused(Frozen, tag=True):
    message: str
    exit: int


class Prepared(Frozen, tag=True):
    """A prepared job. The payload is plan.json."""

    request: msgspec.Raw
    messages: list[str] = msgspec.field(name="said")
    script: str = ""  # the document for its scheduler
    refusal: str = ""  # the reason why sending it would be refused


class Handle(Frozen, tag=True):
    handle: str


class Part(Frozen):
    """Bytes of a file of a run folder from an offset on.

    The payload holds the bytes of all parts, in the order of the parts.
    """

    path: str
    offset: int
    size: int


class Looked(Frozen, tag=True):
    alive: bool
    state: RunState
    parts: list[Part]
    more: bool = False  # one answer could not hold everything


class Done(Frozen, tag=True):
    pass


Answer = Refused | Prepared | Handle | Looked | Done


def encode(message: Question | Answer) -> bytes:
    """Returns the JSON of a message. UnicodeEncodeError for one with text that is not UTF-8."""
    return msgspec.json.encode(message)


def write(stream: BinaryIO, encoded: bytes, payload: bytes = b"") -> None:
    """Writes one message, which `encode` has returned, and flushes the stream."""
    stream.write(_LENGTH.pack(len(encoded), len(payload)))
    stream.write(encoded)
    stream.write(payload)
    stream.flush()


def read_question(stream: BinaryIO) -> tuple[Question, bytes] | None:
    """Reads a question; returns None at the end of the stream. ValueError for another message."""
    message = _read(stream)
    return None if message is None else (msgspec.json.decode(message[0], type=Question), message[1])


def read_answer(stream: BinaryIO) -> tuple[Answer, bytes] | None:
    """Reads an answer; returns None at the end of the stream. ValueError for another message."""
    message = _read(stream)
    return None if message is None else (msgspec.json.decode(message[0], type=Answer), message[1])


def _read(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    message_size, payload_size = _LENGTH.unpack(head)
    if message_size > _LONGEST_JSON or payload_size > 1 << 31:
        raise ValueError(f"a message of {message_size} and {payload_size} bytes")
    raw = stream.read(message_size)
    payload = stream.read(payload_size)
    return (raw, payload) if len(raw) == message_size and len(payload) == payload_size else None
