"""TrainRuns without a cluster: schema and values, what is done for a run, who gets which nodes. All
pure."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some
from msgspec import structs

from orchestrator.backends.kubernetes import train_run_client
from orchestrator.backends.kubernetes.controller import decide as steps
from orchestrator.backends.kubernetes.controller import main as controller_main
from orchestrator.backends.kubernetes.controller.decide import Seen, decide
from orchestrator.backends.kubernetes.controller.ledger import Allocation
from orchestrator.backends.kubernetes.controller.observed import Job, Pod
from orchestrator.backends.kubernetes.controller.program_code import CodeChecks
from orchestrator.backends.kubernetes.controller.reconcile import Reconciler
from orchestrator.backends.kubernetes.controller.room import (
    Fits,
    NodeRequest,
    Placed,
    Room,
    node_request,
)
from orchestrator.backends.kubernetes.controller.status import Report, begun, next_status
from orchestrator.backends.kubernetes.devices import GpuDevices, NodeGpus
from orchestrator.backends.kubernetes.fitting import pod_needs
from orchestrator.backends.kubernetes.names import GATE, GENERATION, INDEX, RUN, SUBMISSION
from orchestrator.backends.kubernetes.objects.code_maps import chunk_names
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.backends.kubernetes.pod_requests import PODS
from orchestrator.backends.kubernetes.record import KubernetesRecord
from orchestrator.backends.kubernetes.train_run import (
    Bundle,
    Meta,
    Spec,
    Status,
    TrainRun,
    changed_fields,
    planned,
    unpacked,
)
from orchestrator.cluster.importers.kubernetes import PRODUCT, Node
from orchestrator.plan import Exit, Plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import Code, PackedCode
from tests.beds.base import ROOT
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan
from tests.kubernetes.test_fitting import BY_CLAIM, bare, cuda, node
from tests.kubernetes.test_watching import state

NOW = 1_800_000_000.0
LONG_AGO = "2026-01-01T00:00:00Z"
SCHEMA = yaml.safe_load(Path(ROOT, "charts/orch-controller/files/trainruns.yaml").read_text())


def fields_of(section: str) -> dict[str, Any]:
    [version] = SCHEMA["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"][section]["properties"]


@pytest.mark.parametrize(("section", "kind"), [("spec", Spec), ("status", Status)])
def test_the_schema_has_the_fields_of_the_values(section, kind):
    """Else the API server would drop what the controller writes, without a word."""
    assert set(fields_of(section)) == {field.encode_name for field in structs.fields(kind)}


def test_every_column_is_a_field():
    [version] = SCHEMA["spec"]["versions"]
    columns = {column["jsonPath"] for column in version["additionalPrinterColumns"]}
    assert columns <= {f".status.{name}" for name in fields_of("status")} | {
        ".metadata.creationTimestamp"
    }
    assert {"State", "Step", "Loss", "Nodes", "ETTR", "Reason"} <= {
        column["name"] for column in version["additionalPrinterColumns"]
    }


texts = some.text("abc", max_size=3)
statuses = some.builds(
    Status,
    state=some.sampled_from(["pending", "running", "done"]), reason=texts, step=some.none() | some.integers(0, 9),
    observed_generation=some.integers(0, 2), loss=some.none() | some.floats(0, 9),
    run=some.dictionaries(texts, some.integers(0, 2) | some.dictionaries(texts, some.integers(0, 2), max_size=2)),
)  # fmt: skip


def merged(old: Any, patch: Any) -> Any:
    """RFC 7386, as it reads."""
    if not isinstance(patch, dict):
        return patch
    document = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            document.pop(key, None)
        else:
            document[key] = merged(document.get(key), value)
    return document


@given(statuses, statuses)
def test_a_patch_makes_one_status_of_another(before, after):
    stored = msgspec.to_builtins(before)
    patched_status = msgspec.convert(merged(stored, changed_fields(before, after)), Status)
    assert patched_status == after
    assert changed_fields(after, after) in ({}, {"state": after.state})


def test_a_run_whose_new_words_have_another_size_can_ask_for_its_end():
    """It holds eight nodes, and no plan is of eight nodes any more: what it asks for is weighed all
    the same."""
    from tests.kubernetes.test_render import request_of

    sent, plan = request_of(
        ["cluster=h100x64", "cluster.nodes=4", "model=llama3_8b", "parallel=tp8"], "r-1"
    )
    bundle = Bundle(sent.request, b"", {4: plan})
    held = Allocation(
        uid="u",
        number=1,
        generation=0,
        nodes=[f"n{index}" for index in range(8)],
        size=8,
        inputs="old",
    )
    collaborators = ("store", "ledger", "decisions", "planner", "reports", "again", "leads")
    reconciler = Reconciler(None, **dict.fromkeys(collaborators))
    wish = reconciler._node_request(
        TrainRun(Meta(name="r-1", uid="u")), held, bundle, read_options({"image": "x"})
    )
    assert [(size, sized_plan.hash) for size, sized_plan in wish.sizes] == [(4, plan.hash)]


def test_what_was_planned_comes_back_whole():
    from tests.kubernetes.test_render import request_of

    bundle, plan = request_of(["cluster=h100x64", "model=llama3_8b"], "r-1")
    unpacked_bundle = unpacked(planned(bundle, [plan]))
    assert (unpacked_bundle.request, unpacked_bundle.plans) == (
        bundle.request,
        {len(bundle.request.agents): plan},
    )
    with refusal("spec.planned", Exit.CONFIG):
        unpacked(structs.replace(planned(bundle, [plan]), plans=["no plan"]))


def test_a_program_is_whole_before_nodes_are_asked_for():
    """Its parts are read once for each start, and belong to the run from then on."""
    from tests.kubernetes.test_render import request_of

    archive = b"a program"
    packed = PackedCode(sha256=hashlib.sha256(archive).hexdigest(), bytes=len(archive))
    code = Code(kind="folder", packed=packed)
    overrides = ["cluster=h100x64", "model=llama3_8b"]
    sent, plan = request_of(overrides, "r-1", ["python", "train.py"], code, archive)
    bundle = Bundle(sent.request, b"", {4: plan})
    reads = []
    owners = [{"uid": "another"}]

    class Stored:
        namespace = "n"
        content: bytes | None = None

        def get(self, kind: str, name: str) -> dict | None:
            reads.append(name)
            if self.content is None:
                return None
            content = base64.b64encode(self.content).decode()
            metadata = {"name": name, "uid": "c", "ownerReferences": owners}
            return {"metadata": metadata, "immutable": True, "binaryData": {"code.000": content}}

        def apply(self, body: dict, manager: str) -> None:
            owners.extend(body["metadata"]["ownerReferences"])

    checks = CodeChecks()
    stored = Stored()
    with refusal(f"ConfigMap {chunk_names(packed)[0]} is missing", Exit.CAPACITY):
        checks.check(stored, run(), bundle)
    stored.content = b"another"
    with refusal("was submitted: delete its ConfigMaps", Exit.SECURITY):
        checks.check(stored, run(), bundle)
    stored.content = archive
    for generation in (0, 0, 1):
        checks.check(stored, with_status(run(), generation=generation), bundle)
    assert [owner["uid"] for owner in owners] == ["another", "u"]
    assert len(reads) == 2 + 2 + 1


def test_a_run_of_the_same_name_is_not_that_of_a_submission_without_an_answer(
    tmp_path, monkeypatch
):
    """It is found if its answer was lost, and nobody else's is ended or started again."""
    found = TrainRun(Meta(name="r", annotations={SUBMISSION: "theirs"}))
    monkeypatch.setattr(train_run_client, "read", lambda *_: found)
    runs = train_run_client.ControlledRuns(lambda record: None, lambda: None)
    folder = RunFolder(tmp_path / "r")
    for submission, is_ours in (("ours", False), ("theirs", True)):
        record = KubernetesRecord(None, "n", "Job", "r", submission, 1.0, train_run="r")
        assert runs.is_alive(folder, record) == is_ours
    theirs = KubernetesRecord(None, "n", "Job", "r", "ours", 1.0, train_run="r")
    with refusal("is gone from namespace n", Exit.USAGE):
        runs.resume(folder, None, theirs, {})
    with refusal("is not running", Exit.USAGE):
        runs.cancel(folder, theirs, force=True)


# ------------------------------------------------------------------------------------------ what is
#     done for a run


def run(**spec: Any) -> TrainRun:
    about = Meta(name="r", namespace="n", uid="u", generation=1, creation_timestamp=LONG_AGO)
    return TrainRun(about, Spec(words=["cluster=local"], **spec))


def with_status(train_run: TrainRun, **status: Any) -> TrainRun:
    defaults = {"inputs": train_run.inputs, "generation": 0}
    return structs.replace(train_run, status=Status(**(defaults | status)))


def job(generation: int = 0, count: int = 2, **status: Any) -> Job:
    labels = {RUN: "r", GENERATION: str(generation)}
    body = {
        "metadata": {"name": "r", "namespace": "n", "labels": labels, "creationTimestamp": LONG_AGO}
    }
    return msgspec.convert({**body, "spec": {"completions": count}, "status": status}, Job)


def pod(
    index: int, where: str = "", phase: str = "Pending", gated: bool = False, **fields: Any
) -> Pod:
    labels = {RUN: "r", INDEX: str(index), GENERATION: "0"}
    about = {
        "name": f"r-{index}",
        "namespace": "n",
        "uid": f"p{index}",
        "resourceVersion": "1",
        "labels": labels,
    }
    about |= {"creationTimestamp": fields.pop("created", LONG_AGO), **fields.pop("about", {})}
    spec = {"nodeName": where, "schedulingGates": [{"name": GATE}] if gated else []}
    return msgspec.convert(
        {"metadata": about, "spec": spec, "status": {"phase": phase, **fields}}, Pod
    )


def held(*nodes: str, **fields: Any) -> Allocation:
    defaults = {
        "uid": "u",
        "number": 1,
        "generation": 0,
        "nodes": list(nodes),
        "size": len(nodes),
    }
    return Allocation(**(defaults | fields))


def seen(
    train_run: TrainRun | None = None, job: Job | None = None, pods: Any = (), **changes: Any
) -> Seen:
    fields = {
        "fits": {"a", "b"},
        "ready": {"a", "b"},
        "least": 2,
        "now": NOW,
        "allocation": None,
        **changes,
    }
    return Seen(run=train_run or with_status(run()), job=job, pods=pods, **fields)


ENDED = {"containerStatuses": [{"name": "agent", "state": {"terminated": {"exitCode": 75}}}]}
RUNNING = [pod(0, "a", "Running"), pod(1, "b", "Running")]


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (seen(planned=False), [steps.Plan()]),
        (seen(), [steps.Wait()]),
        (seen(pods=[pod(0, "a", "Running")]), []),  # of a start before: nothing new while they live
        (seen(allocation=held("a", "b")), [steps.Make(0)]),
        (seen(job=job(), allocation=held("a", "b"), pods=RUNNING), []),
        (
            seen(job=job(), allocation=held("a", "b"), pods=[pod(0, gated=True), pod(1, gated=True)]),
            [steps.Ungate("r-0", "a", 2), steps.Ungate("r-1", "b", 2)],
        ),
        # its node went out of service before it was let go: it goes first, and only then the node
        # is given away
        (
            seen(job=job(), allocation=held("a", "c"), pods=[pod(0, "a", "Running"), pod(1, gated=True)]),
            [steps.Move("r-1", 1, "c", "its node is out of service")],
        ),
        (seen(job=job(), allocation=held("a", "c"), pods=[pod(0, "a", "Running")]), [steps.Replace([1])]),
        (seen(job=job(), allocation=held("a", ""), pods=[RUNNING[0], pod(1, gated=True)]), [steps.Replace([1])]),
        (
            seen(job=job(), allocation=held("a", "b"), pods=[pod(0, "b", "Running"), pod(1, "b", "Running")]),
            [steps.Move("r-0", 0, "b", "is on node b instead of a")],
        ),
        # the Job was deleted by somebody: it is made again, once its pods have left
        (seen(allocation=held("a", "b"), pods=[pod(0, "a", "Running")]), []),
        # of another start than the one that was decided
        (seen(job=job(generation=0), allocation=held("a", "b", generation=1)), [steps.Remove()]),
        (seen(with_status(run(stopped=True)), job(), RUNNING, allocation=held("a", "b")), [steps.Remove()]),
        (
            seen(with_status(run(stopped=True, force=True)), job(), RUNNING, allocation=held("a", "b")),
            [steps.Remove(True)],
        ),
        (
            seen(with_status(run(stopped=True)), None, [pod(0, "a", "Failed")], allocation=held("a", "b")),
            [steps.Release()],
        ),
        (seen(with_status(run(stopped=True)), None, RUNNING, allocation=held("a", "b")), []),
        (seen(job=job(), allocation=held("a", "b", ending="resize"), pods=RUNNING), [steps.Remove()]),
        (seen(with_status(run(), state="done"), job(conditions=[{"type": "Complete", "status": "True"}]),
              allocation=held("a", "b")), [steps.Release()]),
        (seen(with_status(run(), state="done"), job(conditions=[{"type": "Complete", "status": "True"}])), []),
        # one more attempt of a run that has ended: what is left of the last one goes first
        (seen(job=job(conditions=[{"type": "Failed", "status": "True"}])), [steps.Remove()]),
        (seen(with_status(run(draft=True))), [steps.Discard()]),
        (seen(with_status(run(), ended_generation=0), queued=True), [steps.Make(1)]),
        (seen(with_status(run(), generation=-1), queued=True), [steps.Make(0)]),
        (seen(job=job(), queued=True, pods=RUNNING), []),
        (seen(with_status(run(nodes=1)), job(), queued=True), [steps.Remove()]),
        (seen(job=job(), queued=True, changed=True), [steps.Remove()]),
    ],
)  # fmt: skip
def test_what_is_done_for_a_run(observation, expected):
    assert decide(observation) == expected


def waits(index: int, where: str, reason: str) -> Pod:
    state = {"waiting": {"reason": reason, "message": "no such image"}}
    return pod(index, where, containerStatuses=[{"name": "agent", "state": state}])


def test_a_pod_moves_away_from_where_it_cannot_run():
    refused = [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "Insufficient cpu",
        }
    ]
    there = {"job": job(), "allocation": held("a", "b")}
    [moved] = decide(seen(pods=[pod(0, "a", "Running"), pod(1, conditions=refused)], **there))
    assert (moved.pod, moved.node) == ("r-1", "b") and "Insufficient cpu" in moved.reason
    [moved] = decide(
        seen(pods=[pod(0, "a", "Running"), waits(1, "b", "ImagePullBackOff")], **there)
    )
    assert moved.pod == "r-1" and "no such image" in moved.reason
    [given_up] = decide(
        seen(pods=[waits(0, "a", "ErrImagePull"), waits(1, "b", "ErrImagePull")], **there)
    )
    assert given_up.wait and "ErrImagePull" in given_up.reason
    [given_up] = decide(seen(no_quota="exceeded quota: pods", **there))
    assert given_up == steps.Yield("exceeded quota: pods", wait=True)


def test_a_run_that_misses_nodes_does_not_keep_the_others_for_ever():
    pods = [pod(0, "a", "Running"), pod(1, gated=True)]
    lost = {
        "job": job(),
        "pods": pods,
        "allocation": held("a", "", lost_at=NOW - 100),
        "hold_s": 600.0,
    }
    assert decide(seen(**lost)) == [steps.Replace([1])]
    assert isinstance(decide(seen(crowded=True, **lost))[0], steps.Yield)
    assert isinstance(decide(seen(**(lost | {"hold_s": 90.0})))[0], steps.Yield)
    assert decide(seen(crowded=True, least=1, **lost)) == [
        steps.Replace([1])
    ]  # it goes on with what is left


def test_pods_of_a_dead_node_are_ended_and_those_of_a_slow_one_are_not():
    dying_pod = pod(1, "c", "Running", about={"deletionTimestamp": LONG_AGO})
    there = {
        "job": job(),
        "allocation": held("a", "c"),
        "pods": [pod(0, "a", "Running"), dying_pod],
    }
    assert decide(seen(**there)) == [steps.ForceDelete("r-1", "c")]
    assert decide(seen(ready={"a", "c"}, **there)) == []
    alone = {
        "job": job(count=1),
        "allocation": held("c"),
        "pods": [pod(0, "c", "Running", about={"deletionTimestamp": LONG_AGO})],
    }
    assert decide(seen(**alone)) == []  # nobody would notice if it still trained there


def test_a_sick_node_is_left_out():
    ended = [{"name": "agent", "state": {"terminated": {"exitCode": 74}}}]
    pods = [pod(0, "a", "Running"), pod(1, "b", "Failed", containerStatuses=ended)]
    [sick] = decide(seen(job=job(), allocation=held("a", "b"), pods=pods))
    assert isinstance(sick, steps.MarkBad) and sick.node == "b"


# ------------------------------------------------------------------------------------------ its
#     status


def test_status_of_a_run_from_its_objects():
    report = Report(0, structs.replace(state("running", epoch=2), reason=None))

    def status(train_run: TrainRun, **observed: Any) -> Status:
        return next_status(
            seen(train_run, **observed), None, report, "waiting for room: needs 2 nodes"
        )

    new = status(structs.replace(run(), status=Status()))
    assert (new.state, new.reason, new.observed_generation) == (
        "pending",
        "waiting for room: needs 2 nodes",
        1,
    )
    began = with_status(run())
    there = {"job": job(), "allocation": held("a", "b")}
    assert status(began, pods=RUNNING, **there).state == "running"
    assert status(began, pods=RUNNING, **there).nodes == "2/2"
    assert status(began, pods=RUNNING, **there).restarts == 2
    starting = status(began, pods=RUNNING[:1], **there)
    assert (starting.state, starting.reason) == ("restarting", "1 of 2 pods run")
    done = status(
        began,
        job=job(conditions=[{"type": "Complete", "status": "True"}]),
        allocation=held("a", "b"),
    )
    assert (done.state, done.exit_code, done.over, done.ended_generation) == ("done", 0, True, 0)
    stopping = status(with_status(run(stopped=True)), pods=RUNNING, **there)
    assert stopping.state == "stopping"
    assert status(with_status(run(stopped=True))).state == "cancelled"
    degraded = status(began, pods=RUNNING[:1], job=job(count=2), allocation=held("a", ""))
    assert degraded.nodes == "1/2"
    assert {condition.type: condition.status for condition in done.conditions}["Ended"] == "True"


def test_another_attempt_begins_afresh_and_keeps_its_counters():
    ended = with_status(
        run(attempt=1), state="failed", exit_code=1, restarts=3, lost_pods=2, step=7, fails=2
    )
    fresh_status = begun(ended)
    assert (
        fresh_status.state,
        fresh_status.exit_code,
        fresh_status.attempt,
        fresh_status.fails,
    ) == ("pending", None, 1, 0)
    assert (fresh_status.restarts, fresh_status.lost_pods, fresh_status.step) == (3, 2, 7)
    assert not structs.replace(ended, status=fresh_status).is_over
    cancelled = with_status(run(), state="cancelled")
    assert not cancelled.is_over  # nobody wants it to be stopped any more
    assert with_status(run(stopped=True), state="cancelled").is_over


# ------------------------------------------------------------------------------------------ who
#     gets which nodes


def nodes(count: int, **labels: str) -> dict[str, Node]:
    listed = msgspec.convert([node(f"n{i}", labels) for i in range(count)], list[Node])
    return {api_node.metadata.name: api_node for api_node in listed}


@pytest.fixture(scope="module")
def gpus() -> Plan:
    return cuda(make_plan(nodes=2, tp=2, pp=2))


@pytest.fixture(scope="module")
def cpus() -> Plan:
    return make_plan(nodes=4, tp=2, pp=2, dp=2)


OPTIONS = read_options({"image": "x", "cpus": 4, "memory_gib": 8, "shm_gib": 1})


def wish(key: str, plan: Plan, count: int = 2, **changes: Any) -> NodeRequest:
    return structs.replace(
        node_request(key, {count: plan}, OPTIONS, pod_needs(plan, OPTIONS), None), **changes
    )


def test_nodes_with_gpus_belong_to_one_run_each(gpus):
    room = Room(Fits(nodes(5)), [], {"n/other": held("n4")})
    first, second, third = (room.place(wish(f"n/{i}", gpus)) for i in range(3))
    assert isinstance(first, Placed) and isinstance(second, Placed)
    assert sorted(first.nodes + second.nodes) == ["n0", "n1", "n2", "n3"]
    assert first.needs == {}
    assert third == "waiting for room: needs 2 nodes, 0 are free (5 held by other runs)"


def test_gpus_that_are_asked_for_by_a_claim_are_counted_by_their_labels(gpus):
    options = structs.replace(OPTIONS, pod=BY_CLAIM)
    labels = [{"nvidia.com/gpu.count": "2"}, {"nvidia.com/gpu.count": "2"}, {}]
    there = msgspec.convert(
        [bare(f"n{i}", node_labels) for i, node_labels in enumerate(labels)], list[Node]
    )
    room = Room(Fits({api_node.metadata.name: api_node for api_node in there}), [], {})
    placement = room.place(node_request("n/r", {2: gpus}, options, pod_needs(gpus, options), None))
    assert isinstance(placement, Placed) and placement.nodes == ["n0", "n1"]


def test_gpus_that_are_asked_for_by_a_claim_are_where_their_driver_says(gpus):
    options = structs.replace(OPTIONS, pod=BY_CLAIM)
    there = {
        f"n{i}": msgspec.convert(bare(f"n{i}", {"nvidia.com/gpu.count": "2"}), Node)
        for i in range(5)
    }
    by_node = {
        f"n{i}": NodeGpus(count) for i, count in enumerate((2, 1, 2, 2))
    }  # and n4 has none, whatever it says
    unnamed = {name: msgspec.convert(bare(name), Node) for name in there}
    for api_node in unnamed.values():
        del api_node.metadata.labels[PRODUCT]
    request = node_request("n/r", {2: gpus}, options, pod_needs(gpus, options), None)
    placement = Room(Fits(there, GpuDevices(by_node, {"n0": "theirs"})), [], {}).place(request)
    assert isinstance(placement, Placed) and placement.nodes == ["n2", "n3"]
    room = Room(Fits(there, GpuDevices(by_node, {"n0": "theirs", "n3": "theirs"})), [], {})
    short = (
        "waiting for room: needs 2 nodes, 1 are free (1 x 1 GPUs for claims, 1 x 0 GPUs for claims)"
    )
    assert room.place(request) == short
    assert room.more(request, [], 2) == ["n2"]
    by_node = {
        name: NodeGpus(gpus.count, "NVIDIA A100-SXM4-80GB") for name, gpus in by_node.items()
    }
    assert "4 x NVIDIA A100-SXM4-80GB instead of h100" in Room(
        Fits(unnamed, GpuDevices(by_node)), [], {}
    ).place(request)
    plain_options = structs.replace(OPTIONS, pod={})  # whose GPUs are no claims
    plain = node_request("n/p", {2: gpus}, plain_options, pod_needs(gpus, plain_options), None)
    assert "5 x no nvidia.com/gpu" in str(room.place(plain))


def test_where_devices_cannot_be_read_a_run_that_waits_for_claims_says_so(gpus):
    options = structs.replace(OPTIONS, pod=BY_CLAIM)
    there = {
        f"n{i}": msgspec.convert(bare(f"n{i}", {"nvidia.com/gpu.count": "2"}), Node)
        for i in range(2)
    }
    theirs = msgspec.convert(
        {"metadata": {"name": "x", "namespace": "y", "uid": "z", "resourceVersion": "1"},
         "spec": {"nodeName": "n0", "resourceClaims": [{"name": "gpus"}]}, "status": {"phase": "Running"}}, Pod,
    )  # fmt: skip
    waiting_reason = Room(Fits(there), [theirs], {}).place(
        node_request("n/r", {2: gpus}, options, pod_needs(gpus, options), None)
    )
    assert waiting_reason.startswith("waiting for room: needs 2 nodes, 1 are free")
    assert waiting_reason.endswith(
        "; resourceslices may not be read, so GPUs are counted by the label nvidia.com/gpu.count"
    )


def test_who_does_not_fit_does_not_hold_up_those_behind(gpus):
    large = structs.replace(wish("n/large", gpus), sizes=[(8, make_large())])
    room = Room(Fits(nodes(3)), [], {})
    assert isinstance(room.place(large), str)
    assert isinstance(room.place(wish("n/small", gpus)), Placed)


def make_large() -> Plan:
    return cuda(make_plan(nodes=8, tp=2, pp=2, dp=4))


def test_the_largest_size_that_finds_room(gpus):
    sizes = structs.replace(wish("n/r", gpus), sizes=[(8, make_large()), (2, gpus)])
    placement = Room(Fits(nodes(3)), [], {}).place(sizes)
    assert isinstance(placement, Placed) and (placement.size, len(placement.nodes)) == (2, 2)
    with refusal("legal are 2, 8", Exit.CONFIG):
        node_request("n/r", {8: gpus, 2: gpus}, OPTIONS, pod_needs(gpus, OPTIONS), 5)


def test_nodes_without_gpus_are_shared_as_far_as_they_hold(cpus):
    room = Room(Fits(nodes(2)), [], {})
    placement = room.place(wish("n/r", cpus, 4))
    assert isinstance(placement, Placed) and sorted(placement.nodes) == ["n0", "n0", "n1", "n1"]
    assert placement.needs["cpu"] == 4
    for index in range(7):  # 64 CPUs hold sixteen pods
        assert isinstance(room.place(wish(f"n/{index}", cpus, 4)), Placed)
    assert "needs 4 places for pods, 0 are free" in room.place(wish("n/last", cpus, 4))


def test_what_others_have_on_a_node_counts_and_what_an_allocation_promises_counts_once(cpus, gpus):
    theirs = msgspec.convert(
        {"metadata": {"name": "x", "namespace": "y", "uid": "z", "resourceVersion": "1"},
         "spec": {"nodeName": "n0", "containers": [{"resources": {"requests": {"cpu": "62"}}}]},
         "status": {"phase": "Running"}}, Pod,
    )  # fmt: skip
    placement = Room(Fits(nodes(2)), [theirs], {}).place(wish("n/r", cpus, 4))
    assert isinstance(placement, Placed) and set(placement.nodes) == {"n1"}
    there = nodes(2)
    there["n1"].status.allocatable[PODS] = "2"
    assert "needs 4 places for pods, 2 are free" in Room(Fits(there), [theirs], {}).place(
        wish("n/r", cpus, 4)
    )
    own_pod = pod(0, "n0", "Running")
    room = Room(Fits(nodes(2)), [own_pod], {"n/r": held("n0", "n0", needs={"cpu": 60.0})})
    assert isinstance(room.place(wish("n/other", cpus, 4)), Placed)


def test_a_lost_node_is_replaced_by_one_near_the_others(gpus):
    labels = [{"network.topology.nvidia.com/leaf": f"leaf{i // 3}"} for i in range(6)]
    listed = msgspec.convert([node(f"n{i}", labels[i]) for i in range(6)], list[Node])
    there = {api_node.metadata.name: api_node for api_node in listed}
    room = Room(Fits(there), [], {"n/r": held("n3", "n4")})
    assert room.more(wish("n/r", gpus), ["n3"], 1) == ["n5"]
    assert room.more(wish("n/r", gpus, excluded=frozenset({"n0", "n1"})), ["n3"], 3) == ["n2"]
    assert Room(Fits(nodes(1)), [], {}, bad=["n0"]).more(wish("n/r", gpus), [], 1) == []


def test_an_elastic_run_grows_by_whole_sizes(gpus):
    sizes = {8: make_large(), 4: make_large(), 2: gpus}
    elastic = node_request("n/r", sizes, OPTIONS, pod_needs(gpus, OPTIONS), None, elastic=True)
    room = Room(Fits(nodes(6)), [], {})
    placement = room.place(elastic)
    assert isinstance(placement, Placed) and (placement.size, elastic.pods) == (
        2,
        8,
    )  # eight GPU nodes of make_large
    assert room.more(elastic, placement.nodes, 6) != []
    small = Room(Fits(nodes(3)), [], {})
    placement = small.place(elastic)
    assert (
        isinstance(placement, Placed) and small.more(elastic, placement.nodes, 6) == []
    )  # one more is no size
    assert node_request("n/r", sizes, OPTIONS, pod_needs(gpus, OPTIONS), 4, elastic=True).pods == 4


def test_a_run_that_is_rendered_for_the_controller_is_gated_and_owned():
    from orchestrator.backends.kubernetes.controller.objects import manifest
    from orchestrator.backends.kubernetes.objects.render import render
    from tests.kubernetes.test_render import request_of

    bundle, plan = request_of(["cluster=h100x64", "model=llama3_8b"], "r-1")
    plan_bundle = Bundle(bundle.request, b"", {len(bundle.request.agents): plan})
    train_run = structs.replace(run(environment_secret="s"), spec=Spec(environment_secret="s"))
    options = read_options({"image": "x"})
    objects = render(
        manifest(train_run, plan_bundle, plan, options, generation=3, topology=None, gated=True)
    )
    owners = {json.dumps(body["metadata"]["ownerReferences"]) for body in objects}
    assert len(owners) == 1 and '"uid": "u"' in owners.pop()
    spec = objects[-1]["spec"]["template"]["spec"]
    assert spec["schedulingGates"] == [{"name": GATE}] and "affinity" not in spec
    assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "s"}}]
    assert objects[-1]["metadata"]["labels"][GENERATION] == "3"


def test_types_that_threads_of_the_controller_decode_are_worked_out_before():
    """msgspec works out a type where it is first decoded; two threads that do that at a time end
    the process."""
    folder = Path(controller_main.__file__).parent
    calls = [
        node
        for file in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "msgspec.json.decode"
    ]
    named = {
        ast.unparse(keyword.value)
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "type"
    }
    assert named
    assert named <= {kind.__name__ for kind in controller_main.DECODED}
