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
_REPLACED_FILES = re.compile(r"(plan|plan\.nodes\d+|request|code|report)\.json|config\.yaml")
_APPENDED_FILES = re.compile(r"(events|metrics)/[^/]+\.jsonl|stacks/[^/]+\.txt")
_LOG_FILES = re.compile(r"logs/[^/]+\.log")
_ANSWER_BYTES = 16 << 20  # bytes of an answer


def known(folder: RunFolder) -> dict[str, int]:
    """Bytes of what this machine has of the files that grow."""
    return {
        name: path.stat().st_size
        for name, path in _files(folder)
        if not _REPLACED_FILES.fullmatch(name)
    }


def parts_of(
    folder: RunFolder, known_sizes: Mapping[str, int], logs: bool
) -> tuple[list[Part], bytes, bool]:
    """What the other side lacks, with the bytes of all parts, and whether that is not all of it
    yet."""
    file_parts = list[Part]()
    payload = bytearray()
    room = _ANSWER_BYTES
    for name, path in _files(folder):
        replaced = _REPLACED_FILES.fullmatch(name) is not None
        if not replaced and not (
            _APPENDED_FILES.fullmatch(name) or (logs and _LOG_FILES.fullmatch(name))
        ):
            continue
        with contextlib.suppress(OSError), open_regular(path) as file:
            size = file.seek(0, 2)
            offset = 0 if replaced or size < known_sizes.get(name, 0) else known_sizes.get(name, 0)
            if size == offset and (size or name in known_sizes):
                continue
            file.seek(offset)
            data = file.read(size - offset if replaced else min(size - offset, room))
            room -= len(data)
            payload += data
            file_parts.append(Part(path=name, offset=offset, size=len(data)))
            if room <= 0:
                return file_parts, bytes(payload), True
    return file_parts, bytes(payload), False


def write_parts(folder: RunFolder, file_parts: list[Part], payload: bytes) -> None:
    """Puts them into the folder of this machine. OrchError (78) for a file that no run folder
    has."""
    position = 0
    for file_part in file_parts:
        if (
            not any(
                kind.fullmatch(file_part.path)
                for kind in (_REPLACED_FILES, _APPENDED_FILES, _LOG_FILES)
            )
            or file_part.size < 0
        ):
            raise OrchError(f"run {folder.run_id}: the host sent {file_part.path!r}", Exit.SECURITY)
        data = payload[position : position + file_part.size]
        path = folder.path / file_part.path
        position += file_part.size
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if file_part.offset == 0:
            write_private(path, data, durable=False)
            continue
        with path.open("r+b") as file:
            if (
                file.seek(0, 2) != file_part.offset
            ):  # another command of this machine has just written it
                continue
            file.write(data)


def _files(folder: RunFolder) -> Iterator[tuple[str, Path]]:
    for subfolder in ("", "events", "metrics", "stacks", "logs"):
        with contextlib.suppress(OSError):
            for path in sorted((folder.path / subfolder).iterdir()):
                yield f"{subfolder}/{path.name}" if subfolder else path.name, path
