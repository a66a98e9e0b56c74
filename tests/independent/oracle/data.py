"""The data of a run: text, tokens, the order of samples, the batch of a step. Written from
docs/verify.md in plain steps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

END = 256  # the end-of-document token of the tokenizer "bytes"
IGNORED = -100  # a target that does not count
WORD = 2**64


def corpus(data: dict[str, Any]) -> list[int]:
    """Returns all tokens of the plan's `job.data`: the bytes of each document, then END. Raises
    ValueError unless the tokenizer is "bytes"."""
    if data["tokenizer"] != "bytes":
        raise ValueError(f"the independent oracle reads bytes, not tokenizer {data['tokenizer']}")
    tokens: list[int] = []
    for path in map(Path, data["paths"]):
        files = [path]
        if not path.is_file():
            files = [
                file
                for file in sorted(path.rglob("*"), key=lambda file: file.parts)
                if file.is_file() and file.suffix.lower() in data["extensions"]
            ]
        for file in files:
            for document in documents(file):
                tokens += [*document, END]
    return tokens


def documents(file: Path) -> list[bytes]:
    """Returns the documents of a file that are not empty: the whole file, or one per line of a
    .jsonl file."""
    if file.suffix.lower() != ".jsonl":
        return [document for document in [file.read_bytes()] if document]
    lines = [
        json.loads(line)["text"].encode() for line in file.read_bytes().splitlines() if line.strip()
    ]
    return [document for document in lines if document]


def sample_number(consumed: int, samples: int, seed: int) -> int:
    """Returns the number of the sample, in a corpus of `samples`, that a run reads after it has
    consumed `consumed`: a six-round Feistel network, keyed by seed, epoch and size, is applied
    until the result is in range."""
    epoch, index = divmod(consumed, samples)
    key_source = f"orch.order/1 {seed} {epoch} {samples}".encode()
    digest = hashlib.blake2b(key_source, digest_size=48).digest()
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 48, 8)]
    half = 2 ** max(1, ((samples - 1).bit_length() + 1) // 2)
    while True:
        high, low = divmod(index, half)
        for key in keys:
            next_low = high ^ mixed(low ^ key) % half
            high = low
            low = next_low
        index = high * half + low
        if index < samples:
            return index


def mixed(bits: int) -> int:
    """The finaliser of splitmix64."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % WORD
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % WORD
    return bits ^ bits >> 31


@dataclass(frozen=True)
class Batch:
    """Samples in the order of the data; all [samples, sequence], int64."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    # numbers of isolated documents; all 0 where attention sees whole samples
    documents: Tensor

    @property
    def valid(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())

    def rows(self, samples: slice | list[int]) -> Batch:
        """Returns the batch of some samples."""
        return Batch(
            self.tokens[samples],
            self.targets[samples],
            self.positions[samples],
            self.documents[samples],
        )


class Reader:
    """Reads the batches of a plan (as JSON)."""

    def __init__(self, plan: dict[str, Any]):
        self.train = plan["job"]["train"]
        self.parallel = plan["parallel"]
        self.data = plan["job"]["data"]
        self.length = self.train["seq_len"]
        self.tokens = corpus(self.data)
        # Neighbours share one token, so each token is a target once.
        self.samples = (len(self.tokens) - 1) // self.length

    def size(self, consumed: int) -> int:
        """Returns the samples of the step after `consumed`: the global batch, or during a ramp a
        part of it, in whole micro-batches."""
        par = self.parallel
        ramp = self.train.get("batch_ramp")
        if ramp is None or consumed >= ramp["over_samples"]:
            return par["global_batch_samples"]
        unit = par["micro_batch_size"] * par["dp"] * par["ep"]
        growth = par["global_batch_samples"] - ramp["start_samples"]
        grown = growth * consumed // ramp["over_samples"]
        return max(1, (ramp["start_samples"] + grown) // unit) * unit

    def batch(self, consumed: int) -> Batch:
        """Returns the batch of the step after `consumed` samples."""
        rows = [self._sample(consumed + number) for number in range(self.size(consumed))]
        return Batch(*(torch.tensor(column) for column in zip(*rows, strict=True)))

    def _sample(self, consumed: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """Returns (tokens, targets, positions, documents). With isolated documents, positions
        restart after each END, whose own target does not count."""
        first = sample_number(consumed, self.samples, self.data["seed"]) * self.length
        window = self.tokens[first : first + self.length + 1]
        tokens = window[:-1]
        targets = window[1:]
        if not self.data["isolate_documents"]:
            return tokens, targets, list(range(self.length)), [0] * self.length
        positions = []
        numbers = []
        position = 0
        number = 0
        for token in tokens:
            positions.append(position)
            numbers.append(number)
            position += 1
            if token == END:
                position = 0
                number += 1
        targets = [
            IGNORED if token == END else target
            for token, target in zip(tokens, targets, strict=True)
        ]
        return tokens, targets, positions, numbers
