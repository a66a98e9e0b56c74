"""GPUs that pods request by ResourceClaims (dynamic resource allocation) instead of by a resource:
which nodes have them, and which claims hold them.

Sources: https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/ ;
kubernetes-sigs/dra-driver-nvidia-gpu, whose driver for whole GPUs and MIG slices is named
gpu.nvidia.com and whose devices have the attributes type and productName.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec import Struct, structs

from orchestrator.cluster.importers.kubernetes import CARDS, PRODUCT, Node
from orchestrator.errors import OrchError

from .api.client import Cluster, in_background
from .options import KubernetesOptions

T = TypeVar("T")


class _Text(Struct, frozen=True):
    string: str = ""


class _Basic(Struct, frozen=True):
    attributes: dict[str, _Text] = {}


class _Device(Struct, frozen=True):
    attributes: dict[str, _Text] = {}
    basic: _Basic = _Basic()  # before Kubernetes 1.34

    def attribute(self, name: str) -> str:
        return (self.attributes.get(name) or self.basic.attributes.get(name) or _Text()).string


class _Pool(Struct, frozen=True):
    name: str = ""


class _SliceSpec(Struct, frozen=True, rename="camel"):
    driver: str = ""
    pool: _Pool = _Pool()
    node_name: str = ""
    devices: list[_Device] = []


class _Slice(Struct, frozen=True):
    spec: _SliceSpec


class _Result(Struct, frozen=True, rename="camel"):
    driver: str = ""
    pool: str = ""
    admin_access: bool | None = None  # a monitor of devices that other claims use


class _Devices(Struct, frozen=True):
    results: list[_Result] = []


class _Allocation(Struct, frozen=True):
    devices: _Devices = _Devices()


class _ClaimStatus(Struct, frozen=True):
    allocation: _Allocation | None = None


class _Meta(Struct, frozen=True):
    name: str


class _Claim(Struct, frozen=True):
    metadata: _Meta
    status: _ClaimStatus = _ClaimStatus()


class NodeGpus(Struct, frozen=True):
    count: int
    product: str = ""


class GpuDevices(Struct, frozen=True):
    """The GPUs of a cluster's nodes. None: they may not be read, or the cluster has no such kind of
    object."""

    by_node: dict[str, NodeGpus] | None = None
    held: dict[str, str] | None = None  # node -> a claim that holds GPUs of it


NOT_READ = GpuDevices()


def asks_by_claim(options: KubernetesOptions) -> bool:
    """Tells whether the site's own fields of the pod name ResourceClaims."""
    spec = options.pod.get("spec")
    return isinstance(spec, Mapping) and bool(spec.get("resourceClaims"))


def read_devices(cluster: Cluster) -> GpuDevices:
    """Reads which GPUs are published and which are held. OrchError (76, 78) if the cluster does not
    answer."""
    reading = in_background(lambda: _read(cluster, "AllResourceClaims", _Claim))
    slices = _read(cluster, "ResourceSlice", _Slice)
    claims = reading.result()
    if slices is None:
        return NOT_READ
    specs = [slice.spec for slice in slices]
    gpu_specs = [spec for spec in specs if spec.driver.startswith("gpu.") and spec.node_name]
    by_node: dict[str, NodeGpus] = {}
    for spec in gpu_specs:
        earlier = by_node.get(spec.node_name, NodeGpus(0))
        by_node[spec.node_name] = _with_slice(earlier, spec)
    if claims is None:
        return GpuDevices(by_node, None)
    pools = {(spec.driver, spec.pool.name): spec.node_name for spec in gpu_specs}
    return GpuDevices(by_node, _held(claims, pools))


def _with_slice(earlier: NodeGpus, spec: _SliceSpec) -> NodeGpus:
    """Adds the whole GPUs of one ResourceSlice to those of its node."""
    gpus = [device for device in spec.devices if device.attribute("type") in ("", "gpu")]
    products = filter(None, (device.attribute("productName") for device in gpus))
    return NodeGpus(earlier.count + len(gpus), next(products, earlier.product))


def _held(claims: Sequence[_Claim], pools: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Node -> a claim that holds GPUs of it. `pools`: (driver, pool) -> node."""
    held: dict[str, str] = {}
    for claim in claims:
        allocation = claim.status.allocation or _Allocation()
        for result in allocation.devices.results:
            node = pools.get((result.driver, result.pool))
            if node is not None and not result.admin_access:
                held[node] = claim.metadata.name
    return held


def _read(cluster: Cluster, kind: str, record_type: type[T]) -> Sequence[T] | None:
    for version in (kind, f"Old{kind}"):
        try:
            return cluster.read(version, record_type, cached=True)
        except OrchError as error:
            if getattr(error, "status", None) == 403:
                return None
            if getattr(error, "status", None) != 404:
                raise
    return None


def gpus_of(node: Node, devices: GpuDevices) -> NodeGpus:
    """Returns the GPUs that a claim may get on the node: those that drivers publish, or, if those
    may not be read, as many as the node's label says."""
    if devices.by_node is not None:
        return devices.by_node.get(node.metadata.name, NodeGpus(0))
    count = node.metadata.labels.get(CARDS, "")
    return NodeGpus(int(count) if count.isdigit() else 0)


def with_devices(nodes: Sequence[Node], resource: str, devices: GpuDevices) -> list[Node]:
    """Returns the nodes as if they had their GPUs as a resource of that name."""
    changed = []
    for node in nodes:
        gpus = gpus_of(node, devices)
        product = {PRODUCT: gpus.product} if gpus.product else {}
        metadata = structs.replace(node.metadata, labels=product | node.metadata.labels)
        allocatable = node.status.allocatable | {resource: str(gpus.count)}
        status = structs.replace(node.status, allocatable=allocatable)
        changed.append(structs.replace(node, metadata=metadata, status=status))
    return changed
