"""What is said before a job is sent. Pure."""

from __future__ import annotations

import pytest

from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.backends.slurm.preflight import check_partition, warnings
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import save_seconds
from tests.beds.plans import make_plan

PLAN = make_plan(tp=2, dp=4, nodes=4)
MAIN = {"PartitionName": "main", "MaxTime": "1-00:00:00", "DefaultTime": "00:30:00", "MaxNodes": "UNLIMITED",
        "TotalNodes": "8", "GraceTime": "20", "PreemptMode": "REQUEUE"}  # fmt: skip


def test_a_job_that_fits_is_let_pass():
    check_partition(PLAN, SlurmOptions(time="1-00:00:00"), MAIN)
    check_partition(PLAN, SlurmOptions(), {})
    assert warnings(PLAN, SlurmOptions(), MAIN, 30) == []


@pytest.mark.parametrize(
    ("options", "partition", "exit", "text"),
    [
        ({"time": "1-00:00:01"}, {}, Exit.CONFIG, "over the 1-00:00:00 that partition main allows"),
        ({"time": "UNLIMITED"}, {}, Exit.CONFIG, "main allows"),
        ({}, {"MaxNodes": "3"}, Exit.CONFIG, "needs 4 nodes, partition main allows 3"),
        ({}, {"TotalNodes": "2"}, Exit.CAPACITY, "partition main has 2"),
    ],
)
def test_what_would_wait_for_ever_is_refused(options, partition, exit, text):
    with pytest.raises(OrchError, match=text) as refused:
        check_partition(PLAN, SlurmOptions(**options), MAIN | partition)
    assert refused.value.exit == exit


def test_a_save_that_does_not_fit_is_told():
    slow = SlurmOptions(checkpoint_gb_per_s=1e-12, notice_s=60)
    assert save_seconds(PLAN, 1e-12) > 60
    said = " ".join(warnings(PLAN, slow, MAIN, 5))
    assert "raise backend.options.notice_s" in said and "preempted job of partition main has 20 s" in said
    assert "preempted" not in " ".join(warnings(PLAN, slow, MAIN | {"PreemptMode": "OFF"}, 5))


def test_a_notice_longer_than_the_limit_is_told():
    assert any("it comes at once" in line for line in warnings(PLAN, SlurmOptions(time="2", notice_s=180), MAIN, 30))


def test_preemption_without_requeue_is_told():
    assert any("requeue is false" in line for line in warnings(PLAN, SlurmOptions(requeue=False), MAIN, 30))
