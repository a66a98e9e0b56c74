"""Finding the newest copy of which every file is left somewhere, and bringing each node the files that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from orchestrator.plan import Plan
from trainer.checkpoint.format import MANIFEST, Manifest, Piece, decode, rank_file
from trainer.checkpoint.load import Found, check_file
from trainer.checkpoint.restore import Stored
from trainer.checkpoint.save import layout_of
from trainer.comm import messages
from trainer.errors import CheckpointError

from . import transfer
from .peers import nodes_of
from .store import NodeMemory


class _Held(Struct, frozen=True):
    """What one rank has found good of one copy on its node."""

    name: str  # of the copy's folder
    hash: str  # of its manifest
    epoch: int
    step: int
    files: int  # that it consists of, on all nodes together
    good: list[str]


@dataclass(frozen=True)
class Copy:
    """A copy that is whole: every file is good on some node."""

    name: str
    epoch: int
    step: int
    holders: dict[str, list[int]]  # file -> ranks whose node has it, one a node, ascending
    source: int  # a rank whose node has the manifest

    @property
    def age(self) -> tuple[int, int]:
        """As `Found.age`."""
        return self.epoch, self.step


class Torn(NamedTuple):
    """A copy of which files are gone."""

    age: tuple[int, int]
    text: str


class Survey(NamedTuple):
    """What the nodes hold together."""

    whole: Copy | None  # the newest copy, by epoch and then step, of which every file is left
    torn: Torn | None  # the newest of all, if it is not that one


class Holdings:
    """The copies that nodes hold. `nodes`: the ranks on each, ascending. Every method is collective."""

    def __init__(self, nodes: Mapping[str, Sequence[int]], rank: int, run_id: str, memory: NodeMemory | None):
        self.nodes, self.rank, self.run_id, self.memory = nodes, rank, run_id, memory
        self.node_of = {rank: node for node, ranks in nodes.items() for rank in ranks}
        self.leader_of = {rank: nodes[node][0] for rank, node in self.node_of.items()}

    def newest(self) -> Copy | None:
        """The copy of the newest epoch, and of that the newest step, that is whole."""
        return self.survey().whole

    def survey(self) -> Survey:
        """The newest whole copy, and one that would be newer."""
        raw = messages.all_gather_bytes(msgspec.json.encode(self._held()))
        found: dict[tuple[int, int, str], dict[str, set[int]]] = {}
        about: dict[tuple[int, int, str], tuple[_Held, int]] = {}
        for rank, held in enumerate(msgspec.json.decode(one, type=list[_Held]) for one in raw):
            for one in held:
                key = one.epoch, one.step, one.hash
                about.setdefault(key, (one, rank))
                for file in one.good:
                    found.setdefault(key, {}).setdefault(file, set()).add(self.leader_of[rank])
        whole = max((key for key, (one, _) in about.items() if len(found.get(key, {})) == one.files), default=None)
        torn = None
        if about and (newest := max(about)) != whole:
            one, _ = about[newest]
            missing = one.files - len(found.get(newest, {}))
            text = f"of the copy of step {one.step} {missing} of {one.files} files are good on no node that is left"
            torn = Torn(newest[:2], text)
        if whole is None:
            return Survey(None, torn)
        one, source = about[whole]
        holders = {file: sorted(leaders) for file, leaders in found[whole].items()}
        return Survey(Copy(one.name, one.epoch, one.step, holders, self.leader_of[source]), torn)

    def _held(self) -> list[_Held]:
        """The ranks of a node share the hashing of its files."""
        mates = self.nodes[self.node_of[self.rank]]
        held = []
        for path in sorted(self.memory.copies()) if self.memory is not None else []:
            try:
                manifest = decode((path / MANIFEST).read_bytes())
            except (OSError, CheckpointError):
                continue  # not finished, or damaged: other nodes may have it
            if manifest.run_id == self.run_id:
                mine = manifest.files[mates.index(self.rank) :: len(mates)]
                good = [one.file for one in mine if (path / one.file).exists() and check_file(path, one) is None]
                held.append(_Held(path.name, manifest.hash, manifest.epoch, manifest.step, len(manifest.files), good))
        return held

    def manifest(self, copy: Copy) -> Manifest:
        raw = (self.memory.folder / copy.name / MANIFEST).read_bytes() if self.rank == copy.source else b""
        return decode(messages.broadcast_bytes(raw, src=copy.source))


class Recall(Holdings):
    """The copies that the nodes of a plan still hold, for the ranks of that plan. Every method is collective."""

    def __init__(self, plan: Plan, rank: int, run_id: str, memory: NodeMemory | None):
        super().__init__(nodes_of(plan), rank, run_id, memory)
        self.plan = plan

    def fetch(self, copy: Copy, pieces: Iterable[Piece]) -> Found:
        """The copy as this node has it, with all files that hold any of this rank's pieces, and its random state if it
        is on the layout that it was on. Raises CheckpointError on every rank if one of them cannot have them."""
        manifest, place, problems = self.manifest(copy), None, []
        needed: set[str] = set()
        try:
            place = self._place(copy)
            needed = Stored(Found(place, manifest)).files(pieces)
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        self._agree(copy, problems)
        own = rank_file(self.rank)
        if manifest.layout == layout_of(self.plan) and own in copy.holders:
            needed.add(own)
        raw = messages.all_gather_bytes(msgspec.json.encode(sorted(needed)))
        wants = [msgspec.json.decode(one, type=list[str]) for one in raw]
        missing: dict[int, set[str]] = {}
        for rank, files in enumerate(wants):
            leader = self.leader_of[rank]
            missing.setdefault(leader, set()).update(f for f in files if leader not in copy.holders[f])
        sizes = {record.file: record.bytes for record in manifest.files}
        for leader in sorted(missing):
            for file in sorted(missing[leader]):
                source = copy.holders[file][(leader + len(file)) % len(copy.holders[file])]
                if self.rank == source:
                    problems += transfer.run([transfer.Sending(place / file, sizes[file], leader)])
                elif self.rank == leader:
                    problems += transfer.run([transfer.Receiving(place / file, sizes[file], source)])
        if self.rank in missing:
            records = (record for record in manifest.files if record.file in missing[self.rank])
            problems += [problem for record in records if (problem := check_file(place, record))]
        self._agree(copy, problems)
        return Found(place, manifest)

    def _agree(self, copy: Copy, problems: list[str]) -> None:
        said = [one.decode() for one in messages.all_gather_bytes("; ".join(problems).encode())]
        if failed := [f"rank {rank}: {one}" for rank, one in enumerate(said) if one]:
            raise CheckpointError(f"copy of step {copy.step} in memory: {failed[0]}")

    def _place(self, copy: Copy) -> Path:
        if self.memory is None:
            raise CheckpointError("this node has no memory for copies")
        place = self.memory.folder / copy.name
        place.mkdir(mode=0o700, exist_ok=True)
        return place
