"""The controller on simulated nodes: real control plane, real processes, pods whose kubelets are
played."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from orchestrator.plan import Exit
from orchestrator.run.processes import descendants
from tests.beds.base import ROOT, BedError, wait
from tests.beds.kubernetes import controllers
from tests.beds.kubernetes.bed import Bed, Shape
from tests.beds.kubernetes.controllers import Replica, controller
from tests.beds.kubernetes.runs import Orch, Run
from tests.beds.kubernetes.simulate import FINISHES, LEVELS
from tests.patience import PATIENCE_S

from .conftest import bring_up
from .test_fitting import BY_CLAIM, CLAIM

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]
MAIN = ("+cluster=h100x64", "parallel=tp8_pp4_zero1")  # eight nodes
OPTIONS = {"image": "orch.test/none:1", "levels": LEVELS}
NODES = 24


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with bring_up(Shape(simulated=NODES)) as started_bed:
        controllers.install(started_bed)
        yield started_bed


@pytest.fixture
def space(bed, request) -> Iterator[Callable[[str], str]]:
    """Namespaces of a test; what is in them goes with it."""
    namespaces: list[str] = []

    def make(name: str) -> str:
        namespaces.append(name)
        bed.kubectl("create", "namespace", name)
        return name

    yield make
    for name in namespaces:
        bed.kubectl("delete", "trainruns", "-n", name, "--all", "--wait=false", check=False)
        bed.kubectl("delete", "namespace", name, "--wait=false", check=False)
    bed.wait(lambda: not living(bed), 180, "end of the pods")


@pytest.fixture
def orch(bed, space, tmp_path, request) -> Orch:
    return Orch(bed, tmp_path, space(f"one-{abs(hash(request.node.name)) % 10**6}"), OPTIONS)


def living(bed: Bed, *where: str) -> list[dict]:
    """Pods of runs that have not ended."""
    run_pods = bed.get("pods", *(where or ("-A",)), "-l", "orch.dev/run")["items"]
    return [pod for pod in run_pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]


def status(bed: Bed, run: str, namespace: str) -> dict:
    return bed.get("trainrun", "-n", namespace, run).get("status", {})


def until(
    bed: Bed,
    condition: Callable[[], object],
    seconds: float,
    about: Callable[[], object] = lambda: "",
) -> None:
    assert wait(condition, seconds, 0.3), about()


def train_run(name: str, namespace: str, nodes: int = 8, **spec: object) -> dict:
    overrides = ["cluster=h100x64", "model=llama3_8b", f"cluster.nodes={nodes}", "parallel=tp8"]
    options = {**OPTIONS, "annotations": {FINISHES: "yes"}, **spec.pop("options", {})}
    about = {"name": name, "namespace": namespace}
    return {"apiVersion": "orch.dev/v1alpha1", "kind": "TrainRun", "metadata": about,
            "spec": {"words": overrides, "options": options, **spec}}  # fmt: skip


def runs_of(pods: list[dict]) -> set[str]:
    return {pod["metadata"]["labels"]["orch.dev/run"] for pod in pods}


def shared_nodes(pods: list[dict]) -> set[str]:
    """Nodes that pods of two runs have."""
    owner: dict[str, str] = {}
    shared = set()
    for pod in pods:
        if node := pod["spec"].get("nodeName"):
            run = f"{pod['metadata']['namespace']}/{pod['metadata']['labels']['orch.dev/run']}"
            if owner.setdefault(node, run) != run:
                shared.add(node)
    return shared


# ------------------------------------------------------------------------------------------
#     planning


@pytest.mark.full
def test_words_in_a_repository_are_planned_by_the_controller(bed, orch):
    """They are planned anew where they change: the run goes on under the new plan, at once where it
    fits."""
    with controller(bed, "gitops"):
        bed.apply(train_run("gitops", orch.namespace, 8, options={"annotations": {}}))
        orch.bound("gitops", 8)
        bed.apply(train_run("gitops", orch.namespace, 4, options={"annotations": {}}))
        until(bed, lambda: status(bed, "gitops", orch.namespace).get("nodes") == "4/4", 120,
              lambda: status(bed, "gitops", orch.namespace))  # fmt: skip
        assert status(bed, "gitops", orch.namespace)["generation"] == 1
        bed.apply(train_run("wrong", orch.namespace, 8, options={"imagee": "x"}))
        until(bed, lambda: status(bed, "wrong", orch.namespace).get("state") == "failed", 60)
        wrong = status(bed, "wrong", orch.namespace)
        assert wrong["exitCode"] == Exit.CONFIG and "did you mean 'image'" in wrong["reason"]
        both = train_run("both", orch.namespace)
        both["spec"]["planned"] = {"request": "", "config": "", "plans": [""]}
        with pytest.raises(BedError, match="either words"):
            bed.apply(both)


@pytest.mark.full
def test_variables_that_nobody_should_read_make_a_draft_first(bed, orch):
    """A draft that stays one, for its submission was killed, is deleted with what it owns."""
    with controller(bed, "draft"):
        done = orch(
            *orch.submission(),
            *MAIN,
            "--env",
            "HF_TOKEN",
            env={"HF_TOKEN": "hush", "LANG": "C.UTF-8"},
        )
        run = Run(orch, json.loads(done.stdout)["run_dir"])
        spec = bed.get("trainrun", "-n", orch.namespace, run.id)["spec"]
        assert "hush" not in json.dumps(spec) and not spec.get("draft")
        assert spec["environment"]["LANG"] == "C.UTF-8"
        orch.bound(run.id, 8)
        owner = bed.get("secret", "-n", orch.namespace, f"{run.id}-env")["metadata"][
            "ownerReferences"
        ][0]
        assert (owner["kind"], owner["name"]) == ("TrainRun", run.id)


# ------------------------------------------------------------------------------------------ claims


def eight_gpus(bed: Bed, namespace: str, *nodes: str) -> None:
    """These nodes have eight GPUs each for claims of that namespace, as the driver of a vendor says
    it."""
    api = {"apiVersion": "resource.k8s.io/v1"}
    texts = {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA H100 80GB HBM3"}}
    devices = [{"name": f"gpu-{index}", "attributes": texts} for index in range(8)]
    driver = {"driver": "gpu.nvidia.com"}
    selector = {"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}
    request = {"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 8}}
    about = {"metadata": {"name": "two-gpus", "namespace": namespace}}
    template = {"spec": {"spec": {"devices": {"requests": [request]}}}}
    slices = [
        {**api, "kind": "ResourceSlice", "metadata": {"name": node},
         "spec": {**driver, "nodeName": node, "devices": devices,
                  "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}}
        for node in nodes
    ]  # fmt: skip
    classes = {
        **api,
        "kind": "DeviceClass",
        "metadata": {"name": "gpu.nvidia.com"},
        "spec": {"selectors": [selector]},
    }
    bed.apply(classes, {**api, "kind": "ResourceClaimTemplate", **about, **template}, *slices)


def test_gpus_that_are_asked_for_by_claims_are_where_their_driver_says(bed, orch):
    """The scheduler binds the pods to the nodes that the controller has chosen, for they have the
    devices; a run that waits for those that others hold gets them once they are given back."""
    space = orch.namespace
    eight_gpus(bed, space, "sim-1", "sim-6", "sim-20")
    options = {"annotations": {}, "pod": BY_CLAIM}
    theirs = {"nodeSelector": {"kubernetes.io/hostname": "sim-6"}, **CLAIM,
              "containers": [{"name": "x", "image": "x", "resources": {"claims": [{"name": "gpus"}]}}]}  # fmt: skip
    bed.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "theirs", "namespace": space},
            "spec": theirs,
        }
    )
    running = ("get", "pod", "theirs", "-n", space, "-o", "jsonpath={.spec.nodeName}")
    until(bed, lambda: bed.kubectl(*running) == "sim-6", PATIENCE_S)
    with controller(bed, "claims"):
        bed.apply(train_run("first", space, 2, options=options))
        assert {pod["spec"]["nodeName"] for pod in orch.bound("first", 2)} == {"sim-1", "sim-20"}
        bed.apply(train_run("second", space, 1, options=options))
        pending_reason = lambda: status(bed, "second", space).get("reason", "")  # noqa: E731
        until(bed, lambda: "21 x 0 GPUs for claims" in pending_reason(), PATIENCE_S, pending_reason)
        bed.kubectl("delete", "pod", "theirs", "-n", space, "--wait=false")
        assert {pod["spec"]["nodeName"] for pod in orch.bound("second", 1)} == {"sim-6"}


# ------------------------------------------------------------------------------------------ faults
#     of the controller


def test_a_paused_leader_decides_nothing_when_it_wakes(bed, space):
    """It is stopped for longer than its lease in the middle of its work, another one places other
    runs on the same nodes, and then it goes on."""
    names = [space("pause-a"), space("pause-b")]
    with controller(bed, "first", 8.0) as first:
        bed.apply(
            *(train_run(f"r{i}", names[i % 2], 8, options={"annotations": {}}) for i in range(3))
        )
        bed.wait(lambda: len(controllers.ledger(bed)) == 3, 120, "three allocations")
        first.signal(signal.SIGSTOP)
        for name in names:
            bed.kubectl("delete", "trainruns", "-n", name, "--all")
        with controller(bed, "second", 8.0):
            bed.apply(
                *(
                    train_run(f"s{i}", names[i % 2], 8, options={"annotations": {}})
                    for i in range(3)
                )
            )
            done = lambda: len([pod for pod in living(bed) if pod["spec"].get("nodeName")]) == 24  # noqa: E731
            bed.wait(done, 180, "the second's pods")
            first.signal(signal.SIGCONT)
            assert wait(lambda: not first.alive, 60), first.log[-3000:]
            # A request that it was sending when it was stopped arrives now, and may make the Job of
            # a deleted TrainRun. Its pods are given no node, and the garbage collector takes them.
            at_once = living(bed)
            until(bed, lambda: runs_of(living(bed)) == {"s0", "s1", "s2"}, PATIENCE_S)
            for pods in (at_once, living(bed)):
                placed = [pod for pod in pods if pod["spec"].get("nodeName")]
                assert not shared_nodes(pods)
                assert runs_of(placed) == {"s0", "s1", "s2"}


@pytest.mark.full
def test_the_ledger_is_made_anew_from_the_pods(bed, space):
    name = space("ledger")
    with controller(bed, "before"):
        bed.apply(train_run("r", name, 8, options={"annotations": {}}))
        bed.wait(
            lambda: len([p for p in living(bed) if p["spec"].get("nodeName")]) == 8, 120, "pods"
        )
        held = controllers.ledger(bed)[f"{name}/r"]["nodes"]
    bed.kubectl("delete", "configmap", "-n", controllers.SPACE, "orch-placements")
    with controller(bed, "after"):
        bed.apply(*(train_run(f"s{i}", name, 8, options={"annotations": {}}) for i in range(2)))
        bed.wait(
            lambda: len([p for p in living(bed) if p["spec"].get("nodeName")]) == 24, 120, "pods"
        )
        assert controllers.ledger(bed)[f"{name}/r"]["nodes"] == held
        assert not shared_nodes(living(bed))


def competition(bed: Bed, names: list[str], round: int, count: int) -> None:
    """`count` runs of four namespaces for room for a few: all of them end well, no node is given
    twice, and none stands idle while somebody fits."""
    bodies = [
        train_run(f"r{round}-{i}", names[i % len(names)], random.choice((4, 8)))
        for i in range(count)
    ]
    over = threading.Event()
    shared = set()
    idle = []

    def watch() -> None:
        since = None
        while not over.wait(0.5):
            pods = living(bed)
            shared.update(shared_nodes(pods))
            waiting = [
                body
                for body in controllers.runs(bed).values()
                if body.get("status", {}).get("state") == "pending"
            ]
            held = {
                node
                for allocation in controllers.ledger(bed).values()
                for node in allocation["nodes"]
            }
            least = min(
                (4 if "cluster.nodes=4" in body["spec"]["words"] else 8 for body in waiting),
                default=99,
            )
            since = (since or time.monotonic()) if NODES - len(held) >= least else None
            if since and time.monotonic() - since > 60:  # on a machine that does much else
                idle.append((len(held), least))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        bed.apply(*bodies)

        def ended():
            return [
                body
                for body in controllers.runs(bed).values()
                if body.get("status", {}).get("state") == "done"
            ]

        bed.wait(lambda: len(ended()) == count, 900, f"end of {count} runs")
    finally:
        over.set()
        watcher.join()
    assert not shared and not idle
    for name in names:
        bed.kubectl("delete", "trainruns", "-n", name, "--all")
    bed.wait(lambda: not controllers.ledger(bed), 120, "an empty ledger")


def test_runs_of_several_namespaces_compete_for_room(bed, space):
    with controller(bed, "compete"):
        competition(bed, [space(f"compete-{i}") for i in range(4)], 0, 8)


@pytest.mark.full
def test_twenty_runs_of_four_namespaces_fifty_times(bed, space):
    with controller(bed, "fifty"):
        names = [space(f"fifty-{i}") for i in range(4)]
        for round in range(50):
            competition(bed, names, round, 20)


@pytest.mark.parametrize("points", [2, pytest.param(100, marks=pytest.mark.full)])
def test_a_controller_killed_anywhere_leaves_one_run_or_none(bed, space, points):
    """SIGKILL at a random moment after a run was asked for; the next one comes to one Job of it and
    whole pods."""
    name = space("killed")
    seed = random.Random(21)
    for point in range(points):
        replica = Replica(bed, f"kill-{point}", lease_s=2.0)
        bed.apply(train_run(f"k{point}", name, 8, options={"annotations": {}}))
        wait(lambda replica=replica: replica.leads, 60)
        time.sleep(seed.uniform(0.0, 2.0))
        replica.kill()
        with controller(bed, f"next-{point}", 2.0):
            run = f"k{point}"
            until(
                bed,
                lambda run=run: status(bed, run, name).get("nodes") == "8/8",
                120,
                lambda run=run: status(bed, run, name),
            )
            jobs = bed.get("jobs", "-n", name)["items"]
            assert [job["metadata"]["name"] for job in jobs] == [run]
            pods = living(bed, "-n", name)
            held = controllers.ledger(bed)[f"{name}/{run}"]["nodes"]
            assert sorted(pod["spec"]["nodeName"] for pod in pods) == sorted(held)
            bed.kubectl("delete", "trainrun", "-n", name, run)
            kinds = "jobs,pods,secrets,services"
            remaining = lambda kinds=kinds: bed.kubectl(  # noqa: E731
                "get", kinds, "-n", name, "-o", "name"
            )
            until(bed, lambda remaining=remaining: not remaining(), 60, remaining)
            until(bed, lambda: not controllers.ledger(bed), 30)


@pytest.mark.full
@pytest.mark.parametrize("points", [100])
def test_a_submitter_killed_anywhere_leaves_one_run_or_none(bed, orch, points):
    """SIGKILL at a random moment of `orch submit` with a secret to pass on: a whole run, a draft
    that goes, nothing."""
    seed = random.Random(22)
    submit_command = orch.submission()
    env = {"HF_TOKEN": "hush"}
    began = time.monotonic()
    orch(*submit_command, *MAIN, "--env", "HF_TOKEN", "run.name=warm", env=env)
    takes = time.monotonic() - began
    with controller(bed, "submitter"):
        for point in range(points):
            argv = [
                sys.executable,
                "-m",
                "orchestrator.cli.main",
                *submit_command,
                *MAIN,
                "--env",
                "HF_TOKEN",
            ]
            environ = {
                "ORCH_HOME": str(orch.home),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                **env,
            }
            process = bed.popen(f"submit-{point}", *argv, f"--run-id=s{point}", env=environ)
            time.sleep(seed.uniform(0.3, 1.1) * takes)
            for pid in (*descendants(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(30)
            bed.kubectl(
                "delete",
                "trainrun",
                "-n",
                orch.namespace,
                f"s{point}",
                "--ignore-not-found",
                "--wait=false",
            )
        kinds = "trainruns,jobs,pods,secrets,services"
        remaining = lambda: [  # noqa: E731
            object_name
            for object_name in bed.kubectl("get", kinds, "-n", orch.namespace, "-o", "name").split()
            if "warm" not in object_name
        ]
        until(bed, lambda: not remaining(), 300, remaining)


@pytest.mark.full
def test_the_api_server_may_go_and_come_back(bed, space):
    """Killed while runs are being placed and started: nothing is done twice, and everything in the
    end."""
    name = space("api-server")
    with controller(bed, "api", 15.0) as replica:
        for round in range(3):
            bed.apply(
                *(
                    train_run(f"a{round}-{i}", name, 8, options={"annotations": {}})
                    for i in range(3)
                )
            )
            time.sleep(1.0 + round)
            bed.end("kube-apiserver", signal.SIGKILL)
            time.sleep(3.0)
            bed.start_apiserver()
            ready = lambda: len([p for p in living(bed) if p["spec"].get("nodeName")]) == 24  # noqa: E731
            bed.wait(ready, 240, "every pod", "api")
            assert not shared_nodes(living(bed)) and replica.alive
            assert len(bed.get("jobs", "-n", name)["items"]) == 3
            bed.kubectl("delete", "trainruns", "-n", name, "--all")
            bed.wait(
                lambda: not controllers.ledger(bed) and not living(bed),
                180,
                "an empty ledger",
                "api",
            )


# ------------------------------------------------------------------------------------------ a whole
#     life


def test_a_run_from_its_submission_to_its_end(bed, orch, tmp_path):
    """Submitted, placed under leaves, cancelled, resumed, seen by somebody else, deleted: and
    nothing is left.

    Not the first of the bed: Kubernetes' garbage collector hears of a new kind after half a minute.
    """
    with controller(bed, "life"):
        run = orch.submit(*MAIN)
        pods = orch.bound(run.id, 8)
        assert len({pod["spec"]["nodeName"] for pod in pods}) == 8
        leaf = {int(pod["spec"]["nodeName"].removeprefix("sim-")) // 4 for pod in pods}
        assert len(leaf) == 2  # two pipelines of four nodes, each under one leaf
        held = controllers.ledger(bed)[f"{orch.namespace}/{run.id}"]
        assert held["nodes"] == [pod["spec"]["nodeName"] for pod in pods]
        until(bed, lambda: status(bed, run.id, orch.namespace).get("nodes") == "8/8", 60)
        table = bed.kubectl("get", "trainruns", "-n", orch.namespace)
        assert table.split()[:8] == [
            "NAME",
            "STATE",
            "STEP",
            "LOSS",
            "NODES",
            "ETTR",
            "AGE",
            "REASON",
        ]
        orch("cancel", run.id)
        assert run.state().state == "cancelled"
        assert not living(bed, "-n", orch.namespace)
        until(bed, lambda: not controllers.ledger(bed), 30)
        orch("resume", run.id)
        assert len(orch.bound(run.id, 8)) == 8
        # The status follows the pods.
        until(bed, lambda: status(bed, run.id, orch.namespace)["generation"] == 1, 60)
        other_user = Orch(bed, tmp_path / "other", orch.namespace, OPTIONS)
        other_user.home.mkdir()
        seen = json.loads(other_user("list", "--json", "--everyone").stdout)
        assert run.id in {listed_run["state"]["run_id"] for listed_run in seen}
        assert (
            json.loads(other_user("status", "--json", run.id).stdout)["state"]["plan_hash"]
            == run.state().plan_hash
        )
        bed.kubectl("delete", "trainrun", "-n", orch.namespace, run.id)
        kinds = "jobs,pods,secrets,services,configmaps"

        def left():
            return bed.kubectl(
                "get", kinds, "-n", orch.namespace, "-l", f"orch.dev/run={run.id}", "-o", "name"
            )

        until(bed, lambda: not left(), 90, left)
        until(bed, lambda: not controllers.ledger(bed), 30)


def test_a_program_travels_with_its_train_run(bed, orch, tmp_path):
    """Its ConfigMap belongs to the TrainRuns that use it. If it is gone, a resume where the run was
    submitted stores it again; resumed elsewhere, the run says so and waits, until a submission with
    the same code does."""
    program = tmp_path / "program"
    program.mkdir()
    (program / "train.py").write_text("print('hello')")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def submitted() -> Run:
        words = [word for word in orch.submission()[1:] if word != "--in-place"]
        two_nodes = ("cluster=h100x64", "parallel=tp8", "nodes=2")
        argv = ("submit", *words, *two_nodes, "--", "python3", "train.py")
        return Run(orch, json.loads(orch(*argv, cwd=program).stdout)["run_dir"])

    def stored() -> list[dict]:
        return bed.get("configmaps", "-n", orch.namespace, "-l", "orch.dev/code")["items"]

    def reason() -> str:
        return status(bed, first.id, orch.namespace).get("reason", "")

    with controller(bed, "code"):
        first = submitted()
        [pod, _] = orch.bound(first.id, 2)
        [chunk] = stored()
        [owner] = chunk["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("TrainRun", first.id)
        assert not bed.get("trainrun", "-n", orch.namespace, first.id)["spec"].get("draft")
        assert chunk["metadata"]["name"] in json.dumps(pod["spec"]["volumes"])
        for resuming in (orch, Orch(bed, elsewhere, orch.namespace, OPTIONS)):
            orch("cancel", first.id)
            bed.kubectl("delete", "configmap", "-n", orch.namespace, chunk["metadata"]["name"])
            resuming("resume", first.id)
            if resuming is orch:
                orch.bound(first.id, 2)
        until(bed, lambda: f"{chunk['metadata']['name']} is missing" in reason(), 60, reason)
        assert not living(bed, "-n", orch.namespace)
        second = submitted()
        orch.bound(second.id, 2)
        orch.bound(first.id, 2)
        [chunk] = stored()
        owners = {owner["name"] for owner in chunk["metadata"]["ownerReferences"]}
        assert owners == {first.id, second.id}
        for run in (second, first):
            bed.kubectl("delete", "trainrun", "-n", orch.namespace, run.id)
        until(bed, lambda: not stored(), 90, stored)


# ------------------------------------------------------------------------------------------ healing


@pytest.mark.full
def test_a_node_out_of_service_is_replaced(bed, space):
    """Cordoned and its pod gone, as a drain leaves it; and one that was never fit to take its
    pod."""
    name = space("heal")
    with controller(bed, "heal"):
        bed.apply(train_run("r", name, 8, options={"annotations": {}}))
        bed.wait(
            lambda: len([p for p in living(bed) if p["spec"].get("nodeName")]) == 8, 120, "pods"
        )
        held = controllers.ledger(bed)[f"{name}/r"]["nodes"]
        bed.kubectl("cordon", held[3])
        try:
            victim = next(p for p in living(bed) if p["spec"].get("nodeName") == held[3])[
                "metadata"
            ]["name"]
            bed.kubectl("delete", "pod", "-n", name, victim, "--wait=false")

            def whole():
                return [p["spec"].get("nodeName") for p in living(bed) if p["spec"].get("nodeName")]

            bed.wait(lambda: len(whole()) == 8 and held[3] not in whole(), 120, "another node")
            now = controllers.ledger(bed)[f"{name}/r"]["nodes"]
            assert now[:3] + now[4:] == held[:3] + held[4:] and now[3] not in held
        finally:
            bed.kubectl("uncordon", held[3])


@pytest.mark.full
def test_a_quota_gives_the_nodes_back(bed, space):
    """Pods that may not be made hold no nodes: others get them, and the run comes back when there
    is quota."""
    name = space("quota")
    other_space = space("quota-other")
    bed.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": name},
               "spec": {"hard": {"pods": "0"}}})  # fmt: skip
    with controller(bed, "quota"):
        bed.apply(train_run("r", name, 8, options={"annotations": {}}))
        reason = lambda: status(bed, "r", name).get("reason", "")  # noqa: E731
        until(
            bed, lambda: "exceeded quota" in reason() and "tried again at" in reason(), 120, reason
        )
        until(bed, lambda: not controllers.ledger(bed), 60)
        bed.apply(
            *(train_run(f"s{i}", other_space, 8, options={"annotations": {}}) for i in range(3))
        )
        bed.wait(
            lambda: len([p for p in living(bed) if p["spec"].get("nodeName")]) == 24,
            120,
            "the others' pods",
        )
        bed.kubectl("delete", "trainruns", "-n", other_space, "--all")
        bed.kubectl("delete", "resourcequota", "-n", name, "q")
        until(bed, lambda: status(bed, "r", name).get("nodes") == "8/8", 180, reason)
