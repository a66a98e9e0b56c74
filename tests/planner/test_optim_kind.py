"""What a plan says of an optimizer: the bytes of its state, and which layouts it is refused in."""

from __future__ import annotations

import json

import pytest

from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan import to_json
from tests.planner.configs import build_plan


def plan_of(*overrides):
    return build_plan(load(list(overrides)))


def test_sgd_keeps_one_tensor_and_adamw_two():
    wide = {
        kind: plan_of(f"optim.kind={kind}", "train.precision=fp32").memory
        for kind in ("adamw", "sgd", "muon")
    }
    assert wide["adamw"].optimizer == 2 * wide["sgd"].optimizer == 2 * wide["sgd"].params
    assert wide["muon"] == wide["adamw"]  # the most that it takes
    narrow = {
        kind: plan_of(f"optim.kind={kind}", "train.precision=bf16").memory
        for kind in ("adamw", "sgd")
    }
    assert narrow["adamw"].optimizer == 6 * narrow["adamw"].params  # a master copy and two moments
    assert narrow["sgd"].optimizer == 4 * narrow["sgd"].params


def test_plans_of_adamw_do_not_name_it():
    assert "kind" not in json.loads(to_json(plan_of()))["job"]["optim"]
    assert plan_of("optim.kind=muon").job.optim.kind == "muon"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.kind=sgd", "train.offload=disk"], "optim.kind=sgd with train.offload=disk"),
        (["optim.kind=muon", "train.offload=disk"], "chunks that cut matrices: train.offload=host"),
        (["optim.state=8bit", "train.offload=disk"], "optim.state=8bit with train.offload=disk"),
        (
            ["optim.kind=muon", "train.offload=host", "train.offload_delayed=true"],
            "train.offload_delayed updates beside the next step",
        ),
        (["optim.kind=muon", "optim.state=bf16"], "look at each element alone"),
        (["optim.kind=moun"], "did you mean 'muon'"),
    ],
)
def test_refused_at_plan_time(overrides, message):
    with pytest.raises(OrchError, match=message) as caught:
        plan_of(*overrides)
    assert "\n" not in str(caught.value)
