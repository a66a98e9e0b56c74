"""Text to token ids: bytes by default, a Hugging Face `tokenizers` JSON file on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trainer.errors import DataError

BYTES = "bytes"

#: Names under which published tokenizers keep the token that ends a document, most specific first.
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)


#: Names under which published tokenizers keep the token that hides another one.
MASK_TOKENS = ("[MASK]", "<mask>", "<|mask|>")


class Tokenizer(Protocol):
    """Encodes documents. Ids are below `vocab_size`; `eod` ends a document, and no text encodes to
    it, nor to `mask`."""

    identity: str  # equal for equal behaviour: part of the cache key
    vocab_size: int
    eod: int
    mask: int | None  # hides a token (`trainer.data.objectives.masked`); None: there is none

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns one array of ids (any unsigned dtype) for each UTF-8 text."""
        ...


class ByteTokenizer:
    """Encodes each byte as a token, and the end of a document as 256. The mask, 257, is not part of
    the vocabulary: only models that predict masked tokens have an embedding for it."""

    identity = "bytes/1"
    vocab_size = 257
    eod = 256
    mask: int | None = 257

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, dtype=np.uint8) for document in texts]


class FileTokenizer:
    """Encodes with a `tokenizers` JSON file. Text that spells a special token is encoded as
    ordinary text: a corpus must not be able to forge the end of a document."""

    def __init__(self, path: Path):
        """Reads the file. Raises DataError: no such file, not a tokenizer, no end-of-document
        token, package not installed."""
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise DataError(
                "data.tokenizer is a file, which needs tokenizers: pip install tokenizers"
            ) from None
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise DataError(f"cannot read tokenizer {path}: not a regular file")
        try:
            raw = path.read_bytes()
            self._backend = Backend.from_str(raw.decode())
        except OSError as error:
            raise DataError(f"cannot read tokenizer {path}: {error.strerror}") from error
        except Exception as error:  # the Rust side raises bare Exception
            raise DataError(
                f"{path} is not a tokenizers JSON file: {str(error).splitlines()[0]}"
            ) from None
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        candidates = ((name, self._backend.token_to_id(name)) for name in END_TOKENS)
        self._end, self.eod = next(
            ((name, number) for name, number in candidates if number is not None),
            ("", -1),
        )
        if not self._end:
            raise DataError(
                f"{path} has no end-of-document token; known names: {', '.join(END_TOKENS)}"
            )
        masks = (self._backend.token_to_id(name) for name in MASK_TOKENS)
        self.mask = next((number for number in masks if number is not None), None)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.identity = f"tokenizers/1 {hashlib.sha256(raw).hexdigest()}"

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        segments = [self._without_end(document.decode()) for document in texts]
        encoded = self._backend.encode_batch(
            [segment for document in segments for segment in document], add_special_tokens=False
        )
        ids = iter([np.array(entry.ids, dtype=np.uint32) for entry in encoded])
        return [np.concatenate([next(ids) for _ in document]) for document in segments]

    def _without_end(self, document: str) -> list[str]:
        """Cuts the text in the middle of each spelled-out end token: models whose base vocabulary
        holds that token would find it even with `encode_special_tokens`."""
        middle = len(self._end) // 2
        end_head = self._end[:middle]
        end_tail = self._end[middle:]
        segments = document.split(self._end)
        prefixes = ["", *[end_tail] * (len(segments) - 1)]
        suffixes = [*[end_head] * (len(segments) - 1), ""]
        return [
            prefix + segment + suffix
            for prefix, segment, suffix in zip(prefixes, segments, suffixes, strict=True)
        ]


def load_tokenizer(name: str) -> Tokenizer:
    """Loads the tokenizer `bytes`, or a tokenizers JSON file by its path. Raises DataError."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name).expanduser())
