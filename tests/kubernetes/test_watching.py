"""What the API server shows, put into words and exit codes; and what it refuses, put into one line.
All pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from orchestrator.backends.base import write_record
from orchestrator.backends.kubernetes.api.api_errors import api_error, unreachable
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.cluster_view import check_queue
from orchestrator.backends.kubernetes.objects.node_affinity import (
    choose,
    in_whole_units,
    node_affinity,
)
from orchestrator.backends.kubernetes.observer import force_delete_stuck_pods
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.backends.kubernetes.phases import ObservedRun, nodes_of, status_of
from orchestrator.backends.kubernetes.record import KubernetesRecord, verdict
from orchestrator.cluster.model import Machine, Tier, Topology
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import SCHEMA, RunState, write_state
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan

NOW = 1_800_000_000.0


def job(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "r", "uid": "u"}, "spec": {"completions": 2}, "status": status}


def condition(kind: str, **fields: str) -> dict[str, str]:
    return {"type": kind, "status": "True", **fields}


def pod(
    index: int, phase: str = "Running", code: int | None = None, message: str = "", **metadata: Any
) -> dict[str, Any]:
    ended = (
        {"terminated": {"exitCode": code, "message": message}}
        if code is not None
        else {"running": {}}
    )
    notes = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {
        "metadata": {"name": f"r-{index}-x", "annotations": notes, **metadata},
        "spec": {"nodeName": f"n{index}"},
        "status": {"phase": phase, "containerStatuses": [{"name": "agent", "state": ended}]},
    }


def seen(main: dict | None = None, pods: list[dict] | None = None, **observed: Any) -> ObservedRun:
    return ObservedRun(main=main, job=main, pods=pods or [], **observed)


def state(phase: str = "running", epoch: int = 0) -> RunState:
    fields = {
        "schema": SCHEMA,
        "run_id": "r",
        "backend": "kubernetes",
        "plan_hash": "h",
        "writer": "backend",
    }
    return RunState(**fields, state=phase, epoch=epoch, created_at=1, updated_at=1)


def test_a_running_job_is_running_and_its_nodes_are_named_by_index():
    run_status = status_of(seen(job(), [pod(1), pod(0)]), NOW)
    assert (run_status.phase, run_status.over) == ("running", False)
    assert nodes_of([pod(1), pod(0), pod(2, "Failed")]) == ("n0", "n1")


def test_an_elastic_run_is_at_work_with_fewer_pods():
    """What it does is its coordinator's to say; a run of one size that lacks a pod does nothing."""
    main = job()
    assert status_of(seen(main, [pod(0)]), NOW).phase == "starting"
    main["spec"]["successPolicy"] = {"rules": [{"succeededCount": 1}]}
    run_status = status_of(seen(main, [pod(0)]), NOW)
    assert (run_status.phase, run_status.reason) == ("running", "1 of 2 pods run")
    assert verdict(state("running"), run_status, False).state == "running"
    assert status_of(seen(main, []), NOW).phase == "starting"


def test_the_end_of_a_job_carries_the_code_and_the_last_word_of_its_pod():
    failure = condition(
        "Failed",
        reason="PodFailurePolicy",
        message="Container agent for pod x failed with exit code 65",
    )
    pods = [pod(0, "Failed", 75), pod(1, "Failed", 65, '{"code": 65, "text": "plan: not ours"}')]
    run_status = status_of(seen(job(conditions=[failure]), pods), NOW)
    assert (run_status.phase, run_status.exit, run_status.over, run_status.reason) == (
        "failed",
        Exit.CONFIG,
        True,
        "plan: not ours",
    )
    assert status_of(seen(job(conditions=[condition("Complete")])), NOW).exit == Exit.DONE
    spent = condition(
        "Failed",
        reason="BackoffLimitExceeded",
        message="Job has reached the specified backoff limit",
    )
    run_status = status_of(seen(job(conditions=[spent]), [pod(0, "Failed", 137)]), NOW)
    assert run_status.exit == Exit.USER
    assert "backoff limit" in run_status.reason


def test_a_job_that_ends_is_not_over_before_its_pods_are():
    failure_target = condition("FailureTarget", message="")
    run_status = status_of(seen(job(conditions=[failure_target])), NOW)
    assert (run_status.phase, run_status.over) == ("stopping", False)
    failed = condition("Failed", message="Container agent for pod x failed with exit code 65")
    run_status = status_of(
        seen(job(conditions=[failure_target, failed])), NOW
    )  # in the order in which the Job's controller adds them
    assert (run_status.phase, run_status.over, run_status.exit) == ("failed", True, Exit.CONFIG)
    deleting = {
        **job(),
        "metadata": {"name": "r", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"},
    }
    assert status_of(seen(deleting), NOW).phase == "stopping"


@pytest.mark.parametrize(
    ("pods", "events", "says"),
    [
        (
            [{"reason": "ImagePullBackOff", "message": "no such image"}],
            [],
            "image cannot be pulled",
        ),
        (
            [{"reason": "CreateContainerConfigError", "message": 'secret "r" not found'}],
            [],
            'secret "r" not found',
        ),
        (
            [],
            [{"reason": "FailedCreate", "message": "exceeded quota: gpus", "lastTimestamp": "2"}],
            "exceeded quota",
        ),
    ],
)
def test_why_it_does_not_start_is_said(pods, events, says):
    waiting = [pod(index, "Pending") for index in range(len(pods))]
    for body, reason in zip(waiting, pods, strict=True):
        body["status"]["containerStatuses"][0]["state"] = {"waiting": reason}
    run_status = status_of(seen(job(), waiting, events=events), NOW)
    assert run_status.phase == "pending"
    assert says in run_status.reason


def test_no_room_and_the_queue_s_own_words_are_said():
    body = pod(1, "Pending")
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    body["status"]["conditions"] = [unschedulable]
    explanation = status_of(seen(job(), [pod(0), body]), NOW).reason
    assert "Insufficient nvidia.com/gpu" in explanation
    assert explanation.endswith(
        "wait for room, or ask for less of a node (cpus, memory_gib, gpu_resource, rdma)"
    )
    queued = job()
    queued["spec"]["suspend"] = True
    explanation = (
        'couldn\'t assign flavors to pod set main: topology "ib" allows to fit only 4 out of 8'
        " pod(s)"
    )
    workload = {
        "status": {
            "conditions": [{"type": "QuotaReserved", "status": "False", "message": explanation}]
        }
    }
    run_status = status_of(seen(queued, workload=workload), NOW)
    assert run_status.phase == "pending"
    assert "fit only 4 out of 8" in run_status.reason


def test_a_pod_that_hangs_on_a_dead_node_is_recognised_with_the_remedy():
    hanging = pod(1, deletionTimestamp="2026-11-21T10:00:00Z")
    run_status = status_of(seen(job(), [pod(0), hanging]), NOW)
    assert "pod r-1-x hangs on node n1" in run_status.reason
    assert "out-of-service" in run_status.reason
    just_now = pod(1, deletionTimestamp="2027-01-15T08:00:00Z")  # NOW
    assert "hangs" not in status_of(seen(job(), [pod(0), just_now]), NOW).reason


class Nodes:
    """A cluster of nodes that are ready or not, and a user who may end pods, or may not."""

    def __init__(self, may: bool = True, **ready: str):
        self.may = may
        self.done = []
        self.nodes = [
            {
                "metadata": {"name": name},
                "status": {"conditions": [{"type": "Ready", "status": status}]},
            }
            for name, status in ready.items()
        ]

    def list(self, kind: str, labels: str = "", absent_ok: bool = False) -> list[dict]:
        return self.nodes if kind == "Node" else []

    def patch_status(self, kind: str, name: str, change: dict) -> None:
        if not self.may:
            raise OrchError("u may not patch pods/status", Exit.SECURITY)
        self.done.append((name, change["phase"], change["conditions"][0]["type"]))

    def delete(self, kind: str, name: str, grace_s: int) -> None:
        self.done.append((name, grace_s))


def test_a_pod_that_hangs_is_let_go_where_its_node_is_gone_and_the_user_may():
    at = {"deletionTimestamp": "2026-11-21T10:00:00Z"}
    run = seen(job(), [pod(0), pod(1, **at)])
    cluster = Nodes(n0="True", n1="Unknown")
    assert "r-1-x of node n1" in force_delete_stuck_pods(cluster, run, NOW)
    assert cluster.done == [("r-1-x", "Failed", "DisruptionTarget"), ("r-1-x", 0)]
    assert force_delete_stuck_pods(
        Nodes(n0="True"), run, NOW
    )  # its node is no longer in the list at all
    ended = pod(1, "Failed", 75, **at)  # its Job keeps it until it has made another one
    assert not force_delete_stuck_pods(
        Nodes(n0="True", n1="False"), seen(job(), [pod(0), ended]), NOW
    )
    assert not force_delete_stuck_pods(
        Nodes(n0="True", n1="True"), run, NOW
    )  # the node lives: it is only slow
    assert not force_delete_stuck_pods(
        Nodes(), run, NOW
    )  # nodes cannot be read: nothing is known of them
    assert not force_delete_stuck_pods(Nodes(may=False, n0="True", n1="False"), run, NOW)
    alone = seen(job(), [pod(0, **at)])
    # no peer would stop it, should it still run
    assert not force_delete_stuck_pods(Nodes(n1="True", n0="False"), alone, NOW)
    just_now = pod(1, deletionTimestamp="2027-01-15T08:00:00Z")
    assert not force_delete_stuck_pods(
        Nodes(n0="True", n1="False"), seen(job(), [pod(0), just_now]), NOW
    )


def test_cluster_and_pods_words_are_put_together():
    running = status_of(seen(job(), [pod(0), pod(1)]), NOW)
    assert verdict(state("running"), running, False).state == "running"
    assert verdict(state("pending", epoch=-1), running, False).state == "starting"
    assert verdict(state("done"), running, False).state == "stopping"
    assert verdict(state("stopped"), running, False).state == "restarting"
    absent = status_of(seen(None), NOW)
    assert verdict(state("done"), absent, False).state == "done"
    assert verdict(state("running"), absent, True).state == "cancelled"
    lost = verdict(state("running"), absent, False)
    assert (lost.state, lost.exit_code) == ("stopped", Exit.RESTART)
    assert verdict(state("pending"), absent, False, sent=False).state == "pending"
    done = status_of(seen(job(conditions=[condition("Complete")])), NOW)
    ended = verdict(state("running"), done, True)
    assert (ended.state, ended.exit_code, ended.cause) == ("done", Exit.DONE, None)


def test_a_run_whose_job_is_gone_is_stopped(tmp_path, monkeypatch):
    """It is asked about from the run folder to the API server and back, through the backend."""
    folder = RunFolder(tmp_path / "r")
    backend = KubernetesBackend()
    folder.create()
    write_state(folder, state("running"))
    write_record(folder, KubernetesRecord(None, "n", "Job", "r", "s", 1.0, sent=True))
    monkeypatch.setattr(backend, "_cluster", lambda context, namespace: Nodes())
    assert backend.state(folder).state == "stopped" and not backend.is_alive(folder)


# ------------------------------------------------------------------------------------------
#     refusals


@pytest.mark.parametrize(
    ("status", "message", "says", "exit"),
    [
        (401, "Unauthorized", "log in again", Exit.SECURITY),
        (403, 'jobs.batch is forbidden: User "ann" cannot create resource "jobs" in API group "batch" in the namespace '
         '"x"', 'ann may not create jobs in namespace x; the rule to add: {apiGroups: ["batch"], resources: [jobs], '
         "verbs: [create]}", Exit.SECURITY),
        (403, 'pods "r" is forbidden: exceeded quota: gpus, requested: 8', "larger quota", Exit.CAPACITY),
        (403, 'pods "r" is forbidden: violates PodSecurity "x"', "backend.options.security", Exit.SECURITY),
        (404, "the server could not find the requested resource", "Kueue or JobSet installed", Exit.CONFIG),
        (404, "404 page not found", "Kueue or JobSet installed", Exit.CONFIG),
        (404, 'namespaces "llm" not found', "backend.options.namespace", Exit.CONFIG),
        (422, 'Job.batch "r" is invalid: spec.template: Invalid value', "refuses the object", Exit.CONFIG),
        (503, "etcdserver: leader changed", "cannot answer now", Exit.CAPACITY),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_with_what_to_do(status, message, says, exit):
    error = api_error(status, json.dumps({"kind": "Status", "message": message}))
    assert says in error.message
    assert (error.exit, error.status) == (exit, status)
    assert "\n" not in error.message


def test_no_answer_is_one_line():
    pool_error = (
        "HTTPSConnectionPool(host='10.0.0.1', port=1): Max retries (Caused by <urllib3.Connection"
        " 0x7f>: refused)"
    )
    error = unreachable("https://10.0.0.1:6443", RuntimeError(pool_error))
    assert error.exit == Exit.CAPACITY
    assert "0x7f" not in error.message


# ------------------------------------------------------------------------------------------ nodes
#     without a queue

LEAVES = {f"l{i}": tuple(f"n{i * 5 + j}" for j in range(5)) for i in range(4)}
LEAF = {"leaf": "example.org/leaf"}
BUSY = {"n0", "n7"}
MACHINES = {f"n{i}": Machine(gpus=2, free=f"n{i}" not in BUSY) for i in range(20)}
CLUSTER = Topology("tree", (Tier("leaf", LEAVES),), machines=MACHINES)


def test_whole_pipelines_are_chosen_from_what_is_free():
    plan = make_plan(tp=2, pp=2, dp=3, nodes=6)
    chosen = choose(plan, CLUSTER, LEAF).nodes
    assert len(chosen) == 6
    assert not BUSY & set(chosen)
    for members in LEAVES.values():
        assert len(set(members) & set(chosen)) % 2 == 0
    assert len(in_whole_units(CLUSTER.free, CLUSTER, 2)) == 16


def test_pods_may_go_to_chosen_nodes_and_few_others():
    """A preference alone is lost where the scheduler looks at a part of the nodes only, as it does
    above a hundred."""
    plan = make_plan(tp=2, pp=2, dp=3, nodes=6)
    chosen = choose(plan, CLUSTER, {})
    assert len(chosen.spares) == 2
    assert not {*chosen.nodes, *BUSY} & set(chosen.spares)
    affinity = node_affinity(chosen)["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == [*chosen.nodes, *chosen.spares]
    assert wished(affinity, chosen.nodes) == list(chosen.nodes)
    assert wished(affinity, chosen.spares) == []


def test_switches_that_are_chosen_whole_are_named_instead_of_their_nodes():
    """Hundreds of names in each of hundreds of pods are most of what the cluster has to read and
    write."""
    plan = make_plan(tp=2, dp=12, nodes=12)
    chosen = choose(plan, CLUSTER, LEAF)
    leaves = [name for name, members in LEAVES.items() if set(members) <= set(chosen.nodes)]
    assert chosen.whole == (("example.org/leaf", tuple(leaves)),)
    assert leaves
    covered = {node for leaf in leaves for node in LEAVES[leaf]}
    assert set(chosen.rest) == set(chosen.nodes) - covered
    affinity = node_affinity(chosen)["nodeAffinity"]
    within, elsewhere = affinity["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert within["matchExpressions"] == [
        {"key": "example.org/leaf", "operator": "In", "values": leaves}
    ]
    assert elsewhere["matchExpressions"][0]["values"] == [*chosen.rest, *chosen.spares]
    assert wished(affinity, chosen.nodes) == list(chosen.nodes)
    assert wished(affinity, chosen.spares) == []


def wished(affinity: dict, nodes: Sequence[str]) -> list[str]:
    """The nodes that one of the preferences is for, as the scheduler understands it."""
    has = {
        "In": lambda label, values: label in values,
        "NotIn": lambda label, values: label not in values,
    }

    def meets(node: str, expression: dict) -> bool:
        leaf = next((name for name, members in LEAVES.items() if node in members), None)
        return has[expression["operator"]](
            {"kubernetes.io/hostname": node}.get(expression["key"], leaf), expression["values"]
        )

    terms = [
        wish["preference"]["matchExpressions"]
        for wish in affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    ]
    return [
        node
        for node in nodes
        if any(all(meets(node, expression) for expression in term) for term in terms)
    ]


def test_spares_are_switches_like_the_chosen_ones_and_cost_one_word():
    """Each word is weighed by the scheduler for every pod on every node: of 512 pods on 1,000 nodes
    it was a third of all that it did."""
    leaves = {f"l{i}": tuple(f"n{4 * i + j}" for j in range(4)) for i in range(32)}
    machines = {
        node: Machine(gpus=2, free=node != "n64") for members in leaves.values() for node in members
    }
    topology = Topology("t", (Tier("leaf", leaves),), machines=machines)
    chosen = choose(make_plan(tp=2, dp=64, nodes=64), topology, LEAF)
    assert (chosen.rest, chosen.spares) == ((), ())
    (spare,) = chosen.spare_whole[0][1]
    assert spare not in ("l16", *chosen.whole[0][1])  # one of its nodes is taken
    affinity = node_affinity(chosen)["nodeAffinity"]
    (required,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert required["matchExpressions"][0]["values"] == [*chosen.whole[0][1], spare]
    elsewhere = {
        "matchExpressions": [{"key": LEAF["leaf"], "operator": "NotIn", "values": [spare]}]
    }
    assert affinity["preferredDuringSchedulingIgnoredDuringExecution"] == [
        {"weight": 100, "preference": elsewhere}
    ]


def test_where_no_other_node_is_free_nothing_is_preferred():
    machines = {f"n{i}": Machine(gpus=2, free=i < 12) for i in range(20)}
    chosen = choose(
        make_plan(tp=2, dp=12, nodes=12), structs.replace(CLUSTER, machines=machines), LEAF
    )
    assert list(node_affinity(chosen)["nodeAffinity"]) == [
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]


def test_all_nodes_or_none():
    plan = make_plan(tp=2, pp=2, dp=5, nodes=10)
    assert len(choose(plan, CLUSTER, {}).nodes) == 10
    with refusal("needs 20 nodes, 18 of 20 nodes are free", Exit.CAPACITY):
        choose(make_plan(tp=2, pp=2, dp=10, nodes=20), CLUSTER, {})


class Queues:
    """Stands for an API server: one LocalQueue of Kueue before 0.15, priorities that may not be
    listed."""

    namespace = "llm"

    def list(self, kind: str) -> list[dict]:
        if kind == "LocalQueue":
            raise api_error(404, "404 page not found")
        if kind == "WorkloadPriorityClass":
            raise api_error(403, '{"message": "no"}')
        return [{"metadata": {"name": "research"}}]


def test_a_queue_that_is_not_there_is_refused_and_what_may_not_be_listed_is_not():
    check_queue(Queues(), KubernetesOptions())
    check_queue(Queues(), KubernetesOptions(queue="research", workload_priority="any"))
    with refusal("no LocalQueue 'reserch' in namespace llm; did you mean 'research'", Exit.CONFIG):
        check_queue(Queues(), KubernetesOptions(queue="reserch"))
