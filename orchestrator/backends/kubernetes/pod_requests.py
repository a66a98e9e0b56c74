"""What the scheduler counts for a pod: the room that it takes on its node. Pure.

Sources: k8s.io/component-helpers/resource/helpers.go (PodRequests), kube-scheduler's filter
NodeResourcesFit,
https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

PODS = "pods"  # the resource of which every pod takes one
_FACTORS = {"m": 1e-3, "": 1.0} | {
    unit + binary: float(base**power)
    for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)
    for binary, base in (("", 1000), ("i", 1024))
} | {"Ki": 1024.0}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)")

Amounts = dict[str, float]


class Resources(Struct, frozen=True, omit_defaults=True):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None

    @property
    def amounts(self) -> Amounts:
        """A resource with a limit alone is asked for as far as its limit."""
        return _numbers((self.limits or {}) | (self.requests or {}))


class Container(Struct, frozen=True, omit_defaults=True, rename="camel"):
    resources: Resources = Resources()
    restart_policy: str = ""


class PodShape(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The fields of `v1.PodSpec` that ask for room."""

    containers: list[Container] = []
    init_containers: list[Container] = []
    resources: Resources | None = None  # of the whole pod
    overhead: dict[str, str | int | float] = {}  # of its runtime class
    resource_claims: list[dict[str, str]] = []  # by which it asks for devices


def pod_requests(spec: PodShape) -> Amounts:
    """Resource -> amount, one of `pods` among them.

    Containers and sidecars (init containers that stay) add up. Another init container runs alone,
    beside the sidecars that were started before it. Resources of the whole pod take the place of
    what its containers ask for.
    """
    sidecars: Amounts = {}
    starting: Amounts = {}
    for container in spec.init_containers:
        beside = _sum(sidecars, container.resources.amounts)
        if container.restart_policy == "Always":
            sidecars = beside
        starting = _most(starting, beside)
    running = sidecars
    for container in spec.containers:
        running = _sum(running, container.resources.amounts)
    found = _most(running, starting)
    if spec.resources is not None:
        found = (
            _numbers(spec.resources.limits or {}) | found | _numbers(spec.resources.requests or {})
        )
    return _sum(_sum(found, _numbers(spec.overhead)), {PODS: 1.0})


def quantity(amount: object) -> float:
    """A Kubernetes quantity as a number: 64Gi, 500m, 1e3. What cannot be read is 0."""
    found = _QUANTITY.fullmatch(str(amount))
    if not found or found[2] not in _FACTORS:
        return 0.0
    try:
        return float(found[1]) * _FACTORS[found[2]]
    except ValueError:
        return 0.0


def _numbers(given: Mapping[str, str | int | float]) -> Amounts:
    return {name: quantity(amount) for name, amount in given.items()}


def _sum(one: Amounts, other: Amounts) -> Amounts:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in _names(one, other)}


def _most(one: Amounts, other: Amounts) -> Amounts:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in _names(one, other)}


def _names(one: Amounts, other: Amounts) -> Sequence[str]:
    return [*one, *(name for name in other if name not in one)]
