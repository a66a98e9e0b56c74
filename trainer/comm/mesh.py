"""The process groups of one rank, taken from the plan's group lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Literal

import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from orchestrator.plan.expert_mesh import (
    axes,
    expert_mesh,
    nvlink_domain_of,
    position,
    spread,
    tensor_ranks,
)
from orchestrator.plan.hierarchy import hierarchy, is_hierarchical
from orchestrator.plan.ranks import embeds_at_both_ends
from orchestrator.plan.schedules import copies_of
from trainer.compat import bound_to_device, split_group

#: The order of creation, equal on every rank; a group follows its parent. "kv": tp ranks that share
#: one key/value head. "shard": ranks of "grad" that together hold one copy of the ZeRO-sharded
#: state; "replica": ranks of "grad" with the same shard (hybrid sharding).
DENSE_GROUPS = (
    "tp",
    "cp",
    "ep",
    "pp",
    "dp",
    "grad",
    "model",
    "embedding",
    "kv",
    "shard",
    "replica",
)
#: The groups of experts: the ranks of "experts" hold different ones, those of "etp" cut the same
#: ones.
EXPERT_GROUPS = ("experts", "etp", "expert_grad", "expert_model", "expert_shard", "expert_replica")
#: Ranks of "experts" in one NVLink domain, and those with equal positions in all domains
#: (`plan.hierarchy`).
DOMAIN_GROUPS = ("experts_inside", "experts_across")
GROUPS: tuple[str, ...] = (*DENSE_GROUPS, *EXPERT_GROUPS, *DOMAIN_GROUPS)

#: The group from which a group is split in place of the world: fewer ranks then take part.
PARENTS = {"embedding": "pp", "kv": "tp", "shard": "grad", "replica": "grad"}
PARENTS |= {
    "etp": "tp",
    "expert_grad": "grad",
    "expert_shard": "expert_grad",
    "expert_replica": "expert_grad",
}
PARENTS |= dict.fromkeys(DOMAIN_GROUPS, "experts")
#: Groups for which computation waits at once: their kernels run before those that only have to end
#: with the step.
URGENT = frozenset(
    {
        "tp",
        "cp",
        "ep",
        "kv",
        "pp",
        "experts",
        "etp",
        *DOMAIN_GROUPS,
    }
)
#: Groups of gradients and weights, whose operations run while others compute and communicate. Of
#: ZeRO-3 both share one: the next unit's weights follow the last unit's gradients, as in FSDP2.
GRADIENTS = frozenset(
    {
        "grad",
        "shard",
        "replica",
        "expert_grad",
        "expert_shard",
        "expert_replica",
    }
)
#: What a communicator carries. Its operations run one after the other, so what computation waits
#: for must not queue behind gradients, nor a pipeline's transfers behind either.
Traffic = Literal["transfers", "gradients", "awaited"]


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates and groups. A group of one member is None: collectives over it do
    nothing."""

    rank: int
    coord: Coord
    #: Axis or composite -> global ranks of this rank's group, ascending.
    members: Mapping[str, tuple[int, ...]]
    groups: Mapping[str, dist.ProcessGroup | None]
    domains: tuple[int, ...] = ()  # the NVLink domain of each rank of the plan

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        rank: int,
        timeout: timedelta | None = None,
        split: bool | None = None,
    ) -> Mesh:
        """Creates this rank's process groups, in the same order on all ranks of the plan.
        Collective.

        With `split` (default: if the default group is bound to a device, as NCCL's is) a group is
        split from a larger group, all of whose members take part: NCCL then starts once for the
        world, and not once per group. Otherwise only a group's members synchronise to create it.
        Neither connects ranks: NCCL and gloo do that when a group is first used.

        Groups with equal members and the same traffic share one communicator. Those that
        communicate at the end of a step alone share any.
        """
        if split is None:
            split = bound_to_device()
        members = {name: members_of(plan, name, rank) for name in GROUPS}
        created: dict[tuple[Traffic, tuple[int, ...]], dist.ProcessGroup | None] = {}
        groups: dict[str, dist.ProcessGroup | None] = {}
        for name in groups_used(plan):
            ranks = members[name]
            shared = ((traffic, ranks) for traffic in _traffic_beside(name))
            key = next((key for key in shared if key in created), (_traffic(name), ranks))
            # A middle stage is in no embedding group, but takes part in its creation.
            outside = name == "embedding" and not ranks
            if len(ranks) <= 1 and not outside:
                continue
            if key not in created:
                parent = groups.get(PARENTS.get(name, "")) if split else None
                group_ranks = _ends(members["pp"]) if outside else ranks
                created[key] = _make(
                    name,
                    group_ranks,
                    rank,
                    parent=parent,
                    split=split,
                    timeout=timeout,
                )
            groups[name] = created[key]
        return cls._of(plan, rank, members, groups)

    @classmethod
    def alone(cls, plan: Plan, rank: int = 0) -> Mesh:
        """Returns the same coordinates without process groups: for one process, dry runs and tests
        of pure code."""
        members = {name: members_of(plan, name, rank) for name in GROUPS}
        return cls._of(plan, rank, members, dict.fromkeys(GROUPS))

    @classmethod
    def _of(
        cls,
        plan: Plan,
        rank: int,
        members: dict[str, tuple[int, ...]],
        groups: dict[str, dist.ProcessGroup | None],
    ) -> Mesh:
        return cls(
            rank,
            plan.ranks[rank].coord,
            members=MappingProxyType(members),
            groups=MappingProxyType(groups),
            domains=tuple(nvlink_domain_of(plan)),
        )

    def size(self, axis: str) -> int:
        """Returns the number of members of this rank's group."""
        return max(1, len(self.members[axis]))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Returns this rank's group, or None if it has one member. Raises KeyError for a group that
        the plan does not use (`groups_used`)."""
        if axis not in self.groups and self.size(axis) > 1 and self.groups:
            raise KeyError(f"{axis}: not among the groups of this plan, {', '.join(self.groups)}")
        return self.groups.get(axis)

    def required_group(self, axis: str) -> dist.ProcessGroup:
        """Returns the group of an axis that is known to have several members."""
        group = self.group(axis)
        assert group is not None, axis
        return group

    def ranks(self, axis: str) -> tuple[int, ...]:
        """Returns the global ranks of this rank's group; empty if it has none ("embedding" on a
        middle stage)."""
        return self.members[axis]

    def levels(self, axis: str) -> tuple[str, ...]:
        """Returns the links by which this rank reaches the ranks of its group, including itself:
        "nvlink" or "network"."""
        own_domain = self.domains[self.rank]
        return tuple(
            "nvlink" if self.domains[rank] == own_domain else "network"
            for rank in self.members[axis]
        )

    def index(self, axis: str) -> int:
        """Returns this rank's position in its group."""
        return self.members[axis].index(self.rank) if self.members[axis] else 0


def groups_used(plan: Plan) -> tuple[str, ...]:
    """Returns the groups in which ranks of this plan communicate, in the order of their creation.
    Gradients of dense weights are summed over "grad", those of experts over "expert_grad", those of
    a table at both ends of the model over "embedding"."""
    mesh = expert_mesh(plan.parallel)
    unused = {"ep", "dp"}
    if not is_hierarchical(plan):
        unused |= {*DOMAIN_GROUPS}
    if mesh.ep == 1:
        unused |= {*EXPERT_GROUPS}
    elif spread(plan.parallel) == 1:
        # Experts are spread within tp alone: they are summed and sharded like dense weights.
        unused |= {*EXPERT_GROUPS} - {"experts", "etp"}
    if not embeds_at_both_ends(plan.model):
        unused.add("embedding")
    return tuple(name for name in GROUPS if name not in unused)


def _traffic(name: str) -> Traffic:
    """Returns what a communicator that is made for this group carries."""
    if name == "pp":
        return "transfers"
    return "gradients" if name in GRADIENTS else "awaited"


def _traffic_beside(name: str) -> tuple[Traffic, ...]:
    """Returns what communicators may carry that this group shares."""
    is_at_the_end = name not in URGENT | GRADIENTS
    return ("gradients", "awaited") if is_at_the_end else (_traffic(name),)


def _make(
    name: str,
    ranks: tuple[int, ...],
    rank: int,
    *,
    parent: dist.ProcessGroup | None,
    split: bool,
    timeout: timedelta | None,
) -> dist.ProcessGroup | None:
    """Creates the group of `ranks`. Returns None on a rank of the parent that is not a member."""
    if split:
        return split_group(
            parent,
            ranks,
            name,
            timeout,
            urgent=name in URGENT,
        )
    # torch names a group by the number of earlier groups, so all ranks must create equally many.
    if rank not in ranks:
        ranks = (rank,)
    group = dist.new_group(
        list(ranks),
        timeout=timeout,
        use_local_synchronization=True,
        group_desc=name,
    )
    return group if isinstance(group, dist.ProcessGroup) and len(ranks) > 1 else None


def lone_group(rank: int) -> dist.ProcessGroup:
    """Creates a group of this rank alone. All ranks call it equally often, since torch names a
    group by the number of earlier groups."""
    group = dist.new_group(
        [rank],
        use_local_synchronization=True,
        group_desc="alone",
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _ends(pipeline: tuple[int, ...]) -> tuple[int, ...]:
    return pipeline[0], pipeline[-1]


def members_of(plan: Plan, name: str, rank: int) -> tuple[int, ...]:
    """Returns the global ranks of the group of `rank` on an axis or composite; empty if it has
    none.

    The ranks are ascending, since torch numbers the members of a group in ascending order; with dp
    nested inside cp, the plan's own order (cp fastest) differs.
    """
    if name == "kv":
        return _kv_replicas(plan, rank)
    if name in ("shard", "replica"):
        return _hybrid(
            members_of(plan, "grad", rank),
            plan.parallel.zero_group,
            name,
            rank,
        )
    if name in DOMAIN_GROUPS:
        if not is_hierarchical(plan):
            return ()
        return getattr(hierarchy(plan, rank), name.removeprefix("experts_"))
    if name in EXPERT_GROUPS:
        return _of_experts(plan, name, rank)
    if name in ("grad", "model", "embedding") and copies_of(plan.parallel) > 1:
        return _two_copies(plan, name, rank)
    return next((tuple(sorted(group)) for group in plan.groups[name] if rank in group), ())


def _kv_replicas(plan: Plan, rank: int) -> tuple[int, ...]:
    """Returns the tp/kv_heads neighbours that hold the same key/value head, if there are fewer
    heads than tp ranks."""
    share = max(1, plan.parallel.tp // plan.model.kv_heads)
    tp_ranks = members_of(plan, "tp", rank)
    first = tp_ranks.index(rank) // share * share
    return tp_ranks[first : first + share]


def _of_experts(plan: Plan, name: str, rank: int) -> tuple[int, ...]:
    """Returns a group of experts: the counterpart of a dense group among the ranks that hold the
    same experts. The ranks of "expert_model" together hold all experts once."""
    par = plan.parallel
    coord = plan.ranks[rank].coord
    etp = tensor_ranks(par)
    if name == "etp":
        tp_ranks = members_of(plan, "tp", rank)
        return tuple(
            peer for peer in tp_ranks if plan.ranks[peer].coord.tp // etp == coord.tp // etp
        )
    if name == "experts":
        peers = _along(plan, axes(par), rank)
        return tuple(peer for peer in peers if plan.ranks[peer].coord.tp % etp == coord.tp % etp)
    if name == "expert_model":
        outside_tp = _along(
            plan,
            tuple(axis for axis in axes(par) if axis != "tp"),
            rank,
        )
        return tuple(
            sorted(
                model_rank for peer in outside_tp for model_rank in members_of(plan, "model", peer)
            )
        )
    expert_position = position(par, coord)
    with_same_experts = tuple(
        p
        for p in members_of(plan, "grad", rank)
        if position(par, plan.ranks[p].coord) == expert_position
    )
    if name == "expert_grad":
        return with_same_experts
    return _hybrid(
        with_same_experts,
        par.zero_group // spread(par),
        name.removeprefix("expert_"),
        rank,
    )


def _along(plan: Plan, over: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Returns the ranks that differ from `rank` only in these axes, including `rank`."""
    peers = {rank}
    for axis in over:
        peers = {peer for member in peers for peer in members_of(plan, axis, member)}
    return tuple(sorted(peers))


def _hybrid(ranks: tuple[int, ...], size: int, name: str, rank: int) -> tuple[int, ...]:
    """Returns a hybrid-sharding group of `rank`. `ranks` are cut into runs of `size` neighbours (0:
    one run): a run is a "shard" group, and ranks with equal positions in their runs are "replica"
    groups."""
    size = size or len(ranks)
    run, position = divmod(ranks.index(rank), size)
    return ranks[run * size : (run + 1) * size] if name == "shard" else ranks[position::size]


def _two_copies(plan: Plan, name: str, rank: int) -> tuple[int, ...]:
    """Returns a group in a bidirectional pipeline, which holds the model twice: ranks r and pp - 1
    - r have the same stages.

    These ranks sum their gradients, so "grad" contains both; each half of the pipeline is one copy
    of the model, so "model" contains a half.
    """
    stage = plan.ranks[rank].coord.pp
    if name == "embedding":  # each outer rank holds both ends of the model: nothing to sum
        return (rank,)
    if name == "model":
        half = plan.parallel.pp // 2
        ranks = next(sorted(group) for group in plan.groups["model"] if rank in group)
        return tuple(peer for peer in ranks if (plan.ranks[peer].coord.pp < half) == (stage < half))
    grad_ranks = next(group for group in plan.groups["grad"] if rank in group)
    return tuple(
        sorted(grad_ranks + [members_of(plan, "pp", peer)[-1 - stage] for peer in grad_ranks])
    )
