"""Token files: a folder with `tokens.bin`, `documents.bin` and `index.json`, memory-mapped when read.

`tokens.bin`: every document's ids followed by the end-of-document id, little-endian uint16 (uint32 above 65536 ids).
`documents.bin`: the offset of each document, and the total, little-endian uint64. `index.json`: `Index`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from trainer.data.tokenizer import Tokenizer
from trainer.durable import sync_folder
from trainer.errors import DataError

FORMAT = "orch.tokens/1"


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


class TokenWriter:
    """Appends encoded text to the files of a folder. `close` makes them durable and writes the index last."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.tokenizer = folder, tokenizer
        self.dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._tokens = (folder / "tokens.bin").open("wb", buffering=1 << 20)
        self._documents = (folder / "documents.bin").open("wb", buffering=1 << 16)
        self._count = self._ended = 0
        self._begin_document()

    def _begin_document(self) -> None:
        self._documents.write(self._count.to_bytes(8, "little"))

    def add(self, ids: np.ndarray, ends_document: bool) -> None:
        self._tokens.write(ids.astype("<u2" if self.dtype == "uint16" else "<u4").tobytes())
        self._count += len(ids)
        if ends_document:
            self._tokens.write(self.tokenizer.eod.to_bytes(2 if self.dtype == "uint16" else 4, "little"))
            self._count += 1
            self._ended += 1
            self._begin_document()

    def close(self, key: str, source_files: int, source_bytes: int) -> None:
        """Must follow a piece that ended its document. fsync of every file and of the folder."""
        fields: dict[str, Any] = {"key": key, "tokenizer": self.tokenizer.identity, "eod": self.tokenizer.eod}
        fields |= {"vocab_size": self.tokenizer.vocab_size, "dtype": self.dtype, "tokens": self._count}
        fields |= {"documents": self._ended, "source_files": source_files, "source_bytes": source_bytes}
        index = Index(format=FORMAT, **fields)
        with (self.folder / "index.json").open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(index)))
            for each in (self._tokens, self._documents, file):
                each.flush()
                os.fsync(each.fileno())
        self.abandon()
        sync_folder(self.folder)

    def abandon(self) -> None:
        """Close the files without writing an index: the folder is then never read."""
        self._tokens.close()
        self._documents.close()


class TokenStore:
    """A finished folder, open for reading. Pages are shared between the processes of a node."""

    def __init__(self, folder: Path):
        """Raises DataError when the folder is not what a writer left."""
        self.folder = folder
        try:
            self.index = msgspec.json.decode((folder / "index.json").read_bytes(), type=Index)
            sizes = {name: (folder / name).stat().st_size for name in ("tokens.bin", "documents.bin")}
        except (OSError, msgspec.MsgspecError) as error:
            raise DataError(f"token files in {folder} are damaged ({error}); delete that folder") from error
        dtype = np.dtype(self.index.dtype).newbyteorder("<")
        expected = {"tokens.bin": self.index.tokens * dtype.itemsize, "documents.bin": (self.index.documents + 1) * 8}
        for name, size in sizes.items():
            if size != expected[name] or self.index.format != FORMAT:
                what = f"{name} has {size} bytes, its index says {expected[name]} in format {self.index.format}"
                raise DataError(f"token files in {folder} are damaged ({what}); delete that folder")
        self.tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")
        self.documents = np.memmap(folder / "documents.bin", dtype="<u8", mode="r")

    def samples(self, seq_len: int) -> int:
        """Windows of `seq_len` + 1 tokens that overlap in one, so that each token but the first is a target once."""
        return max(0, (self.index.tokens - 1) // seq_len)

    def window(self, sample: int, seq_len: int) -> np.ndarray:
        """[seq_len + 1] ids of one sample, a view of the map in the file's dtype."""
        return self.tokens[sample * seq_len : (sample + 1) * seq_len + 1]
