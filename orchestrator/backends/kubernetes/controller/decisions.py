"""Decisions: the changes of the ledger. One thread makes them one after the other, each as one
write.

Reconciling a run asks for what it needs (nodes, another node, its end); here all requests are
weighed together. Waiting runs are placed in order of priority, then of age; a run that does not fit
does not hold up those behind it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import structs

from orchestrator.backends.kubernetes.devices import GpuDevices
from orchestrator.errors import OrchError

from .decide import Exclude, MarkBad, Release, Replace, Yield
from .ledger import Allocation, BadNode, Ledger
from .room import Fits, NodeRequest, Placed, Room
from .store import Store

EXCLUDED_S = 120.0  # how long a node that a pod had to leave is not given to its run again
_BATCH = 16  # runs placed in one write, so that the first need not wait for the last

log = logging.getLogger("orch.decisions")

Ask = Exclude | Release | Replace | MarkBad | Yield


class Waiting(NamedTuple):
    """A waiting run. The order of the fields is the order in which runs are placed."""

    priority: int  # negated, so that the higher comes first
    created: str
    request: NodeRequest
    uid: str
    generation: int  # the Job's, if the run gets nodes
    inputs: str


class Decisions:
    """Collects requests and decides them. `dirty(key)` is called when something was decided about
    that run; `bad_s`: how long a bad node is excluded."""

    def __init__(
        self,
        ledger: Ledger,
        store: Store,
        dirty: Callable[[str], None],
        bad_s: float = 86400.0,
    ):
        self._ledger = ledger
        self._store = store
        self._dirty = dirty
        self._bad_s = bad_s
        self._lock = threading.Lock()
        self._waiting: dict[str, Waiting] = {}
        self._asks: dict[str, list[Ask]] = {}
        self._requests: dict[str, NodeRequest] = {}  # requests for other nodes
        self._news = False  # whether requests came since the last decision
        self._fits = Fits({})
        self.reasons: dict[str, str] = {}  # run that waits -> why it has no nodes

    # ---------------------------------------------------------------------------------- any thread

    def wait(self, key: str, waiting: Waiting | None) -> None:
        """Registers that the run waits for nodes, or no longer does."""
        with self._lock:
            if waiting is None:
                self._waiting.pop(key, None)
                self.reasons.pop(key, None)
            else:
                registered = self._waiting.get(key)
                if (
                    registered is None
                    or registered[:2] + registered[3:] != waiting[:2] + waiting[3:]
                ):
                    self._news = True
                self._waiting[key] = waiting

    def ask(self, key: str, asks: list[Ask], request: NodeRequest | None) -> None:
        with self._lock:
            pending = self._asks.setdefault(key, [])
            pending += [ask for ask in asks if ask not in pending]
            self._news = True
            if request is not None:
                self._requests[key] = request

    @property
    def anything(self) -> bool:
        return bool(self._asks or self._waiting)

    @property
    def news(self) -> bool:
        """Whether something was requested, or another run waits, since the last decision."""
        return self._news

    @property
    def waits_for_claims(self) -> bool:
        """Whether a run waits for GPUs that it requests by ResourceClaims: no event tells when
        other claims free theirs."""
        return any(waiting.request.claims for waiting in list(self._waiting.values()))

    def crowded(self, key: str) -> bool:
        """Tells whether other runs wait for nodes."""
        return any(waiting_key != key for waiting_key in list(self._waiting))

    def bad(self, now: float) -> dict[str, BadNode]:
        return {node: bad for node, bad in self._ledger.book.bad.items() if bad.until > now}

    # -------------------------------------------------------------------------- the deciding thread

    def decide(self, now: float) -> None:
        """Decides all requests. Fenced. OrchError: nothing was decided, and the runs ask again."""
        with self._lock:
            self._news = False
            asks = self._asks
            self._asks = {}
            requests = self._requests
            self._requests = {}
            waiting = sorted(self._waiting.items(), key=lambda item: item[1][:2])
        book = self._ledger.book
        bad = self.bad(now)
        changed: dict[str, Allocation] = {}
        released: list[str] = []
        replaced: dict[str, Replace] = {}
        for key, ask in [(key, ask) for key, run_asks in asks.items() for ask in run_asks]:
            allocation = changed.get(key) or book.allocations.get(key)
            match ask:
                case MarkBad():
                    bad[ask.node] = BadNode(now + self._bad_s, ask.reason)
                case Replace():
                    replaced[key] = ask
                case Exclude() if allocation is not None:
                    excluded = {**allocation.excluded, ask.node: now + EXCLUDED_S}
                    changed[key] = structs.replace(allocation, excluded=excluded)
                case Release() if allocation is not None:
                    released.append(key)
                case Yield() if allocation is not None and not allocation.ending:
                    changed[key] = structs.replace(
                        allocation,
                        ending=ask.reason,
                        wait=ask.wait,
                    )
        self._ledger.write(changed, released, bad)
        for key in (*changed, *released):
            self._dirty(key)
        if replaced or waiting:
            self._place(replaced, requests, dict(waiting), bad, now)

    def _place(
        self,
        replaced: Mapping[str, Replace],
        requests: Mapping[str, NodeRequest],
        waiting: Mapping[str, Waiting],
        bad: Mapping[str, BadNode],
        now: float,
    ) -> None:
        allocations = self._ledger.book.allocations
        all_requests = [*requests.values(), *(run.request for run in waiting.values())]
        self._update_fits(by_claim=any(request.claims for request in all_requests))
        room = Room(self._fits, self._store.pods.all(), allocations, bad)
        changed: dict[str, Allocation] = {}
        for key, replace in replaced.items():
            allocation = allocations.get(key)
            if allocation is not None and not allocation.ending and key in requests:
                moved = _replaced(
                    allocation,
                    replace,
                    requests[key],
                    room=room,
                    now=now,
                    grow=not waiting,
                )
                if moved != allocation:
                    changed[key] = moved
        self._commit(changed)
        number = self._ledger.book.next
        for key, run in waiting.items():
            if key in self._ledger.book.allocations:
                continue
            try:
                placed = room.place(run.request)
            except OrchError as error:
                placed = error.message
            if isinstance(placed, str):
                if self.reasons.get(key) != placed:
                    self.reasons[key] = placed
                    self._dirty(key)
                continue
            changed[key] = _allocation(run, placed, number)
            number += 1
            if len(changed) >= _BATCH:
                self._commit(changed)
        self._commit(changed)

    def _update_fits(self, by_claim: bool) -> None:
        nodes, _ = self._store.nodes_now()
        devices = self._devices() if by_claim else self._fits.devices
        if self._fits.nodes is not nodes or self._fits.devices != devices:
            self._fits = Fits(nodes, devices)

    def _devices(self) -> GpuDevices:
        """Reads the devices now; returns the last known ones if the API server does not answer,
        because other runs do not wait for it."""
        try:
            return self._store.devices()
        except OrchError as error:
            log.warning("devices: %s", error.message)
            return self._fits.devices

    def _commit(self, changed: dict[str, Allocation]) -> None:
        self._ledger.write(changed)
        for key, allocation in changed.items():
            nodes = ",".join(allocation.nodes)[:200]
            log.info("%s: allocation %d, %s", key, allocation.number, nodes)
            with self._lock:
                self._waiting.pop(key, None)
                self.reasons.pop(key, None)
            self._dirty(key)
        changed.clear()


def _allocation(run: Waiting, placed: Placed, number: int) -> Allocation:
    absent = [""] * max(0, run.request.pods - len(placed.nodes))
    return Allocation(
        uid=run.uid,
        number=number,
        generation=run.generation,
        nodes=placed.nodes + absent,
        needs=placed.needs,
        size=placed.size,
        inputs=run.inputs,
    )


def _replaced(
    allocation: Allocation,
    replace: Replace,
    request: NodeRequest,
    *,
    room: Room,
    now: float,
    grow: bool,
) -> Allocation:
    """Returns the allocation with other nodes for these indices, as far as there are any. `grow`:
    an elastic run may grow beyond the size that it was placed with, which no run does while others
    wait."""
    nodes = list(allocation.nodes)
    excluded = {node: until for node, until in allocation.excluded.items() if until > now}
    for index in replace.indices:
        nodes[index] = ""
    request = structs.replace(request, excluded=frozenset(excluded))
    near = [node for node in nodes if node]
    largest = len(nodes) if grow or not request.elastic else allocation.size
    new_nodes = room.more(request, near, largest - len(near))
    empty_indices = [index for index, node in enumerate(nodes) if not node]
    for index, node in zip(empty_indices, new_nodes, strict=False):
        nodes[index] = node
    lost_at = 0.0 if all(nodes) else allocation.lost_at or now
    return structs.replace(
        allocation,
        nodes=nodes,
        excluded=excluded,
        lost_at=lost_at,
    )
