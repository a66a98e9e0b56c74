"""The chart as Helm renders it, and what its schema refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from orchestrator.backends.kubernetes.options import read_options
from orchestrator.plan.exits import FATAL, Exit
from orchestrator.run.folder import check_run_id
from tests.beds.kubernetes.building import program

from .conftest import built
from .test_chart import CHART, FULL

# Of the tier, though they need no cluster: it has Helm built first.
pytestmark = [pytest.mark.kubernetes, pytest.mark.process]


CLUSTER_WIDE = ("Topology", "ResourceFlavor", "ClusterQueue", "ClusterRole", "ClusterRoleBinding")


@pytest.fixture(scope="module")
def helm() -> str:
    built("helm")
    return str(program("helm"))


def run(helm: str, *argv: str, values: dict) -> subprocess.CompletedProcess[str]:
    argv = (helm, *argv, "--values", "-")
    return subprocess.run(
        argv, input=json.dumps(values), capture_output=True, text=True, timeout=120
    )


def rendered(
    helm: str,
    values: dict,
    release: str = "my-run",
    namespace: str = "llm",
    chart: Path = CHART,
    *helm_options: str,
) -> list[dict]:
    done = run(
        helm,
        "template",
        release,
        str(chart),
        "--namespace",
        namespace,
        *helm_options,
        values=values,
    )
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def test_lint(helm):
    done = run(helm, "lint", str(CHART), "--strict", values=FULL)
    assert done.returncode == 0, done.stdout + done.stderr


def of(bodies: list[dict], kind: str, fragment: str = "") -> dict:
    return next(b for b in bodies if b["kind"] == kind and fragment in b["metadata"]["name"])


def test_the_launcher_submits_with_options_that_orch_takes(helm):
    bodies = rendered(helm, FULL)
    conf = yaml.safe_load(of(bodies, "ConfigMap", "-values")["data"]["helm.yaml"])
    options = read_options(conf["backend"]["options"])
    assert options.image == "registry.example/orch@sha256:" + "0" * 64
    assert (options.queue, options.claim, options.namespace) == ("my-run", "my-run-runs", "llm")
    assert options.owner.name == of(bodies, "ConfigMap", "-values")["metadata"]["name"]
    assert options.annotations == {"note": "it's: #1"}
    job = of(bodies, "Job", "-launch")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert {"cluster=h100x64", "parallel=tp8_pp4_zero1", "train.steps=100", "backend=helm"} <= set(
        container["command"]
    )
    failing = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert set(map(int, FATAL)) | {int(Exit.INTERNAL)} == set(failing)


def test_other_values_are_another_run_and_the_same_ones_the_same(helm):
    def name(**values: object) -> str:
        release_values = {"image": {"repository": "registry.example/orch"}, **values}
        return of(rendered(helm, release_values), "ConfigMap", "-values")["metadata"]["name"]

    assert (
        name() == name(launcher={"environment": {"A": "b"}}) == name(monitoring={"dashboard": True})
    )
    assert (
        len(
            {
                name(),
                name(parallel="dp8"),
                name(overrides=["train.steps=5"]),
                name(options={"cpus": 1}),
            }
        )
        == 4
    )


def test_releases_that_look_alike_share_no_name(helm):
    """Equal in their first forty characters; with a dot, which no run id has; `a`/`b-c` beside
    `a-b`/`c`."""
    alike = ["x" * 45 + "-a", "x" * 45 + "-b", "my.run", "my-run"]
    names = []
    for release in alike:
        bodies = rendered(helm, FULL, release)
        command = of(bodies, "Job", "-launch")["spec"]["template"]["spec"]["containers"][0][
            "command"
        ]
        check_run_id(command[command.index("--run-id") + 1])
        names += [(body["kind"], body["metadata"]["name"]) for body in bodies]
    assert len(names) == len(set(names))
    cluster_wide = [
        of(rendered(helm, FULL, *at), "ClusterRole")["metadata"]["name"]
        for at in (("b-c", "a"), ("c", "a-b"))
    ]
    assert len(set(cluster_wide)) == 2


def test_where_the_controller_is_a_release_is_one_train_run(helm):
    """It has the release's name, whatever the values: an upgrade changes it and does not replace
    it."""
    api_versions = ("--api-versions", "orch.dev/v1alpha1/TrainRun")
    values = {**FULL, "priority": 7, "environmentSecret": "tokens"}
    bodies = rendered(helm, values, "my-run", "llm", CHART, *api_versions)
    (run,) = [body for body in bodies if body["kind"] == "TrainRun"]
    spec = run["spec"]
    assert run["metadata"]["name"] == "my-run"
    assert {
        "cluster=h100x64",
        "parallel=tp8_pp4_zero1",
        "train.steps=100",
        "backend=kubernetes",
    } == set(spec["words"])
    options = read_options(spec["options"])
    assert (options.claim, options.owner, options.namespace, options.cpus) == (
        "my-run-runs",
        None,
        None,
        96,
    )
    assert (spec["priority"], spec["environmentSecret"]) == (7, "tokens")
    assert not {"Role", "ClusterRole"} & {body["kind"] for body in bodies}
    assert not [body for body in bodies if "-launch" in body["metadata"]["name"]]
    assert rendered(helm, {**values, "controller": "always"}) == bodies
    without = rendered(
        helm, {**values, "controller": "never"}, "my-run", "llm", CHART, *api_versions
    )
    assert of(without, "Job", "-launch") and "TrainRun" not in {body["kind"] for body in without}


def test_the_controllers_chart(helm):
    chart = CHART.parent / "orch-controller"
    values = {"image": {"repository": "registry.example/orch"}}
    assert run(helm, "lint", str(chart), "--strict", values=values).returncode == 0
    bodies = rendered(helm, values, "c", "orch-system", chart)
    deployment = of(bodies, "Deployment")["spec"]
    assert deployment["replicas"] == 2
    (container,) = deployment["template"]["spec"]["containers"]
    assert (
        "orchestrator.backends.kubernetes.controller" in container["command"]
        and "--lease-s=15" in container["command"]
    )
    crd = of(bodies, "CustomResourceDefinition")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    for body in bodies:
        for rule in body["rules"] if body["kind"] in ("Role", "ClusterRole") else ():
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            if "secrets" in rule["resources"]:
                assert rule["verbs"] == ["create"]  # it makes them and reads none
    namespaced = rendered(helm, {**values, "oneNamespace": True}, "c", "team", chart)
    (cluster_wide,) = [
        body
        for body in namespaced
        if body["kind"] == "ClusterRole"
        and "-view" not in body["metadata"]["name"]
        and "-edit" not in body["metadata"]["name"]
    ]
    assert [rule["resources"] for rule in cluster_wide["rules"]] == [
        ["nodes"],
        ["resourceslices", "resourceclaims"],
    ]
    assert (
        "--one-namespace"
        in of(namespaced, "Deployment")["spec"]["template"]["spec"]["containers"][0]["command"]
    )


def test_accounts_of_somebody_else_are_named_and_bound(helm):
    """Made elsewhere, with a cloud's role or pull secrets; without a name it is the namespace's
    default one."""
    for names, bound in (({}, "default"), ({"launcher": "ours", "pods": "theirs"}, "ours")):
        bodies = rendered(helm, FULL | {"serviceAccount": {"create": False, **names}})
        assert not [body for body in bodies if body["kind"] == "ServiceAccount"]
        assert {
            body["subjects"][0]["name"] for body in bodies if body["kind"].endswith("Binding")
        } == {bound}
        spec = of(bodies, "Job", "-launch")["spec"]["template"]["spec"]
        assert spec.get("serviceAccountName") == names.get("launcher")
        conf = yaml.safe_load(of(bodies, "ConfigMap", "-values")["data"]["helm.yaml"])
        assert read_options(conf["backend"]["options"]).service_account == names.get("pods")
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}
    accounts = [
        b
        for b in rendered(helm, FULL | {"serviceAccount": {"annotations": role}})
        if b["kind"] == "ServiceAccount"
    ]
    assert [body["metadata"]["annotations"] for body in accounts] == [role, role]


def test_the_launcher_runs_under_the_image_s_interpreter(helm):
    for options, python in (
        ({}, "python3"),
        ({"python": "/opt/conda/bin/python"}, "/opt/conda/bin/python"),
    ):
        job = of(rendered(helm, FULL | {"options": options}), "Job", "-launch")
        assert job["spec"]["template"]["spec"]["containers"][0]["command"][0] == python


def test_releases_of_one_name_share_no_object_of_the_cluster(helm):
    """Nor do two of one namespace that name the same queue; a release's own objects refer to one
    another."""
    queue = {**FULL["kueue"], "queue": "shared"}
    cluster_objects = [
        {
            (body["kind"], body["metadata"]["name"])
            for body in bodies
            if body["kind"] in CLUSTER_WIDE
        }
        for bodies in (
            rendered(helm, FULL, "r", "a"),
            rendered(helm, FULL, "r", "b"),
            rendered(helm, FULL | {"kueue": queue}, "one", "c"),
            rendered(helm, FULL | {"kueue": queue}, "two", "c"),
        )
    ]
    assert (
        len(set().union(*cluster_objects))
        == sum(map(len, cluster_objects))
        == 4 * len(CLUSTER_WIDE)
    )
    bodies = rendered(helm, FULL, "r", "a")
    name = of(bodies, "ClusterQueue")["metadata"]["name"]
    assert of(bodies, "LocalQueue")["spec"]["clusterQueue"] == name
    assert of(bodies, "ClusterQueue")["spec"]["resourceGroups"][0]["flavors"][0]["name"] == name
    assert (
        of(bodies, "ResourceFlavor")["spec"]["topologyName"]
        == of(bodies, "Topology")["metadata"]["name"]
    )


def test_each_release_scrapes_its_own_pods(helm):
    for api_versions, suffix in (
        ((), "-values"),
        (("--api-versions", "orch.dev/v1alpha1/TrainRun"), None),
    ):
        bodies = rendered(helm, FULL, "my-run", "llm", CHART, *api_versions)
        run_id = (
            of(bodies, "ConfigMap", suffix)["metadata"]["name"].removesuffix(suffix)
            if suffix
            else "my-run"
        )
        assert of(bodies, "PodMonitor")["spec"]["selector"] == {
            "matchLabels": {"orch.dev/run": run_id}
        }


def test_labels_are_data(helm):
    """Neither a key nor a value writes YAML of its own, and none replaces what the chart says of
    itself."""
    evil = {'x: y\n  annotations: {a: "b"}\n  z': "1"}
    image = {"repository": "registry.example/orch"}
    done = run(
        helm, "template", "r", str(CHART), values={"image": image, "monitoring": {"labels": evil}}
    )
    assert done.returncode != 0
    assert "does not match pattern" in done.stderr
    labels = {"release": "prom", "app.kubernetes.io/name": "other", "example.org/on": "yes"}
    monitor = of(
        rendered(helm, FULL | {"monitoring": {"podMonitor": True, "labels": labels}}), "PodMonitor"
    )
    monitor_labels = monitor["metadata"]["labels"]
    assert (
        monitor_labels["release"],
        monitor_labels["app.kubernetes.io/name"],
        monitor_labels["example.org/on"],
    ) == (
        "prom",
        "orch",
        "yes",
    )


def test_pods_of_the_chart_meet_the_restricted_profile(helm):
    for body in rendered(helm, FULL):
        if body["kind"] == "Job":
            spec = body["spec"]["template"]["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True
            for container in spec["containers"]:
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["resources"]["limits"]["memory"]


def test_rights_are_named_one_by_one(helm):
    run_id = of(rendered(helm, FULL), "ConfigMap", "-values")["metadata"]["name"].removesuffix(
        "-values"
    )
    rules = of(rendered(helm, FULL), "Role")["rules"]
    (secrets,) = [rule for rule in rules if "secrets" in rule["resources"]]
    assert secrets["resourceNames"] == [run_id]  # and no other Secret of the namespace
    assert of(rendered(helm, FULL, "9lives"), "Role")["rules"][2]["resourceNames"][0].startswith(
        "r9lives-"
    )
    for body in rendered(helm, FULL):
        if body["kind"] in ("Role", "ClusterRole"):
            for rule in body["rules"]:
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if body["kind"] == "ClusterRole":
            assert body["rules"] == [
                {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]},
                {
                    "apiGroups": ["resource.k8s.io"],
                    "resources": ["resourceslices", "resourceclaims"],
                    "verbs": ["list"],
                },
                {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["list"]},
            ]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "repository"),
        ({"image": {"repository": "x"}, "paralel": "dp8"}, "paralel"),
        ({"image": {"repository": "x", "digest": "sha256:123"}}, "digest"),
        ({"image": {"repository": "x"}, "options": {"que": "a"}}, "que"),
        ({"image": {"repository": "x"}, "cluster": "a b"}, "cluster"),
        ({"image": {"repository": "x"}, "claim": {"size": "much"}}, "size"),
        ({"image": {"repository": "x"}, "overrides": ["no equals sign\n"]}, "overrides"),
    ],
)
def test_bad_values_are_refused_with_a_message(helm, values, says):
    done = run(helm, "template", "my-run", str(CHART), values=values)
    assert done.returncode != 0
    assert says in done.stderr
