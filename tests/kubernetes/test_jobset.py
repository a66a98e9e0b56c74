"""`kubernetes.kind=jobset` on simulated nodes: JobSet's own controller, without Kueue and under
it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from orchestrator.plan import Exit
from tests.beds.kubernetes.bed import Bed
from tests.beds.kubernetes.runs import Orch, Run
from tests.beds.kubernetes.simulate import FINISHES, LEVELS

from .test_simulated import MAIN, bound, seated, split_pipelines, split_slices

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow, pytest.mark.full]
#: Kinds of which a run has objects, whoever made them.
KINDS = "jobsets,jobs,services,configmaps,secrets,pods"


@pytest.fixture
def orch(queued_bed: Bed, tmp_path) -> Iterator[Orch]:
    yield Orch(
        queued_bed,
        tmp_path,
        "default",
        {"image": "orch.test/none:1", "levels": LEVELS, "kind": "jobset"},
    )


def end(bed: Bed, pod: dict, code: int) -> None:
    """The pod's agent ends with that code, as its kubelet would tell it."""
    ended = {"exitCode": code, "message": json.dumps({"code": code, "text": "told by the test"})}
    container = {
        "name": "agent",
        "restartCount": 0,
        "image": "none",
        "imageID": "",
        "ready": False,
        "started": False,
    }
    status = {
        "phase": "Failed",
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }
    change = json.dumps({"status": status})
    bed.kubectl(
        "patch",
        "pod",
        pod["metadata"]["name"],
        "--subresource=status",
        "--type=merge",
        "-p",
        change,
    )


def running(orch: Orch, run: Run, but: str = "") -> list[dict]:
    """The run's eight pods, once all of them run and none is the one with that uid, which has
    failed."""

    def found() -> list[dict]:
        pods = [pod for pod in orch.pods(run.id) if pod["status"]["phase"] == "Running"]
        return (
            pods if len(pods) == 8 and but not in {pod["metadata"]["uid"] for pod in pods} else []
        )

    run.until("eight running pods", found, 300)
    return found()


@pytest.mark.parametrize("queue", [None, "large"])
def test_a_jobset_is_placed_as_a_job_is(orch, queue, ended, topology):
    run = ended(orch.submit(*MAIN, options={"queue": queue} if queue else {}))
    nodes = bound(orch, run, 8)
    assert len(set(nodes)) == 8
    assert split_pipelines(seated(run, nodes, topology).plan, topology) == 0
    assert not queue or split_slices(nodes, topology) == 0
    service = orch.bed.get("service", run.id)["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    for index, pod in enumerate(orch.pods(run.id)):  # the names under which pods look for pod 0
        assert pod["spec"]["hostname"] == f"{run.id}-node-0-{index}"
        assert pod["spec"]["subdomain"] == run.id


def test_the_life_of_a_jobset_under_kueue(orch, ended):
    """75 brings a pod back and is not counted; cancel leaves nothing; resume brings the run; 65
    ends it for good."""
    bed = orch.bed
    run = ended(orch.submit(*MAIN, options={"queue": "large"}))
    before = running(orch, run)
    end(bed, before[3], Exit.RESTART)
    after = running(orch, run, but=before[3]["metadata"]["uid"])
    assert [p["metadata"]["uid"] for p in after[:3]] == [p["metadata"]["uid"] for p in before[:3]]
    assert bed.get("jobset", run.id)["status"]["restarts"] == 0
    assert not bed.get("job", f"{run.id}-node-0")["status"].get("failed")

    orch("cancel", run.id)
    object_query = ("get", KINDS, "-l", f"orch.dev/run={run.id}", "-o", "name")
    run.until("nothing of it left", lambda: not bed.kubectl(*object_query).split(), 300)
    assert run.state().state == "cancelled"

    orch("resume", run.id)
    again = running(orch, run)
    assert {p["metadata"]["labels"]["orch.dev/generation"] for p in again} == {"1"}
    end(bed, again[5], Exit.CONFIG)
    state = run.wait("failed", seconds=300)
    assert (state.exit_code, state.reason) == (Exit.CONFIG, "told by the test")
    run.until("the others are ended", lambda: not any(map(_alive, orch.pods(run.id))), 300)


def _alive(pod: dict) -> bool:
    return pod["status"]["phase"] in ("Pending", "Running")


def test_a_jobset_that_is_done(orch, ended):
    run = ended(orch.submit(*MAIN, options={"annotations": {FINISHES: "yes"}}))
    assert run.wait("done", seconds=300).exit_code == 0
    assert "Completed" in {
        c["type"] for c in orch.bed.get("jobset", run.id)["status"]["conditions"]
    }
