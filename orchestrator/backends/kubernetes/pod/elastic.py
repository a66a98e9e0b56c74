"""How the pods of an elastic run find each other: through the run folder, which all of them share
on the claim.

Any number of them may be missing, pod 0 included, so no particular pod is waited for. A pod that
comes while a coordinator lives joins that run as its node. Otherwise each waiting pod rewrites a
file of its own at intervals; the pod with the lowest index begins an attempt once all are there, or
enough are there and no more come. Attempts are numbered, and a number is taken by `link(2)`, which
is atomic and exclusive, also on NFS. The agents elect the coordinator (docs/protocol.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from orchestrator.agent.node.connection import read_address
from orchestrator.backends.kubernetes.pod.rank_mapping import RankMapping, map_ranks, pod_topology
from orchestrator.backends.kubernetes.pod.rendezvous import Join
from orchestrator.cluster.model import FLAT, Topology
from orchestrator.cluster.nodes import with_nodes
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit
from orchestrator.planner.elastic.next_plan import legal_size
from orchestrator.planner.placement.rank_assignment import used_node_count
from orchestrator.run.folder import RunFolder, make_private_folder, write_private

LOOK_S = 0.5
SETTLE_S = 15.0  # how long no more pods have come before enough of them begin
_STALE_LOOKS = 20  # a pod whose file has not changed for so many looks is gone
_READY_S = 60.0  # time to write the plan of an attempt

log = logging.getLogger("orch.elastic")


class Waiting(Frozen):
    """`kubernetes/waiting/<index>.json`: a waiting pod. `heartbeats` counts its heartbeats."""

    index: int
    node: str
    address: str
    pod: str
    together: int  # nodes that the run had when this pod's gate was removed
    heartbeats: int = msgspec.field(default=0, name="beat")

    @property
    def join(self) -> Join:
        return Join(self.index, self.node, self.address, self.pod)


class Attempt(Frozen):
    """`kubernetes/attempts/<number>`: pods that start together."""

    number: int
    members: list[str]  # names of the pods
    plan_hash: str = ""  # hash of the plan in force, once it is written


class Begun(Struct, frozen=True):
    """The attempt that this pod takes part in; None if it joins a running run."""

    attempt: Attempt | None


def node_name(pod: Join, shared: bool) -> str:
    """Returns the run's name of this pod's share of a node, which does not depend on other pods.
    `shared`: several pods may be on the node."""
    return f"{pod.node}.pod-{pod.index}" if shared else pod.node


def come_together(
    folder: RunFolder,
    this_pod: Waiting,
    *,
    least: int,
    heartbeat_s: float,
    timeout_s: float,
    begin: Callable[[list[Join]], str],
    settle_s: float = SETTLE_S,
) -> Begun:
    """Waits until this pod knows its attempt. `begin`: called by the pod that begins an attempt
    with its members, before it announces the attempt; returns the hash of their plan.

    OrchError (76) if fewer than `least` pods come within `timeout_s`.
    """
    started = time.monotonic()
    waiting_room = _WaitingPods(folder, this_pod)
    coordinator = _Coordinator(folder, heartbeat_s)
    first = newest_attempt(folder)
    try:
        while True:
            waiting_pods = waiting_room.look()
            if (attempt := _announced(folder, first, this_pod.pod)) is not None:
                return Begun(_ready(folder, attempt))
            all_here = len(waiting_pods) >= max(pod.together for pod in waiting_pods)
            if not all_here and coordinator.is_alive():
                return Begun(None)
            unchanged_s = time.monotonic() - waiting_room.changed_at
            settled = unchanged_s >= settle_s and coordinator.is_gone()
            may_begin = len(waiting_pods) >= least and (all_here or settled)
            number = newest_attempt(folder) + 1
            if (
                may_begin
                and waiting_pods[0].pod == this_pod.pod
                and _take(folder, number, waiting_pods)
            ):
                return Begun(_begin(folder, number, waiting_pods, begin))
            if time.monotonic() > started + timeout_s:
                message = (
                    f"{len(waiting_pods)} pods are here, at least {least} are needed: no more came"
                    " within"
                    f" {timeout_s:g} s"
                )
                raise OrchError(message, Exit.CAPACITY)
            time.sleep(LOOK_S)
    finally:
        waiting_room.leave()


class _WaitingPods:
    """The waiting pods as this one sees them: those whose files change."""

    def __init__(self, folder: RunFolder, this_pod: Waiting):
        self._folder = folder.path / "kubernetes" / "waiting"
        self._own = this_pod
        self._seen: dict[int, tuple[Waiting, int]] = {}  # with the number of looks without a change
        self.changed_at = time.monotonic()
        self._names: frozenset[str] = frozenset()
        make_private_folder(self._folder)

    def look(self) -> list[Waiting]:
        """Rewrites this pod's file, and returns the waiting pods by index, this one among them."""
        self._own = structs.replace(self._own, heartbeats=self._own.heartbeats + 1)
        write_private(self._path, msgspec.json.encode(self._own), durable=False)
        waiting_pods = {self._own.index: self._own}
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, *UNREADABLE):
                pod = msgspec.json.decode(path.read_bytes(), type=Waiting)
                last_seen, unchanged_looks = self._seen.get(pod.index, (None, _STALE_LOOKS))
                changed = last_seen is not None and last_seen != pod
                unchanged_looks = 0 if changed else unchanged_looks + 1
                self._seen[pod.index] = (pod, unchanged_looks)
                if pod.index != self._own.index and unchanged_looks < _STALE_LOOKS:
                    waiting_pods[pod.index] = pod
        names = frozenset(pod.pod for pod in waiting_pods.values())
        if names != self._names:
            self._names = names
            self.changed_at = time.monotonic()
            log.info("%d pods wait: %s", len(names), ", ".join(sorted(names))[:300])
        return [waiting_pods[index] for index in sorted(waiting_pods)]

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._own.index}.json"


class _Coordinator:
    """Tells whether a pod coordinates the run already: then the heartbeats in `coordinator.json`
    continue."""

    def __init__(self, folder: RunFolder, heartbeat_s: float):
        self._folder = folder
        self._heartbeat_s = heartbeat_s
        self._last = read_address(folder)
        self._since = time.monotonic()

    def is_alive(self) -> bool:
        now = read_address(self._folder)
        if now is None or now == self._last or self._last is None:
            self._last = self._last or now
            return False
        return True

    def is_gone(self) -> bool:
        return self._last is None or time.monotonic() > self._since + self._heartbeat_s


# ------------------------------------------------------------------------------------------
#     attempts


def _attempts(folder: RunFolder) -> Path:
    return folder.path / "kubernetes" / "attempts"


def newest_attempt(folder: RunFolder) -> int:
    """Returns the number of the newest attempt, 0 for none."""
    try:
        names = os.listdir(_attempts(folder))
    except FileNotFoundError:
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def _announced(folder: RunFolder, first: int, pod: str) -> Attempt | None:
    """Returns the newest attempt since `first` if this pod is a member of it."""
    number = newest_attempt(folder)
    if number <= first:
        return None
    with contextlib.suppress(OSError, *UNREADABLE):
        attempt = msgspec.json.decode((_attempts(folder) / str(number)).read_bytes(), type=Attempt)
        return attempt if pod in attempt.members else None
    return None


def _take(folder: RunFolder, number: int, waiting_pods: Sequence[Waiting]) -> bool:
    """Takes the number for an attempt that this pod begins. Returns False if another pod has taken
    it."""
    make_private_folder(_attempts(folder))
    path = _attempts(folder) / str(number)
    draft = path.with_name(f".{number}.{secrets.token_hex(4)}")
    attempt = Attempt(number=number, members=[waiting.pod for waiting in waiting_pods])
    write_private(draft, msgspec.json.encode(attempt))
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _begin(
    folder: RunFolder,
    number: int,
    waiting_pods: Sequence[Waiting],
    begin: Callable[[list[Join]], str],
) -> Attempt:
    attempt = Attempt(
        number=number,
        members=[waiting.pod for waiting in waiting_pods],
        plan_hash=begin([waiting.join for waiting in waiting_pods]),
    )
    write_private(_attempts(folder) / f"{number}.ready", msgspec.json.encode(attempt))
    return attempt


def _ready(folder: RunFolder, attempt: Attempt) -> Attempt:
    """Waits for the attempt's plan. OrchError (75) if the pod that begins the attempt does not
    write it."""
    path = _attempts(folder) / f"{attempt.number}.ready"
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, *UNREADABLE):
            return msgspec.json.decode(path.read_bytes(), type=Attempt)
        time.sleep(LOOK_S)
    raise OrchError(
        f"{attempt.members[0]} began attempt {attempt.number} and went away", Exit.RESTART
    )


# ------------------------------------------------------------------------------------------ ranks


class ElasticMapping(Struct, frozen=True):
    mapping: RankMapping
    names: list[str]  # node names of all members, also of those without a rank
    plans: dict[int, Plan]  # size -> plan, as coordinators read them


def map_elastic(
    planned: Mapping[int, Plan],
    members: Sequence[Join],
    topology: Topology | None,
    shared: bool,
) -> ElasticMapping:
    """Returns the plan of the largest size that these pods can hold, on the best of their nodes;
    the others are spares.

    OrchError (76) if they are too few. The plan of the largest size contains all of their nodes, so
    that coordinators know the network when they choose again.
    """
    from orchestrator.planner.elastic.replan import replan  # numpy, which only pods need

    size = legal_size(planned, len(members))
    if size is None:
        smallest = min(planned)
        message = f"{len(members)} pods are fewer than the smallest size of this run, {smallest}"
        raise OrchError(message, Exit.CAPACITY)
    names = [node_name(pod, shared) for pod in members]
    network = pod_topology(topology or FLAT, members, names)
    chosen = set(network.order(names)[:size])
    active = [pod for pod, name in zip(members, names, strict=True) if name in chosen]
    active_names = [node_name(pod, shared) for pod in active]
    mapping = map_ranks(planned[size], active, topology, active_names)
    plans = dict(planned)
    largest = max(plans)
    absent = [f"absent-{index}" for index in range(max(0, largest - len(names)))]
    cluster = with_nodes(plans[largest].cluster, [*names, *absent], network)
    plans[largest] = replan(plans[largest], cluster)
    if size != largest:
        plans[size] = mapping.plan
    assert used_node_count(mapping.plan) == size
    return ElasticMapping(mapping, names, plans)
