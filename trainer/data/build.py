"""Opens the token store of a plan's `data` section; the first process tokenises the corpus for all.

Under `cache_dir`: `<key>/` holds the token files of one content and tokenizer. `seen/<state>.json`
maps a set of files (by path, size and modification time) to its key, so that a start does not read
the corpus again. `seen/<state>.lock` makes all processes of a node, and of a shared file system
that supports locks, wait for the first. Without working locks two may build at once; the first
rename wins, and both results are equal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from orchestrator.plan.document import Data
from trainer.data.corpus import Source, TextPiece, find_sources, read_pieces
from trainer.data.store import FORMAT, TokenStore, TokenWriter
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.durable import sync_folder
from trainer.errors import DataError

#: (phase, bytes done, bytes in all); phases: "hash", "tokenise", "wait" (for another process: 0 of
#: 0).
Progress = Callable[[str, int, int], None]

BATCH_BYTES = 4 << 20  # text encoded at once: enough for a parallel tokenizer's threads
_POLL_S = 0.05
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class _Seen(msgspec.Struct, frozen=True):
    key: str


def rate_limited(
    progress: Progress,
    every_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Wraps `progress` so that it is called at most once per `every_s` seconds, and always for the
    first and the last report of a phase."""
    last_phase = ""
    last_time = 0.0

    def call(phase: str, done: int, total: int) -> None:
        nonlocal last_phase, last_time
        finished = phase != "wait" and done >= total
        if phase != last_phase or finished or clock() - last_time >= every_s:
            last_phase = phase
            last_time = clock()
            progress(phase, done, total)

    return call


def open_tokens(data: Data, progress: Progress | None = None) -> TokenStore:
    """Returns the token store of the corpus and builds it if there is none. Several processes may
    call this at the same time.

    Raises DataError: no text, bad text (file and line or offset), bad tokenizer, no space or
    permission to write.
    """
    report = progress if progress is not None else lambda *_: None
    if not data.cache_dir:
        raise DataError("data.cache_dir is empty: token files need a folder")
    tokenizer = load_tokenizer(data.tokenizer)
    sources = find_sources(data.paths, data.extensions)
    cache = Path(data.cache_dir).expanduser()
    state = _state_of(sources, tokenizer)
    seen = cache / "seen" / f"{state}.json"
    try:
        seen.parent.mkdir(parents=True, exist_ok=True)
        if store := _cached_store(cache, seen):
            return store
        with _locked(seen.with_suffix(".lock"), lambda: report("wait", 0, 0)):
            if store := _cached_store(cache, seen):
                return store
            key = _content_key(sources, tokenizer, report)
            if not (cache / key / "index.json").exists():
                _build(cache, key, sources, tokenizer, report)
            if _state_of(find_sources(data.paths, data.extensions), tokenizer) != state:
                shutil.rmtree(cache / key)  # its content may not match its key
                raise DataError(
                    "the corpus changed while it was being read; start again when it is complete"
                )
            _write_atomically(seen, msgspec.json.encode(_Seen(key)))
            return TokenStore(cache / key)
    except OSError as error:
        detail = str(error.strerror or error)
        if error.filename:
            detail = f"{error.strerror}: {error.filename}"
        raise DataError(
            f"cannot write token files under {cache} ({detail}); choose another data.cache_dir"
        ) from error


def _cached_store(cache: Path, seen: Path) -> TokenStore | None:
    try:
        key = msgspec.json.decode(seen.read_bytes(), type=_Seen).key
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return TokenStore(cache / key) if (cache / key / "index.json").exists() else None


# ------------------------------------------------------------------------------------------------
#     keys


def _state_of(sources: Sequence[Source], tokenizer: Tokenizer) -> str:
    """Returns a digest that changes whenever a file may have changed; it reads no file."""
    digest = hashlib.sha256(f"{FORMAT}\0{tokenizer.identity}\0".encode())
    for source in sources:
        entry = f"{source.path}\0{source.size}\0{source.mtime_ns}\0"
        digest.update(entry.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _content_key(sources: Sequence[Source], tokenizer: Tokenizer, report: Progress) -> str:
    """Returns a digest that is equal exactly if the token files would be: it covers content, order
    and kind of the files, not their names."""
    total = sum(source.size for source in sources)
    done = 0
    digest = hashlib.sha256(f"{FORMAT}\0{tokenizer.identity}\0".encode())
    buffer = memoryview(bytearray(BATCH_BYTES))
    for source in sources:
        file_digest = hashlib.sha256()
        try:
            with source.path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    file_digest.update(buffer[:count])
                    done += count
                    report("hash", min(done, total), total)
        except OSError as error:
            raise DataError(f"cannot read {source.path}: {error.strerror}") from error
        is_jsonl = source.path.suffix.lower() == ".jsonl"
        digest.update(f"{is_jsonl} {file_digest.hexdigest()}\0".encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------
#     building


def _build(
    cache: Path,
    key: str,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    report: Progress,
) -> None:
    """Builds the token files in a private folder, then renames it. Deletes the leftovers of killed
    processes first."""
    host = socket.gethostname()
    _sweep(cache, host)
    folder = cache / f"{key}.tmp-{host}-{os.getpid()}"
    folder.mkdir()
    try:
        writer = TokenWriter(folder, tokenizer)
        try:
            _encode(sources, tokenizer, writer, report)
            writer.close(
                key,
                len(sources),
                sum(source.size for source in sources),
            )
        finally:
            writer.abandon()
        try:
            folder.rename(cache / key)
        except OSError as error:
            # Another process without our lock was faster, with an equal result.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync_folder(cache)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _encode(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    writer: TokenWriter,
    report: Progress,
) -> None:
    total = sum(source.size for source in sources)
    done = 0
    pending: list[TextPiece] = []
    size = 0

    def flush() -> None:
        encoded = tokenizer.encode([piece.text for piece in pending])
        for piece, ids in zip(pending, encoded, strict=True):
            writer.add(ids, piece.ends_document)
        pending.clear()

    for source in sources:
        for piece in read_pieces(source):
            pending.append(piece)
            size += len(piece.text)
            if size >= BATCH_BYTES:
                flush()
                report("tokenise", min(done + size, total), total)
                done = done + size
                size = 0
    flush()
    report("tokenise", total, total)


def _sweep(cache: Path, host: str) -> None:
    for folder in cache.glob(f"*.tmp-{host}-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on a file; the kernel releases it if the process dies. It polls, so
    that signal handlers run and `waiting` can report."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_S)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    break
                raise
        yield
