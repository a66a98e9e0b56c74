"""How the pods of an elastic run come together: over the run folder, which all of them share on the
claim.

Any number of them may be missing, pod 0 too, so nobody is waited for in particular. A pod that
comes while a coordinator lives joins that run as its node. Else the pods that wait write a file
each, again and again; the one with the lowest index begins an attempt once all are there, or enough
and no more come. Attempts are numbered, and a number is taken by `link(2)`, which is atomic and
exclusive, also on NFS. Who coordinates is elected by the agents (docs/protocol.md).
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
SETTLE_S = 15.0  # enough pods are there, and nobody more has come for so long
_STALE_LOOKS = 20  # a pod whose file stands still this long has gone
_READY_S = 60.0  # for who begins an attempt to write its plan

log = logging.getLogger("orch.elastic")


class Waiting(Frozen):
    """`kubernetes/waiting/<index>.json`: a pod that waits. `beat` grows."""

    index: int
    node: str
    address: str
    pod: str
    together: int  # nodes that the run had when this pod was let go
    beat: int = 0

    @property
    def join(self) -> Join:
        return Join(self.index, self.node, self.address, self.pod)


class Attempt(Frozen):
    """`kubernetes/attempts/<number>`: pods that begin together."""

    number: int
    members: list[str]  # names of the pods
    plan_hash: str = ""  # of the plan that is in force, once it is written


class Begun(Struct, frozen=True):
    """What a pod does now. None of an attempt: it joins a run that is at work."""

    attempt: Attempt | None


def node_name(pod: Join, shared: bool) -> str:
    """What the run calls this pod's share of a node, whoever else is there. `shared`: several pods
    may be on it."""
    return f"{pod.node}.pod-{pod.index}" if shared else pod.node


def come_together(
    folder: RunFolder,
    own: Waiting,
    least: int,
    heartbeat_s: float,
    timeout_s: float,
    begin: Callable[[list[Join]], str],
    settle_s: float = SETTLE_S,
) -> Begun:
    """Wait for what this pod is to do. `begin`: what the pod that begins an attempt does with its
    members, before it tells them; returns the hash of their plan.

    OrchError (76) when fewer than `least` come within `timeout_s`.
    """
    began = time.monotonic()
    waits = _Others(folder, own)
    coordinator = _Coordinator(folder, heartbeat_s)
    first = newest_attempt(folder)
    try:
        while True:
            found = waits.look()
            if (attempt := _announced(folder, first, own.pod)) is not None:
                return Begun(_ready(folder, attempt))
            everybody = len(found) >= max(one.together for one in found)
            if not everybody and coordinator.lives():
                return Begun(None)
            still = time.monotonic() - waits.changed_at
            enough = len(found) >= least and (
                everybody or (still >= settle_s and coordinator.is_gone())
            )
            number = newest_attempt(folder) + 1
            if enough and found[0].pod == own.pod and _take(folder, number, found):
                return Begun(_begin(folder, number, found, begin))
            if time.monotonic() > began + timeout_s:
                text = (
                    f"{len(found)} pods are here, at least {least} are needed: no more came within"
                    f" {timeout_s:g} s"
                )
                raise OrchError(text, Exit.CAPACITY)
            time.sleep(LOOK_S)
    finally:
        waits.leave()


class _Others:
    """The pods that wait, as this one sees them: those whose files change."""

    def __init__(self, folder: RunFolder, own: Waiting):
        self._folder = folder.path / "kubernetes" / "waiting"
        self._own = own
        self._seen: dict[int, tuple[Waiting, int]] = {}  # and for how many looks it has stood still
        self.changed_at = time.monotonic()
        self._names: frozenset[str] = frozenset()
        make_private_folder(self._folder)

    def look(self) -> list[Waiting]:
        """By index, this pod among them."""
        self._own = structs.replace(self._own, beat=self._own.beat + 1)
        write_private(self._path, msgspec.json.encode(self._own), durable=False)
        found = {self._own.index: self._own}
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, *UNREADABLE):
                one = msgspec.json.decode(path.read_bytes(), type=Waiting)
                before, still = self._seen.get(one.index, (None, _STALE_LOOKS))
                moved = before is not None and before != one
                self._seen[one.index] = one, 0 if moved else still + 1
                if one.index != self._own.index and self._seen[one.index][1] < _STALE_LOOKS:
                    found[one.index] = one
        names = frozenset(one.pod for one in found.values())
        if names != self._names:
            self._names = names
            self.changed_at = time.monotonic()
            log.info("%d pods wait: %s", len(names), ", ".join(sorted(names))[:300])
        return [found[index] for index in sorted(found)]

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._own.index}.json"


class _Coordinator:
    """Whether somebody coordinates the run already: its heartbeats in `coordinator.json` go on."""

    def __init__(self, folder: RunFolder, heartbeat_s: float):
        self._folder = folder
        self._heartbeat_s = heartbeat_s
        self._last = read_address(folder)
        self._since = time.monotonic()

    def lives(self) -> bool:
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
    """Its number, 0 for none."""
    try:
        names = os.listdir(_attempts(folder))
    except FileNotFoundError:
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def _announced(folder: RunFolder, first: int, pod: str) -> Attempt | None:
    """The newest attempt since `first`, if this pod is to take part in it."""
    number = newest_attempt(folder)
    if number <= first:
        return None
    with contextlib.suppress(OSError, *UNREADABLE):
        found = msgspec.json.decode((_attempts(folder) / str(number)).read_bytes(), type=Attempt)
        return found if pod in found.members else None
    return None


def _take(folder: RunFolder, number: int, found: Sequence[Waiting]) -> bool:
    """Whether this pod begins the attempt of that number, and nobody else."""
    make_private_folder(_attempts(folder))
    path = _attempts(folder) / str(number)
    draft = path.with_name(f".{number}.{secrets.token_hex(4)}")
    write_private(
        draft, msgspec.json.encode(Attempt(number=number, members=[one.pod for one in found]))
    )
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _begin(
    folder: RunFolder, number: int, found: Sequence[Waiting], begin: Callable[[list[Join]], str]
) -> Attempt:
    made = Attempt(
        number=number,
        members=[one.pod for one in found],
        plan_hash=begin([one.join for one in found]),
    )
    write_private(_attempts(folder) / f"{number}.ready", msgspec.json.encode(made))
    return made


def _ready(folder: RunFolder, attempt: Attempt) -> Attempt:
    """The attempt with its plan written. OrchError (75) when who begins it does not get there."""
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
    names: list[str]  # of every member, those without a rank too
    plans: dict[int, Plan]  # of every size, as coordinators read them


def map_elastic(
    planned: Mapping[int, Plan], members: Sequence[Join], topology: Topology | None, shared: bool
) -> ElasticMapping:
    """The plan of the largest size that these pods can hold, on the best of their nodes; the others
    are spares.

    OrchError (76) when they are too few. The plan of the largest size knows all of their nodes, so
    that coordinators know the network when they choose again.
    """
    from orchestrator.planner.elastic.replan import replan  # numpy, which only pods need

    size = legal_size(planned, len(members))
    if size is None:
        raise OrchError(
            f"{len(members)} pods are fewer than the smallest size of this run, {min(planned)}",
            Exit.CAPACITY,
        )
    names = [node_name(pod, shared) for pod in members]
    known = pod_topology(topology or FLAT, members, names)
    order = known.order(names)
    chosen = set(order[:size])
    taking = [pod for pod, name in zip(members, names, strict=True) if name in chosen]
    found = map_ranks(planned[size], taking, topology, [node_name(pod, shared) for pod in taking])
    plans = dict(planned)
    largest = max(plans)
    absent = [f"absent-{index}" for index in range(max(0, largest - len(names)))]
    whole = with_nodes(plans[largest].cluster, [*names, *absent], known)
    plans[largest] = replan(plans[largest], whole)
    if size != largest:
        plans[size] = found.plan
    assert used_node_count(found.plan) == size
    return ElasticMapping(found, names, plans)
