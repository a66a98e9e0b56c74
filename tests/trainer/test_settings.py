"""What a worker sets before CUDA starts follows from the plan, and gives way to what the user has
set."""

from __future__ import annotations

import pytest
from msgspec import structs

from orchestrator.config.compose import load
from tests.beds.plans import make_plan
from tests.planner.configs import build_plan
from trainer.comm.settings import MANY_QUEUES, apply_settings, settings

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def on_gpus(**layout):
    plan = make_plan(**layout)
    return structs.replace(plan, cluster=structs.replace(plan.cluster, device="cuda"))


def test_nothing_is_set_on_cpus():
    assert settings(make_plan(tp=2, deterministic=True)) == {}


@pytest.mark.parametrize(
    ("layout", "queues"),
    [
        ({"tp": 2}, 1),
        ({"tp": 2, "dp": 2, "zero": 1}, 1),
        ({}, MANY_QUEUES),
        ({"tp": 2, "dp": 2, "zero": 3}, MANY_QUEUES),
        ({"tp": 2, "dp": 4, "zero": 1, "zero_group": 2}, MANY_QUEUES),
        ({"tp": 2, "pp": 2}, MANY_QUEUES),
        ({"tp": 2, "cp": 2}, MANY_QUEUES),
    ],
)
def test_kernels_begin_in_order_only_where_no_stream_waits_for_long(layout, queues):
    environment = settings(on_gpus(**layout))
    assert environment[QUEUES] == str(queues)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "NCCL_ALGO" not in environment


def test_a_deterministic_run_is_asked_for_in_words_and_changes_no_other_plan():
    plain, deterministic = (
        build_plan(load(["cluster=h100x8", *overrides]))
        for overrides in ([], ["train.deterministic=true"])
    )
    assert (
        deterministic.job.train.deterministic is True and plain.job.train.deterministic is not True
    )
    assert settings(plain).items() < settings(deterministic).items()
    assert settings(deterministic)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_what_the_user_has_set_stays():
    environ = {QUEUES: "8"}
    apply_settings(on_gpus(tp=2), environ)
    assert environ == settings(on_gpus(tp=2)) | {QUEUES: "8"}
