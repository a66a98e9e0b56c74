"""The hierarchical all-to-all: a token goes once over the network to each NVLink domain that holds
some of its experts (node-limited routing, DeepSeek-V3, arXiv 2412.19437, section 2.1.2), and from
the rank where it lands on to them.

The ranks that share the experts lie in D domains, L in each. The i-th rank of a domain sends to the
i-th ranks of the others. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

from .document import Moe, Plan
from .expert_mesh import axes, expert_mesh, nvlink_domain_of, tensor_ranks


class Hierarchy(NamedTuple):
    """Ranks, ascending."""

    inside: tuple[int, ...]  # those of one domain
    across: tuple[int, ...]  # one of each domain, in equal places


def is_hierarchical(plan: Plan) -> bool:
    """Whether tokens go by domain: where that is asked for and there are several."""
    by_domain = (
        plan.parallel.expert_all_to_all == "hierarchical" and expert_mesh(plan.parallel).ep > 1
    )
    return by_domain and any(len(set(runs)) > 1 for runs in _domains(plan))


def expert_groups(plan: Plan) -> list[list[int]]:
    """Ranks that share a layer's experts, ascending, group by group."""
    par = plan.parallel
    ranks_by_key = dict[tuple[int, ...], list[int]]()
    expert_axes = axes(par)
    etp = tensor_ranks(par)
    for rank in plan.ranks:
        coord = rank.coord
        key = (
            coord.pp,
            coord.dp,
            0 if "cp" in expert_axes else coord.cp,
            coord.tp % etp if "tp" in expert_axes else coord.tp,
        )
        ranks_by_key.setdefault(key, []).append(rank.rank)
    return list(ranks_by_key.values())


def hierarchy(plan: Plan, rank: int) -> Hierarchy:
    """Of the group that `rank` is in."""
    group = next(ranks for ranks in expert_groups(plan) if rank in ranks)
    domain = nvlink_domain_of(plan)
    inside = [member for member in group if domain[member] == domain[rank]]
    return Hierarchy(tuple(inside), tuple(group[inside.index(rank) :: len(inside)]))


def problem(plan: Plan) -> str | None:
    """Why tokens cannot go by domain in this plan, in one line; None where they can or need not."""
    if plan.parallel.expert_all_to_all != "hierarchical":
        return None
    ep = expert_mesh(plan.parallel).ep
    moe = plan.model.moe
    if moe is None or ep == 1:
        return (
            "expert_all_to_all=hierarchical without expert parallelism; legal: direct, or ep of two"
            " or more"
        )
    return problem_of(moe, _domains(plan))


def problem_of(moe: Moe, every: Sequence[Sequence[int]]) -> str | None:
    """The same of groups of ranks that share experts, given as the NVLink domain of each rank, in
    the ranks' order."""
    ep = len(every[0])
    if len({len(set(runs)) for runs in every}) > 1:
        return (
            f"expert_all_to_all=hierarchical: some groups of {ep} ranks that share experts lie in"
            " one NVLink domain, others in several; legal: equally many for each, or direct"
        )
    for runs in dict.fromkeys(map(tuple, every)):
        names = list(dict.fromkeys(runs))
        counts = [runs.count(name) for name in names]
        if len(set(counts)) > 1 or runs != tuple(name for name in names for _ in range(counts[0])):
            return (
                f"expert_all_to_all=hierarchical: the {ep} ranks that share experts lie"
                f" {' + '.join(map(str, counts))} in their NVLink domains; legal: equally many"
                " neighbours in each, or direct"
            )
        if not hold_groups(moe, len(names)):
            legal = [many for many in range(1, ep + 1) if ep % many == 0 and moe.groups % many == 0]
            near = min(legal, key=lambda many: abs(many - len(names)))
            return (
                f"expert_all_to_all=hierarchical: {len(names)} NVLink domains do not hold whole"
                f" groups of experts, so a token of {moe.top_groups} of {moe.groups} groups would"
                f" go to more domains than that; nearest: {near} domains"
                f" (ep={ep // len(names) * near})"
            )
    return None


def hold_groups(moe: Moe, domains: int) -> bool:
    """Whether groups of experts lie whole in so many domains, where tokens are limited to some of
    them."""
    return moe.top_groups == moe.groups or moe.groups % domains == 0


def landings(moe: Moe, domains: int) -> float:
    """Expected number of domains that hold experts of one token, where all choices are equally
    likely: `top_groups` of the groups, and `top_k` of their experts. Groups lie whole in the
    domains, or there is one."""
    limited = moe.top_groups < moe.groups
    groups, experts_per_group = (
        (moe.groups, moe.experts // moe.groups) if limited else (moe.experts, 1)
    )
    token_groups = moe.top_groups if limited else groups
    groups_per_domain = groups // domains
    missed = 0.0
    for inside in range(
        min(token_groups, groups_per_domain) + 1
    ):  # of the token's groups, in one domain
        if token_groups - inside > groups - groups_per_domain:
            continue
        chance = (
            comb(groups_per_domain, inside)
            * comb(groups - groups_per_domain, token_groups - inside)
            / comb(groups, token_groups)
        )
        missed += (
            chance
            * comb((token_groups - inside) * experts_per_group, moe.top_k)
            / comb(token_groups * experts_per_group, moe.top_k)
        )
    return domains * (1.0 - missed)


def _domains(plan: Plan) -> list[list[int]]:
    """Of each group of ranks that share experts, the domain of each rank."""
    domain = nvlink_domain_of(plan)
    return [[domain[rank] for rank in ranks] for ranks in expert_groups(plan)]
