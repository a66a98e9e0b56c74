"""GPUs that pods ask for by claims (dynamic resource allocation) in place of a resource: who has
them, who holds them.

Sources: https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/ ;
kubernetes-sigs/dra-driver-nvidia-gpu, whose driver of whole GPUs and MIG slices is called
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
    admin_access: bool | None = None  # of who watches devices that others use


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
    """Of a cluster's nodes. None: may not be read, or the cluster has no such kind."""

    by_node: dict[str, NodeGpus] | None = None
    held: dict[str, str] | None = None  # node -> a claim that has GPUs of it


NOT_READ = GpuDevices()


def asks_by_claim(options: KubernetesOptions) -> bool:
    """Whether a site's own fields of the pod name claims."""
    spec = options.pod.get("spec")
    return isinstance(spec, Mapping) and bool(spec.get("resourceClaims"))


def read_devices(cluster: Cluster) -> GpuDevices:
    """OrchError (76, 78) where the cluster does not answer."""
    reading = in_background(lambda: _read(cluster, "AllResourceClaims", _Claim))
    slices = _read(cluster, "ResourceSlice", _Slice)
    claims = reading.result()
    if slices is None:
        return NOT_READ
    ours = [one.spec for one in slices if one.spec.driver.startswith("gpu.") and one.spec.node_name]
    pools = {(spec.driver, spec.pool.name): spec.node_name for spec in ours}
    by_node: dict[str, NodeGpus] = {}
    for spec in ours:
        whole = [device for device in spec.devices if device.attribute("type") in ("", "gpu")]
        before = by_node.get(spec.node_name, NodeGpus(0))
        product = next(
            (name for device in whole if (name := device.attribute("productName"))), before.product
        )
        by_node[spec.node_name] = NodeGpus(before.count + len(whole), product)
    held: dict[str, str] = {}
    for claim in claims or ():
        for result in claim.status.allocation.devices.results if claim.status.allocation else ():
            node = pools.get((result.driver, result.pool))
            if node is not None and not result.admin_access:
                held[node] = claim.metadata.name
    return GpuDevices(by_node, None if claims is None else held)


def _read(cluster: Cluster, kind: str, of: type[T]) -> Sequence[T] | None:
    for version in (kind, f"Old{kind}"):
        try:
            return cluster.read(version, of, cached=True)
        except OrchError as error:
            if getattr(error, "status", None) == 403:
                return None
            if getattr(error, "status", None) != 404:
                raise
    return None


def gpus_of(node: Node, devices: GpuDevices) -> NodeGpus:
    """Those that a claim may get there: that drivers publish, or if that may not be read, as many
    as its label says."""
    if devices.by_node is not None:
        return devices.by_node.get(node.metadata.name, NodeGpus(0))
    count = node.metadata.labels.get(CARDS, "")
    return NodeGpus(int(count) if count.isdigit() else 0)


def with_devices(nodes: Sequence[Node], resource: str, devices: GpuDevices) -> list[Node]:
    """The nodes, as if they had their GPUs as a resource of that name."""
    found = []
    for node in nodes:
        about = node.metadata
        gpus = gpus_of(node, devices)
        product = {PRODUCT: gpus.product} if gpus.product else {}
        status = structs.replace(
            node.status, allocatable=node.status.allocatable | {resource: str(gpus.count)}
        )
        meta = structs.replace(about, labels=product | about.labels)
        found.append(structs.replace(node, metadata=meta, status=status))
    return found
