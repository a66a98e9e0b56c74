"""The bundled trainer in an elastic run: nodes are lost, the coordinator's among them, and the
losses stay the same: with another accumulation, with replicas of unequal shares, at another
pipeline depth."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest

from orchestrator.backends.base import read_record
from orchestrator.backends.local.backend import LocalBackend, LocalRecord
from orchestrator.observe.goodput.ledger import ledger
from orchestrator.observe.timeline import StepFollower
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.plan.batch import share
from orchestrator.plan.document import Moe
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import descendants
from orchestrator.run.request import read_request
from orchestrator.run.state import read_state
from tests.backends.conftest import write_text
from tests.beds.bundles import events, make_bundle, reports, wait_end, wait_for
from tests.beds.held.sitecustomize import environment, release
from tests.beds.plans import make_plan, tiny_model
from tests.patience import PATIENCE_S
from tests.trainer.workers import running

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 40
BATCH = 4
EVERY = 10
#: No run makes these steps before what is to happen to it has happened.
HELD = (22, 34)


def sized(corpus, tmp_path, nodes: int, **shape) -> Plan:
    """The same steps on any number of nodes: what changes is how many micro-batches a replica
    takes. Three do not divide them."""
    files = {
        "data_paths": [str(corpus)],
        "cache_dir": str(tmp_path / "cache"),
        "checkpoint_every_steps": EVERY,
    }
    counts = share(BATCH, nodes)
    unequal = {"replica_micro_batches": counts} if BATCH % nodes else {"micro_batches": counts[0]}
    return make_plan(
        **({"dp": nodes, "zero": 1, **unequal} | shape),
        **files,
        nodes=nodes,
        steps=STEPS,
        seq_len=32,
    )


def staged(corpus, tmp_path, nodes: int) -> Plan:
    """The same steps in a pipeline over any number of nodes, which keep each other's state in
    memory."""
    shape = {
        "dp": 1,
        "pp": nodes,
        "micro_batches": BATCH,
        "replica_micro_batches": None,
        "copy_every_steps": 1,
    }
    return sized(corpus, tmp_path, nodes, **shape)


def mixed(corpus, tmp_path, nodes: int, **degrees: int) -> Plan:
    """A mixture of experts whose routers' biases move, four ranks a node and no checkpoint but the
    copies in memory."""
    moe = Moe(experts=4, top_k=2, ffn_hidden=32, balance_loss=0.01, z_loss=0.001, bias_update=0.01)
    files = {
        "data_paths": [str(corpus)],
        "cache_dir": str(tmp_path / "cache"),
        "copy_every_steps": 1,
    }
    count = BATCH // degrees.get("ep", 1)
    return make_plan(
        model=tiny_model(moe=moe),
        **degrees,
        **files,
        nodes=nodes,
        micro_batches=count,
        steps=STEPS,
        seq_len=32,
    )


def start(tmp_path, run_id: str, sizes: dict[int, Plan], elastic: bool) -> RunFolder:
    backend = {"grace_s": 120, "hang_after_s": 2 * PATIENCE_S}  # who is held does not hang
    options = {"run_id": run_id, "command": (), "backend": backend, "env": environment(*HELD)}
    largest = sizes[max(sizes)]
    bundle = make_bundle(largest, tmp_path / "runs", **options, sizes=sizes if elastic else {})
    LocalBackend().submit(bundle, os.environ)
    return RunFolder(tmp_path / "runs" / run_id)


def steps_of(folder: RunFolder) -> list[dict]:
    return reports(folder.path / "metrics")


def losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step, as the last epoch that did it tells."""
    lines = sorted(steps_of(folder), key=lambda line: line["epoch"])
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory):
    """The loss of every step of one worker that nothing happens to; agents would add nothing to it
    but seconds."""
    home = tmp_path_factory.mktemp("whole")
    with running(sized(write_text(home), home, 1), home / "run") as worker:
        assert worker.wait() == [0], worker.log(0)
    return worker.losses()


def reached(folder: RunFolder, epoch: int, step: int) -> bool:
    return any(line["epoch"] >= epoch and line["step"] >= step for line in steps_of(folder))


def release_all(folder: RunFolder) -> None:
    for step in HELD:
        release(folder.path, step)


def kill_node(folder: RunFolder, node: str) -> None:
    """Kills an agent and all below it, as when the machine fails."""
    agent = read_record(folder, LocalRecord).agents[node]
    for process in (*descendants(agent), agent):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def compare(folder: RunFolder, undisturbed_losses: dict[int, float]) -> None:
    """Every step was made with the loss of the undisturbed run, and no sample was left out or taken
    twice."""
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))
    for step, loss in undisturbed_losses.items():
        assert losses(folder)[step] == pytest.approx(loss, rel=1e-5), step
    book = ledger(StepFollower(folder).read(read_state(folder).nodes))
    assert book.problems == [] and book.samples == STEPS * BATCH


def test_a_pipeline_that_loses_nodes_has_the_losses_of_a_run_that_does_not(
    tmp_path, corpus, undisturbed_losses
):
    """Three stages, two, one: of each lost stage another node has the state in memory, and the rest
    share it out anew. The global batch, the order of the samples and, to rounding, every loss stay
    the same."""
    sizes = {nodes: staged(corpus, tmp_path, nodes) for nodes in (3, 2, 1)}
    broken = start(tmp_path, "broken", sizes, elastic=True)
    for epoch, (step, held) in enumerate(zip((12, 26), HELD, strict=True)):
        wait_for(
            lambda epoch=epoch, step=step: reached(broken, epoch, step),
            400,
            f"step {step} of epoch {epoch}",
        )
        state = read_state(broken)
        peers = {node for node, status in state.nodes.items() if status.state == "running"} - {
            state.writer
        }
        victim = state.writer if epoch else peers.pop()  # the coordinator's node the second time
        kill_node(broken, victim)
        release(broken.path, held)
    state = wait_end(broken, 600)
    assert state.state == "done", (state.reason, broken.rank_log(0).read_text()[-2000:])
    assert [epoch.cause.kind for epoch in state.epochs[:2]] == ["node_lost", "coordinator_lost"]
    assert [event["pp"] for event in events(broken, "replanned")] == [2, 1] and load_plan(
        broken.plan
    ).parallel.pp == 1
    resumes = sorted(events(broken, "resumed"), key=lambda event: event["epoch"])
    assert [event["epoch"] for event in resumes] == [1, 2]
    for epoch, event in enumerate(resumes):
        last = max(line["step"] for line in steps_of(broken) if line["epoch"] == epoch)
        assert event["step"] >= last - 1 and not event["fields"]["same_layout"], (
            "one step is lost at most"
        )
        assert event["fields"]["source"] == "memory" or event["step"] % EVERY == 0, event
    compare(broken, undisturbed_losses)


def test_below_the_smallest_size_the_nodes_that_are_left_save_what_their_memories_hold(
    tmp_path, corpus, undisturbed_losses
):
    """The coordinator's node is lost, of two stages. The other one alone is too few; it has both
    stages in its memory, and the run that is resumed goes on from there and not from the last
    checkpoint."""
    folder = start(tmp_path, "small", {2: staged(corpus, tmp_path, 2)}, elastic=True)
    wait_for(lambda: reached(folder, 0, EVERY + 5), 400, f"step {EVERY + 5}")
    kill_node(folder, read_state(folder).writer)
    release_all(folder)
    state = wait_end(folder, 400)
    last = max(line["step"] for line in steps_of(folder))
    assert (state.state, state.exit_code) == ("failed", Exit.CAPACITY), (
        state.reason,
        folder.rank_log(0).read_text(),
    )
    (saved,) = [
        event
        for event in events(folder, "checkpoint_saved")
        if event["fields"].get("source") == "memory"
    ]
    assert saved["step"] >= last - 1 > EVERY, "one step is lost at most"
    assert (
        f"the state after step {saved['step']} was saved from the nodes' memories" in state.reason
    )
    assert state.epochs[-1].outcome == "saved"
    intervals = json.loads(folder.report.read_text())["goodput"]["intervals"]
    *_, (begin, end, _) = [interval for interval in intervals if interval[2] == "checkpoint_stall"]
    assert end - begin == pytest.approx(saved["fields"]["stall_s"], abs=0.01)
    LocalBackend().resume(folder, read_request(folder), os.environ)
    state = wait_end(folder, 600)
    assert state.state == "done", (state.reason, folder.rank_log(0).read_text()[-2000:])
    (resumed,) = events(folder, "resumed")
    assert (resumed["step"], resumed["fields"]["source"]) == (saved["step"], "disk")
    compare(folder, undisturbed_losses)


def test_experts_over_five_axes_lose_a_node_and_have_the_losses_of_one_process(tmp_path, corpus):
    """ep2 tp2 pp2 on two nodes, and ep2 tp2 on the one that is left: stages, experts, their
    optimizer's states and the routers' biases come from the memories of both, and are laid out
    anew."""
    with running(mixed(corpus, tmp_path, 1), tmp_path / "alone") as worker:
        assert worker.wait() == [0], worker.log(0)
    sizes = {
        2: mixed(corpus, tmp_path, 2, ep=2, tp=2, pp=2),
        1: mixed(corpus, tmp_path, 1, ep=2, tp=2),
    }
    folder = start(tmp_path, "experts", sizes, elastic=True)
    wait_for(lambda: reached(folder, 0, STEPS // 2), 400, "half of the steps")
    kill_node(
        folder, next(node for node in read_state(folder).nodes if node != read_state(folder).writer)
    )
    release_all(folder)
    state = wait_end(folder, 600)
    assert state.state == "done", (state.reason, folder.rank_log(0).read_text()[-2000:])
    assert [event["pp"] for event in events(folder, "replanned")] == [1]
    (resumed,) = events(folder, "resumed")
    assert resumed["fields"]["source"] == "memory" and resumed["step"] >= STEPS // 2 - 1
    compare(folder, worker.losses())


# test_walk.py makes two resumes with agents and a program of its own; here the real trainer
@pytest.mark.full
def test_two_resumes_in_a_row_each_at_another_size(tmp_path, corpus, undisturbed_losses):
    """The run starts on three nodes, one of which takes more micro-batches than the others."""
    sizes = {nodes: sized(corpus, tmp_path, nodes) for nodes in (3, 2, 1)}
    assert sizes[3].parallel.replica_micro_batches == [2, 1, 1]
    assert {plan.parallel.global_batch_samples for plan in sizes.values()} == {BATCH}
    folder = start(tmp_path, "resized", sizes, elastic=True)
    for epoch, (step, nodes, held) in enumerate(zip((5, 1), (1, 2), HELD, strict=True)):
        wait_for(
            lambda epoch=epoch, step=step: reached(folder, epoch, step),
            400,
            f"step {step} of epoch {epoch}",
        )
        LocalBackend().resize(folder, read_request(folder), nodes, os.environ)
        wait_for(
            lambda epoch=epoch: len(events(folder, "epoch_runs")) == epoch + 2,
            what=f"epoch {epoch + 1}",
        )
        release(folder.path, held)
    state = wait_end(folder, 600)
    assert state.state == "done", (state.reason, folder.rank_log(0).read_text()[-2000:])
    assert [event["workers"] for event in events(folder, "epoch_runs")] == [3, 1, 2]
    assert len(events(folder, "resumed")) == 2 and state.summary["world_size"] == 2
    compare(folder, undisturbed_losses)
