"""Which nodes a run is given without a queue: those that the scheduler will take for its pods."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec import structs

from orchestrator.backends.kubernetes.api.api_errors import api_error
from orchestrator.backends.kubernetes.cluster_view import Reservation, reserve_nodes
from orchestrator.backends.kubernetes.fitting import pod_needs, quantity, why_not
from orchestrator.backends.kubernetes.names import NODES
from orchestrator.backends.kubernetes.objects.node_affinity import HOST, node_affinity
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.cluster.importers.kubernetes import Node
from orchestrator.plan import Exit, Plan
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan

ROOM = {"cpu": "64", "memory": "1Ti", "nvidia.com/gpu": "2", "rdma/ib": "2"}
LEAF, SPINE = "network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine"


def cuda(plan: Plan, gpu: str = "H100-SXM") -> Plan:
    cluster = structs.replace(plan.cluster, device="cuda", gpu=structs.replace(plan.cluster.gpu, name=gpu))
    return structs.replace(plan, cluster=cluster)


def node(name: str, labels: dict | None = None, **changes: dict) -> dict:
    own = {HOST: name, "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "topology.kubernetes.io/zone": "z"}
    body = {
        "metadata": {"name": name, "labels": own | (labels or {})},
        "spec": {},
        "status": {"allocatable": dict(ROOM), "conditions": [{"type": "Ready", "status": "True"}]},
    }
    for key, value in changes.items():
        body[key] = body[key] | value
    return body


def has(**amounts: str) -> dict:
    return {
        "status": {"allocatable": ROOM | {name.replace("__", "/").replace("_", "."): n for name, n in amounts.items()}}
    }


class Api:
    """Of an API server: lists of what there is."""

    namespace = "llm"

    def __init__(
        self, nodes: list[dict], pods: list[dict] = (), jobs: list[dict] = (), all_jobs: list[dict] | None = None
    ):
        self.found = {"Node": nodes, "AllPods": pods, "Job": jobs, "JobSet": [], "AllJobs": all_jobs}

    def read(self, kind, of, labels="", fields="", cached=False):
        return msgspec.json.decode(json.dumps(self.found[kind]), type=list[of])

    def list(self, kind, labels="", fields="", absent_ok=False):
        if self.found[kind] is None and not absent_ok:
            raise api_error(403, "forbidden")
        return self.found[kind] or []

    def create(self, body):
        return {**body, "metadata": {**body["metadata"], "uid": "u", "resourceVersion": "1"}}

    def delete(self, *_, **__):
        return True


def reserve(api: Api, plan: Plan, **options: object) -> Reservation:
    with reserve_nodes(api, plan, read_options({"image": "x", **options}), "run-1") as found:
        return found


@pytest.mark.parametrize(
    ("options", "gpu", "changes", "why"),
    [
        ({}, "H100-SXM", {}, ""),
        ({"rdma": {"rdma/ib": 2}}, "H100-SXM", {}, ""),
        ({"rdma": {"rdma/hca": 2}}, "H100-SXM", {}, "no rdma/hca"),
        ({"rdma": {"rdma/ib": 8}}, "H100-SXM", {}, "too little rdma/ib"),
        ({"cpus": 96}, "H100-SXM", {}, "too little cpu"),
        ({"memory_gib": 2000}, "H100-SXM", {}, "too little memory"),
        ({}, "A100-SXM", {}, "instead of a100"),
        ({}, "H10-X", {}, "instead of h10"),
        ({"gpu_resource": "amd.com/gpu"}, "H100-SXM", {}, "no amd.com/gpu"),
        ({}, "H100-SXM", {"spec": {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}}, "taint team"),
        ({}, "H100-SXM", {"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}, ""),
        ({}, "H100-SXM", {"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoExecute"}]}}, "taint nvidia"),
        ({}, "H100-SXM", {"spec": {"taints": [{"key": "team", "effect": "PreferNoSchedule"}]}}, ""),
    ],
)  # fmt: skip
def test_what_the_scheduler_will_check(options, gpu, changes, why):
    plan = cuda(make_plan(tp=2, dp=2, nodes=2), gpu)
    needs = pod_needs(plan, read_options({"image": "x", **options}))
    found = why_not(msgspec.convert(node("n", **changes), Node), needs, {})
    assert why in found and bool(why) == bool(found)


def test_a_taint_that_is_tolerated_does_not_matter_and_one_of_another_value_does():
    taints = {"spec": {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}}
    api, plan = Api([node(f"n{i}", **taints) for i in range(2)]), cuda(make_plan(tp=2, dp=2, nodes=2))
    ours = {"key": "team", "operator": "Equal", "value": "a"}
    assert len(reserve(api, plan, tolerations=[ours]).chosen.nodes) == 2
    with refusal("2 x taint team", Exit.CAPACITY):
        reserve(api, plan, tolerations=[ours | {"value": "b"}])


def test_cpus_that_others_use_are_not_there():
    pod = {
        "metadata": {"name": "p"},
        "spec": {"nodeName": "n1", "containers": [{"resources": {"requests": {"cpu": "60"}}}]},
    }
    plan = cuda(make_plan(tp=2, dp=2, nodes=2))
    found = reserve(Api([node(f"n{i}") for i in range(3)], [pod]), plan)
    assert found.chosen.nodes == ("n0", "n2")
    with refusal("1 x too little cpu", Exit.CAPACITY):
        reserve(Api([node(f"n{i}") for i in range(2)], [pod]), plan)


def test_other_makers_gpus_are_chosen():
    nodes = [
        node(f"n{i}", **{"status": {"allocatable": {"cpu": "64", "memory": "1Ti", "amd.com/gpu": "2"}}})
        for i in range(2)
    ]
    plan = cuda(make_plan(tp=2, dp=2, nodes=2))
    assert len(reserve(Api(nodes), plan, gpu_resource="amd.com/gpu").chosen.nodes) == 2


def test_pods_ask_for_hostnames_and_not_for_node_names():
    nodes = [node(f"ip-{i}.internal", {HOST: f"ip-{i}"}) for i in range(2)]
    found = reserve(Api(nodes), cuda(make_plan(tp=2, dp=2, nodes=2))).chosen
    terms = node_affinity(found)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert (terms[0]["matchExpressions"][0]["values"], found.nodes[0]) == (["ip-0", "ip-1"], "ip-0.internal")


def test_nodes_of_other_namespaces_runs_are_theirs_where_they_may_be_seen():
    job = {"metadata": {"name": "theirs", "annotations": {NODES: "n0,n1"}}}
    plan, nodes = cuda(make_plan(tp=2, dp=2, nodes=2)), [node(f"n{i}") for i in range(4)]
    assert reserve(Api(nodes, all_jobs=[job]), plan).chosen.nodes == ("n2", "n3")
    assert reserve(Api(nodes), plan).chosen.nodes == ("n0", "n1")  # no right to list them


def test_labels_that_auto_finds_are_what_pods_ask_for():
    """Names of switches instead of names of nodes; and never one that is no label's value."""
    labels = lambda i: {LEAF: f"l{i // 2}", SPINE: f"s{i // 4}"}  # noqa: E731
    plan = cuda(make_plan(tp=2, dp=4, nodes=4))
    found = reserve(
        Api([node(f"n{i}", labels(i)) for i in range(8)] + [node("cpu", status={"allocatable": {"cpu": "8"}})]), plan
    )
    assert (found.chosen.label, found.chosen.values) == (SPINE, ("s0",))
    twice = [node(f"n{i}", {LEAF: f"l{i // 2 % 2}", SPINE: f"s{i // 4}"}) for i in range(8)]  # l0 and l1 under both
    chosen = reserve(Api(twice), cuda(make_plan(tp=2, dp=2, nodes=2))).chosen
    asked = node_affinity(chosen)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    values = [v for term in asked["nodeSelectorTerms"] for e in term["matchExpressions"] for v in e["values"]]
    assert values and not any("/" in value for value in values)
    older = [node(f"n{i}", {"network.topology.nvidia.com/block": f"b{i // 2}"}) for i in range(4)]
    assert reserve(Api(older), cuda(make_plan(tp=2, dp=2, nodes=2))).chosen.label == "network.topology.nvidia.com/block"


def test_a_layout_that_the_labels_cannot_support_warns_with_its_price():
    plan = cuda(make_plan(tp=2, pp=2, dp=2, nodes=4))
    together = reserve(Api([node(f"n{i}", {LEAF: "l"}) for i in range(4)]), plan)
    assert together.warnings == ()
    apart = reserve(Api([node(f"n{i}", {LEAF: f"l{i // 2}"}) for i in range(4)]), plan)
    (line,) = apart.warnings
    assert line.startswith("1 of 1 units of the plan do not lie under one leaf; predicted step +")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("500m", 0.5),
        ("1Ki", 1024),
        ("2Gi", 2 * 2**30),
        ("3k", 3000),
        ("1e3", 1000),
        ("1Ti", 2**40),
        ("x", 0),
    ],
)
def test_quantities(text, value):
    assert quantity(text) == value
