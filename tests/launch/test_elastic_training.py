"""The bundled trainer in an elastic run: nodes are lost, the coordinator's among them, and the losses stay the same."""

from __future__ import annotations

import json
import os
import signal

import pytest

from orchestrator.launch.local import LocalBackend, read_record
from orchestrator.launch.run_folder import RunFolder
from orchestrator.launch.state import read_state
from orchestrator.plan import Plan, load_plan
from tests.launch.parcels import make_parcel, wait_end, wait_for
from tests.plans import make_plan

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS, BATCH = 20, 6


def sized(corpus, tmp_path, nodes: int) -> Plan:
    """The same steps on any number of nodes: what changes is the accumulation."""
    files = {"data_paths": [str(corpus)], "cache_dir": str(tmp_path / "cache"), "checkpoint_every_steps": 5}
    shape = {"dp": nodes, "nodes": nodes, "zero": 1, "micro_batches": BATCH // nodes}
    return make_plan(**shape, **files, steps=STEPS, seq_len=32)


def start(tmp_path, run_id: str, sizes: dict[int, Plan], elastic: bool) -> RunFolder:
    options = {"run_id": run_id, "command": (), "backend": {"grace_s": 30}}
    largest = sizes[max(sizes)]
    parcel = make_parcel(largest, tmp_path / "runs", **options, sizes=sizes if elastic else {})
    LocalBackend().submit(parcel, os.environ)
    return RunFolder(tmp_path / "runs" / run_id)


def steps_of(folder: RunFolder) -> list[dict]:
    paths = sorted((folder.path / "metrics").glob("*.jsonl"))
    return [line for path in paths for line in map(json.loads, path.read_text().splitlines())]


def losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step, as the last epoch that did it tells."""
    lines = sorted(steps_of(folder), key=lambda line: line["epoch"])
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


def test_a_run_that_loses_nodes_has_the_losses_of_one_that_does_not(tmp_path, corpus):
    """Three nodes, two, one: the global batch, the order of the samples and, to rounding, every loss stay the same."""
    sizes = {nodes: sized(corpus, tmp_path, nodes) for nodes in (3, 2, 1)}
    assert {plan.parallel.global_batch_samples for plan in sizes.values()} == {BATCH}
    whole = start(tmp_path, "whole", {1: sizes[1]}, elastic=False)
    assert wait_end(whole, 300).state == "done", whole.rank_log(0).read_text()

    broken = start(tmp_path, "broken", sizes, elastic=True)
    for epoch, step in ((0, 6), (1, 11)):
        at = {"epoch": epoch, "step": step}
        wait_for(lambda at=at: any(at.items() <= line.items() for line in steps_of(broken)), 200, f"{at}")
        state = read_state(broken)
        others = {node for node, one in state.nodes.items() if one.state == "running"} - {state.writer}
        victim = state.writer if epoch else others.pop()  # the coordinator's node the second time
        os.kill(read_record(broken).agents[victim], signal.SIGKILL)
    state = wait_end(broken, 300)
    assert state.state == "done", (state.reason, broken.rank_log(0).read_text()[-2000:])
    assert [epoch.cause.kind for epoch in state.epochs[:2]] == ["node_lost", "coordinator_lost"]
    assert load_plan(broken.plan).parallel.dp == 1 and sorted(losses(broken)) == list(range(1, STEPS + 1))
    for step, loss in losses(whole).items():
        assert losses(broken)[step] == pytest.approx(loss, rel=1e-5), step
