"""Text files as a sorted list of sources and a stream of documents.

A text file is one document; a `.jsonl` file holds one per line, in the string field `text`.
"""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from trainer.errors import DataError

STDLIB = "stdlib"  # path that stands for the sources of the running Python's standard library
#: Bytes per read of a file, roughly: memory does not grow with the corpus.
PIECE_BYTES = 4 << 20
LINE_BYTES = 64 << 20  # longest accepted line of a .jsonl file

_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_NEVER_TEXT = frozenset({"__pycache__", ".git"})


@dataclass(frozen=True)
class Source:
    """A file of the corpus. `name` orders it and appears in messages."""

    name: str
    path: Path  # without symbolic links
    size: int  # bytes
    mtime_ns: int


@dataclass(frozen=True)
class TextPiece:
    """A part of a UTF-8 text, cut between lines, or between characters if there are no lines."""

    text: bytes
    ends_document: bool


class _Line(msgspec.Struct):
    text: str


_LINES = msgspec.json.Decoder(_Line)


# ------------------------------------------------------------------------------------------------
#     files


def find_sources(paths: Sequence[str], extensions: Sequence[str]) -> list[Source]:
    """Returns the files named in `paths`, and the files with one of `extensions` anywhere under
    folders named in it. They are sorted by name within each path, so that every machine with the
    same files sees the same order. A file is returned once.

    Raises DataError if a path does not exist, a folder cannot be read, or nothing is found.
    """
    sources: dict[Path, Source] = {}
    ignored: Counter[str] = Counter()
    for path in paths:
        root = Path(sysconfig.get_path("stdlib")) if path == STDLIB else Path(path).expanduser()
        if not root.exists():
            raise DataError(f"data path {path!r} does not exist")
        if root.is_file():
            _add(sources, root.name, root.resolve(), root.stat())
            continue
        if not root.is_dir():
            raise DataError(
                f"data path {path!r} is neither a file nor a folder (a pipe or a device)"
            )
        # Only the root is resolved, not every file: each rank does this at each start, and a corpus
        # may have a million files.
        resolved_root = root.resolve()
        entries = _walk(resolved_root, path == STDLIB)
        for file in sorted(entries, key=lambda file: file.path.split(os.sep)):
            file_path = Path(file.path)
            if (suffix := file_path.suffix.lower()) not in extensions:
                ignored[suffix or "no extension"] += 1
                continue
            name = f"{path}/{file_path.relative_to(resolved_root).as_posix()}"
            _add(
                sources,
                name,
                file_path.resolve() if file.is_symlink() else file_path,
                file.stat(),
            )
    if not sources:
        counts = [f"{count} {suffix}" for suffix, count in ignored.most_common(4)]
        raise DataError(
            f"no {'/'.join(extensions)} files in {', '.join(map(repr, paths))}"
            f" (found {', '.join(counts) or 'no files at all'})"
        )
    return list(sources.values())


def _add(
    sources: dict[Path, Source],
    name: str,
    file: Path,
    status: os.stat_result,
) -> None:
    sources.setdefault(file, Source(name, file, status.st_size, status.st_mtime_ns))


def _walk(root: Path, is_stdlib: bool) -> Iterator[os.DirEntry[str]]:
    """Yields files and links to files; it does not follow links to folders."""
    skipped = _NEVER_TEXT | (_STDLIB_SKIPPED if is_stdlib else frozenset())
    folders = [str(root)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders += [entry.path] if entry.name not in skipped else []
                    elif entry.is_file():
                        yield entry
        except OSError as error:
            raise DataError(
                f"cannot read data folder {error.filename!r}: {error.strerror}"
            ) from error


# ------------------------------------------------------------------------------------------------
#     documents


def read_pieces(source: Source) -> Iterator[TextPiece]:
    """Yields the text of a file without empty documents.

    Raises DataError for a file that cannot be read, is not UTF-8 text, or has a line that is not a
    JSON object with a string `text`, with its line number.
    """
    try:
        with source.path.open("rb") as file:
            if source.path.suffix.lower() == ".jsonl":
                yield from _read_jsonl(file, source)
            else:
                yield from _read_text(file, source)
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}") from error


def _read_text(file: BinaryIO, source: Source) -> Iterator[TextPiece]:
    offset = 0
    rest = b""
    chunk = file.read(PIECE_BYTES)
    while chunk:
        following = file.read(PIECE_BYTES)
        unsent = rest + chunk
        cut = len(unsent)
        if following:
            cut = unsent.rfind(b"\n") + 1 or _last_character(unsent)
        piece = unsent[:cut]
        rest = unsent[cut:]
        chunk = following
        if piece:
            _check_text(piece, source, offset)
            yield TextPiece(piece, ends_document=not following)
            offset += cut


def _last_character(content: bytes) -> int:
    """Returns the index at which the last character of UTF-8 text begins; its end may still be
    unread."""
    index = len(content) - 1
    while index > 0 and len(content) - index < 4 and content[index] & 0xC0 == 0x80:
        index -= 1
    return index


def _check_text(content: bytes, source: Source, offset: int) -> None:
    if (zero := content.find(b"\0")) >= 0:
        raise DataError(f"{source.path} is not text: it has a zero byte at offset {offset + zero}")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        position = offset + error.start
        raise DataError(
            f"{source.path} is not UTF-8 text: {error.reason} at offset {position}"
        ) from None


def _read_jsonl(file: BinaryIO, source: Source) -> Iterator[TextPiece]:
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) > LINE_BYTES:
            raise DataError(f"{source.path}:{number}: line is longer than {LINE_BYTES >> 20} MiB")
        if not line.strip():
            continue
        try:
            document = _LINES.decode(line).text.encode()
        except (msgspec.DecodeError, UnicodeError) as error:
            raise DataError(
                f'{source.path}:{number}: expected {{"text": "..."}}: {error}'
            ) from None
        if document:
            yield TextPiece(document, ends_document=True)
