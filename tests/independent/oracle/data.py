"""What a run reads: text, tokens, the order of samples, the batch of a step. Written from
docs/verify.md, plainly."""

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
    """All tokens of the plan's `job.data`: the bytes of each document, then END. Only for the
    tokenizer "bytes"."""
    if data["tokenizer"] != "bytes":
        raise ValueError(f"the independent oracle reads bytes, not tokenizer {data['tokenizer']}")
    tokens: list[int] = []
    for path in map(Path, data["paths"]):
        below = sorted(path.rglob("*"), key=lambda file: file.parts)
        files = (
            [path]
            if path.is_file()
            else [f for f in below if f.is_file() and f.suffix.lower() in data["extensions"]]
        )
        for file in files:
            for text in documents(file):
                tokens += [*text, END]
    return tokens


def documents(file: Path) -> list[bytes]:
    """The documents of a file that are not empty: one, or one a line of a .jsonl file."""
    if file.suffix.lower() != ".jsonl":
        return [text for text in [file.read_bytes()] if text]
    lines = [
        json.loads(line)["text"].encode() for line in file.read_bytes().splitlines() if line.strip()
    ]
    return [text for text in lines if text]


def place(consumed: int, samples: int, seed: int) -> int:
    """Which of a corpus of `samples` samples a run reads after it has consumed `consumed`: a
    six-round Feistel network, keyed by seed, epoch and size, walked until it lands inside."""
    epoch, index = divmod(consumed, samples)
    digest = hashlib.blake2b(
        f"orch.order/1 {seed} {epoch} {samples}".encode(), digest_size=48
    ).digest()
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 48, 8)]
    half = 2 ** max(1, ((samples - 1).bit_length() + 1) // 2)
    while True:
        left, right = divmod(index, half)
        for key in keys:
            left, right = right, left ^ mixed(right ^ key) % half
        index = left * half + right
        if index < samples:
            return index


def mixed(word: int) -> int:
    """The finaliser of splitmix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


@dataclass(frozen=True)
class Batch:
    """Samples in the order of the data; all [samples, sequence], int64."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    # numbers of the documents that attention must keep apart; all 0 where it sees whole samples
    documents: Tensor

    @property
    def valid(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())

    def rows(self, which: slice | list[int]) -> Batch:
        return Batch(
            self.tokens[which], self.targets[which], self.positions[which], self.documents[which]
        )


class Reader:
    """The batches of a plan (as JSON): what the step after `consumed` samples reads."""

    def __init__(self, plan: dict[str, Any]):
        self.train = plan["job"]["train"]
        self.parallel = plan["parallel"]
        self.data = plan["job"]["data"]
        self.length, self.tokens = self.train["seq_len"], corpus(self.data)
        self.samples = (
            len(self.tokens) - 1
        ) // self.length  # neighbours share one token, so each is a target once

    def size(self, consumed: int) -> int:
        """Samples of the step after `consumed`: the global batch, or its part of a ramp, in whole
        micro-batches."""
        par = self.parallel
        ramp = self.train.get("batch_ramp")
        if ramp is None or consumed >= ramp["over_samples"]:
            return par["global_batch_samples"]
        unit = par["micro_batch_size"] * par["dp"] * par["ep"]
        more = (
            (par["global_batch_samples"] - ramp["start_samples"]) * consumed // ramp["over_samples"]
        )
        return max(1, (ramp["start_samples"] + more) // unit) * unit

    def batch(self, consumed: int) -> Batch:
        rows = [self._sample(consumed + number) for number in range(self.size(consumed))]
        return Batch(*(torch.tensor(column) for column in zip(*rows, strict=True)))

    def _sample(self, consumed: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """(tokens, targets, positions, documents). Where documents are kept apart, positions begin
        anew after each END, and nothing is learnt from what follows it."""
        first = place(consumed, self.samples, self.data["seed"]) * self.length
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
            position, number = (0, number + 1) if token == END else (position + 1, number)
        targets = [
            IGNORED if token == END else target
            for token, target in zip(tokens, targets, strict=True)
        ]
        return tokens, targets, positions, numbers
