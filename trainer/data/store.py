"""Token files: a folder with `tokens.bin`, `documents.bin`, `blocks.bin` and `index.json`.

`tokens.bin`: every document's ids followed by the end-of-document id, little-endian uint16 (uint32
above 65536 ids). `documents.bin`: the offset of each document, and the total, little-endian uint64.
`blocks.bin`: the sha256 of each `BLOCK_BYTES` of `tokens.bin`. `index.json`: `Index`, which has the
sha256 of `blocks.bin`.

Opening a store hashes `blocks.bin`, and each read hashes the blocks that it touches. So a run never
trains on a token that has changed since it was written, and a start does not read the whole corpus.
"""

from __future__ import annotations

import errno
import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from orchestrator.plan.worker import TOKENS
from trainer.data.tokenizer import Tokenizer
from trainer.durable import sync_folder
from trainer.errors import DataError, UnreadableData

FORMAT = TOKENS
#: A sample of 4,096 tokens costs one or two hashes of this size, in the loader's thread.
BLOCK_BYTES = 1 << 16
_DIGEST = 32  # bytes of a sha256


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of `index.json`."""

    format: str
    key: str  # sha256 of format, tokenizer and content: equal for equal tokens
    tokenizer: str
    vocab_size: int
    eod: int
    dtype: Literal["uint16", "uint32"]
    tokens: int
    documents: int
    source_files: int
    source_bytes: int
    blocks_sha256: str


class BlockHasher:
    """Computes the sha256 of each `BLOCK_BYTES` of a stream."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._block = hashlib.sha256()
        self._filled = 0

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            chunk = view[: BLOCK_BYTES - self._filled]
            self._block.update(chunk)
            self._filled += len(chunk)
            view = view[len(chunk) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._digests += self._block.digest()
        self._block = hashlib.sha256()
        self._filled = 0

    def close(self) -> bytes:
        """Returns all digests; the last block may be shorter."""
        if self._filled:
            self._end_block()
        return bytes(self._digests)


class TokenWriter:
    """Appends encoded text to the files of a folder. `close` makes them durable and writes the
    index last."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder = folder
        self.tokenizer = tokenizer
        self.dtype: Literal["uint16", "uint32"] = (
            "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        )
        self._tokens = (folder / "tokens.bin").open("wb", buffering=1 << 20)
        self._documents = (folder / "documents.bin").open("wb", buffering=1 << 16)
        self._blocks = BlockHasher()
        self._count = 0
        self._ended = 0
        self._begin_document()

    def _begin_document(self) -> None:
        self._documents.write(self._count.to_bytes(8, "little"))

    def add(self, ids: np.ndarray, ends_document: bool) -> None:
        self._write(ids.astype("<u2" if self.dtype == "uint16" else "<u4").tobytes())
        self._count += len(ids)
        if ends_document:
            self._write(self.tokenizer.eod.to_bytes(2 if self.dtype == "uint16" else 4, "little"))
            self._count += 1
            self._ended += 1
            self._begin_document()

    def _write(self, data: bytes) -> None:
        self._tokens.write(data)
        self._blocks.add(data)

    def close(self, key: str, source_files: int, source_bytes: int) -> None:
        """Writes the index and fsyncs every file and the folder. The last piece must have ended its
        document."""
        digests = self._blocks.close()
        index = Index(
            format=FORMAT,
            key=key,
            tokenizer=self.tokenizer.identity,
            vocab_size=self.tokenizer.vocab_size,
            eod=self.tokenizer.eod,
            dtype=self.dtype,
            tokens=self._count,
            documents=self._ended,
            source_files=source_files,
            source_bytes=source_bytes,
            blocks_sha256=hashlib.sha256(digests).hexdigest(),
        )
        with (
            (self.folder / "blocks.bin").open("wb") as blocks,
            (self.folder / "index.json").open("wb") as file,
        ):
            blocks.write(digests)
            file.write(msgspec.json.format(msgspec.json.encode(index)))
            for open_file in (self._tokens, self._documents, blocks, file):
                open_file.flush()
                os.fsync(open_file.fileno())
        self.abandon()
        sync_folder(self.folder)

    def abandon(self) -> None:
        """Closes the files without writing an index: the folder is then never read."""
        self._tokens.close()
        self._documents.close()


class TokenStore:
    """A finished folder, open for reading. Pages are shared between the processes of a node."""

    def __init__(self, folder: Path):
        """Opens a folder. Raises DataError if it is not as its writer left it."""
        self.folder = folder
        try:
            raw = (folder / "index.json").read_bytes()
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            stored_format = msgspec.json.decode(fields.get("format", b"null"))
            if stored_format != FORMAT:
                raise _damaged(folder, f"format {stored_format}, this version reads {FORMAT}")
            self.index = msgspec.json.decode(raw, type=Index)
            sizes = {
                name: (folder / name).stat().st_size for name in ("tokens.bin", "documents.bin")
            }
            self._digests = (folder / "blocks.bin").read_bytes()
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            raise _damaged(folder, str(error)) from error
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._bytes = self.index.tokens * self._dtype.itemsize
        expected = {"tokens.bin": self._bytes, "documents.bin": (self.index.documents + 1) * 8}
        for name, size in sizes.items():
            if size != expected[name]:
                raise _damaged(folder, f"{name} has {size} bytes, its index says {expected[name]}")
        complete = len(self._digests) == -(-self._bytes // BLOCK_BYTES) * _DIGEST
        if not complete or hashlib.sha256(self._digests).hexdigest() != self.index.blocks_sha256:
            raise _damaged(folder, "blocks.bin does not have the sha256 in the index")
        self._file = os.open(folder / "tokens.bin", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @cached_property
    def tokens(self) -> np.ndarray:
        """All ids, memory-mapped, without a check of their hashes."""
        return np.memmap(
            self.folder / "tokens.bin",
            dtype=self._dtype,
            mode="r",
        )

    @cached_property
    def documents(self) -> np.ndarray:
        """The offset of each document and the total, memory-mapped."""
        return np.memmap(self.folder / "documents.bin", dtype="<u8", mode="r")

    @property
    def identity(self) -> str:
        """A digest of the hashes of all tokens, equal for equal tokens; `index.key` is a digest of
        the text instead."""
        index = self.index
        identity_source = (
            f"{index.dtype} {index.tokens} {index.eod} {index.vocab_size} {index.blocks_sha256}"
        )
        return hashlib.sha256(identity_source.encode()).hexdigest()

    def samples(self, seq_len: int) -> int:
        """Returns the number of windows of `seq_len` + 1 tokens. Neighbours overlap in one token,
        so that each token but the first is a target once."""
        return max(0, (self.index.tokens - 1) // seq_len)

    def window(self, sample: int, seq_len: int) -> np.ndarray:
        """Returns the ids [seq_len + 1] of one sample in the file's dtype. Raises DataError if they
        are not as written."""
        width = self._dtype.itemsize
        start = sample * seq_len * width
        stop = ((sample + 1) * seq_len + 1) * width
        first = start // BLOCK_BYTES
        raw = self._verified(first, -(-stop // BLOCK_BYTES))
        return np.frombuffer(
            raw,
            self._dtype,
            seq_len + 1,
            start - first * BLOCK_BYTES,
        )

    def _verified(self, first: int, end: int) -> bytes:
        """Returns the bytes of the blocks from `first` to before `end`, read once and compared with
        their hashes. Raises DataError."""
        begin = first * BLOCK_BYTES
        unread = min(end * BLOCK_BYTES, self._bytes) - begin
        chunks = list[bytes]()
        try:
            while unread and (chunk := os.pread(self._file, unread, begin + sum(map(len, chunks)))):
                chunks.append(chunk)
                unread -= len(chunk)
        except OSError as error:
            error_type = UnreadableData if error.errno == errno.EIO else DataError
            raise error_type(
                f"cannot read {self.folder / 'tokens.bin'}: {error.strerror}"
            ) from error
        raw = b"".join(chunks)
        for block in range(first, end):
            start = (block - first) * BLOCK_BYTES
            digest = hashlib.sha256(memoryview(raw)[start : start + BLOCK_BYTES]).digest()
            if digest != self._digests[block * _DIGEST : (block + 1) * _DIGEST]:
                raise self._changed(block)
        return raw

    def _changed(self, block: int) -> DataError:
        width = self._dtype.itemsize
        first = block * BLOCK_BYTES // width
        last = min((block + 1) * BLOCK_BYTES, self._bytes) // width - 1
        detail = f"tokens.bin has changed since it was written, among tokens {first} to {last}"
        return _damaged(self.folder, detail)


def _damaged(folder: Path, detail: str) -> DataError:
    return DataError(f"token files in {folder} are damaged ({detail}); delete that folder")
