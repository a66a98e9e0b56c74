"""The hierarchical all-to-all: a token crosses the network once per NVLink domain that holds some
of its experts (node-limited routing, DeepSeek-V3, arXiv 2412.19437, section 2.1.2). The rank that
receives it there forwards it to the experts.

The ranks that share the experts are in D domains with L ranks each. The i-th rank of a domain sends
to the i-th ranks of the others. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

from .document import Moe, Plan
from .expert_mesh import axes, expert_mesh, nvlink_domain_of, tensor_ranks


class Hierarchy(NamedTuple):
    """The ranks with which a rank exchanges tokens, ascending."""

    inside: tuple[int, ...]  # ranks of its own domain
    across: tuple[int, ...]  # one rank of each domain, at the same position


def is_hierarchical(plan: Plan) -> bool:
    """Checks whether tokens go by domain: the plan requests it, and some group has several
    domains."""
    by_domain = (
        plan.parallel.expert_all_to_all == "hierarchical" and expert_mesh(plan.parallel).ep > 1
    )
    return by_domain and any(len(set(runs)) > 1 for runs in _domains(plan))


def expert_groups(plan: Plan) -> list[list[int]]:
    """Lists the groups of ranks that share a layer's experts, each ascending."""
    par = plan.parallel
    ranks_by_key = dict[tuple[int, ...], list[int]]()
    expert_axes = axes(par)
    etp = tensor_ranks(par)
    for rank in plan.ranks:
        coord = rank.coord
        cp = 0 if "cp" in expert_axes else coord.cp
        tp = coord.tp % etp if "tp" in expert_axes else coord.tp
        ranks_by_key.setdefault(
            (coord.pp, coord.dp, cp, tp),
            [],
        ).append(rank.rank)
    return list(ranks_by_key.values())


def hierarchy(plan: Plan, rank: int) -> Hierarchy:
    """The hierarchy of `rank` in its expert group."""
    group = next(ranks for ranks in expert_groups(plan) if rank in ranks)
    domain = nvlink_domain_of(plan)
    inside = [member for member in group if domain[member] == domain[rank]]
    return Hierarchy(tuple(inside), tuple(group[inside.index(rank) :: len(inside)]))


def problem(plan: Plan) -> str | None:
    """Explains in one line why tokens cannot go by domain in this plan; None if they can or need
    not."""
    if plan.parallel.expert_all_to_all != "hierarchical":
        return None
    ep = expert_mesh(plan.parallel).ep
    moe = plan.model.moe
    if moe is None or ep == 1:
        return (
            "expert_all_to_all=hierarchical without expert parallelism; legal: direct, or ep of 2"
            " or more"
        )
    return problem_of(moe, _domains(plan))


def problem_of(moe: Moe, domains_of_groups: Sequence[Sequence[int]]) -> str | None:
    """Explains why tokens cannot go by domain between these groups of ranks that share experts.
    Each group is given as the NVLink domains of its ranks, in the ranks' order."""
    ep = len(domains_of_groups[0])
    if len({len(set(domains)) for domains in domains_of_groups}) > 1:
        return (
            f"expert_all_to_all=hierarchical: some groups of {ep} ranks that share experts are in"
            " one NVLink domain, others in several; legal: equally many domains for each group, or"
            " direct"
        )
    for domains in dict.fromkeys(map(tuple, domains_of_groups)):
        distinct = list(dict.fromkeys(domains))
        counts = [domains.count(domain) for domain in distinct]
        runs = tuple(domain for domain in distinct for _ in range(counts[0]))
        if len(set(counts)) > 1 or domains != runs:
            return (
                f"expert_all_to_all=hierarchical: the NVLink domains of the {ep} ranks that share"
                f" experts have {' + '.join(map(str, counts))} of them; legal: equally many"
                " neighbours in each domain, or direct"
            )
        if not hold_groups(moe, len(distinct)):
            legal = [
                count for count in range(1, ep + 1) if ep % count == 0 and moe.groups % count == 0
            ]
            nearest = min(legal, key=lambda count: abs(count - len(distinct)))
            return (
                f"expert_all_to_all=hierarchical: {len(distinct)} NVLink domains do not hold whole"
                f" groups of experts, so a token of {moe.top_groups} of {moe.groups} groups would"
                f" go to more domains than that; nearest: {nearest} domains"
                f" (ep={ep // len(distinct) * nearest})"
            )
    return None


def hold_groups(moe: Moe, domains: int) -> bool:
    """Checks that no group of experts is split over `domains` domains, unless tokens may choose
    from all groups."""
    return moe.top_groups == moe.groups or moe.groups % domains == 0


def landings(moe: Moe, domains: int) -> float:
    """The expected number of domains that hold experts of one token.

    All choices are equally likely: `top_groups` of the groups, and `top_k` of their experts. Groups
    are not split over domains, unless there is only one group.
    """
    groups = token_groups = moe.experts
    experts_per_group = 1
    if moe.top_groups < moe.groups:
        groups = moe.groups
        token_groups = moe.top_groups
        experts_per_group = moe.experts // moe.groups
    groups_per_domain = groups // domains
    missed = 0.0
    # `inside`: how many of the token's groups are in one domain.
    for inside in range(min(token_groups, groups_per_domain) + 1):
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
    """Lists the domain of each rank, for each group of ranks that share experts."""
    domain = nvlink_domain_of(plan)
    return [[domain[rank] for rank in ranks] for ranks in expert_groups(plan)]
