"""Scheduling constraints that put pods where the plan expects them. Pure.

With Kueue: annotations of topology-aware scheduling (kueue.x-k8s.io,
apis/kueue/v1beta2/topology_types.go). Without it: node affinity for nodes that were chosen from the
live ones. In both cases `orchestrator.planner.elastic.replan` maps the ranks to the pods' real
nodes, so a constraint that is only preferred costs speed and never correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from orchestrator.backends.kubernetes.names import REQUIRED, Body, JsonObject
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.cluster.model import Topology
from orchestrator.cluster.nodes import choose_nodes
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import block_size, used_node_count, whole_unit

KUEUE = "kueue.x-k8s.io"
HOST = "kubernetes.io/hostname"
#: The scheduler may stop scoring after this many nodes that fit (kube-scheduler,
#: minFeasibleNodesToFind), so preferences hold only among them. In larger sets only requirements
#: keep pods on chosen nodes.
SCORED = 100


class ChosenNodes(Struct, frozen=True):
    """Nodes for a run without a queue, and the switches that they share."""

    nodes: tuple[str, ...]  # in topology order
    #: label of the innermost switch above all of them; "" if there is none
    label: str = ""
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
    """Returns the labels of the Job or JobSet: its queue and its priority."""
    if options.queue is None:
        return {}
    labels = {f"{KUEUE}/queue-name": options.queue}
    if options.workload_priority:
        labels[f"{KUEUE}/priority-class"] = options.workload_priority
    return labels


def kueue_annotations(plan: Plan, options: KubernetesOptions) -> dict[str, str]:
    """Returns the annotations of the pod template: which pods must be under one innermost switch,
    and how far all of them may spread.

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
    annotations = {f"{KUEUE}/podset-{options.topology}-topology": together}
    if options.slices and inner and 1 < unit < pods:
        annotations[f"{KUEUE}/podset-slice-required-topology"] = inner
        annotations[f"{KUEUE}/podset-slice-size"] = str(unit)
    return annotations


def check_levels(plan: Plan, options: KubernetesOptions) -> None:
    """Refuses a level that the plan's cluster does not have. OrchError (65)."""
    level_names = [level.name for level in plan.cluster.levels]
    for name in options.levels:
        if name not in level_names:
            message = (
                f"backend.options.levels.{name}: cluster {plan.cluster.name} has no such level"
            )
            raise OrchError(f"{message}; {did_you_mean(name, level_names)}", Exit.CONFIG)


def common_level(plan: Plan, names: Sequence[str]) -> str:
    """Returns the innermost of these levels on which one switch is above every node of the plan;
    else the outermost."""
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
    """Chooses free nodes for the plan, close together, with no TP/EP domain or pipeline split over
    two innermost switches.

    `labels`: tier -> node label, for the switches that the nodes share; `hosts`: node -> hostname
    label, None: they are equal. OrchError (76) if too few nodes are free: all of them or none, so
    that two runs never wait for each other.
    """
    count = used_node_count(plan)
    gpus = plan.cluster.gpus_per_node
    machines = topology.machines
    fitting = [
        node for node in topology.free if node not in machines or machines[node].gpus >= gpus
    ]
    if len(fitting) < count:
        raise _too_few(count, gpus, fitting, topology)
    switches = topology.tiers[0].switches.values() if topology.tiers else ()
    largest = max((len(members) for members in switches), default=block_size(plan))
    units = in_whole_units(fitting, topology, whole_unit(plan, largest))
    nodes = choose_nodes(units if len(units) >= count else fitting, topology, count)
    host_of = hosts or {}

    def host_labels(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(host_of.get(name, name) for name in names)

    label, values = _common(nodes, topology, labels)
    if label:
        return ChosenNodes(tuple(nodes), label, values, rest=host_labels(nodes))
    whole_switches, rest = _whole(nodes, topology, labels)
    spare_nodes = _spares(nodes, fitting, topology)
    if not rest:
        like_chosen = _spare_switches(
            whole_switches,
            fitting,
            topology,
            labels,
            len(nodes),
        )
        spare_nodes = like_chosen or spare_nodes
    spare_whole, spares = _whole(spare_nodes, topology, labels)
    return ChosenNodes(
        tuple(nodes),
        whole=whole_switches,
        rest=host_labels(rest),
        spares=host_labels(spares),
        spare_whole=spare_whole,
    )


def _too_few(
    count: int,
    gpus: int,
    fitting: Sequence[str],
    topology: Topology,
) -> OrchError:
    """Builds the error for a plan that finds too few nodes, with the commonest reasons."""
    smaller = set(topology.free) - set(fitting)
    reasons = Counter(
        f"fewer than {gpus} GPUs" if node in smaller else topology.machines[node].reason
        for node in topology.nodes
        if node in topology.machines
    )
    causes = ", ".join(
        f"{nodes} x {reason}"
        for reason, nodes in reasons.most_common(4)
        if reason and not reason.startswith("has pod")
    )
    free = f"{len(fitting)} of {len(topology.nodes)} nodes are free with {gpus} GPUs"
    if causes:
        free += f" ({causes})"
    message = f"the plan needs {count} nodes, {free}: submit it later, or through a queue"
    return OrchError(message, Exit.CAPACITY)


def split_units(plan: Plan, chosen: Sequence[str], topology: Topology) -> tuple[int, int]:
    """Returns (pipelines or TP/EP domains that cannot be under one innermost switch, all of them)
    for the chosen nodes."""
    unit = whole_unit(plan, block_size(plan))
    pool = set(chosen)
    units = len(chosen) // unit
    inner = topology.tiers[0].switches.values() if topology.tiers else ()
    if unit <= 1:
        return 0, units
    unsplit = sum(len(pool.intersection(members)) // unit for members in inner)
    return units - unsplit, units


def _whole(
    nodes: Sequence[str],
    topology: Topology,
    labels: Mapping[str, str],
) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[str, ...]]:
    """Returns the largest labelled switches whose every node is chosen, outermost first, and the
    nodes that are left.

    Every pod carries its affinity: 512 names would be 12 KB to read and write with each change of
    each of 512 pods.
    """
    remaining = set(nodes)
    whole_switches = []
    for tier in reversed(topology.tiers):
        full = [
            name
            for name, members in tier.switches.items()
            if _is_value(name) and members and remaining.issuperset(members)
        ]
        if tier.name in labels and full:
            whole_switches.append((labels[tier.name], tuple(full)))
            remaining.difference_update(*(tier.switches[name] for name in full))
    return tuple(whole_switches), tuple(node for node in nodes if node in remaining)


def _spares(
    nodes: Sequence[str],
    fitting: Sequence[str],
    topology: Topology,
) -> tuple[str, ...]:
    """Returns a few of the other free nodes, those under the innermost switches of the chosen ones
    first."""
    chosen = set(nodes)
    near: set[str] = set()
    for members in topology.tiers[0].switches.values() if topology.tiers else ():
        if not chosen.isdisjoint(members):
            near.update(members)
    spares = [node for node in fitting if node not in chosen]
    spares.sort(key=lambda node: node not in near)
    return tuple(spares[: _spare_count(len(nodes))])


def _spare_count(nodes: int) -> int:
    return max(2, nodes // 16)


def _spare_switches(
    whole_switches: Sequence[tuple[str, tuple[str, ...]]],
    fitting: Sequence[str],
    topology: Topology,
    labels: Mapping[str, str],
    nodes: int,
) -> tuple[str, ...]:
    """Returns the nodes of free switches on the level of the chosen ones, where one value of that
    level's label names all nodes of a switch.

    () if there are none, or so many nodes that the scheduler might not score one of the chosen.
    """
    spares: list[str] = []
    free = set(fitting)
    for tier in topology.tiers:
        if [labels.get(tier.name)] != [label for label, _ in whole_switches]:
            continue
        for name, members in tier.switches.items():
            is_free = members and name not in whole_switches[0][1] and free.issuperset(members)
            if is_free and len(spares) < _spare_count(nodes):
                spares += members
    return tuple(spares) if _spare_count(nodes) <= len(spares) < SCORED else ()


def in_whole_units(free: Sequence[str], topology: Topology, unit: int) -> list[str]:
    """Returns, of the free nodes under each innermost switch, as many as make whole units; the
    others would split one."""
    if unit <= 1 or not topology.tiers:
        return list(free)
    pool = set(free)
    in_units = []
    for members in topology.tiers[0].switches.values():
        free_members = [node for node in members if node in pool]
        in_units += free_members[: len(free_members) // unit * unit]
    return in_units


def _common(
    nodes: Sequence[str],
    topology: Topology,
    labels: Mapping[str, str],
) -> tuple[str, tuple[str, ...]]:
    """Returns (label, switches) of the innermost labelled tier on which one switch, of at most
    SCORED nodes, is above all of them."""
    pool = set(nodes)
    for tier in topology.tiers:
        above = [name for name, members in tier.switches.items() if not pool.isdisjoint(members)]
        if len(above) != 1 or tier.name not in labels or not _is_value(above[0]):
            continue
        members = set(tier.switches[above[0]])
        covers_all = len(pool & members) == len(nodes)
        if covers_all and len(tier.switches[above[0]]) <= SCORED:
            return labels[tier.name], tuple(above)
    return "", ()


def without_hosts(affinity: Body, hosts: Sequence[str]) -> JsonObject:
    """Returns the affinity with these hostname labels excluded from every term that does not itself
    name its nodes."""
    nodes = affinity.get("nodeAffinity", {})
    if not hosts:
        return dict(affinity)
    terms = nodes.get(REQUIRED, {}).get("nodeSelectorTerms") or [{"matchExpressions": []}]
    other_hosts = _is(HOST, hosts, "NotIn")
    narrowed = []
    for term in terms:
        rules = term["matchExpressions"]
        if not any(rule["key"] == HOST and rule["operator"] == "In" for rule in rules):
            term = {**term, "matchExpressions": [*rules, other_hosts]}
        narrowed.append(term)
    return {**affinity, "nodeAffinity": {**nodes, REQUIRED: {"nodeSelectorTerms": narrowed}}}


def both_spellings(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the possible hostname labels of nodes known only by name: the name, or its first
    part."""
    return tuple(dict.fromkeys(host for name in names for host in (name, name.split(".")[0])))


def node_affinity(chosen: ChosenNodes) -> JsonObject:
    """Builds the affinity: the chosen nodes first and, if one of them is lost, others under the
    same switch, or one of the spares.

    It has as few terms as possible, because the scheduler evaluates each for every pod on every
    node: one per label. The preference names the spares as second choice because they are fewer
    than the chosen nodes.
    """
    first = [*chosen.whole, *([(HOST, chosen.rest)] if chosen.rest else [])]
    if chosen.label:
        within = [(chosen.label, chosen.values)]
        preferences = [[_is(label, values)] for label, values in first]
    else:
        second = [*chosen.spare_whole, *([(HOST, chosen.spares)] if chosen.spares else [])]
        values_by_label: dict[str, list[str]] = {}
        for label, values in (*first, *second):
            values_by_label.setdefault(label, []).extend(values)
        within = [(label, tuple(values)) for label, values in values_by_label.items()]
        preferences = [[_is(label, values, "NotIn") for label, values in second]] if second else []
    affinity: JsonObject = {}
    if preferences:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": {"matchExpressions": rules}} for rules in preferences
        ]
    terms = [{"matchExpressions": [_is(label, values)]} for label, values in within]
    return {"nodeAffinity": affinity | {REQUIRED: {"nodeSelectorTerms": terms}}}


def _is_value(switch: str) -> bool:
    """Tells whether a switch's name is the value of its nodes' label: of two switches with the same
    name, each is named by its path."""
    return "/" not in switch


def _is(label: str, values: Sequence[str], operator: str = "In") -> JsonObject:
    return {
        "key": label,
        "operator": operator,
        "values": list(values),
    }
