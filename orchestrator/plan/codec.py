"""Converts plans to and from JSON, and computes the hash that ties a run to exactly one plan."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from .batch import check_batch
from .document import NO_MODEL, SCHEMA, Plan
from .ranks import check_ranks


class PlanError(ValueError):
    """A plan is unreadable, has another schema, was changed after sealing, or contradicts
    itself."""


#: Errors of decoding damaged or hostile JSON: besides msgspec's own errors, ValueError for invalid
#: UTF-8 in a key, and RecursionError for endless nesting.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

_ONE_AT_A_TIME = threading.Lock()


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Makes a decoder for a type that several threads decode. Call it before the threads start.

    msgspec (0.22) analyses a type when it is first decoded, and other threads see the unfinished
    analysis. A thread that decodes the same type at that moment, or a type that contains it, ends
    the process with a segmentation fault.
    """
    with _ONE_AT_A_TIME:
        return msgspec.json.Decoder(kind)


_OTHER_VERSION = (
    "another version of orch sealed it: continue with that version, or submit a new run with this"
    " one and the old run's checkpoint.dir"
)


def _problem(plan: Plan) -> str | None:
    """Finds a contradiction inside the plan. Returns one line, or None."""
    if plan.program != (plan.model == NO_MODEL):
        return "the plan of a user's program has no model, and every other plan has one"
    return check_ranks(plan) or check_batch(plan.parallel)


def _canonical(plan: Plan) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(plan, hash=""), order="sorted")


def plan_hash(plan: Plan) -> str:
    """The sha256 (hex) of the canonical JSON (sorted keys, no spaces) with an empty `hash`."""
    return hashlib.sha256(_canonical(plan)).hexdigest()


def seal(plan: Plan) -> Plan:
    """Fills in the hash. Raises PlanError if the rank map or the batch contradict the degrees."""
    problem = _problem(plan)
    if problem:
        raise PlanError(problem)
    return msgspec.structs.replace(plan, hash=plan_hash(plan))


def to_json(plan: Plan, indent: int = 0) -> bytes:
    raw = msgspec.json.encode(plan, order="deterministic")
    return msgspec.json.format(raw, indent=indent) if indent else raw


def from_json(raw: bytes | str) -> Plan:
    """Decodes and verifies a plan. Raises PlanError with one line that says what is wrong and
    where."""
    try:
        head = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        raise PlanError(f"not a plan: {error}") from None
    schema = head.get("schema")
    if schema is None or bytes(schema) != f'"{SCHEMA}"'.encode():
        schema_text = "missing" if schema is None else bytes(schema).decode(errors="replace")
        raise PlanError(f"plan schema is {schema_text}, this version reads {SCHEMA!r}")
    try:
        plan = msgspec.json.decode(raw, type=Plan)
    except UNREADABLE as error:
        hint = f"; {_OTHER_VERSION}" if _is_whole(raw) else ""
        raise PlanError(f"plan: {error}{hint}") from None
    if plan.hash != plan_hash(plan):
        if _is_whole(raw):
            missing = ", ".join(_missing(msgspec.json.decode(raw), msgspec.to_builtins(plan)))
            raise PlanError(
                f"plan {plan.hash[:12]} does not have {missing or 'all fields'}; {_OTHER_VERSION}"
            )
        raise PlanError(
            f"plan hash {plan.hash[:12] or '(empty)'} does not match its content"
            f" {plan_hash(plan)[:12]}"
        )
    problem = _problem(plan)
    if problem:
        raise PlanError(problem)
    return plan


def _is_whole(raw: bytes | str) -> bool:
    """Checks that these bytes are unchanged since they were sealed, whatever fields the plans of
    that version had."""
    try:
        document = msgspec.json.decode(raw)
        sealed = msgspec.json.encode(document | {"hash": ""}, order="sorted")
    except (*UNREADABLE, TypeError):
        return False
    return bool(document.get("hash") == hashlib.sha256(sealed).hexdigest())


def _missing(document: object, reference: object, path: str = "") -> Iterator[str]:
    """Yields the fields of `reference` that `document` lacks, as dotted paths. In lists, only the
    first element is compared."""
    if isinstance(reference, dict) and isinstance(document, dict):
        for name, value in reference.items():
            field_path = f"{path}.{name}" if path else name
            if name in document:
                yield from _missing(document[name], value, field_path)
            else:
                yield field_path
    elif isinstance(reference, list) and isinstance(document, list) and reference and document:
        yield from _missing(document[0], reference[0], f"{path}[0]")


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Raises OSError for anything else: reading a FIFO, for
    example, could block forever."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(fd, "rb")


def read_file(path: Path) -> bytes:
    """Reads a regular file. Raises OSError for anything else."""
    with open_regular(path) as file:
        return file.read()


def load_plan(path: str | Path) -> Plan:
    try:
        raw = read_file(Path(path))
    except OSError as error:
        raise PlanError(f"cannot read plan {path}: {error.strerror}") from error
    return from_json(raw)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a plan document (draft 2020-12)."""
    schema = msgspec.json.schema(Plan)
    # Fields that a program's plan leaves out have no default that a reader may assume.
    for struct_name in ("Plan", "Job"):
        for name, field in schema["$defs"][struct_name]["properties"].items():
            if "$ref" in field or name in ("mfu", "tokens_per_s_per_gpu"):
                field.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA, **schema}
