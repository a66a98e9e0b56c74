"""The process groups of one rank, taken from the plan's group lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from orchestrator.plan.schedules import copies_of

#: Order of creation, equal on every rank. "kv": tp ranks that share one key/value head. "shard": ranks of "grad" that
#: together hold one copy of the ZeRO-sharded state; "replica": those of "grad" with the same shard (hybrid sharding).
GROUPS = ("tp", "cp", "ep", "pp", "dp", "grad", "model", "embedding", "kv", "shard", "replica")


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates and groups. A group of one member is None: every collective then does nothing."""

    rank: int
    coord: Coord
    members: Mapping[str, tuple[int, ...]]  # axis or composite -> global ranks of this rank's group, ascending
    groups: Mapping[str, dist.ProcessGroup | None]

    @classmethod
    def from_plan(cls, plan: Plan, rank: int, timeout: timedelta | None = None) -> Mesh:
        """Create this rank's process groups. Collective over all ranks of the plan.

        Only a group's members synchronise to create it (`use_local_synchronization`), so a rank's cost does not grow
        with the world size; the fixed order of `GROUPS` prevents a cyclic wait between overlapping groups. Groups with
        equal members share one communicator, except "pp": its point-to-point transfers are asynchronous and must not
        queue behind collectives.
        """
        members = {name: members_of(plan, name, rank) for name in GROUPS}
        made: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}
        groups: dict[str, dist.ProcessGroup | None] = {}
        for name in GROUPS:
            ranks, key = members[name], (name == "pp", members[name])
            if len(ranks) > 1 and key not in made:
                created = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
                assert isinstance(created, dist.ProcessGroup)
                made[key] = created
            groups[name] = made[key] if len(ranks) > 1 else None
            if name == "embedding" and not ranks and plan.parallel.pp > 2:
                # torch names a group by the number of groups created before: all ranks must create equally many
                dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
        return cls(rank, plan.ranks[rank].coord, MappingProxyType(members), MappingProxyType(groups))

    @classmethod
    def alone(cls, plan: Plan, rank: int = 0) -> Mesh:
        """The same coordinates without process groups: for one process, dry runs and tests of pure code."""
        members = {name: members_of(plan, name, rank) for name in GROUPS}
        return cls(rank, plan.ranks[rank].coord, MappingProxyType(members), MappingProxyType(dict.fromkeys(GROUPS)))

    def size(self, axis: str) -> int:
        return max(1, len(self.members[axis]))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        return self.groups[axis]

    def required_group(self, axis: str) -> dist.ProcessGroup:
        """The group of an axis that is known to have several members."""
        group = self.groups[axis]
        assert group is not None, axis
        return group

    def ranks(self, axis: str) -> tuple[int, ...]:
        """Global ranks of this rank's group; empty where it has none ("embedding" on a middle stage)."""
        return self.members[axis]

    def index(self, axis: str) -> int:
        """This rank's position in its group."""
        return self.members[axis].index(self.rank) if self.members[axis] else 0


def members_of(plan: Plan, name: str, rank: int) -> tuple[int, ...]:
    """Global ranks of the group of `rank` on an axis or composite; empty if it is in none.

    Ascending, since torch numbers the members of a group so whatever order it is given; with dp nested inside cp, the
    plan's own order (cp fastest) differs.
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
    """ "grad" cut into runs of `zero_group` neighbours: a run shards, equal positions in the runs hold equal shards."""
    ranks = members_of(plan, "grad", rank)
    size = plan.parallel.zero_group or len(ranks)
    run, position = divmod(ranks.index(rank), size)
    return ranks[run * size : (run + 1) * size] if name == "shard" else ranks[position::size]


def _two_copies(plan: Plan, name: str, rank: int) -> tuple[int, ...]:
    """A bidirectional pipeline holds the model twice: ranks r and pp - 1 - r have the same stages.

    They sum their gradients, so "grad" spans both; each half of the pipeline is one copy, so "model" is a half.
    """
    mine = plan.ranks[rank].coord.pp
    if name == "embedding":  # both ends of the model are on each outer rank: nothing to sum
        return (rank,)
    if name == "model":
        half = plan.parallel.pp // 2
        ranks = next(sorted(group) for group in plan.groups["model"] if rank in group)
        return tuple(other for other in ranks if (plan.ranks[other].coord.pp < half) == (mine < half))
    own = next(group for group in plan.groups["grad"] if rank in group)
    return tuple(sorted(own + [members_of(plan, "pp", other)[-1 - mine] for other in own]))
