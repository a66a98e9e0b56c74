"""Copies files of a run's folder on another host into its folder here: its state, and files that
only grow."""

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

#: Small files that are copied as a whole whenever they change. The others only grow.
_REPLACED_FILES = re.compile(r"(plan|plan\.nodes\d+|request|code|report)\.json|config\.yaml")
_APPENDED_FILES = re.compile(r"(events|metrics)/[^/]+\.jsonl|stacks/[^/]+\.txt")
_LOG_FILES = re.compile(r"logs/[^/]+\.log")
_ANSWER_BYTES = 16 << 20  # the most that one answer carries


def known(folder: RunFolder) -> dict[str, int]:
    """Bytes that this machine has of each file that grows."""
    return {
        name: path.stat().st_size
        for name, path in _files(folder)
        if not _REPLACED_FILES.fullmatch(name)
    }


def parts_of(
    folder: RunFolder,
    known_sizes: Mapping[str, int],
    logs: bool,
) -> tuple[list[Part], bytes, bool]:
    """The parts of files that the other side lacks, their bytes, and whether there are more."""
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
    """Writes the parts into the folder of this machine.

    OrchError (78) for a file that does not belong in a run folder.
    """
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
            # another command of this machine may have written the part already
            if file.seek(0, 2) != file_part.offset:
                continue
            file.write(data)


def _files(folder: RunFolder) -> Iterator[tuple[str, Path]]:
    for subfolder in ("", "events", "metrics", "stacks", "logs"):
        with contextlib.suppress(OSError):
            for path in sorted((folder.path / subfolder).iterdir()):
                yield f"{subfolder}/{path.name}" if subfolder else path.name, path
