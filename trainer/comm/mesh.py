"""The process groups of one rank, taken from the plan's group lists. No arithmetic on ranks happens here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from orchestrator.plan.schedules import copies_of

#: Order of creation, the same on every rank. "kv": tp ranks that share one key/value head. "shard": ranks of "grad"
#: that together hold one copy of what ZeRO shards; "replica": those of "grad" with the same shard (hybrid sharding).
GROUPS = ("tp", "cp", "ep", "pp", "dp", "grad", "model", "embedding", "kv", "shard", "replica")


@dataclass(frozen=True)
class Mesh:
    """One rank's place and its groups. A group of one member is None: every communication helper then does nothing."""

    rank: int
    coord: Coord
    members: Mapping[str, tuple[int, ...]]  # axis or composite -> global ranks of this rank's group, ascending
    groups: Mapping[str, dist.ProcessGroup | None]

    @classmethod
    def from_plan(cls, plan: Plan, rank: int, timeout: timedelta | None = None) -> Mesh:
        """Create this rank's process groups; every rank of the plan must call it at the same time.

        Only members meet to create a group (`use_local_synchronization`), so that the cost for a rank does not grow
        with the world; the one order in `GROUPS` keeps overlapping groups from waiting on each other in a ring.
        Groups with equal members share one communicator, except "pp": its point-to-point traffic is asynchronous
        and must not be ordered behind collectives.
        """
        members = {name: members_of(plan, name, rank) for name in GROUPS}
        made: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}
        groups: dict[str, dist.ProcessGroup | None] = {}
        for name in GROUPS:
            ranks, key = members[name], (name == "pp", members[name])
            if len(ranks) > 1 and key not in made:
                made[key] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
            groups[name] = made[key] if len(ranks) > 1 else None
            if name == "embedding" and not ranks and plan.parallel.pp > 2:
                # torch names a group by how many a rank has made before: all ranks must make equally many
                dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
        return cls(rank, plan.ranks[rank].coord, MappingProxyType(members), MappingProxyType(groups))

    @classmethod
    def alone(cls, plan: Plan, rank: int = 0) -> Mesh:
        """The same place without process groups: for one process, dry runs and tests of pure code."""
        members = {name: members_of(plan, name, rank) for name in GROUPS}
        return cls(rank, plan.ranks[rank].coord, MappingProxyType(members), MappingProxyType(dict.fromkeys(GROUPS)))

    def size(self, axis: str) -> int:
        return max(1, len(self.members[axis]))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        return self.groups[axis]

    def ranks(self, axis: str) -> tuple[int, ...]:
        """Global ranks of this rank's group; empty where it has none ("embedding" on a middle stage)."""
        return self.members[axis]

    def index(self, axis: str) -> int:
        """This rank's position in its group."""
        return self.members[axis].index(self.rank) if self.members[axis] else 0


def members_of(plan: Plan, name: str, rank: int) -> tuple[int, ...]:
    """Global ranks of the group of `rank` on an axis or composite; empty if it is in none.

    Ascending, because that is how torch numbers the members of a group whatever order it is given: with dp nested
    inside cp, the plan's own order (cp fastest) would be another.
    """
    if name == "kv":
        return _kv_replicas(plan, rank)
    if name in ("shard", "replica"):
        return _hybrid(plan, name, rank)
    if name in ("grad", "model", "embedding") and copies_of(plan.parallel) > 1:
        return _two_copies(plan, name, rank)
    return next((tuple(sorted(group)) for group in plan.groups[name] if rank in group), ())


def _kv_replicas(plan: Plan, rank: int) -> tuple[int, ...]:
    """With fewer key/value heads than tp ranks, tp/kv_heads neighbours hold the same head."""
    share = max(1, plan.parallel.tp // plan.model.kv_heads)
    tp_ranks = members_of(plan, "tp", rank)
    first = tp_ranks.index(rank) // share * share
    return tp_ranks[first : first + share]


def _hybrid(plan: Plan, name: str, rank: int) -> tuple[int, ...]:
    """ "grad" cut into runs of `zero_group` neighbours: a run shards, equal places of the runs hold the same shard."""
    ranks = members_of(plan, "grad", rank)
    size = plan.parallel.zero_group or len(ranks)
    run, place = divmod(ranks.index(rank), size)
    return ranks[run * size : (run + 1) * size] if name == "shard" else ranks[place::size]


def _two_copies(plan: Plan, name: str, rank: int) -> tuple[int, ...]:
    """A bidirectional pipeline holds the model twice: ranks r and pp - 1 - r have the same stages.

    They sum their gradients, so "grad" spans both; each half of the pipeline is one copy, so "model" is a half.
    """
    place = plan.ranks[rank].coord.pp
    if name == "embedding":  # both ends of the model are on each outer rank: nothing to sum
        return (rank,)
    if name == "model":
        half = plan.parallel.pp // 2
        ranks = next(sorted(group) for group in plan.groups["model"] if rank in group)
        return tuple(other for other in ranks if (plan.ranks[other].coord.pp < half) == (place < half))
    own = next(group for group in plan.groups["grad"] if rank in group)
    return tuple(sorted(own + [members_of(plan, "pp", other)[-1 - place] for other in own]))
