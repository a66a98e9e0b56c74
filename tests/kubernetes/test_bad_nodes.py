"""Nodes that runs have found bad, or that a user excludes: no later run is given them, with a queue
or without."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from orchestrator.backends.kubernetes import submission, train_run_client
from orchestrator.backends.kubernetes.controller.room import Fits, Placed, Room, node_request
from orchestrator.backends.kubernetes.controller.room import fitting as still_fitting
from orchestrator.backends.kubernetes.direct_runs import DirectRuns
from orchestrator.backends.kubernetes.fitting import EXCLUDED, pod_needs
from orchestrator.backends.kubernetes.objects.node_affinity import HOST
from orchestrator.backends.kubernetes.objects.render import render
from orchestrator.backends.kubernetes.observer import LastReport, save_last_report
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.backends.kubernetes.record import KubernetesRecord
from orchestrator.backends.kubernetes.train_run import Meta, Planned, Spec, Status, TrainRun
from orchestrator.cli.main import main
from orchestrator.cluster.importers.kubernetes import Node
from orchestrator.plan import Exit
from orchestrator.run.bad_nodes import BadNode, NodeMemory
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import from_bytes, read_request, to_bytes
from orchestrator.run.state import read_state
from tests.beds.bundles import make_bundle, refusal
from tests.beds.plans import make_plan

from .test_fitting import LEAF, Api, cuda, node, reserve
from .test_render import main_line, manifest  # noqa: F401
from .test_watching import state, write_state

BAD = "ip-10-0-1-12.example.internal"
SHORT = "ip-10-0-1-12"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def aws(count: int, **labels: str) -> list[dict]:
    """Nodes whose hostname label is the first part of their name."""
    hosts = [f"ip-10-0-1-{11 + i}" for i in range(count)]
    return [node(f"{host}.example.internal", {HOST: host} | labels) for host in hosts]


def expressions(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The expressions of each term that the pods require."""
    spec = job["spec"]["template"]["spec"]
    return [
        term["matchExpressions"]
        for term in spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    ]


def not_on(*hosts: str) -> dict[str, Any]:
    return {"key": HOST, "operator": "NotIn", "values": list(hosts)}


@pytest.mark.parametrize("spelling", [BAD, SHORT])
def test_an_excluded_node_is_not_given_and_a_run_that_needs_it_is_refused(spelling):
    plan = cuda(make_plan(tp=2, dp=4, nodes=4))
    reservation = reserve(Api(aws(5)), plan, exclude=[spelling])
    assert BAD not in reservation.chosen.nodes and len(reservation.chosen.nodes) == 4
    with refusal(rf"3 of 4 nodes are free with 2 GPUs \(1 x {EXCLUDED}\)", Exit.CAPACITY):
        reserve(Api(aws(4)), plan, exclude=[spelling])
    assert reserve(Api(aws(4)), plan, exclude=["another"]).excluded == ()


def test_nor_may_pods_go_there_later_where_a_switch_is_all_that_they_ask_for(main_line):  # noqa: F811
    one_leaf = {LEAF: "l"}
    reservation = reserve(
        Api(aws(5, **one_leaf)), cuda(make_plan(tp=2, dp=4, nodes=4)), exclude=[BAD]
    )
    assert reservation.chosen.label == LEAF
    job = render(
        manifest(
            main_line, {"exclude": [BAD]}, chosen=reservation.chosen, excluded=reservation.excluded
        )
    )[-1]
    assert expressions(job) == [[{"key": LEAF, "operator": "In", "values": ["l"]}, not_on(SHORT)]]
    apart = reserve(Api(aws(6)), cuda(make_plan(tp=2, dp=4, nodes=4)), exclude=[BAD])
    (only,) = expressions(
        render(manifest(main_line, {}, chosen=apart.chosen, excluded=apart.excluded))[-1]
    )
    assert [expression["operator"] for expression in only] == ["In"] and SHORT not in only[0][
        "values"
    ]


@pytest.mark.parametrize("options", [{"queue": "q"}, {"gang": "volcano"}], ids=["queue", "gang"])
def test_a_queue_is_told_by_the_hostname_label(main_line, options):  # noqa: F811
    api = Api(aws(4))
    plan = cuda(make_plan(tp=2, dp=4, nodes=4))
    api.found["LocalQueue"] = [{"metadata": {"name": "q"}}]
    reservation = reserve(api, plan, exclude=[BAD, "gone.example.internal"], **options)
    assert (reservation.chosen, reservation.excluded) == (None, (SHORT,))
    job = render(manifest(main_line, options | {"exclude": [BAD]}, excluded=reservation.excluded))[
        -1
    ]
    assert expressions(job) == [[not_on(SHORT)]]
    unread = render(manifest(main_line, options | {"exclude": [BAD]}))[
        -1
    ]  # nobody may look at the nodes
    assert expressions(unread) == [[not_on(BAD, SHORT)]]
    assert "affinity" not in render(manifest(main_line, options))[-1]["spec"]["template"]["spec"]


def test_a_controller_gives_no_excluded_node():
    plan = cuda(make_plan(tp=2, pp=2, nodes=2))
    options = read_options({"image": "x", "exclude": ["n1"]})
    nodes = {
        api_node.metadata.name: api_node
        for api_node in msgspec.convert([node(f"n{i}") for i in range(3)], list[Node])
    }
    needs = pod_needs(plan, options)
    placement = Room(Fits(nodes), [], {}).place(
        node_request("n/r", {2: plan}, options, needs, None)
    )
    assert isinstance(placement, Placed) and placement.nodes == ["n0", "n2"]
    assert still_fitting(nodes, ["n0", "n1"], needs, options) == {"n0"}


def test_a_submission_leaves_out_what_is_on_the_list_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    now = time.time()
    for name, cluster in ((BAD, "h100x64"), ("n6", "elsewhere")):
        bad_node = BadNode(cluster=cluster, node=name, why="ECC", run="r", at=now, until=now + 60)
        NodeMemory(tmp_path / "home").add(bad_node)
    arguments = [
        "submit",
        "--dry-run",
        "--json",
        "--in-place",
        "backend.options.exclude=[n7]",
        "backend=kubernetes",
    ]
    arguments += [
        "cluster=h100x64",
        "model=llama3_70b",
        "parallel=tp8_pp4",
        "backend.options.image=x",
    ]
    assert main(arguments) == 0
    seen = capsys.readouterr()
    options = json.loads(seen.out)["backend_options"]
    assert (options["exclude"], options["bad_nodes"]) == (["n7"], [BAD])
    assert read_options(options).without == ["n7", BAD]
    assert f"orch: without {BAD}, found bad by earlier runs (orch nodes)" in seen.err


#: Of a run that was submitted while `old` was on the list.
OF_A_SUBMISSION = {"exclude": ["n7"], "bad_nodes": ["old"]}


def a_run(path: Path) -> RunFolder:
    bundle = make_bundle(make_plan(nodes=2, dp=2), path / "home" / "runs")
    with create_run_folder(bundle, "kubernetes") as folder:
        write_state(folder, state("running", 0))
    return folder


def test_what_a_run_finds_inside_its_pods_is_remembered_here_and_once(tmp_path):
    folder = a_run(tmp_path)
    memory = NodeMemory.of(folder)
    run_state = structs.replace(
        state("running", 1), excluded={BAD: "GPU fell off the bus", "n2.pod-3": "slow"}
    )
    save_last_report(folder, LastReport(run_state))
    assert {bad_node.node: bad_node.why for bad_node in memory.read(time.time())} == {
        BAD: "GPU fell off the bus",
        "n2": "slow",
    }
    assert read_state(folder).excluded == run_state.excluded
    memory.forget(time.time(), lambda bad_node: bad_node.node == BAD)
    save_last_report(folder, LastReport(run_state))  # the same once more
    assert [bad_node.node for bad_node in memory.read(time.time())] == ["n2"]


def test_what_a_controller_keeps_of_a_run_that_has_ended_is_remembered_too(tmp_path, monkeypatch):
    folder = a_run(tmp_path)
    stored_state = msgspec.to_builtins(structs.replace(state("failed", 1), excluded={BAD: "ECC"}))
    status = Status(state="failed", exit_code=74, observed_generation=1, run=stored_state)
    ended = TrainRun(Meta(name="r"), Spec(), status)
    monkeypatch.setattr(train_run_client, "read", lambda *_: ended)
    record = KubernetesRecord(None, "n", "Job", "r", "s", 1.0, sent=True, train_run="r")
    runs = train_run_client.ControlledRuns(lambda record: None, lambda: None)
    assert runs.state(folder, record).excluded == {BAD: "ECC"}
    memory = NodeMemory.of(folder)
    assert [bad_node.node for bad_node in memory.forget(time.time(), lambda bad_node: True)] == [
        BAD
    ]
    assert runs.state(folder, record).is_final and memory.read(time.time()) == []


def test_a_run_that_starts_again_leaves_out_what_was_found_since(tmp_path, monkeypatch, capsys):
    folder = a_run(tmp_path)
    sent = []
    save_last_report(
        folder, LastReport(structs.replace(state("running", 1), excluded={BAD: "ECC"}))
    )
    monkeypatch.setattr(submission, "draft_objects", lambda *_: [])
    monkeypatch.setattr(
        submission,
        "submit_objects",
        lambda *arguments, **_: sent.append(arguments[2].backend_options),
    )
    runs = DirectRuns(lambda *_: None, lambda: None, lambda: None)
    request = structs.replace(read_request(folder), backend_options=OF_A_SUBMISSION)
    for generation in (0, 1):
        runs._send(folder, request, None, {}, generation=generation, drafts=[])
    assert f"orch: without {BAD}" in capsys.readouterr().err
    NodeMemory.of(folder).forget(time.time(), lambda bad_node: True)
    runs._send(folder, request, None, {}, generation=2, drafts=[])
    assert sent == [OF_A_SUBMISSION, {"exclude": ["n7"], "bad_nodes": [BAD]}, {"exclude": ["n7"]}]
    assert "orch: without" not in capsys.readouterr().err


def test_and_so_does_one_that_a_controller_starts_again(tmp_path, monkeypatch):
    folder = a_run(tmp_path)
    changes = []
    request = structs.replace(read_request(folder), backend_options=OF_A_SUBMISSION)
    spec = Spec(planned=Planned(to_bytes(request).decode(), "", []))
    ended = TrainRun(
        Meta(name="r"), spec, Status(state="failed", exit_code=74, observed_generation=1)
    )
    monkeypatch.setattr(train_run_client, "read", lambda *_: ended)
    monkeypatch.setattr(
        train_run_client, "change", lambda cluster, name, **spec: changes.append(spec)
    )
    runs = train_run_client.ControlledRuns(lambda record: None, lambda: None)
    record = KubernetesRecord(None, "n", "Job", "r", "s", 1.0, sent=True, train_run="r")
    save_last_report(
        folder, LastReport(structs.replace(state("running", 1), excluded={BAD: "ECC"}))
    )
    for bad in ({"bad_nodes": [BAD]}, {}):
        runs.resume(folder, request, record, {})
        resumed = from_bytes(changes[-1]["planned"]["request"].encode())
        assert resumed == structs.replace(request, backend_options={"exclude": ["n7"], **bad})
        assert changes[-1]["attempt"] == 1
        NodeMemory.of(folder).forget(time.time(), lambda bad_node: True)


def test_a_node_is_taken_back_by_either_spelling(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    memory = NodeMemory(tmp_path / "home")
    now = time.time()

    def remember(*names: str) -> None:
        for name in names:
            memory.add(BadNode(cluster="c", node=name, why="ECC", run="r", at=now, until=now + 60))

    for listed, spelling in ((BAD, BAD), (BAD, SHORT), (SHORT, BAD)):
        remember(listed, "n2")
        assert main(["nodes", "--forget", spelling]) == Exit.DONE
        assert [bad_node.node for bad_node in memory.read(now)] == ["n2"]
    remember(BAD, f"{SHORT}.elsewhere.internal")
    capsys.readouterr()
    assert main(["nodes", "--forget", SHORT]) == Exit.USAGE
    assert (
        f"may be any of {SHORT}.elsewhere.internal, {BAD}: give the full name"
        in capsys.readouterr().err
    )
    assert main(["nodes", "--forget", "ip-10-0-1-99"]) == Exit.USAGE
    assert BAD in capsys.readouterr().err
