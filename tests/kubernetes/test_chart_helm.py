"""The chart as Helm renders it, and what its schema refuses."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from orchestrator.backends.kubernetes.options import read_options
from orchestrator.plan.exits import FATAL, Exit
from tests.beds.kubernetes.building import program

from .conftest import built
from .test_chart import CHART, FULL

# Of the tier, though they need no cluster: it has Helm built first.
pytestmark = [pytest.mark.kubernetes, pytest.mark.process]


@pytest.fixture(scope="module")
def helm() -> str:
    built("helm")
    return str(program("helm"))


def run(helm: str, *argv: str, values: dict) -> subprocess.CompletedProcess[str]:
    argv = (helm, *argv, "--values", "-")
    return subprocess.run(argv, input=json.dumps(values), capture_output=True, text=True, timeout=120)


def rendered(helm: str, values: dict) -> list[dict]:
    done = run(helm, "template", "my-run", str(CHART), "--namespace", "llm", values=values)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def test_lint(helm):
    done = run(helm, "lint", str(CHART), "--strict", values=FULL)
    assert done.returncode == 0, done.stdout + done.stderr


def of(bodies: list[dict], kind: str, part: str = "") -> dict:
    return next(b for b in bodies if b["kind"] == kind and part in b["metadata"]["name"])


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
    assert {"cluster=h100x64", "parallel=tp8_pp4_zero1", "train.steps=100", "backend=helm"} <= set(container["command"])
    failing = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert set(map(int, FATAL)) | {int(Exit.INTERNAL)} == set(failing)


def test_other_values_are_another_run_and_the_same_ones_the_same(helm):
    def name(**values: object) -> str:
        given = {"image": {"repository": "registry.example/orch"}, **values}
        return of(rendered(helm, given), "ConfigMap", "-values")["metadata"]["name"]

    assert name() == name(launcher={"environment": {"A": "b"}}) == name(monitoring={"dashboard": True})
    assert len({name(), name(parallel="dp8"), name(overrides=["train.steps=5"]), name(options={"cpus": 1})}) == 4


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
    for body in rendered(helm, FULL):
        if body["kind"] in ("Role", "ClusterRole"):
            for rule in body["rules"]:
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if body["kind"] == "ClusterRole":
            assert body["rules"] == [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]}]


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
