"""The ledger: which run holds which nodes, in one object, so that every decision is one
compare-and-swap.

It is a ConfigMap of the controller's namespace, written only at the version that was read: if two
controllers decide at once, because one was suspended and another has taken over, the API server
refuses one, which then exits. An allocation is all of a run's nodes or none, so no two runs ever
hold parts of what each other need.

An allocation permits removing the scheduling gates of the run's pods, one by one; nothing else
starts a pod. It is released only when none of the run's pods is left. So a controller that still
acts on a released allocation finds no pod to act on.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct, field

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.names import Body, JsonObject
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

NAME = "orch-placements"
_MOST_BYTES = 1 << 24  # unpacked


class Fenced(Exception):
    """Another process has written the ledger: this one must decide nothing more."""


class Allocation(Struct, frozen=True, omit_defaults=True):
    """The nodes of one start of one run, by completion index; "" for a node that was lost and not
    replaced."""

    uid: str  # the TrainRun's
    number: int  # grows with every allocation of the cluster
    generation: int  # the Job's
    nodes: list[str]
    #: requests of one pod if several may share a node; {}: a node belongs to one pod alone
    needs: dict[str, float] = {}
    size: int = 0  # nodes of the plan that it was made for
    inputs: str = ""  # digest of that plan's inputs
    #: node -> Unix seconds until which it is not given to this run again
    excluded: dict[str, float] = {}
    lost_at: float = 0.0  # since when a node is missing
    ending: str = ""  # why it is released once its pods have ended
    wait: bool = False  # ... and its run is not placed again at once

    @property
    def held(self) -> list[str]:
        return [node for node in self.nodes if node]


class BadNode(Struct, frozen=True):
    until: float  # Unix seconds
    reason: str = field(name="why")


class Book(Struct, frozen=True, omit_defaults=True):
    """The content of the ledger. Keys: namespace/name of the TrainRun; a node's name."""

    next: int = 1
    allocations: dict[str, Allocation] = {}
    bad: dict[str, BadNode] = {}


class Ledger:
    """The book as this process last read or wrote it. Only one thread may use it."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._version = ""
        self.book = Book()

    def load(self) -> bool:
        """Reads the ledger, or creates an empty one and returns False. OrchError."""
        body = self._cluster.get("ConfigMap", NAME)
        existed = body is not None
        if body is None:
            empty = _body(self._cluster.namespace, Book())
            body = self._cluster.create(empty) or self._cluster.get("ConfigMap", NAME)
        if body is None:
            raise OrchError(f"ConfigMap {NAME} comes and goes", Exit.CAPACITY)
        self._version = body["metadata"]["resourceVersion"]
        self.book = _unpacked(body)
        return existed

    def get(self, key: str) -> Allocation | None:
        return self.book.allocations.get(key)

    def write(
        self,
        changed: Mapping[str, Allocation],
        released: Iterable[str] = (),
        bad: Mapping[str, BadNode] | None = None,
    ) -> None:
        """Adds and removes allocations in one write; `bad`: all bad nodes, None: unchanged. Fenced
        if another process has written the ledger."""
        allocations = {**self.book.allocations}
        for key in released:
            allocations.pop(key, None)
        allocations |= changed
        next_number = max([self.book.next, *(added.number + 1 for added in changed.values())])
        book = Book(
            next_number,
            allocations,
            self.book.bad if bad is None else dict(bad),
        )
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

    def _check_lost(self, written_book: Book) -> None:
        """Accepts our own write whose answer was lost: the transport repeats it, and it then
        conflicts with itself."""
        body = self._cluster.get("ConfigMap", NAME)
        if body is None or _unpacked(body) != written_book:
            raise Fenced("the ledger has been written by somebody else")
        self._version = body["metadata"]["resourceVersion"]
        self.book = written_book


def _body(namespace: str, book: Book) -> JsonObject:
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


def _unpacked(body: Body) -> Book:
    """Unpacks the book. OrchError (65) if the object is not ours, or damaged."""
    try:
        packed = b64decode(body["binaryData"]["book"])
        raw = zlib.decompressobj().decompress(packed, _MOST_BYTES)
        return msgspec.json.decode(raw, type=Book)
    except (KeyError, TypeError, ValueError, zlib.error, msgspec.MsgspecError) as error:
        message = (
            f"ConfigMap {NAME} cannot be read ({error}): delete it, and the controller rebuilds it"
            " from the living pods"
        )
        raise OrchError(message, Exit.CONFIG) from None
