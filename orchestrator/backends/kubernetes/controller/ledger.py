"""The ledger: which run holds which nodes, in one object, so that every decision is one
compare-and-swap.

A ConfigMap of the controller's namespace. It is written only at the version that was read: of two
controllers that decide at once, because one was paused and another has taken over, one is refused
by the API server and leaves. An allocation is all of a run's nodes or none, so no two runs ever
hold parts of what each other need.

What an allocation allows is to take the scheduling gate off the run's pods, one by one, and nothing
else starts a pod. It is given back only when none of the run's pods is left. So whoever still acts
on an allocation that is gone finds no pod to act on.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

NAME = "orch-placements"
_MOST = 1 << 24  # bytes unpacked


class Fenced(Exception):
    """Somebody else has written the ledger: this process must decide nothing more."""


class Allocation(Struct, frozen=True, omit_defaults=True):
    """Of one start of one run. `nodes`: by completion index; "" where a node was lost and none has
    taken its place."""

    uid: str  # of the TrainRun
    number: int  # grows with every allocation of the cluster
    generation: int  # of the run's Job
    nodes: list[str]
    needs: dict[
        str, float
    ] = {}  # of one pod, where several may share a node; {}: a node belongs to one pod alone
    size: int = 0  # nodes of the plan it was made for
    inputs: str = ""  # digest of what that plan was made from
    excluded: dict[
        str, float
    ] = {}  # node -> Unix seconds until which it is not given to this run again
    lost_at: float = 0.0  # since when it misses a node
    ending: str = ""  # why it is given back, once its pods have left
    wait: bool = False  # ... and its run is not placed again at once

    @property
    def held(self) -> list[str]:
        return [node for node in self.nodes if node]


class BadNode(Struct, frozen=True):
    until: float  # Unix seconds
    why: str


class Book(Struct, frozen=True, omit_defaults=True):
    """What the ledger holds. Keys: namespace/name of the TrainRun; a node's name."""

    next: int = 1
    allocations: dict[str, Allocation] = {}
    bad: dict[str, BadNode] = {}


class Ledger:
    """The book as this process has read or written it last. For one thread alone."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._version = ""
        self.book = Book()

    def load(self) -> bool:
        """Reads it, or makes an empty one. False: it was not there. OrchError."""
        body = self._cluster.get("ConfigMap", NAME)
        made = body is None
        if body is None:
            body = self._cluster.create(
                _body(self._cluster.namespace, Book())
            ) or self._cluster.get("ConfigMap", NAME)
        if body is None:
            raise OrchError(f"ConfigMap {NAME} comes and goes", Exit.CAPACITY)
        self._version = body["metadata"]["resourceVersion"]
        self.book = _unpacked(body)
        return not made

    def get(self, key: str) -> Allocation | None:
        return self.book.allocations.get(key)

    def write(
        self,
        given: Mapping[str, Allocation],
        released: Iterable[str] = (),
        bad: Mapping[str, BadNode] | None = None,
    ) -> None:
        """These allocations put in and those taken out, in one write; `bad`: all nodes that are
        left out, None: as before. Fenced when the ledger is another by now."""
        gone = set(released)
        kept = {key: one for key, one in self.book.allocations.items() if key not in gone} | dict(
            given
        )
        number = max([self.book.next, *(one.number + 1 for one in given.values())])
        book = Book(number, kept, self.book.bad if bad is None else dict(bad))
        if book == self.book:
            return
        body = _body(self._cluster.namespace, book)
        body["metadata"]["resourceVersion"] = self._version
        written = self._cluster.replace(body)
        if written is None:
            self._check_lost(book)
            return
        self._version = written["metadata"]["resourceVersion"]
        self.book = book

    def _check_lost(self, meant: Book) -> None:
        """A write whose answer was lost on the way is tried again by the transport, and then meets
        itself."""
        body = self._cluster.get("ConfigMap", NAME)
        if body is None or _unpacked(body) != meant:
            raise Fenced("the ledger has been written by somebody else")
        self._version = body["metadata"]["resourceVersion"]
        self.book = meant


def _body(namespace: str, book: Book) -> dict[str, Any]:
    raw = zlib.compress(msgspec.json.encode(book, order="deterministic"), 6)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": NAME,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "orch"},
        },
        "binaryData": {"book": b64encode(raw).decode()},
    }


def _unpacked(body: Mapping[str, Any]) -> Book:
    """OrchError (65) for one that is not ours, or damaged."""
    try:
        raw = zlib.decompressobj().decompress(b64decode(body["binaryData"]["book"]), _MOST)
        return msgspec.json.decode(raw, type=Book)
    except (KeyError, TypeError, ValueError, zlib.error, msgspec.MsgspecError) as error:
        text = (
            f"ConfigMap {NAME} cannot be read ({error}): delete it, and it is made anew from the"
            " pods that there are"
        )
        raise OrchError(text, Exit.CONFIG) from None
