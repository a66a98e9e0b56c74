"""Real training in real pods: two kubelets, containers under the restricted profile, checkpoints on a claim."""

from __future__ import annotations

import json

import pytest

from orchestrator.plan import Exit

from .runs import Orch, Run

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]

#: tp inside a pod, pp and dp across pods; two pods a node.
TINY = ("cluster=local", "cluster.nodes=4", "cluster.gpus_per_node=2", "parallel=tp2_pp2", "train.steps=60")
SHORT = ("train.seq_len=64", "train.global_batch_samples=8", "checkpoint.every_steps=20", "train.log_every_steps=1")


@pytest.fixture(scope="module")
def undisturbed(real_bed, tmp_path_factory) -> dict[int, float]:
    """Losses of the run that nothing happens to."""
    with Orch.in_new_namespace(real_bed, tmp_path_factory.mktemp("undisturbed")) as orch:
        run = orch.submit(*TINY, *SHORT)
        run.wait("done")
        check_rank_map(orch, run)
        losses = run.steps()
        assert sorted(losses) == list(range(1, 61))
        assert losses[60] < losses[1] - 0.3
        logs = orch("logs", run.id, "--rank", "0").stdout
        assert logs.strip()
        return losses


def check_rank_map(orch: Orch, run: Run) -> None:
    """Every rank sits where the API server says that its pod lies, tensor-parallel groups inside one pod."""
    placement = json.loads((run.inside / "kubernetes" / "placement.json").read_text())
    pods = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in orch.pods(run.id)}
    assert set(placement["pods"]) == set(pods)
    for name, node in zip(placement["pods"], placement["nodes"], strict=True):
        assert node.split(".pod-")[0] == pods[name]
    plan = run.plan
    assert {rank["node"] for rank in plan["ranks"]} == set(placement["nodes"])
    for group in plan["groups"]["tp"]:
        assert len({plan["ranks"][rank]["node"] for rank in group}) == 1
    assert len(set(pods.values())) == 2


def test_training_in_four_pods_on_two_nodes(undisturbed):
    assert undisturbed[60] < undisturbed[1]


def test_a_deleted_pod_comes_back_and_the_losses_are_the_same(orch, undisturbed):
    run = orch.submit(*TINY, *SHORT)
    run.step(5)
    victim = orch.pods(run.id)[2]["metadata"]["name"]
    orch.bed.kubectl("delete", "pod", "-n", orch.namespace, victim, "--wait=false")
    run.wait("done", seconds=400)
    assert run.steps() == pytest.approx(undisturbed, abs=1e-9)


def test_cancel_saves_and_resume_goes_on(orch, undisturbed):
    run = orch.submit(*TINY, *SHORT)
    run.step(5)
    orch("cancel", run.id)
    assert run.state().state == "cancelled"
    assert orch.pods(run.id) == []
    saved = max(int(path.name.removeprefix("step-")) for path in (run.inside / "checkpoints").glob("step-*"))
    assert saved >= 3
    orch("resume", run.id)
    run.wait("done")
    assert run.steps() == pytest.approx(undisturbed, abs=1e-9)


def test_mistakes_are_one_line(orch):
    small = (*TINY, *SHORT)
    run = orch.submit(*small, options={"image": "orch.test/absent:1"})
    run.until("the image", lambda: "image" in (run.state().reason or ""))
    orch("cancel", run.id, "--force")
    run = orch.submit(*small, options={"node_selector": {"no": "where"}})
    run.until("no node", lambda: "no node for pod" in (run.state().reason or ""))
    orch("cancel", run.id, "--force")
    nowhere = ("backend=kubernetes", "backend.options={image: x, namespace: nowhere}")
    failed = orch("submit", "--in-place", *small, *nowhere, code=int(Exit.CONFIG))
    assert "nowhere" in failed.stderr
