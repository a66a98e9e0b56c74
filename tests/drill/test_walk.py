"""Random walks: nodes are lost, leave and come back in any order, and every sample is trained on
once."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
import typing
from collections.abc import Mapping

import pytest
from msgspec import structs

from orchestrator.backends.local.backend import LocalBackend
from orchestrator.drill.faults import Injection
from orchestrator.drill.targets import LocalTargets
from orchestrator.drill.trial import DrilledRun
from orchestrator.observe.goodput.ledger import Ledger, ledger, uneven
from orchestrator.observe.timeline import StepFollower
from orchestrator.plan import Plan, load_plan
from orchestrator.planner.elastic.replan import replan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import read_request
from orchestrator.run.state import read_state
from tests.agent.test_elastic import cancel, running
from tests.beds.bundles import events, reports, submit, wait_for
from tests.beds.plans import make_plan
from tests.drill.test_drill import TOGETHER
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

BATCH = 24  # samples: one to four nodes share them evenly


def sized(nodes: int, **fields) -> Plan:
    shape = {"micro_batches": BATCH // nodes, "steps": 100_000, **fields}
    plan = make_plan(dp=nodes, nodes=nodes, **shape)
    # Other sums of 1e-7 grow while no node is lost, the faster the larger the steps: to 1e-4 after
    # 550 at five times this rate. A lost moment would still show: one step changes the loss by
    # 1e-3.
    optim = structs.replace(plan.job.optim, lr=2e-5)
    plan = structs.replace(plan, job=structs.replace(plan.job, optim=optim))
    return replan(plan, plan.cluster)


def start(runs, plans: Mapping[int, Plan], command=(), run_id="walk", **options) -> RunFolder:
    backend = {
        "grace_s": 20.0,
        "heartbeat_timeout_s": 15.0,
        "max_restarts": 1000,
        "options": options,
    }
    sizes = plans if len(plans) > 1 else {}
    return submit(
        plans[max(plans)], runs, run_id=run_id, command=command, backend=backend, sizes=sizes
    )


def walk(folder: RunFolder, seed: int, faults: int, pause_s: float, down: bool = False) -> None:
    """Injects that many faults, drawn by the seed; nodes come back meanwhile, and the run grows
    again.

    `down`: nodes are lost first, until a single one is left.
    """
    request = read_request(folder)
    drilled = DrilledRun(folder, LocalBackend(), request, 600.0)
    targets = LocalTargets(folder, request)
    draw = random.Random(seed)
    for _ in range(faults):
        # a single node is only hit where the run gets over it by itself
        with_ranks = seats(folder)
        down = down and with_ranks > 1
        fault = draw.choice(
            ["kill_agent", "kill_node"] + ["kill_agent", "kill_worker", "stop_worker"] * (not down)
        )
        fault = "kill_worker" if with_ranks < 2 else fault
        trial = drilled.run_trial(Injection(fault, "any", draw.random()), targets, 4.0)
        assert trial.ok, trial
        time.sleep(draw.uniform(0, pause_s))


def seats(folder: RunFolder) -> int:
    return sum(
        1 for node in read_state(folder).nodes.values() if node.state == "running" and node.ranks
    )


def ledger_of(folder: RunFolder) -> Ledger:
    return ledger(StepFollower(folder).read(read_state(folder).nodes))


def sizes_seen(folder: RunFolder) -> list[int]:
    """Nodes of each plan that was put in force."""
    changes = sorted((event["at"], len(event["nodes"])) for event in events(folder, "replanned"))
    return [nodes for _, nodes in changes]


def test_a_walk_over_one_to_four_nodes_has_each_sample_once(runs):
    plans = {nodes: sized(nodes) for nodes in (4, 3, 2, 1)}
    folder = start(
        runs, plans, (sys.executable, TOGETHER), restart_lost_nodes_after_s=0.5, grow_after_s=0.3
    )
    wait_for(lambda: ledger_of(folder).samples, what="first steps")
    walk(folder, seed=3, faults=4, pause_s=1.0)
    assert cancel(folder).state == "cancelled"
    book = ledger_of(folder)
    assert book.problems == [] and uneven(book.entries, 12) == [], "stand-ins take 12"
    samples = [sample for entry in book.entries for sample in range(entry.first, entry.last)]
    assert samples == list(range(book.samples)) and sizes_seen(folder)
    assert json.loads(folder.report.read_bytes())["samples"]["problems"] == []


def test_two_resumes_in_a_row_that_end_on_other_sizes(runs):
    """Submitted on three nodes; resumed, and one is lost at once; resumed, and two are."""
    plans = {nodes: sized(nodes) for nodes in (3, 2, 1)}
    folder = start(runs, plans, (sys.executable, TOGETHER))
    request = read_request(folder)
    running(folder, "node0", "node1", "node2")
    for lost in (("node2",), ("node2", "node1")):
        before = ledger_of(folder).samples
        wait_for(lambda before=before: ledger_of(folder).samples > before, what="a step")
        assert cancel(folder).state == "cancelled"
        after = read_state(folder).epoch
        LocalBackend().resume(folder, request, os.environ)
        running(folder, "node0", "node1", "node2", after=after)
        drilled = DrilledRun(folder, LocalBackend(), request, PATIENCE_S)
        targets = LocalTargets(folder, request)
        assert all(
            drilled.run_trial(Injection("kill_node", node, 0.0), targets, 0.0).ok for node in lost
        )
        assert load_plan(folder.plan).parallel.dp == 3 - len(lost)
    assert cancel(folder).state == "cancelled"
    book = ledger_of(folder)
    assert (
        book.problems == []
        and uneven(book.entries, 12) == []
        and len(read_state(folder).pauses) == 2
    )


@pytest.mark.full
def test_a_long_walk_of_the_trainer_over_one_to_eight_nodes_has_the_losses_of_one_that_stays(
    runs, tmp_path
):
    text_folder = tmp_path / "text"
    text_folder.mkdir()
    for module in (
        argparse,
        ast,
        inspect,
        subprocess,
        tarfile,
        typing,
    ):  # too much to be learnt by heart: where the
        shutil.copy(
            inspect.getsourcefile(module), text_folder
        )  # loss falls to nothing, rounding makes a difference
    files = {
        "data_paths": [str(text_folder)],
        "cache_dir": str(tmp_path / "cache"),
        "checkpoint_every_steps": 10,
    }
    shape = {**files, "zero": 1, "seq_len": 8, "copy_every_steps": 1}
    batch = 840  # what every number of nodes up to eight divides
    plans = {
        n: sized(n, **shape, micro_batch_size=batch // n, micro_batches=1) for n in range(8, 0, -1)
    }
    options = {"restart_lost_nodes_after_s": 90.0, "grow_after_s": 2.0}  # the walk down is faster
    folder = start(runs, plans, run_id=f"walk-{os.getpid()}-{time.time_ns()}", **options)
    wait_for(lambda: ledger_of(folder).samples, 900, "first steps")
    walk(folder, seed=8, faults=20, pause_s=4.0, down=True)
    wait_for(lambda: seats(folder) == 8, 900, "all nodes again")
    before = ledger_of(folder).samples
    wait_for(lambda: ledger_of(folder).samples > before, 900, "a step")
    assert cancel(folder).state == "cancelled"
    book = ledger_of(folder)
    assert book.problems == [] and uneven(book.entries, batch) == []
    assert set(sizes_seen(folder)) == set(range(1, 9)), "it went over all sizes"
    steady_run = start(runs, {1: plans[1]}, run_id=f"whole-{os.getpid()}-{time.time_ns()}")
    last = book.entries[-1].step
    wait_for(
        lambda: ledger_of(steady_run).samples >= book.samples,
        2400,
        f"step {last} of the run that stays",
    )
    LocalBackend().cancel(steady_run, force=True)
    want = losses(steady_run)
    have = losses(folder)
    assert sorted(have) == list(range(1, last + 1))
    off = max(abs(have[step] - want[step]) for step in have)
    assert off <= 1e-5, f"of {last} steps, after {sizes_seen(folder)}"


def losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step, as the last epoch that did it tells."""
    lines = sorted(reports(folder.path / "metrics"), key=lambda line: line["epoch"])
    return {line["step"]: line["loss"] for line in lines}
