"""What of a run's folder on another host is copied into its folder here: its state, and what only
grows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.plan.codec import open_regular
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder, write_private

from .wire import Part

#: Small files that are replaced as a whole.
_WHOLE = re.compile(r"(plan|plan\.nodes\d+|request|code|report)\.json|config\.yaml")
_GROWS = re.compile(r"(events|metrics)/[^/]+\.jsonl|stacks/[^/]+\.txt")
_LOGS = re.compile(r"logs/[^/]+\.log")
_AT_ONCE = 16 << 20  # bytes of an answer


def known(folder: RunFolder) -> dict[str, int]:
    """Bytes of what this machine has of the files that grow."""
    return {
        name: path.stat().st_size for name, path in _files(folder) if not _WHOLE.fullmatch(name)
    }


def parts_of(
    folder: RunFolder, has: Mapping[str, int], logs: bool
) -> tuple[list[Part], bytes, bool]:
    """What the other side lacks, with the bytes of all parts, and whether that is not all of it
    yet."""
    parts = list[Part]()
    payload = bytearray()
    left = _AT_ONCE
    for name, path in _files(folder):
        whole = _WHOLE.fullmatch(name) is not None
        if not whole and not (_GROWS.fullmatch(name) or (logs and _LOGS.fullmatch(name))):
            continue
        with contextlib.suppress(OSError), open_regular(path) as file:
            size = file.seek(0, 2)
            offset = 0 if whole or size < has.get(name, 0) else has.get(name, 0)
            if size == offset and (size or name in has):
                continue
            file.seek(offset)
            data = file.read(size - offset if whole else min(size - offset, left))
            left -= len(data)
            payload += data
            parts.append(Part(path=name, offset=offset, size=len(data)))
            if left <= 0:
                return parts, bytes(payload), True
    return parts, bytes(payload), False


def write_parts(folder: RunFolder, parts: list[Part], payload: bytes) -> None:
    """Puts them into the folder of this machine. OrchError (78) for a file that no run folder
    has."""
    at = 0
    for part in parts:
        if not any(kind.fullmatch(part.path) for kind in (_WHOLE, _GROWS, _LOGS)) or part.size < 0:
            raise OrchError(f"run {folder.run_id}: the host sent {part.path!r}", Exit.SECURITY)
        data = payload[at : at + part.size]
        path = folder.path / part.path
        at += part.size
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if part.offset == 0:
            write_private(path, data, durable=False)
            continue
        with path.open("r+b") as file:
            if (
                file.seek(0, 2) != part.offset
            ):  # another command of this machine has just written it
                continue
            file.write(data)


def _files(folder: RunFolder) -> Iterator[tuple[str, Path]]:
    for below in ("", "events", "metrics", "stacks", "logs"):
        with contextlib.suppress(OSError):
            for path in sorted((folder.path / below).iterdir()):
                yield f"{below}/{path.name}" if below else path.name, path
