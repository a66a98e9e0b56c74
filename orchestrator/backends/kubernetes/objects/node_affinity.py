"""Scheduling constraints that put pods where the plan expects them. Pure.

With Kueue: annotations of topology-aware scheduling (kueue.x-k8s.io,
apis/kueue/v1beta2/topology_types.go). Without it: node affinity towards nodes that were chosen from
the live ones. Either way the ranks are mapped to the pods' real nodes by
`orchestrator.planner.elastic.replan`, so a constraint that is only preferred costs speed and never
correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from orchestrator.backends.kubernetes.names import REQUIRED
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.cluster.model import Topology
from orchestrator.cluster.nodes import choose_nodes
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import block_size, used_node_count, whole_unit

KUEUE = "kueue.x-k8s.io"
HOST = "kubernetes.io/hostname"
#: The scheduler scores no more nodes than it needs to: preferences hold among this many that fit,
#: at least (kube-scheduler, minFeasibleNodesToFind). Beyond it, pods may be kept on chosen nodes
#: only by what they require.
SCORED = 100


class ChosenNodes(Struct, frozen=True):
    """Nodes for a run that no queue places, and what they have in common."""

    nodes: tuple[str, ...]  # in topology order
    label: str = ""  # of the tightest switch above all of them; "" when there is none
    values: tuple[str, ...] = ()
    whole: tuple[
        tuple[str, tuple[str, ...]], ...
    ] = ()  # without one: (label, switches) with no other node, and
    rest: tuple[str, ...] = ()  # hostname labels of the nodes that are under none of these
    spares: tuple[
        str, ...
    ] = ()  # also then: where else pods may go, should one of the nodes be lost
    spare_whole: tuple[
        tuple[str, tuple[str, ...]], ...
    ] = ()  # switches with nothing but more of these


def kueue_labels(options: KubernetesOptions) -> dict[str, str]:
    """On the Job or JobSet: which queue, how important."""
    if options.queue is None:
        return {}
    labels = {f"{KUEUE}/queue-name": options.queue}
    if options.workload_priority:
        labels[f"{KUEUE}/priority-class"] = options.workload_priority
    return labels


def kueue_annotations(plan: Plan, options: KubernetesOptions) -> dict[str, str]:
    """On the pod template: the parts that must be under one innermost switch, and how far the whole
    may spread.

    Empty without a queue, without `levels` (Kueue refuses labels that its Topology lacks), or with
    topology=none.
    """
    check_levels(plan, options)
    if options.queue is None or not options.levels or options.topology == "none":
        return {}
    names = [level.name for level in plan.cluster.levels if level.name in options.levels]
    inner = options.levels.get(plan.cluster.levels[0].name)
    unit = whole_unit(plan, block_size(plan))
    pods = used_node_count(plan)
    together = options.levels[common_level(plan, names)]
    found = {f"{KUEUE}/podset-{options.topology}-topology": together}
    if options.slices and inner and 1 < unit < pods:
        found[f"{KUEUE}/podset-slice-required-topology"] = inner
        found[f"{KUEUE}/podset-slice-size"] = str(unit)
    return found


def check_levels(plan: Plan, options: KubernetesOptions) -> None:
    """OrchError (65) for a level that the plan's cluster does not have."""
    known = [level.name for level in plan.cluster.levels]
    for name in options.levels:
        if name not in known:
            text = f"backend.options.levels.{name}: cluster {plan.cluster.name} has no such level"
            raise OrchError(f"{text}; {did_you_mean(name, known)}", Exit.CONFIG)


def common_level(plan: Plan, names: Sequence[str]) -> str:
    """The innermost of these levels on which one switch is above every node of the plan; else the
    outermost."""
    index = {name: i for i, name in enumerate(plan.cluster.node_names)}
    used = {index[rank.node] for rank in plan.ranks}
    for level in plan.cluster.levels:
        if level.name in names and any(used.issubset(switch) for switch in level.switches):
            return level.name
    return names[-1]


# ---------------------------------------------------------------------------------- without a queue


def choose(
    plan: Plan,
    topology: Topology,
    labels: Mapping[str, str],
    hosts: Mapping[str, str] | None = None,
) -> ChosenNodes:
    """Free nodes for the plan, close together, no TP/EP domain or pipeline split over two innermost
    switches.

    `labels`: tier -> node label, for what the nodes have in common; `hosts`: node -> hostname
    label, None: the same. OrchError (76) when too few nodes are free: all of them or none, so that
    two runs never wait for each other.
    """
    wanted = used_node_count(plan)
    gpus = plan.cluster.gpus_per_node
    fitting = [
        n for n in topology.free if n not in topology.machines or topology.machines[n].gpus >= gpus
    ]
    if len(fitting) < wanted:
        have = f"{len(fitting)} of {len(topology.nodes)} nodes are free with {gpus} GPUs"
        fewer = {node: f"fewer than {gpus} GPUs" for node in topology.free if node not in fitting}
        reasons = Counter(
            fewer.get(node, topology.machines[node].reason)
            for node in topology.nodes
            if node in topology.machines
        )
        why = ", ".join(
            f"{n} x {text}"
            for text, n in reasons.most_common(4)
            if text and not text.startswith("has pod")
        )
        text = (
            f"the plan needs {wanted} nodes, {have}{f' ({why})' if why else ''}: submit it later,"
            " or through a queue"
        )
        raise OrchError(text, Exit.CAPACITY)
    sizes = (
        [len(members) for members in topology.tiers[0].switches.values()] if topology.tiers else []
    )
    unit = whole_unit(plan, max(sizes, default=block_size(plan)))
    units = in_whole_units(fitting, topology, unit)
    nodes = choose_nodes(units if len(units) >= wanted else fitting, topology, wanted)
    named = {} if hosts is None else hosts
    label, values = _common(nodes, topology, labels)
    if label:
        return ChosenNodes(
            tuple(nodes), label, values, rest=tuple(named.get(node, node) for node in nodes)
        )
    whole, rest = _whole(nodes, topology, labels)
    alike = _spare_switches(whole, fitting, topology, labels, len(nodes)) if not rest else ()
    spare_whole, spares = _whole(alike or _spares(nodes, fitting, topology), topology, labels)
    rest, spares = (tuple(named.get(node, node) for node in names) for names in (rest, spares))
    return ChosenNodes(tuple(nodes), whole=whole, rest=rest, spares=spares, spare_whole=spare_whole)


def split_units(plan: Plan, chosen: Sequence[str], topology: Topology) -> tuple[int, int]:
    """(pipelines or TP/EP domains that cannot lie under one innermost switch, all of them) on the
    chosen nodes."""
    unit = whole_unit(plan, block_size(plan))
    pool = set(chosen)
    units = len(chosen) // unit
    inner = topology.tiers[0].switches.values() if topology.tiers else ()
    return (
        units - sum(len(pool.intersection(members)) // unit for members in inner) if unit > 1 else 0
    ), units


def _whole(
    nodes: Sequence[str], topology: Topology, labels: Mapping[str, str]
) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[str, ...]]:
    """The largest switches with a label whose every node is chosen, outermost first, and the nodes
    that are left.

    Every pod carries its affinity, so 512 names are 12 KB to be read and written with each change
    of each of 512 pods.
    """
    left = set(nodes)
    found = []
    for tier in reversed(topology.tiers):
        full = [
            n
            for n, members in tier.switches.items()
            if _is_value(n) and members and left.issuperset(members)
        ]
        if tier.name in labels and full:
            found.append((labels[tier.name], tuple(full)))
            left.difference_update(*(tier.switches[name] for name in full))
    return tuple(found), tuple(node for node in nodes if node in left)


def _spares(nodes: Sequence[str], fitting: Sequence[str], topology: Topology) -> tuple[str, ...]:
    """A few of the other free nodes, those under the chosen ones' innermost switches first."""
    chosen = set(nodes)
    near = {
        node
        for tier in topology.tiers[:1]
        for members in tier.switches.values()
        if not chosen.isdisjoint(members)
        for node in members
    }
    others = sorted(
        (node for node in fitting if node not in chosen), key=lambda node: node not in near
    )
    return tuple(others[: _spare_count(len(nodes))])


def _spare_count(nodes: int) -> int:
    return max(2, nodes // 16)


def _spare_switches(
    whole: Sequence[tuple[str, tuple[str, ...]]],
    fitting: Sequence[str],
    topology: Topology,
    labels: Mapping[str, str],
    nodes: int,
) -> tuple[str, ...]:
    """Nodes of free switches of the chosen ones' level: one value of that level's label names all
    nodes of a switch.

    () where there are none, or so many nodes in them that the scheduler would not score one of the
    chosen.
    """
    found: list[str] = []
    free = set(fitting)
    for tier in topology.tiers:
        if [labels.get(tier.name)] != [label for label, _ in whole]:
            continue
        for name, members in tier.switches.items():
            if (
                len(found) < _spare_count(nodes)
                and members
                and name not in whole[0][1]
                and free.issuperset(members)
            ):
                found += members
    return tuple(found) if _spare_count(nodes) <= len(found) < SCORED else ()


def in_whole_units(free: Sequence[str], topology: Topology, unit: int) -> list[str]:
    """Of the free nodes under each innermost switch as many as make whole units; the rest would
    have to split one."""
    if unit <= 1 or not topology.tiers:
        return list(free)
    pool = set(free)
    kept = []
    for members in topology.tiers[0].switches.values():
        here = [node for node in members if node in pool]
        kept += here[: len(here) // unit * unit]
    return kept


def _common(
    nodes: Sequence[str], topology: Topology, labels: Mapping[str, str]
) -> tuple[str, tuple[str, ...]]:
    """(label, switches) of the innermost tier with a label on which one switch, not too large,
    holds them all."""
    for tier in topology.tiers:
        above = [
            name for name, members in tier.switches.items() if not set(nodes).isdisjoint(members)
        ]
        covered = sum(len(set(nodes) & set(tier.switches[name])) for name in above)
        whole = len(above) == 1 and covered == len(nodes)
        if (
            whole
            and tier.name in labels
            and _is_value(above[0])
            and len(tier.switches[above[0]]) <= SCORED
        ):
            return labels[tier.name], tuple(above)
    return "", ()


def without_hosts(affinity: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, Any]:
    """The affinity, with nodes of these hostname labels excluded from every term that does not name
    its nodes."""
    nodes = affinity.get("nodeAffinity", {})
    if not hosts:
        return dict(affinity)
    terms = nodes.get(REQUIRED, {}).get("nodeSelectorTerms") or [{"matchExpressions": []}]
    others = _is(HOST, hosts, "NotIn")
    found = [
        (
            term
            if any(
                one["key"] == HOST and one["operator"] == "In" for one in term["matchExpressions"]
            )
            else {**term, "matchExpressions": [*term["matchExpressions"], others]}
        )
        for term in terms
    ]
    return {**affinity, "nodeAffinity": {**nodes, REQUIRED: {"nodeSelectorTerms": found}}}


def both_spellings(names: Sequence[str]) -> tuple[str, ...]:
    """What the hostname labels of nodes may be whose names alone are known: the same, or its first
    part."""
    return tuple(dict.fromkeys(part for name in names for part in (name, name.split(".")[0])))


def node_affinity(chosen: ChosenNodes) -> dict[str, Any]:
    """The chosen nodes first; where one of them is lost, others under the same switch, or one of
    the spares.

    As few terms as possible, for the scheduler evaluates each for every pod on every node: one a
    label, and the spares are named as second choice because they are fewer than the chosen ones.
    """
    first = [*chosen.whole, *([(HOST, chosen.rest)] if chosen.rest else [])]
    if chosen.label:
        within = [(chosen.label, chosen.values)]
        wishes = [[_is(*place)] for place in first]
    else:
        second = [*chosen.spare_whole, *([(HOST, chosen.spares)] if chosen.spares else [])]
        places: dict[str, list[str]] = {}
        for label, values in (*first, *second):
            places.setdefault(label, []).extend(values)
        within = [(label, tuple(values)) for label, values in places.items()]
        wishes = [[_is(*place, "NotIn") for place in second]] if second else []
    found: dict[str, Any] = {}
    if wishes:
        found["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": {"matchExpressions": wish}} for wish in wishes
        ]
    terms = [{"matchExpressions": [_is(*place)]} for place in within]
    return {"nodeAffinity": found | {REQUIRED: {"nodeSelectorTerms": terms}}}


def _is_value(switch: str) -> bool:
    """Whether a switch is called as its nodes' label says: one of two with the same name is called
    by its path."""
    return "/" not in switch


def _is(label: str, values: Sequence[str], operator: str = "In") -> dict[str, Any]:
    return {"key": label, "operator": operator, "values": list(values)}
