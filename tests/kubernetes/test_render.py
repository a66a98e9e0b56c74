"""The objects of a run: golden text, sizes, rules from the exit codes, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from orchestrator.backends.kubernetes import names
from orchestrator.backends.kubernetes.api.client import PATHS, kind_of
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.objects.code_maps import chunk_names, code_maps
from orchestrator.backends.kubernetes.objects.gang import resolved
from orchestrator.backends.kubernetes.objects.node_affinity import kueue_annotations
from orchestrator.backends.kubernetes.objects.payload import pack_plan, unpack_plan
from orchestrator.backends.kubernetes.objects.pod import pod_exit, pod_failure_policy, quantity
from orchestrator.backends.kubernetes.objects.render import Manifest, render, to_yaml
from orchestrator.backends.kubernetes.options import KubernetesOptions, read_options
from orchestrator.backends.kubernetes.pod.program import unpack_code
from orchestrator.cli.main import main
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, PlanError, seal
from orchestrator.plan.ranks import all_groups, as_dict
from orchestrator.run.code.archive import pack
from orchestrator.run.request import Code, PackedCode, Site, SubmissionBundle, make_request
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan
from tests.planner.configs import build_plan

GOLDEN = Path(__file__).parent / "golden"
IMAGE = {"image": "registry.example/orch@sha256:" + "0" * 64}
LEVELS = {"leaf": "example.org/leaf", "spine": "example.org/spine"}

#: A site's own: local disks, host network, GPUs by DRA, a second network, variables from a Secret,
#: a sidecar.
SITE = {
    "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"}},
    "spec": {
        "runtimeClassName": "nvidia",
        "schedulerName": "gang",
        "hostNetwork": True,
        "hostIPC": False,
        "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}],
        "affinity": {"podAntiAffinity": {}},
        "volumes": [{"name": "work", "hostPath": {"path": "/nvme", "type": "Directory"}}],
        "initContainers": [
            {
                "name": "logs",
                "image": "registry.example/logs:1",
                "restartPolicy": "Always",
                "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
            }
        ],
        "containers": [
            {
                "name": "agent",
                "env": [
                    {
                        "name": "TOKEN",
                        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
                    }
                ],
                "envFrom": [{"secretRef": {"name": "site"}}],
                "resources": {
                    "claims": [{"name": "gpus"}],
                    "limits": {"hugepages-2Mi": "4Gi", "nvidia.com/gpu": None},
                    "requests": {"nvidia.com/gpu": None},
                },
                "securityContext": {"capabilities": {"add": ["SYS_NICE"]}},
            }
        ],
    },
}

CASES: dict[str, dict] = {
    "plain": {},
    "queue": {"queue": "team-a", "workload_priority": "high", "levels": LEVELS, "claim": "runs"},
    "jobset": {"kind": "jobset", "queue": "team-a", "levels": LEVELS, "topology": "required"},
    "everything": {
        "namespace": "llm", "pull_secrets": ["reg"], "service_account": "trainer", "cpus": 96, "memory_gib": 1024.0,
        "shm_gib": 100.5, "rdma": {"rdma/ib": 8}, "security": "baseline", "priority_class": "urgent",
        "node_selector": {"pool": "a"}, "tolerations": [{"key": "team", "operator": "Equal", "value": "x"}],
        "volumes": [{"claim": "data", "path": "/data"}], "claim": "runs", "ttl_s": None, "network_policy": True,
        "labels": {"cost-centre": "7"}, "annotations": {"example.org/note": "it's: #1"}, "checkpoint_gb_per_s": 0.1,
        "egress": [{"cidr": "10.9.0.0/16", "ports": [443]}, {"cidr": "fd00::/8"}],
        "owner": {"name": "release", "uid": "1234"},
    },
    "site": {"pod": SITE},
}  # fmt: skip


def request_of(
    overrides: list[str],
    run_id: str,
    command: Sequence[str] = (),
    code: Code | None = None,
    archive: bytes = b"",
):
    """(bundle, plan) of `orch submit backend=kubernetes` with these words."""
    config = load([*overrides, "backend=kubernetes", f"run.name={run_id.rpartition('-')[0]}"], None)
    plan = build_plan(config)
    site = Site(run_id=run_id, home="/h", runs_dir="/h/runs", python="/py", environment_names=["NCCL_DEBUG", "HOME"],
                cwd="/w", code=code or Code(kind="none"), packed_code=archive)  # fmt: skip
    return make_request(config, plan, site, command), plan


@pytest.fixture(scope="module")
def main_line():
    return request_of(["cluster=h100x64", "model=llama3_8b"], "main-1")


def manifest(main_line, options: dict, **changes: object) -> Manifest:
    bundle, plan = main_line
    kubernetes_options = read_options({**IMAGE, **options})
    space = kubernetes_options.namespace or "default"
    run = Manifest(
        request=bundle.request,
        plan=plan,
        options=kubernetes_options,
        config=b"run: main\n",
        namespace=space,
    )
    secrets = {"key": "ab" * 32, "environment": {"NCCL_DEBUG": "INFO"}}
    return structs.replace(run, **(secrets | changes))


@pytest.mark.parametrize("name", CASES)
def test_golden(main_line, name):
    """Byte for byte, but for what is packed. Delete a golden file to have it written anew, then
    read the difference."""
    objects = render(manifest(main_line, CASES[name]))
    for body in objects:
        for key in body.get("binaryData", {}):
            body["binaryData"][key] = "(packed)"
        if "request.json" in body.get("data", {}):
            body["data"]["request.json"] = "(the request)"
    rendered_yaml = to_yaml(objects)
    path = GOLDEN / f"{name}.yaml"
    if "hash" in rendered_yaml:
        rendered_yaml = rendered_yaml.replace(main_line[1].hash, "f" * 64)
    if not path.exists():
        path.write_text(rendered_yaml)
        pytest.fail(f"{path.name} did not exist: written, look at it and run again")
    assert rendered_yaml == path.read_text()


def test_what_is_printed_is_what_is_sent_with_the_job_last(main_line):
    for options in CASES.values():
        objects = render(manifest(main_line, options))
        assert list(yaml.safe_load_all(to_yaml(objects))) == json.loads(json.dumps(objects))
        assert to_yaml(objects) == to_yaml(render(manifest(main_line, options)))
        assert objects[-1]["kind"] in ("Job", "JobSet")
        assert all(body["metadata"]["labels"][names.RUN] == "main-1" for body in objects)


def test_only_index_0_has_a_service(main_line):
    """Pods of a Service are spread by the scheduler, and listed anew with each change of one of
    them."""
    objects = render(manifest(main_line, {}))
    service = next(body for body in objects if body["kind"] == "Service")
    assert service["spec"]["selector"] == {names.RUN: "main-1", names.INDEX: "0"}
    assert objects[-1]["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


def test_metrics_are_read_from_anywhere_and_the_rest_by_the_run_s_pods_alone(main_line):
    """No selector finds a Prometheus on its node's network, nor one outside the cluster."""
    policy = next(
        b
        for b in render(manifest(main_line, {"network_policy": True}))
        if b["kind"] == "NetworkPolicy"
    )
    peers, metrics = policy["spec"]["ingress"]
    assert peers == {"from": [{"podSelector": {"matchLabels": {names.RUN: "main-1"}}}]}
    assert metrics == {"ports": [{"port": names.METRICS_PORT, "protocol": "TCP"}]}


def test_sixteen_thousand_ranks_fit():
    """They fit into the 1 MiB of a ConfigMap, and with it into the 256 KiB that `kubectl apply`
    writes a second time."""
    bundle, plan = request_of(["cluster=h100x16384", "model=llama3_405b"], "big-1")
    assert len(plan.ranks) == 16384
    objects = render(manifest((bundle, plan), {}))
    assert max(len(json.dumps(body)) for body in objects) < 262_144
    assert unpack_plan(pack_plan(plan)) == plan


def test_a_plan_survives_packing_and_a_damaged_one_does_not():
    plan = make_plan(tp=2, pp=2, dp=2, nodes=4)
    assert unpack_plan(pack_plan(plan)) == plan
    for raw in (b"", b"no plan", pack_plan(plan)[:-9], pack_plan(plan) + b"x" * 3):
        try:
            assert unpack_plan(raw) == plan
        except PlanError:
            continue


def test_ranks_that_do_not_follow_from_the_order_are_kept():
    """A rank map of a user's own making travels as it is."""
    plan = make_plan(tp=2, dp=2, nodes=2)
    swapped = [structs.replace(plan.ranks[i], rank=j) for j, i in enumerate((1, 0, 3, 2))]
    custom_plan = seal(
        structs.replace(plan, ranks=swapped, groups=all_groups([as_dict(r) for r in swapped], 1))
    )
    assert unpack_plan(pack_plan(custom_plan)) == custom_plan


# ------------------------------------------------------------------------------------------ rules


def _first_rule(code: int, disrupted: bool = False) -> str:
    """What Kubernetes does with a pod that ended with this code (batch/v1: the first matching rule,
    else Count)."""
    for rule in pod_failure_policy()["rules"]:
        if "onPodConditions" in rule and disrupted:
            return rule["action"]
        if "onExitCodes" in rule and code in rule["onExitCodes"]["values"]:
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("code", list(Exit))
def test_every_exit_code_has_its_rule(code):
    fatal = (Exit.USAGE, Exit.CONFIG, Exit.SECURITY, Exit.USER, Exit.INTERNAL, Exit.CAPACITY)
    waits = (
        Exit.RESTART,
        Exit.FENCED,
    )  # one missing pod must not use up what all the others may fail
    expected = dict.fromkeys(fatal, "FailJob") | dict.fromkeys(waits, "Ignore")
    assert _first_rule(int(code)) == expected.get(code, "Count")
    assert _first_rule(137, disrupted=True) == "Ignore"
    assert _first_rule(137) == "Count"


def test_a_pod_is_made_anew_as_soon_as_its_own_failures_allow(main_line):
    """The wait of a whole Job grows with each pod that fails, whichever it is, and whether it is
    counted or not."""
    for kind in ("job", "jobset"):
        *_, main = render(manifest(main_line, {"kind": kind, "max_pod_failures": 3}))
        job = main["spec"]["replicatedJobs"][0]["template"] if kind == "jobset" else main
        assert (job["spec"]["backoffLimit"], job["spec"]["backoffLimitPerIndex"]) == (3, 3)
        assert (
            job["spec"]["maxFailedIndexes"] == 0
        )  # the others would wait for ever for one that does not come back


def test_losing_a_peer_never_costs_a_pod():
    """An agent says 76 when a node is lost and 77 when it was overtaken: its pod goes on, or comes
    back uncounted."""
    assert {pod_exit(code) for code in (Exit.CAPACITY, Exit.FENCED, Exit.RESTART)} == {Exit.RESTART}
    assert all(pod_exit(code) == code for code in (0, 1, 64, 65, 70, 74, 78))


def test_the_agent_ends_its_workers_before_the_kubelet_ends_the_agent(main_line):
    for speed in (10.0, 0.001):
        *_, job = render(manifest(main_line, {"checkpoint_gb_per_s": speed}))
        spec = job["spec"]["template"]["spec"]
        cm = next(
            b
            for b in render(manifest(main_line, {"checkpoint_gb_per_s": speed}))
            if b["kind"] == "ConfigMap"
        )
        grace = json.loads(cm["data"]["request.json"])["policy"]["grace_s"]
        assert spec["terminationGracePeriodSeconds"] >= grace + 30
        assert grace >= (120 if speed > 1 else 1000)


def test_shared_memory_is_counted_in_the_limit(main_line):
    *_, job = render(
        manifest(main_line, {"memory_gib": 10.0, "shm_gib": 2.5, "rdma": {"rdma/ib": 8}})
    )
    spec = job["spec"]["template"]["spec"]
    resources = spec["containers"][0]["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == "12800Mi"
    assert {**resources["limits"]}.items() >= {"nvidia.com/gpu": "8", "rdma/ib": "8"}.items()
    assert resources["requests"].items() >= {"nvidia.com/gpu": "8", "rdma/ib": "8"}.items()
    assert (
        next(v for v in spec["volumes"] if v["name"] == "shm")["emptyDir"]["sizeLimit"]
        == quantity(2.5)
        == "2560Mi"
    )


# ------------------------------------------------------------------------------------------ placing


def test_kueue_is_asked_for_whole_pipelines(main_line):
    """tp8 pp4 on nodes of 8: a pipeline is four nodes, a leaf holds four, the job needs the
    spine."""
    options = KubernetesOptions(queue="q", levels=LEVELS)
    assert kueue_annotations(main_line[1], options) == {
        "kueue.x-k8s.io/podset-preferred-topology": "example.org/spine",
        "kueue.x-k8s.io/podset-slice-required-topology": "example.org/leaf",
        "kueue.x-k8s.io/podset-slice-size": "4",
    }


def test_a_job_that_fits_a_leaf_is_asked_there():
    plan = make_plan(tp=2, pp=2, nodes=2)
    levels = {plan.cluster.levels[0].name: "example.org/leaf"}
    options = KubernetesOptions(queue="q", levels=levels, topology="required")
    assert kueue_annotations(plan, options) == {
        "kueue.x-k8s.io/podset-required-topology": "example.org/leaf"
    }


# ------------------------------------------------------------------------------------------
#     refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"immage": "x"},
            "backend.options.immage is not an option of kubernetes; did you mean 'image'",
        ),
        ({"image": "a b"}, "backend.options.image"),
        ({"namespace": "Team"}, "backend.options.namespace"),
        ({"labels": {"a b": "c"}}, "backend.options"),
        ({"queue": "q\nx"}, "backend.options.queue"),
        ({"cpus": 0}, "backend.options.cpus"),
        ({"image": None}, "backend.options.image is not set"),
        ({"levels": {"leave": "a/b"}}, "did you mean 'leaf'"),
    ],
)
def test_bad_options_are_one_line(main_line, options, says):
    with refusal(re.escape(says), Exit.CONFIG):
        render(manifest(main_line, options))


def test_an_option_of_before_goes_by_its_new_name():
    assert read_options({"gather_timeout_s": 5}) == KubernetesOptions(rendezvous_timeout_s=5.0)


def test_names_that_would_be_too_long_are_refused_early():
    assert names.object_name("9lives", 8, "job") == "r9lives"
    assert names.object_name("a" * 61, 8, "job") == "a" * 61
    with pytest.raises(OrchError, match="too long for Kubernetes by 1"):
        names.object_name("a" * 61, 11, "job")
    with pytest.raises(OrchError, match="too long"):
        names.object_name("a" * 61, 8, "jobset")


def program_of(code: Code, archive: bytes = b"") -> tuple[SubmissionBundle, Plan]:
    overrides = ["cluster=h100x64", "model=llama3_8b"]
    return request_of(overrides, "own-1", ["python", "train.py"], code, archive)


def test_a_program_travels_in_config_maps_named_after_its_content():
    """The golden file holds what pods mount; every ConfigMap is below Kubernetes' limit."""
    archive = bytes(range(256)) * 10_000
    packed = PackedCode(sha256="ab" * 32, bytes=len(archive))
    code = Code(kind="git", root="/home/me/x", subfolder="src", packed=packed)
    bundle, plan = program_of(code, archive)
    maps = code_maps(packed, archive, "llm")
    chunks = [base64.b64decode(*body["binaryData"].values()) for body in maps]
    assert b"".join(chunks) == archive and max(map(len, chunks)) < 1 << 20
    assert [body["metadata"]["name"] for body in maps] == chunk_names(packed)
    assert KubernetesBackend.most_code_bytes // len(chunks[0]) == 20
    objects = render(manifest((bundle, plan), {}))
    request = json.loads(objects[1]["data"]["request.json"])
    assert request["worker"]["cwd"] == "/orch/code/own-1/src"
    job = objects[-1]["spec"]["template"]["spec"]["volumes"]
    drafts = [*code_maps(packed, None, "llm"), {"volumes": job}]
    path = GOLDEN / "program.yaml"
    if not path.exists():
        path.write_text(to_yaml(drafts))
        pytest.fail(f"{path.name} did not exist: written, look at it and run again")
    assert to_yaml(drafts) == path.read_text()


def test_orch_render_packs_the_folder_and_refuses_a_large_one(tmp_path, monkeypatch, capsys):
    """With a controller the ConfigMaps come before the TrainRun. A dry run shows what the pods
    start, with no path of this machine's orch."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    (tmp_path / "program").mkdir()
    monkeypatch.chdir(tmp_path / "program")
    Path("train.py").write_text("print()")
    Path("outside").symlink_to("/etc")
    argv = ["render", "--run-id", "own-1", "backend=kubernetes", "backend.options.image=x:1"]
    argv += ["nproc=1"]
    program = ["--", "python", "train.py"]
    assert main([*argv, *program]) == Exit.DONE
    out, err = capsys.readouterr()
    assert "has 1 file, 7 B (" in err and "leaves out links to elsewhere: outside" in err
    chunk, *objects = yaml.safe_load_all(out)
    assert unpacked_names(base64.b64decode(chunk["binaryData"]["code.000"])) == ["train.py"]
    assert [body["kind"] for body in objects][-1] == "Job"
    argv[2] = "own-2"
    assert main([*argv, "backend.options.controller=always", *program]) == Exit.DONE
    same_chunk, train_run = yaml.safe_load_all(capsys.readouterr().out)
    assert same_chunk == chunk
    digest = hashlib.sha256(base64.b64decode(chunk["binaryData"]["code.000"])).hexdigest()
    assert digest in train_run["spec"]["planned"]["request"] and "draft" not in train_run["spec"]
    assert main(["submit", "--dry-run", *argv[3:], *program]) == Exit.DONE
    page = capsys.readouterr().out
    assert "in /orch/code/train-" in page and "orchestrator.agent" not in page
    argv[2] = "own-3"
    monkeypatch.setattr(KubernetesBackend, "most_code_bytes", 4096)
    Path("data.bin").write_bytes(os.urandom(5000))
    assert main([*argv, *program]) == Exit.CONFIG
    err = capsys.readouterr().err
    assert "over 4.00 KiB (largest: data.bin 4.88 KiB, train.py 7 B)" in err
    assert "leave files out by .orchignore, or build the program into the image" in err
    Path(".orchignore").write_text("*.bin")
    assert main([*argv, *program]) == Exit.DONE


def unpacked_names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_a_program_of_the_image_starts_where_the_image_does():
    objects = render(manifest(program_of(Code(kind="none")), {}))
    assert json.loads(objects[1]["data"]["request.json"])["worker"]["cwd"] == "."


def test_a_pod_unpacks_once_what_was_submitted_and_nothing_else(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_bytes(os.urandom(1_500_000))
    archive = pack(tmp_path, ["src/train.py"])
    packed = PackedCode(sha256=hashlib.sha256(archive).hexdigest(), bytes=len(archive))
    code = Code(kind="folder", root="/x", subfolder="work/empty", packed=packed)
    bundle, _ = program_of(code, archive)
    request = bundle.request
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for body in code_maps(packed, archive, ""):
        [(name, content)] = body["binaryData"].items()
        (mounted / name).write_bytes(base64.b64decode(content))
    unpack_code(request, mounted, tmp_path / "code")
    unpacked = tmp_path / "code" / "own-1"
    assert (unpacked / "src" / "train.py").stat().st_size == 1_500_000
    assert (unpacked / "work" / "empty").is_dir()
    (unpacked / "written.txt").touch()
    (mounted / "code.001").write_bytes(b"something else")
    unpack_code(request, mounted, tmp_path / "code")
    assert (unpacked / "written.txt").exists()
    with refusal("was submitted: delete its ConfigMaps", Exit.SECURITY):
        unpack_code(request, mounted, tmp_path / "other")
    (mounted / "code.001").unlink()
    with refusal("No such file", Exit.SECURITY):
        unpack_code(request, mounted, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("gang", ["workload", "volcano", "coscheduling", "kai"])
def test_a_gang_is_rendered_for_the_scheduler_that_places_it(main_line, gang):
    """All eight pods or none, each scheduler told in its own words."""
    objects = render(manifest(main_line, {"gang": gang, "gang_queue": "research"}))
    job = objects[-1]
    template = objects[-1]["spec"]["template"]
    groups = [body for body in objects if body["kind"] in ("PodGroup", "Workload")]
    name = job["metadata"]["name"]
    scheduler = template["spec"].get("schedulerName")
    if gang == "kai":
        assert (
            not groups and job["metadata"]["annotations"]["kai.scheduler/batch-min-member"] == "8"
        )
        assert job["metadata"]["labels"]["kai.scheduler/queue"] == "research"
        assert template["metadata"]["labels"]["kai.scheduler/queue"] == "research"
        assert scheduler == "kai-scheduler"
        return
    (group,) = groups
    assert group["metadata"]["name"] == name
    assert kind_of(group) in PATHS
    if gang == "workload":
        (pods,) = group["spec"]["podGroups"]
        assert pods["policy"] == {"gang": {"minCount": 8}} and scheduler is None
        assert template["spec"]["workloadRef"] == {"name": name, "podGroup": pods["name"]}
    elif gang == "volcano":
        assert group["spec"] == {"minMember": 8, "queue": "research"} and scheduler == "volcano"
        assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == name
    else:
        assert group["spec"] == {"minMember": 8} and scheduler == "scheduler-plugins-scheduler"
        assert template["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == name


def test_a_gang_scheduler_is_found_or_its_absence_is_told():
    def serves(*groups: str):
        return lambda group, plural: group.split("/")[0] in groups

    auto = read_options({"gang": "auto"})
    assert resolved(auto, serves("scheduling.volcano.sh", "scheduling.k8s.io")) == "volcano"
    assert resolved(auto, serves()) == "none"
    with refusal(
        "the cluster does not know podgroups of scheduling.volcano.sh/v1beta1", Exit.CONFIG
    ):
        resolved(read_options({"gang": "volcano"}), serves("scheduling.k8s.io"))


def test_an_elastic_job_is_done_when_its_run_is_and_its_gang_is_its_smallest_size():
    """Pods that never found a node are not waited for; without a claim a run has one size."""
    bundle, plan = request_of(["cluster=h100x64", "model=llama3_8b"], "elastic-1")
    bundle = structs.replace(bundle, request=structs.replace(bundle.request, sizes=[8, 4, 2]))
    sizes = {8: plan, 4: plan, 2: plan}
    elastic_manifest = manifest((bundle, plan), {"claim": "runs", "gang": "volcano"}, sizes=sizes)
    *first_objects, group, job = render(elastic_manifest)
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert group["spec"]["minMember"] == 2
    data = next(body for body in first_objects if body["kind"] == "ConfigMap")
    assert {"plan.nodes8.bin", "plan.nodes4.bin", "plan.nodes2.bin"} <= set(data["binaryData"])
    assert json.loads(data["data"]["request.json"])["sizes"] == [8, 4, 2]
    fixed = render(manifest((bundle, plan), {"gang": "volcano"}, sizes=sizes))
    assert "successPolicy" not in fixed[-1]["spec"] and fixed[-2]["spec"]["minMember"] == 8
