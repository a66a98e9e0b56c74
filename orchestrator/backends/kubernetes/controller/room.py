"""Room: which nodes are free for which run, and how waiting runs share them. Pure.

A run on GPUs has its nodes to itself; a run on CPUs shares them, as many pods per node as its
resources hold. Nodes that the scheduler would refuse are not given (fitting). A run gets all of its
nodes or none.
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

#: Reported to a run whose pods request GPUs by a ResourceClaim when only labels tell how many there
#: are.
_NOT_SELECTED = "not selected"
_BY_LABELS = "resourceslices may not be read, so GPUs are counted by the label nvidia.com/gpu.count"


class NodeRequest(Struct, frozen=True):
    """A run that waits for nodes."""

    key: str
    sizes: Sequence[tuple[int, Plan]]  # tried in this order
    options: KubernetesOptions
    needs: PodNeeds  # needs of one pod, at every size
    excluded: frozenset[str] = frozenset()
    elastic: bool = False  # it changes between its sizes while its pods live

    @property
    def claims(self) -> str:
        """The GPU resource if its pods request GPUs by a ResourceClaim instead of it; else ""."""
        gpu = self.options.gpu_resource if self.sizes[0][1].cluster.device == "cuda" else ""
        return gpu if gpu not in self.needs.requests and asks_by_claim(self.options) else ""

    @property
    def pods(self) -> int:
        """The number of pods of the Job. Those of an elastic run that have no node wait for one."""
        return max(size for size, _ in self.sizes) if self.elastic else 0


class Placed(NamedTuple):
    size: int
    nodes: list[str]  # by completion index
    needs: dict[str, float]  # {}: the nodes belong to the run alone


class _Fit(NamedTuple):
    """The nodes that fit pods of the same requirements."""

    topology: Topology
    obstacles: dict[str, str]  # node that does not fit even if it is empty -> why
    exclusive: bool
    key: str  # the requirements as text


class Fits:
    """The nodes that fit each set of requirements when they are empty: computed once for the same
    nodes and devices."""

    def __init__(self, nodes: Mapping[str, Node], devices: GpuDevices = NOT_READ):
        self.nodes = nodes
        self.devices = devices
        self._known: dict[str, _Fit] = {}
        self._topologies: dict[str, Topology] = {}

    def of(self, request: NodeRequest) -> _Fit:
        """Returns the fit of the request's requirements. OrchError (65) for labels that contradict
        each other."""
        options = request.options
        cluster = request.sizes[0][1].cluster
        cuda = cluster.device == "cuda"
        gpu = options.gpu_resource if cuda else ""
        by_claim = bool(gpu) and gpu not in request.needs.requests
        selector = sorted(options.node_selector.items())
        network = repr((selector, options.levels, options.profile, gpu, by_claim))
        claimed = cluster.gpus_per_node if request.claims else 0
        key = f"{network} {request.needs!r} {options.without} {claimed}"
        if key not in self._known:
            nodes = list(self.nodes.values())
            if by_claim:
                nodes = with_devices(nodes, gpu, self.devices)
            obstacles = self._obstacles(nodes, request, claimed)
            if network not in self._topologies:
                selected = [
                    node for node in nodes if obstacles.get(node.metadata.name) != _NOT_SELECTED
                ]
                topology = Topology("flat", ())
                if selected:
                    topology = from_nodes(selected, profile(options), gpu)
                self._topologies[network] = topology
            self._known[key] = _Fit(self._topologies[network], obstacles, cuda, key)
        return self._known[key]

    def _obstacles(
        self,
        nodes: Iterable[Node],
        request: NodeRequest,
        claimed: int,
    ) -> dict[str, str]:
        """Node -> why it does not fit even if it is empty. `claimed`: GPUs per pod by a
        ResourceClaim."""
        options = request.options
        obstacles: dict[str, str] = {}
        for node in nodes:
            name = node.metadata.name
            if not _is_selected(node, options):
                obstacles[name] = _NOT_SELECTED
            elif is_excluded(node, options):
                obstacles[name] = EXCLUDED
            elif reason := _out_of_service(node) or why_not(node, request.needs, {}):
                obstacles[name] = reason
            elif (count := gpus_of(node, self.devices).count) < claimed:
                obstacles[name] = f"{count} GPUs for claims"
        return obstacles


class Room:
    """What is free. `pods`: those that have a node or are ungated; `allocations`: those of all
    runs; `bad`: nodes that no run gets. Whatever is taken is recorded here, so that each decision
    builds on the one before."""

    def __init__(
        self,
        fits: Fits,
        pods: Iterable[Pod],
        allocations: Mapping[str, Allocation],
        bad: Iterable[str] = (),
    ):
        self._fits = fits
        self._bad = frozenset(bad)
        # key of a fit -> its free nodes, since something was last taken
        self._free_of: dict[str, list[str]] = {}
        self._used: dict[str, dict[str, float]] = {}
        self._pods_with_gpus: dict[str, str] = {}
        self._claims = dict(fits.devices.held or {})  # node -> a claim or pod that holds GPUs of it
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
        for key, allocation in allocations.items():
            self.take(key, allocation.held, allocation.needs)

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

    def place(self, request: NodeRequest) -> Placed | str:
        """Takes nodes for the first of its sizes that fits; else returns why there are none for the
        smallest.

        OrchError (65) for options that contradict the plan or the cluster.
        """
        fit = self._fits.of(request)
        free = self._free(fit, request)
        for size, plan in request.sizes:
            nodes = self._choose(fit, free, plan, size) if len(free) >= size else None
            if nodes is not None:
                needs = {} if fit.exclusive else dict(request.needs.requests)
                self.take(request.key, nodes, needs)
                return Placed(size, nodes, needs)
        shortage = self._shortage(
            min(size for size, _ in request.sizes),
            fit,
            free,
        )
        if request.claims and self._fits.devices.by_node is None:
            return f"{shortage}; {_BY_LABELS}"
        return shortage

    def _choose(
        self,
        fit: _Fit,
        free: Sequence[str],
        plan: Plan,
        size: int,
    ) -> list[str] | None:
        if not fit.exclusive:
            return _spread(free, size)
        free_names = set(free)
        machines = {
            name: structs.replace(machine, free=name in free_names)
            for name, machine in fit.topology.machines.items()
        }
        try:
            return list(choose(plan, structs.replace(fit.topology, machines=machines), {}).nodes)
        except OrchError:  # too few have enough GPUs
            return None

    def _shortage(self, size: int, fit: _Fit, free: Sequence[str]) -> str:
        """Says why a run finds no room, in the words of a status."""
        reasons = Counter(fit.obstacles.values())
        held = sum(1 for node in self._owner if node not in fit.obstacles)
        causes = [f"{count} x {reason}" for reason, count in reasons.most_common(3) if reason]
        if held:
            causes.append(f"{held} held by other runs")
        details = f" ({', '.join(causes)})" if causes else ""
        unit = "nodes" if fit.exclusive else "places for pods"
        return f"waiting for room: needs {size} {unit}, {len(free)} are free{details}"

    # --------------------------------------------------------------------------------- single nodes

    def more(self, request: NodeRequest, near: Sequence[str], count: int) -> list[str]:
        """Takes up to `count` free nodes for single pods, preferring those under the innermost
        switches of most of the run's other nodes. For an elastic run it takes as many as make its
        next larger size, or none."""
        fit = self._fits.of(request)
        free = self._free(fit, request)
        if request.elastic:
            steps = [size - len(near) for size, _ in request.sizes]
            count = max(
                (step for step in steps if 0 < step <= min(count, len(free))),
                default=0,
            )
        neighbours: Counter[str] = Counter()
        for tier in reversed(fit.topology.tiers):
            for members in tier.switches.values():
                near_members = sum(node in members for node in near)
                for node in members if near_members else ():
                    neighbours[node] += near_members
        nearest = sorted(free, key=lambda node: -neighbours[node])[:count]
        self.take(
            request.key,
            nearest,
            {} if fit.exclusive else request.needs.requests,
        )
        return nearest

    def _free(self, fit: _Fit, request: NodeRequest) -> list[str]:
        """Returns nodes for one more pod each; a shared node as often as pods fit on it."""
        if fit.key not in self._free_of:
            free_nodes = self._free_of[fit.key] = []
            for name, node in self._fits.nodes.items():
                if name in fit.obstacles or name in self._bad or name in self._owner:
                    continue
                used = self._used.get(name, {})
                if not fit.exclusive:
                    free_nodes += [name] * _count(node, request.needs, used)
                elif request.claims and name in self._claims:
                    continue
                elif name not in self._pods_with_gpus and not why_not(node, request.needs, used):
                    free_nodes.append(name)
        free = self._free_of[fit.key]
        if not request.excluded:
            return free
        return [name for name in free if name not in request.excluded]


def fitting(
    nodes: Mapping[str, Node],
    held: Iterable[str],
    needs: PodNeeds,
    options: KubernetesOptions,
    excluded: Iterable[str] = (),
) -> set[str]:
    """Returns those of a run's nodes that its pods may use now. `excluded`: nodes that are unfit
    for other reasons."""
    fit = set()
    for name in set(held).difference(excluded):
        node = nodes.get(name)
        if node is None or is_excluded(node, options) or not _is_selected(node, options):
            continue
        if not _out_of_service(node) and not why_not(node, needs, {}):
            fit.add(name)
    return fit


def _is_selected(node: Node, options: KubernetesOptions) -> bool:
    labels = node.metadata.labels
    return all(labels.get(key) == value for key, value in options.node_selector.items())


def _is_allocated(pod: Pod, allocations: Mapping[str, Allocation]) -> bool:
    """Tells whether the pod's resources are part of an allocation, so that they are not counted
    twice."""
    allocation = allocations.get(pod.run) if pod.run else None
    if allocation is None or not 0 <= pod.index < len(allocation.nodes):
        return False
    return allocation.nodes[pod.index] == pod.spec.node_name


def _out_of_service(node: Node) -> str:
    if node.spec.unschedulable:
        return "cordoned"
    ready = next((c.status for c in node.status.conditions if c.type == "Ready"), "True")
    return "" if ready == "True" else "not ready"


def _count(node: Node, needs: PodNeeds, used: Mapping[str, float]) -> int:
    """Returns how many pods fit in addition to what is used."""
    allocatable = node.status.allocatable
    counts = [
        int((quantity(allocatable.get(name, 0)) - used.get(name, 0.0) + 1e-9) // amount)
        for name, amount in needs.requests.items()
        if amount > 0 and (name in allocatable or name not in ALWAYS_REPORTED)
    ]
    return max(0, min(counts, default=1))


def _spread(free: Sequence[str], count: int) -> list[str]:
    """Returns `count` of the places, evenly over as many nodes as there are; pods of one node have
    neighbouring indices."""
    free_places = Counter(free)
    pods_by_node = Counter[str]()
    while sum(pods_by_node.values()) < count:
        node = min(
            (node for node in free_places if free_places[node]),
            key=lambda node: (pods_by_node[node], node),
        )
        free_places[node] -= 1
        pods_by_node[node] += 1
    return [node for node in sorted(pods_by_node) for _ in range(pods_by_node[node])]


def node_request(
    key: str,
    plans: Mapping[int, Plan],
    options: KubernetesOptions,
    needs: PodNeeds,
    nodes: int | None,
    elastic: bool = False,
) -> NodeRequest:
    """Builds the request. `nodes`: the requested size, for an elastic run the largest; None: the
    largest that fits.

    OrchError (65) if the size is not legal.
    """
    from orchestrator.plan.exits import Exit

    if nodes is not None and nodes not in plans:
        legal = ", ".join(map(str, sorted(plans)))
        raise OrchError(
            f"spec.nodes: {nodes} is not a size of this run: legal are {legal}", Exit.CONFIG
        )
    sizes = sorted((size for size in plans if nodes is None or size <= nodes), reverse=True)
    sizes = sizes if elastic or nodes is None else [nodes]
    return NodeRequest(
        key,
        [(size, plans[size]) for size in sizes],
        options,
        needs,
        elastic=elastic,
    )
