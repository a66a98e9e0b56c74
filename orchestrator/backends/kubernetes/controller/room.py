"""Room: which nodes are free for which run, and how those that wait share them out. Pure.

A run on GPUs has its nodes to itself; one on CPUs shares them, as many pods to a node as its
resources hold. What the scheduler would refuse is not given (fitting). All of a run's nodes or
none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, structs

from orchestrator.backends.kubernetes.cluster_view import profile
from orchestrator.backends.kubernetes.devices import (
    NOT_READ,
    GpuDevices,
    asks_by_claim,
    gpus_of,
    with_devices,
)
from orchestrator.backends.kubernetes.fitting import (
    ALWAYS_REPORTED,
    EXCLUDED,
    PodNeeds,
    is_excluded,
    why_not,
)
from orchestrator.backends.kubernetes.objects.node_affinity import choose
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.backends.kubernetes.pod_requests import quantity
from orchestrator.cluster.importers.kubernetes import Node, from_nodes
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError
from orchestrator.plan import Plan

from .ledger import Allocation
from .observed import Pod

#: Said to a run whose pods ask for GPUs by a claim, where only labels tell how many there are.
_BY_LABELS = "resourceslices may not be read, so GPUs are counted by the label nvidia.com/gpu.count"


class Wish(Struct, frozen=True):
    """A run that waits for room."""

    key: str
    sizes: Sequence[tuple[int, Plan]]  # to be tried in this order
    options: KubernetesOptions
    needs: PodNeeds  # of one pod, at every size
    excluded: frozenset[str] = frozenset()
    elastic: bool = False  # it changes between its sizes while its pods live

    @property
    def claims(self) -> str:
        """The resource in place of which its pods ask for GPUs by a claim; "" where they do not."""
        gpu = self.options.gpu_resource if self.sizes[0][1].cluster.device == "cuda" else ""
        return gpu if gpu not in self.needs.requests and asks_by_claim(self.options) else ""

    @property
    def pods(self) -> int:
        """Of its Job. Those of an elastic run that have no node wait for one."""
        return max(size for size, _ in self.sizes) if self.elastic else 0


class Placed(NamedTuple):
    size: int
    nodes: list[str]  # by completion index
    needs: dict[str, float]  # {}: the nodes are the run's alone


class _Fit(NamedTuple):
    """Of all pods that ask for the same."""

    topology: Topology
    why: dict[str, str]  # of nodes that do not fit whatever else is on them
    exclusive: bool
    about: str  # what they ask for, in words


class Fits:
    """Which nodes fit what, whoever else is there: worked out once for the same nodes and devices,
    which stay so."""

    def __init__(self, nodes: Mapping[str, Node], devices: GpuDevices = NOT_READ):
        self.nodes = nodes
        self.devices = devices
        self._known: dict[str, _Fit] = {}
        self._topologies: dict[str, Topology] = {}

    def of(self, wish: Wish) -> _Fit:
        """OrchError (65) for labels that contradict each other."""
        options = wish.options
        cuda = wish.sizes[0][1].cluster.device == "cuda"
        gpu = options.gpu_resource if cuda else ""
        select = sorted(options.node_selector.items())
        where = repr((select, options.levels, options.profile, gpu, gpu in wish.needs.requests))
        claimed = wish.sizes[0][1].cluster.gpus_per_node if wish.claims else 0
        about = f"{where} {wish.needs!r} {options.without} {claimed}"
        if about not in self._known:
            why: dict[str, str] = {}
            there = list(self.nodes.values())
            if gpu and gpu not in wish.needs.requests:
                there = with_devices(there, gpu, self.devices)
            for node in there:
                name = node.metadata.name
                if any(node.metadata.labels.get(key) != value for key, value in select):
                    why[name] = "not selected"
                elif is_excluded(node, options):
                    why[name] = EXCLUDED
                elif reason := _out_of_service(node) or why_not(node, wish.needs, {}):
                    why[name] = reason
                elif (count := gpus_of(node, self.devices).count) < claimed:
                    why[name] = f"{count} GPUs for claims"
            if where not in self._topologies:
                chosen = [node for node in there if why.get(node.metadata.name) != "not selected"]
                flat = Topology("flat", ())
                self._topologies[where] = (
                    from_nodes(chosen, profile(options), gpu) if chosen else flat
                )
            self._known[about] = _Fit(self._topologies[where], why, cuda, about)
        return self._known[about]


class Room:
    """`pods`: those that are bound or were let go; `allocations`: of every run by its key; `bad`:
    nodes that no run gets. Everything that is taken is noted here, so that a decision follows the
    one before."""

    def __init__(
        self,
        fits: Fits,
        pods: Iterable[Pod],
        allocations: Mapping[str, Allocation],
        bad: Iterable[str] = (),
    ):
        self._fits = fits
        self._bad = frozenset(bad)
        self._free_of: dict[
            str, list[str]
        ] = {}  # what was found free for what, since something was last taken
        self._used: dict[str, dict[str, float]] = {}
        self._pods_with_gpus: dict[str, str] = {}
        self._claims = dict(fits.devices.held or {})  # node -> who has GPUs of it by a claim
        self._owner: dict[str, str] = {}  # node -> run that has it to itself
        for pod in pods:
            node = pod.spec.node_name
            if not node or pod.ended or _is_allocated(pod, allocations):
                continue
            self._add(node, pod.needs)
            if any(name.endswith("/gpu") for name in pod.needs):
                self._pods_with_gpus[node] = pod.metadata.name
            if pod.spec.resource_claims and fits.devices.held is None:
                self._claims[node] = pod.metadata.name
        for key, one in allocations.items():
            self.take(key, one.held, one.needs)

    def take(self, key: str, nodes: Iterable[str], needs: Mapping[str, float]) -> None:
        self._free_of.clear()
        for node in nodes:
            if needs:
                self._add(node, needs)
            else:
                self._owner[node] = key

    def _add(self, node: str, needs: Mapping[str, float]) -> None:
        used = self._used.setdefault(node, {})
        for name, amount in needs.items():
            used[name] = used.get(name, 0.0) + amount

    # ---------------------------------------------------------------------------------- whole runs

    def place(self, wish: Wish) -> Placed | str:
        """Nodes for the first of its sizes that finds room, taken from now on; else why there is
        none for the smallest.

        OrchError (65) for options that contradict the plan or the cluster.
        """
        fit = self._fits.of(wish)
        free = self._free(fit, wish)
        for size, plan in wish.sizes:
            found = self._choose(fit, free, plan, size) if len(free) >= size else None
            if found is not None:
                needs = {} if fit.exclusive else dict(wish.needs.requests)
                self.take(wish.key, found, needs)
                return Placed(size, found, needs)
        why = self._shortage(min(size for size, _ in wish.sizes), fit, free)
        return f"{why}; {_BY_LABELS}" if wish.claims and self._fits.devices.by_node is None else why

    def _choose(self, fit: _Fit, free: Sequence[str], plan: Plan, size: int) -> list[str] | None:
        if not fit.exclusive:
            return _spread(free, size)
        known = set(free)
        machines = {
            name: structs.replace(machine, free=name in known)
            for name, machine in fit.topology.machines.items()
        }
        try:
            return list(choose(plan, structs.replace(fit.topology, machines=machines), {}).nodes)
        except OrchError:  # too few have enough GPUs
            return None

    def _shortage(self, wanted: int, fit: _Fit, free: Sequence[str]) -> str:
        """Why a run does not find room, in the words of a status."""
        reasons = Counter(fit.why.values())
        held = sum(1 for node in self._owner if node not in fit.why)
        found = [f"{count} x {text}" for text, count in reasons.most_common(3) if text]
        found += [f"{held} held by other runs"] if held else []
        others = f" ({', '.join(found)})" if found else ""
        what = "places for pods" if not fit.exclusive else "nodes"
        return f"waiting for room: needs {wanted} {what}, {len(free)} are free{others}"

    # --------------------------------------------------------------------------------- single nodes

    def more(self, wish: Wish, near: Sequence[str], count: int) -> list[str]:
        """Up to `count` free nodes for single pods, taken from now on: under the innermost switches
        of most of the run's other nodes, if there are such. Of an elastic run as many as make its
        next larger size, or none."""
        fit = self._fits.of(wish)
        free = self._free(fit, wish)
        if wish.elastic:
            steps = [size - len(near) for size, _ in wish.sizes]
            count = max((step for step in steps if 0 < step <= min(count, len(free))), default=0)
        beside: Counter[str] = Counter()
        for tier in reversed(fit.topology.tiers):
            for members in tier.switches.values():
                known = sum(node in members for node in near)
                for node in members if known else ():
                    beside[node] += known
        best = sorted(free, key=lambda node: -beside[node])[:count]
        self.take(wish.key, best, {} if fit.exclusive else wish.needs.requests)
        return best

    def _free(self, fit: _Fit, wish: Wish) -> list[str]:
        """Nodes for one more pod; where nodes are shared, as often as pods fit."""
        if fit.about not in self._free_of:
            found = self._free_of[fit.about] = []
            for name, node in self._fits.nodes.items():
                if name in fit.why or name in self._bad or name in self._owner:
                    continue
                used = self._used.get(name, {})
                if not fit.exclusive:
                    found += [name] * _count(node, wish.needs, used)
                elif wish.claims and name in self._claims:
                    continue
                elif name not in self._pods_with_gpus and not why_not(node, wish.needs, used):
                    found.append(name)
        free = self._free_of[fit.about]
        return [name for name in free if name not in wish.excluded] if wish.excluded else free


def fitting(
    nodes: Mapping[str, Node],
    held: Iterable[str],
    needs: PodNeeds,
    options: KubernetesOptions,
    out: Iterable[str] = (),
) -> set[str]:
    """Of the nodes that a run holds, those that its pods may be put on now. `out`: left out for
    other reasons."""
    found = set()
    left_out = frozenset(out)
    for name in held:
        node = nodes.get(name)
        if (
            node is None
            or name in left_out
            or is_excluded(node, options)
            or _out_of_service(node)
            or why_not(node, needs, {})
        ):
            continue
        if all(
            node.metadata.labels.get(key) == value for key, value in options.node_selector.items()
        ):
            found.add(name)
    return found


def _is_allocated(pod: Pod, allocations: Mapping[str, Allocation]) -> bool:
    """Whether the pod's room is in an allocation: it is not counted twice."""
    one = allocations.get(pod.run) if pod.run else None
    return (
        one is not None
        and 0 <= pod.index < len(one.nodes)
        and one.nodes[pod.index] == pod.spec.node_name
    )


def _out_of_service(node: Node) -> str:
    if node.spec.unschedulable:
        return "cordoned"
    ready = next((c.status for c in node.status.conditions if c.type == "Ready"), "True")
    return "" if ready == "True" else "not ready"


def _count(node: Node, needs: PodNeeds, used: Mapping[str, float]) -> int:
    """Pods that fit beside what is there."""
    has = node.status.allocatable
    counts = [
        int((quantity(has.get(name, 0)) - used.get(name, 0.0) + 1e-9) // wanted)
        for name, wanted in needs.requests.items()
        if wanted > 0 and (name in has or name not in ALWAYS_REPORTED)
    ]
    return max(0, min(counts, default=1))


def _spread(free: Sequence[str], count: int) -> list[str]:
    """`count` of the places, on as many nodes as there are, evenly; pods of one node have
    neighbouring indices."""
    left = Counter(free)
    given = Counter[str]()
    while sum(given.values()) < count:
        node = min((node for node in left if left[node]), key=lambda node: (given[node], node))
        left[node] -= 1
        given[node] += 1
    return [node for node in sorted(given) for _ in range(given[node])]


def wish_of(
    key: str,
    plans: Mapping[int, Plan],
    options: KubernetesOptions,
    needs: PodNeeds,
    nodes: int | None,
    elastic: bool = False,
) -> Wish:
    """`nodes`: the size that was asked for, of an elastic run the largest; None: the largest that
    finds room.

    OrchError (65) for no legal one.
    """
    from orchestrator.plan.exits import Exit

    if nodes is not None and nodes not in plans:
        legal = ", ".join(map(str, sorted(plans)))
        raise OrchError(
            f"spec.nodes: {nodes} is no size of this run: legal are {legal}", Exit.CONFIG
        )
    sizes = sorted((size for size in plans if nodes is None or size <= nodes), reverse=True)
    sizes = sizes if elastic or nodes is None else [nodes]
    return Wish(key, [(size, plans[size]) for size in sizes], options, needs, elastic=elastic)
