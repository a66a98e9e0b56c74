"""Against a real API server with nothing behind it: strict validation, one run or none, rights, no
answer."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from orchestrator.plan import Exit
from tests.beds.base import ROOT
from tests.beds.kubernetes import bed_conf as conf
from tests.beds.kubernetes.bed import Bed, Shape

from .conftest import bring_up

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]


_NUMBER = itertools.count()


@pytest.fixture(scope="module")
def api() -> Iterator[Bed]:
    with bring_up(Shape(api_only=True)) as bed:
        yield bed


def ask(bed: Bed, step: str, **kubeconfig: str) -> dict:
    """The answer of `tests.beds.kubernetes.api_steps`, with another user or server if named."""
    env = {"PYTHONPATH": str(ROOT)}
    if kubeconfig:
        path = bed.home / f"{next(_NUMBER)}.kubeconfig"
        path.write_text(conf.kubeconfig(**kubeconfig))
        env["KUBECONFIG"] = str(path)
    done = bed.run(
        sys.executable,
        "-m",
        "tests.beds.kubernetes.api_steps",
        step,
        env=env,
        cwd=ROOT,
        timeout=180,
    )
    return json.loads(done.stdout)


def test_the_server_takes_every_rendering_and_knows_every_field(api):
    kinds_by_rendering = ask(api, "dry-run")
    assert set(kinds_by_rendering) == {"plain", "queue", "everything", "site"}
    assert kinds_by_rendering["everything"] == [
        "Secret",
        "ConfigMap",
        "Service",
        "NetworkPolicy",
        "Job",
    ]


def test_nodes_pods_and_devices_are_read_as_the_server_serves_them(api):
    """The field selectors, and the paths and fields of dynamic resource allocation."""
    inventory = ask(api, "nodes")
    gpus = {"count": 8, "product": "NVIDIA H100 80GB HBM3"}
    assert inventory == {"nodes": ["gpus-1"], "devices": {"by_node": {"gpus-1": gpus}, "held": {}}}


def test_a_repeated_submission_is_one_run_and_a_second_submitter_none(api):
    answer = ask(api, "twice")
    assert answer["same"]
    assert answer["owned"]
    assert "exists already" in answer["other"]


def test_a_refused_job_leaves_nothing(api):
    answer = ask(api, "refused")
    assert "backoffLimit" in answer["said"]
    assert answer["left"] == []


def test_a_draft_that_cannot_become_a_run_is_told_and_goes(api):
    api.apply(yaml.safe_load(Path(ROOT, "charts/orch-controller/files/trainruns.yaml").read_text()))
    api.kubectl("wait", "--for=condition=Established", "crd/trainruns.orch.dev")
    answer = ask(api, "drafts")
    assert answer["left"] == {"kept": False, "program": False}
    assert answer["owners"] == [["TrainRun", "program"]]
    assert "does not hold the code that its name promises" in answer["said"]["forged"]
    assert answer["said"]["kept"] == ""
    assert "No Name" in answer["said"]["refused"]
    assert answer["said"]["discarded"].startswith("the controller has discarded TrainRun discarded")


def test_the_placement_lease_is_of_whoever_has_made_it(api):
    answer = ask(api, "lease")
    assert "other submissions hold Lease" in answer["said"]
    assert "suspended" in answer["late"]
    assert (answer["kept"], answer["left"]) == ([False, True], None)


def test_a_program_is_stored_once_by_whoever_comes_first(api):
    """Both of two submitters at once succeed; whoever has other content of that name does not."""
    answer = ask(api, "code")
    assert answer["content"] == [True, True] and answer["same"]
    assert answer["owners"] == [["first", "second", "third"]] * 2
    assert "does not hold the code that its name promises" in answer["other"]


def test_missing_rights_are_told_with_the_rule_to_add(api):
    answer = ask(api, "look", user="user")
    assert answer["exit"] == Exit.SECURITY
    assert (
        'the rule to add: {apiGroups: ["batch"], resources: [jobs], verbs: [list]}'
        in answer["error"]
    )


def test_credentials_that_nobody_knows(api):
    assert "log in again" in ask(api, "look", user="nobody")["error"]


def test_no_cluster_is_said_within_fifteen_seconds(api):
    """Nothing listens there; nobody has that address."""
    servers = ("https://10.77.0.1:1", "https://10.77.0.99:6443")
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda server: ask(api, "look", server=server), servers))
    for answer in answers:
        assert answer["exit"] == Exit.CAPACITY
        assert "no answer from the cluster" in answer["error"]
        assert answer["seconds"] < 15
