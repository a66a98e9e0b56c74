"""Sums up what the scheduler counts for a pod: its requests on its node. Pure.

Sources: k8s.io/component-helpers/resource/helpers.go (PodRequests), kube-scheduler's filter
NodeResourcesFit,
https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

PODS = "pods"  # a resource of which every pod takes one
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
        """Resource -> requested amount; a resource with a limit alone is requested up to its
        limit."""
        return _numbers((self.limits or {}) | (self.requests or {}))


class Container(Struct, frozen=True, omit_defaults=True, rename="camel"):
    resources: Resources = Resources()
    restart_policy: str = ""


class PodShape(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The fields of `v1.PodSpec` that request resources."""

    containers: list[Container] = []
    init_containers: list[Container] = []
    resources: Resources | None = None  # resources of the whole pod
    overhead: dict[str, str | int | float] = {}  # added by the pod's runtime class
    resource_claims: list[dict[str, str]] = []  # claims by which it requests devices


def pod_requests(spec: PodShape) -> Amounts:
    """Resource -> requested amount, one of `pods` among them.

    Containers and sidecars (init containers that keep running) add up. Any other init container
    runs alone with the sidecars that started before it. Resources of the whole pod replace those of
    its containers.
    """
    sidecars: Amounts = {}
    starting: Amounts = {}
    for container in spec.init_containers:
        with_sidecars = _sum(sidecars, container.resources.amounts)
        if container.restart_policy == "Always":
            sidecars = with_sidecars
        starting = _most(starting, with_sidecars)
    running = sidecars
    for container in spec.containers:
        running = _sum(running, container.resources.amounts)
    requests = _most(running, starting)
    if spec.resources is not None:
        pod_limits = _numbers(spec.resources.limits or {})
        requests = pod_limits | requests | _numbers(spec.resources.requests or {})
    return _sum(_sum(requests, _numbers(spec.overhead)), {PODS: 1.0})


def quantity(amount: object) -> float:
    """Reads a Kubernetes quantity as a number: 64Gi, 500m, 1e3. One that cannot be read is 0."""
    match = _QUANTITY.fullmatch(str(amount))
    if not match or match[2] not in _FACTORS:
        return 0.0
    try:
        return float(match[1]) * _FACTORS[match[2]]
    except ValueError:
        return 0.0


def _numbers(quantities: Mapping[str, str | int | float]) -> Amounts:
    return {name: quantity(amount) for name, amount in quantities.items()}


def _sum(left_amounts: Amounts, right_amounts: Amounts) -> Amounts:
    return {
        name: left_amounts.get(name, 0.0) + right_amounts.get(name, 0.0)
        for name in _names(left_amounts, right_amounts)
    }


def _most(left_amounts: Amounts, right_amounts: Amounts) -> Amounts:
    return {
        name: max(left_amounts.get(name, 0.0), right_amounts.get(name, 0.0))
        for name in _names(left_amounts, right_amounts)
    }


def _names(left_amounts: Amounts, right_amounts: Amounts) -> Sequence[str]:
    return [*left_amounts, *(name for name in right_amounts if name not in left_amounts)]
