"""The nodes that a run is given without a queue: those that the scheduler will take for its
pods."""

from __future__ import annotations

import json
import re
from functools import reduce

import msgspec
import pytest
from msgspec import structs

from orchestrator.backends.kubernetes.api.api_errors import api_error
from orchestrator.backends.kubernetes.api.client import PATHS, Cluster
from orchestrator.backends.kubernetes.cluster_view import Reservation, read_snapshot, reserve_nodes
from orchestrator.backends.kubernetes.fitting import pod_needs, why_not
from orchestrator.backends.kubernetes.names import NODES
from orchestrator.backends.kubernetes.objects.node_affinity import HOST, node_affinity
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.backends.kubernetes.pod_requests import PodShape, pod_requests, quantity
from orchestrator.cluster.importers.kubernetes import Node
from orchestrator.plan import Exit, Plan
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan

ROOM = {"cpu": "64", "memory": "1Ti", "nvidia.com/gpu": "2", "rdma/ib": "2"}
LEAF = "network.topology.nvidia.com/leaf"
SPINE = "network.topology.nvidia.com/spine"


def cuda(plan: Plan, gpu: str = "H100-SXM") -> Plan:
    cluster = structs.replace(
        plan.cluster, device="cuda", gpu=structs.replace(plan.cluster.gpu, name=gpu)
    )
    return structs.replace(plan, cluster=cluster)


def node(name: str, labels: dict | None = None, **changes: dict) -> dict:
    base_labels = {
        HOST: name,
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "topology.kubernetes.io/zone": "z",
    }
    body = {
        "metadata": {"name": name, "labels": base_labels | (labels or {})},
        "spec": {},
        "status": {"allocatable": dict(ROOM), "conditions": [{"type": "Ready", "status": "True"}]},
    }
    for key, value in changes.items():
        body[key] = body[key] | value
    return body


def has(**amounts: str) -> dict:
    return {
        "status": {
            "allocatable": (
                ROOM | {name.replace("__", "/").replace("_", "."): n for name, n in amounts.items()}
            )
        }
    }


class Api:
    """Stands for an API server: lists of what there is."""

    namespace = "llm"

    def __init__(
        self,
        nodes: list[dict],
        pods: list[dict] = (),
        jobs: list[dict] = (),
        all_jobs: list[dict] | None = None,
    ):
        self.found = {
            "Node": nodes,
            "AllPods": pods,
            "Job": jobs,
            "JobSet": [],
            "AllJobs": all_jobs,
        }

    def read(self, kind, object_type, labels="", fields="", cached=False):
        selected = [body for body in self.found[kind] if _selected(body, fields)]
        return msgspec.json.decode(json.dumps(selected), type=list[object_type])

    def list(self, kind, labels="", fields="", absent_ok=False):
        if self.found[kind] is None and not absent_ok:
            raise api_error(403, "forbidden")
        return self.found[kind] or []

    def create(self, body):
        return {**body, "metadata": {**body["metadata"], "uid": "u", "resourceVersion": "1"}}

    def delete(self, *_, **__):
        return True


def _selected(body: dict, fields: str) -> bool:
    """A field selector: `status.phase!=Failed,spec.nodeName!=`."""
    for path, unlike, value in re.findall(r"([\w.]+)(!?)=([^,]*)", fields):
        actual = reduce(lambda at, name: at.get(name, {}), path.split("."), body) or ""
        if (actual == value) is bool(unlike):
            return False
    return True


def pod(
    name: str, on: str, spec: dict | None = None, phase: str = "Running", **requests: str
) -> dict:
    container = {"resources": {"requests": requests or {"cpu": "10m"}}}
    body = {"nodeName": on, "containers": [container]} | (spec or {})
    return {"metadata": {"name": name}, "spec": body, "status": {"phase": phase}}


def reserve(api: Api, plan: Plan, **options: object) -> Reservation:
    with reserve_nodes(api, plan, read_options({"image": "x", **options}), "run-1") as reservation:
        return reservation


@pytest.mark.parametrize(
    ("options", "gpu", "changes", "reason"),
    [
        ({}, "H100-SXM", {}, ""),
        ({"rdma": {"rdma/ib": 2}}, "H100-SXM", {}, ""),
        ({"rdma": {"rdma/hca": 2}}, "H100-SXM", {}, "no rdma/hca"),
        ({"rdma": {"rdma/ib": 8}}, "H100-SXM", {}, "too little rdma/ib"),
        ({"cpus": 96}, "H100-SXM", {}, "too little cpu"),
        ({"memory_gib": 2000}, "H100-SXM", {}, "too little memory"),
        ({}, "A100-SXM", {}, "instead of a100"),
        ({}, "H10-X", {}, "instead of h10"),
        ({}, "NVIDIA H100 80GB", {}, ""),
        ({}, "nvidia_h200", {}, "NVIDIA-H100-80GB-HBM3 instead of h200"),
        ({}, "our GPUs", {}, ""),
        ({"gpu_resource": "amd.com/gpu"}, "H100-SXM", {}, "no amd.com/gpu"),
        ({}, "H100-SXM", {"spec": {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}}, "taint team"),
        ({}, "H100-SXM", {"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}, ""),
        ({}, "H100-SXM", {"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoExecute"}]}}, "taint nvidia"),
        ({}, "H100-SXM", {"spec": {"taints": [{"key": "team", "effect": "PreferNoSchedule"}]}}, ""),
    ],
)  # fmt: skip
def test_what_the_scheduler_will_check(options, gpu, changes, reason):
    plan = cuda(make_plan(tp=2, dp=2, nodes=2), gpu)
    needs = pod_needs(plan, read_options({"image": "x", **options}))
    obstacle = why_not(msgspec.convert(node("n", **changes), Node), needs, {})
    assert reason in obstacle and bool(reason) == bool(obstacle)


def test_nodes_with_shared_gpus_are_not_given_and_the_refusal_says_so():
    sharing = [{"nvidia.com/gpu.replicas": "4"}, {"nvidia.com/gpu.sharing-strategy": "mps"}]
    sharing += [
        {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"},
        {"nvidia.com/gpu.count": "1"},
    ]
    nodes = [node(f"n{i}", labels) for i, labels in enumerate(sharing)] + [
        node(f"n{i}") for i in (4, 5)
    ]
    assert reserve(Api(nodes), cuda(make_plan(tp=2, dp=2, nodes=2))).chosen.nodes == ("n4", "n5")
    with refusal(r"2 of 6 nodes are free with 2 GPUs \(4 x shared GPUs\)", Exit.CAPACITY):
        reserve(Api(nodes), cuda(make_plan(tp=2, dp=3, nodes=3)))
    amounts = {
        "status": {"allocatable": ROOM | {"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "8"}}
    }
    renamed = [node(f"n{i}", sharing[0], **amounts) for i in range(2)]
    with refusal("2 x shared GPUs", Exit.CAPACITY):
        reserve(
            Api(renamed), cuda(make_plan(tp=2, dp=2, nodes=2)), gpu_resource="nvidia.com/gpu.shared"
        )


def test_a_taint_that_is_tolerated_does_not_matter_and_one_of_another_value_does():
    taints = {"spec": {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}}
    api = Api([node(f"n{i}", **taints) for i in range(2)])
    plan = cuda(make_plan(tp=2, dp=2, nodes=2))
    ours = {"key": "team", "operator": "Equal", "value": "a"}
    assert len(reserve(api, plan, tolerations=[ours]).chosen.nodes) == 2
    with refusal("2 x taint team", Exit.CAPACITY):
        reserve(api, plan, tolerations=[ours | {"value": "b"}])


def test_cpus_that_others_use_are_not_there():
    theirs = pod("p", "n1", cpu="60")
    plan = cuda(make_plan(tp=2, dp=2, nodes=2))
    reservation = reserve(Api([node(f"n{i}") for i in range(3)], [theirs]), plan)
    assert reservation.chosen.nodes == ("n0", "n2")
    with refusal("1 x too little cpu", Exit.CAPACITY):
        reserve(Api([node(f"n{i}") for i in range(2)], [theirs]), plan)


def test_a_node_without_a_free_slot_for_pods_is_not_given():
    plan = cuda(make_plan(tp=2, dp=2, nodes=2))
    full = has(pods="29")
    pods = [pod(f"small-{i}", "n0") for i in range(29)]
    ended = [pod(f"job-{i}", "n1", phase=("Succeeded", "Failed")[i % 2]) for i in range(40)]
    nodes = [
        node("n0", **full),
        node("n1", **full),
        node("n2"),
    ]  # n2 does not say how many it takes
    assert reserve(Api(nodes, pods + ended), plan).chosen.nodes == ("n1", "n2")
    with refusal(
        r"1 of 2 nodes are free with 2 GPUs \(1 x too many pods \(29 of 29\)\)", Exit.CAPACITY
    ):
        reserve(Api(nodes[:2], pods + ended), plan)
    assert reserve(Api(nodes[:2], pods[1:] + ended), plan).chosen.nodes == ("n0", "n1")


class Asked(Cluster):
    """Answers lists out of what there is, and remembers what was asked."""

    def __init__(self, bodies: dict[str, list[dict]]):
        super().__init__(None, "llm")
        self.found = bodies
        self.queries = {}

    def _raw(self, method, path, query, body=None, kind=""):
        self.queries[path] = query
        if path not in self.found:
            missing = "/v1/" in path and path.replace("/v1/", "/v1beta1/") in self.found
            raise api_error(404 if missing else 403, "forbidden")
        selected = [
            body for body in self.found[path] if _selected(body, query.get("fieldSelector", ""))
        ]
        return json.dumps({"items": selected}).encode()

    def create(self, body):
        return {**body, "metadata": {**body["metadata"], "uid": "u", "resourceVersion": "1"}}

    def delete(self, *_, **__):
        return True


@pytest.mark.parametrize("pods", ["/api/v1/pods", "/api/v1/namespaces/llm/pods"])
def test_pods_are_read_from_the_servers_memory_and_no_more_of_them_than_matter(pods):
    there = [
        pod("a", "n0", cpu="2"),
        pod("waits", "", cpu="4"),
        pod("ended", "n0", phase="Failed", cpu="8"),
    ]
    api = Asked({"/api/v1/nodes": [node("n0")], pods: there})
    assert read_snapshot(api, read_options({"image": "x"})).requests == {
        "n0": {"cpu": 2, "pods": 1}
    }
    for path in ("/api/v1/nodes", pods):
        assert api.queries[path]["resourceVersion"] == "0" and "limit" not in api.queries[path]
    assert "spec.nodeName!=" in api.queries[pods]["fieldSelector"]


CLAIM = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]}
NO_GPU = {"nvidia.com/gpu": None}
BY_CLAIM = {
    "spec": (
        CLAIM
        | {
            "containers": [
                {
                    "name": "agent",
                    "resources": {
                        "claims": [{"name": "gpus"}],
                        "requests": NO_GPU,
                        "limits": NO_GPU,
                    },
                }
            ]
        }
    )
}
NO_RUNS: dict[str, list[dict]] = {
    PATHS[kind].format(ns="llm"): [] for kind in ("AllJobs", "Job", "JobSet")
}


def slices(
    name: str, devices: int, kind: str = "gpu", driver: str = "gpu.nvidia.com", old: bool = False
) -> dict:
    about = {
        "attributes": {"type": {"string": kind}, "productName": {"string": "NVIDIA H100 80GB HBM3"}}
    }
    listed = [
        {"name": f"{kind}-{i}"} | ({"basic": about} if old else about) for i in range(devices)
    ]
    return {"spec": {"driver": driver, "pool": {"name": name}, "nodeName": name, "devices": listed}}


def claim(name: str, pool: str, **fields: object) -> dict:
    held = {"driver": "gpu.nvidia.com", "pool": pool, "device": "gpu-0", "request": "r"} | fields
    return {"metadata": {"name": name}, "status": {"allocation": {"devices": {"results": [held]}}}}


def bare(name: str, labels: dict | None = None) -> dict:
    """A node whose GPUs are no resource."""
    return node(name, labels, status={"allocatable": {"cpu": "64", "memory": "1Ti"}})


def chosen_by_claim(api: Asked) -> tuple[str, ...]:
    return reserve(api, cuda(make_plan(tp=2, dp=2, nodes=2)), pod=BY_CLAIM).chosen.nodes


@pytest.mark.parametrize(("version", "old"), [("v1", False), ("v1beta1", True)])
def test_gpus_that_are_asked_for_by_a_claim_are_where_their_driver_says(version, old):
    names = ("cpus", "few", "cut", "nics", "held", "watched", "free", "also")
    there = [
        slices("few", 1, old=old),
        slices("cut", 2, "mig", old=old),
        slices("nics", 8, driver="nic.vendor"),
    ]
    there += [slices(name, 2, old=old) for name in ("held", "watched", "free", "also")]
    claims = [
        claim("theirs", "held"),
        claim("monitor", "watched", adminAccess=True),
        {"metadata": {"name": "waits"}},
    ]
    api = Asked({
        "/api/v1/nodes": [bare(name) for name in names], "/api/v1/pods": [], **NO_RUNS,
        f"/apis/resource.k8s.io/{version}/resourceslices": there,
        f"/apis/resource.k8s.io/{version}/resourceclaims": claims,
    })  # fmt: skip
    assert set(chosen_by_claim(api)) <= {"watched", "free", "also"}
    there.pop()
    there.pop()
    with refusal(r"1 of 8 nodes are free with 2 GPUs \(.*fewer than 2 GPUs.*\)", Exit.CAPACITY):
        chosen_by_claim(api)


def test_where_devices_cannot_be_read_labels_say_how_many_gpus_a_node_has():
    labels = {"nvidia.com/gpu.count": "2"}
    users = [pod("theirs", "n0", CLAIM)]
    nodes = [bare("n0", labels), bare("n1", labels), bare("cpus"), bare("n2", labels)]
    api = Asked({"/api/v1/nodes": nodes, "/api/v1/pods": users, **NO_RUNS})
    assert chosen_by_claim(api) == ("n1", "n2")


STAYS = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"containers": [{"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "x/y": "3"}}}, {}]},
         {"cpu": 1, "x/y": 3}),
        ({"initContainers": [{"resources": {"requests": {"cpu": "40"}}} | STAYS]}, {"cpu": 41}),
        ({"initContainers": [{"resources": {"requests": {"cpu": "40", "memory": "1Ki"}}}]},
         {"cpu": 40, "memory": 1024}),
        ({"initContainers": [{"resources": {"requests": {"cpu": "500m"}}}]}, {"cpu": 1}),
        # The one that ends runs beside the sidecar before it, and not beside the one after it.
        ({"initContainers": [{"resources": {"requests": {"cpu": "2"}}} | STAYS,
                             {"resources": {"requests": {"cpu": "8"}}},
                             {"resources": {"requests": {"cpu": "4"}}} | STAYS]}, {"cpu": 10}),
        ({"overhead": {"cpu": "2", "memory": "2Ki"}}, {"cpu": 3, "memory": 2048}),
        ({"resources": {"requests": {"cpu": "60", "memory": "900Gi"}}}, {"cpu": 60, "memory": 900 * 2**30}),
        ({"resources": {"limits": {"cpu": "60", "memory": "1Ki"}}, "overhead": {"cpu": "250m"}},
         {"cpu": 1.25, "memory": 1024}),
    ],
)  # fmt: skip
def test_a_pod_takes_what_the_scheduler_counts(spec, expected):
    pod_spec = {"containers": [{"resources": {"requests": {"cpu": "1"}}}]} | spec
    assert pod_requests(msgspec.convert(pod_spec, PodShape)) == expected | {"pods": 1}
    plan = cuda(make_plan(tp=2, dp=1, nodes=1))
    needs = pod_needs(plan, read_options({"image": "x"})).requests
    room = {"cpu": f"{needs['cpu'] + expected['cpu']}", "memory": "2Ti"}
    at_their_side = [node("n0", status={"allocatable": ROOM | room})]
    assert reserve(Api(at_their_side, [pod("theirs", "n0", pod_spec)]), plan).chosen.nodes == (
        "n0",
    )
    with refusal("1 x too little cpu", Exit.CAPACITY):
        reserve(Api(at_their_side, [pod("theirs", "n0", pod_spec), pod("small", "n0")]), plan)


def test_other_makers_gpus_are_chosen():
    nodes = [
        node(
            f"n{i}",
            status={"allocatable": {"cpu": "64", "memory": "1Ti", "amd.com/gpu": "2"}},
        )
        for i in range(2)
    ]
    plan = cuda(make_plan(tp=2, dp=2, nodes=2))
    assert len(reserve(Api(nodes), plan, gpu_resource="amd.com/gpu").chosen.nodes) == 2


def test_pods_ask_for_hostnames_and_not_for_node_names():
    nodes = [node(f"ip-{i}.internal", {HOST: f"ip-{i}"}) for i in range(2)]
    chosen = reserve(Api(nodes), cuda(make_plan(tp=2, dp=2, nodes=2))).chosen
    terms = node_affinity(chosen)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert (terms[0]["matchExpressions"][0]["values"], chosen.nodes[0]) == (
        ["ip-0", "ip-1"],
        "ip-0.internal",
    )


def test_nodes_of_other_namespaces_runs_are_theirs_where_they_may_be_seen():
    job = {"metadata": {"name": "theirs", "annotations": {NODES: "n0,n1"}}}
    plan = cuda(make_plan(tp=2, dp=2, nodes=2))
    nodes = [node(f"n{i}") for i in range(4)]
    assert reserve(Api(nodes, all_jobs=[job]), plan).chosen.nodes == ("n2", "n3")
    assert reserve(Api(nodes), plan).chosen.nodes == ("n0", "n1")  # no right to list them


def test_labels_that_auto_finds_are_what_pods_ask_for():
    """Names of switches instead of names of nodes; and never one that is no label's value."""
    labels = lambda i: {LEAF: f"l{i // 2}", SPINE: f"s{i // 4}"}  # noqa: E731
    plan = cuda(make_plan(tp=2, dp=4, nodes=4))
    reservation = reserve(
        Api(
            [node(f"n{i}", labels(i)) for i in range(8)]
            + [node("cpu", status={"allocatable": {"cpu": "8"}})]
        ),
        plan,
    )
    assert (reservation.chosen.label, reservation.chosen.values) == (SPINE, ("s0",))
    twice = [
        node(f"n{i}", {LEAF: f"l{i // 2 % 2}", SPINE: f"s{i // 4}"}) for i in range(8)
    ]  # l0 and l1 under both
    chosen = reserve(Api(twice), cuda(make_plan(tp=2, dp=2, nodes=2))).chosen
    affinity = node_affinity(chosen)["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    values = [
        v
        for term in affinity["nodeSelectorTerms"]
        for e in term["matchExpressions"]
        for v in e["values"]
    ]
    assert values and not any("/" in value for value in values)
    older = [node(f"n{i}", {"network.topology.nvidia.com/block": f"b{i // 2}"}) for i in range(4)]
    assert (
        reserve(Api(older), cuda(make_plan(tp=2, dp=2, nodes=2))).chosen.label
        == "network.topology.nvidia.com/block"
    )


def test_a_layout_that_the_labels_cannot_support_warns_with_its_price():
    plan = cuda(make_plan(tp=2, pp=2, dp=2, nodes=4))
    together = reserve(Api([node(f"n{i}", {LEAF: "l"}) for i in range(4)]), plan)
    assert together.warnings == ()
    apart = reserve(Api([node(f"n{i}", {LEAF: f"l{i // 2}"}) for i in range(4)]), plan)
    (line,) = apart.warnings
    assert line.startswith("1 of 1 units of the plan are not under one leaf; predicted step +")


@pytest.mark.parametrize(
    ("quantity_text", "value"),
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
def test_quantities(quantity_text, value):
    assert quantity(quantity_text) == value
