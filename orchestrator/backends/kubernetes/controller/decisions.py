"""Decisions: what changes in the ledger. One thread makes them, one after the other, each as one
write.

Reconciling a run asks for what it needs (a place, another node, its end); here all that is asked
for is weighed together. Whoever waits is placed in order of priority, then of age; who does not fit
does not hold up those behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import structs

from orchestrator.backends.kubernetes.devices import GpuDevices
from orchestrator.errors import OrchError

from .decide import Exclude, Release, Replace, Sick, Yield
from .ledger import Allocation, BadNode, Ledger
from .room import Fits, Room, Wish
from .store import Store

EXCLUDED_S = 120.0  # a node that a pod had to leave is not given to its run again for so long
_BATCH = 16  # runs placed in one write: the first need not wait for the last

log = logging.getLogger("orch.decisions")

Ask = Exclude | Release | Replace | Sick | Yield


class Waiting(NamedTuple):
    """A run that waits, in the order in which they are placed."""

    priority: int  # negative: the higher comes first
    created: str
    wish: Wish
    uid: str
    generation: int  # of the Job that it would get
    inputs: str


class Decisions:
    """`dirty(key)`: something has been decided about that run; `bad_s`: how long a sick node is
    left out."""

    def __init__(
        self, ledger: Ledger, store: Store, dirty: Callable[[str], None], bad_s: float = 86400.0
    ):
        self._ledger = ledger
        self._store = store
        self._dirty = dirty
        self._bad_s = bad_s
        self._lock = threading.Lock()
        self._waiting: dict[str, Waiting] = {}
        self._asks: dict[str, list[Ask]] = {}
        self._wishes: dict[str, Wish] = {}  # of runs that ask for other nodes
        self._news = False  # since the last decision
        self._fits = Fits({})
        self.why: dict[str, str] = {}  # why a run that waits has no nodes

    # ---------------------------------------------------------------------------------- any thread

    def wait(self, key: str, waiting: Waiting | None) -> None:
        """The run waits for room, or does not."""
        with self._lock:
            if waiting is None:
                self._waiting.pop(key, None)
                self.why.pop(key, None)
            else:
                before = self._waiting.get(key)
                self._news = (
                    self._news
                    or before is None
                    or before[:2] + before[3:] != waiting[:2] + waiting[3:]
                )
                self._waiting[key] = waiting

    def ask(self, key: str, asks: list[Ask], wish: Wish | None) -> None:
        with self._lock:
            known = self._asks.setdefault(key, [])
            known += [one for one in asks if one not in known]
            self._news = True
            if wish is not None:
                self._wishes[key] = wish

    @property
    def anything(self) -> bool:
        return bool(self._asks or self._waiting)

    @property
    def news(self) -> bool:
        """Whether something was asked for, or somebody waits who did not, since the last
        decision."""
        return self._news

    @property
    def waits_for_claims(self) -> bool:
        """Whether a run waits for GPUs that it asks for by claims: nothing tells when others have
        given theirs back."""
        return any(one.wish.claims for one in list(self._waiting.values()))

    def crowded(self, key: str) -> bool:
        """Whether others wait for room."""
        return any(other != key for other in list(self._waiting))

    def bad(self, now: float) -> dict[str, BadNode]:
        return {node: one for node, one in self._ledger.book.bad.items() if one.until > now}

    # -------------------------------------------------------------------------- the deciding thread

    def decide(self, now: float) -> None:
        """Weigh all that was asked for. Fenced; OrchError: nothing was decided, and all of it is
        asked for again."""
        with self._lock:
            self._news = False
            asks = self._asks
            self._asks = {}
            wishes = self._wishes
            self._wishes = {}
            waiting = sorted(self._waiting.items(), key=lambda item: item[1][:2])
        book = self._ledger.book
        bad = self.bad(now)
        changed: dict[str, Allocation] = {}
        released: list[str] = []
        for key, found in asks.items():
            for one in found:
                given = changed.get(key) or book.allocations.get(key)
                match one:
                    case Sick():
                        bad[one.node] = BadNode(now + self._bad_s, one.why)
                    case Exclude() if given is not None:
                        excluded = {**given.excluded, one.node: now + EXCLUDED_S}
                        changed[key] = structs.replace(given, excluded=excluded)
                    case Release() if given is not None:
                        released.append(key)
                    case Yield() if given is not None and not given.ending:
                        changed[key] = structs.replace(given, ending=one.why, wait=one.wait)
        self._ledger.write(changed, released, bad)
        for key in (*changed, *released):
            self._dirty(key)
        replaced = {
            key: one for key, found in asks.items() for one in found if isinstance(one, Replace)
        }
        if replaced or waiting:
            self._place(replaced, wishes, dict(waiting), bad, now)

    def _place(
        self,
        replaced: Mapping[str, Replace],
        wishes: Mapping[str, Wish],
        waiting: Mapping[str, Waiting],
        bad: Mapping[str, BadNode],
        now: float,
    ) -> None:
        book = self._ledger.book
        nodes, _ = self._store.nodes_now()
        by_claim = any(
            one.claims for one in (*wishes.values(), *(one.wish for one in waiting.values()))
        )
        devices = self._devices() if by_claim else self._fits.devices
        if self._fits.nodes is not nodes or self._fits.devices != devices:
            self._fits = Fits(nodes, devices)
        room = Room(self._fits, self._store.pods.all(), book.allocations, bad)
        changed: dict[str, Allocation] = {}
        for key, asked in replaced.items():
            given = book.allocations.get(key)
            if given is not None and not given.ending and key in wishes:
                now_given = _replaced(given, asked, wishes[key], room, now, grow=not waiting)
                changed |= {key: now_given} if now_given != given else {}
        self._commit(changed)
        number = self._ledger.book.next
        for key, one in waiting.items():
            if key in self._ledger.book.allocations:
                continue
            try:
                found = room.place(one.wish)
            except OrchError as error:
                found = error.message
            if isinstance(found, str):
                if self.why.get(key) != found:
                    self.why[key] = found
                    self._dirty(key)
                continue
            absent = [""] * max(0, one.wish.pods - len(found.nodes))
            changed[key] = Allocation(
                uid=one.uid, number=number, generation=one.generation, nodes=found.nodes + absent, needs=found.needs,
                size=found.size, inputs=one.inputs,
            )  # fmt: skip
            number += 1
            if len(changed) >= _BATCH:
                self._commit(changed)
        self._commit(changed)

    def _devices(self) -> GpuDevices:
        """Of now; as they were where the API server does not tell, for other runs do not wait for
        that."""
        try:
            return self._store.devices()
        except OrchError as error:
            log.warning("devices: %s", error.message)
            return self._fits.devices

    def _commit(self, changed: dict[str, Allocation]) -> None:
        self._ledger.write(changed)
        for key, one in changed.items():
            log.info("%s: allocation %d, %s", key, one.number, ",".join(one.nodes)[:200])
            with self._lock:
                self._waiting.pop(key, None)
                self.why.pop(key, None)
            self._dirty(key)
        changed.clear()


def _replaced(
    given: Allocation, one: Replace, wish: Wish, room: Room, now: float, grow: bool
) -> Allocation:
    """The allocation with other nodes for these indices, as far as there are any. `grow`: beyond
    the size that an elastic run was placed with, which it is not while others wait."""
    nodes = list(given.nodes)
    excluded = {node: until for node, until in given.excluded.items() if until > now}
    for index in one.indices:
        nodes[index] = ""
    wish = structs.replace(wish, excluded=frozenset(excluded))
    near = [node for node in nodes if node]
    most = len(nodes) if grow or not wish.elastic else given.size
    found = room.more(wish, near, most - len(near))
    for index in [index for index, node in enumerate(nodes) if not node][: len(found)]:
        nodes[index] = found.pop(0)
    lost_at = 0.0 if all(nodes) else given.lost_at or now
    return structs.replace(given, nodes=nodes, excluded=excluded, lost_at=lost_at)
