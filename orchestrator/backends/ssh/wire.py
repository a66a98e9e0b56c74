"""What this machine and the orch of another host say to each other, over the standard streams of
ssh.

A message is a JSON object, then as many bytes as its `payload` says. This side asks, the other
answers each question.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from orchestrator.plan.document import Frozen
from orchestrator.run.request import Code
from orchestrator.run.state import RunState

VERSION = 2
#: The line that the other side begins with: what a login shell prints comes before it.
GREETING = b"@orch-remote "
#: Started there by name: nobody knows where it is installed.
MODULE = "orchestrator.remote"

_LENGTH = struct.Struct(">QQ")
_LONGEST_JSON = 64 << 20


class Prepare(Frozen, tag=True, kw_only=True):
    """Plan a job and keep it. Payload: a tar of `code/...` and `conf/...`."""

    words: list[str]
    command: list[str]
    env: list[str]
    program: bool
    code: Code  # of this machine; the other side has its files from the payload
    after: list[str] = []
    run_id: str | None = None
    dry_run: bool = False
    conf: bool = False  # the payload has group files of the user's


class Send(Frozen, tag=True):
    """Start the job that was prepared last."""


class Look(Frozen, tag=True):
    run: str
    known: dict[str, int] = {}  # bytes of the files that only grow, as this machine has them
    logs: bool = False


class Cancel(Frozen, tag=True):
    run: str
    force: bool


class Resume(Frozen, tag=True):
    run: str
    allow: list[str] = []  # as `orch resume --allow`


class Resize(Frozen, tag=True):
    run: str
    nodes: int


class Remove(Frozen, tag=True):
    run: str


Question = Prepare | Send | Look | Cancel | Resume | Resize | Remove


class Refused(Frozen, tag=True):
    message: str
    exit: int


class Prepared(Frozen, tag=True):
    """Payload: plan.json."""

    request: msgspec.Raw
    said: list[str]
    script: str = ""  # what its scheduler would be given
    refusal: str = ""  # why sending it would be refused


class Handle(Frozen, tag=True):
    handle: str


class Part(Frozen):
    """Bytes of a file of a run folder, from an offset on; they lie in the payload, in the order of
    the parts."""

    path: str
    offset: int
    size: int


class Looked(Frozen, tag=True):
    alive: bool
    state: RunState
    parts: list[Part]
    more: bool = False  # there is more than one answer should hold


class Done(Frozen, tag=True):
    pass


Answer = Refused | Prepared | Handle | Looked | Done


def write(stream: BinaryIO, message: Question | Answer, payload: bytes = b"") -> None:
    raw = msgspec.json.encode(message)
    stream.write(_LENGTH.pack(len(raw), len(payload)))
    stream.write(raw)
    stream.write(payload)
    stream.flush()


def read_question(stream: BinaryIO) -> tuple[Question, bytes] | None:
    """None where the other side has gone. ValueError for what is no question."""
    message = _read(stream)
    return None if message is None else (msgspec.json.decode(message[0], type=Question), message[1])


def read_answer(stream: BinaryIO) -> tuple[Answer, bytes] | None:
    """None where the other side has gone. ValueError for what is no answer."""
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
