"""In how many pieces tensor parallelism communicates."""

from __future__ import annotations

import pytest
from msgspec import UNSET, structs

from orchestrator.cost.of_plan import context_of, cost_of
from orchestrator.cost.time import collective
from orchestrator.cost.time.communication import tensor_seconds
from orchestrator.cost.time.layer_traffic import tensor_operations
from orchestrator.cost.workload import Workload
from orchestrator.plan import PlanError, from_json, seal, to_json
from orchestrator.plan.batch import suited_pieces
from orchestrator.plan.trained import tensor_pieces
from tests.beds.plans import make_plan
from tests.planner import shapes
from tests.planner.configs import planned


@pytest.mark.parametrize(
    ("pieces", "tp", "tokens"),
    [
        (1, 2, 4096),  # a half would cost more than it hides
        (2, 2, 8192),
        (4, 2, 1 << 17),
        (1, 1, 1 << 17),
    ],
)
def test_pieces_that_suit_a_micro_batch(pieces, tp, tokens):
    assert suited_pieces(tp, tokens, hidden=4096) == pieces


@pytest.mark.parametrize(
    ("pieces", "layout"),
    [
        (1, {"tp": 2}),
        (8, {"tp": 2, "tp_pieces": 8}),
        (1, {"tp": 2, "tp_pieces": 8, "schedule": "zb_h1"}),
        (1, {"tp": 2, "tp_pieces": 8, "matmul": "fp8_tensor"}),
    ],
)
def test_pieces_of_a_plan(pieces, layout):
    matmul = layout.pop("matmul", "")
    plan = make_plan(**layout)
    job = structs.replace(plan.job, matmul=matmul)
    assert tensor_pieces(structs.replace(plan, job=job)) == pieces


LAYOUT = {"tp": 8, "pp": 4, "zero": 1}


def test_the_plan_has_the_number_that_is_given_or_suits_it():
    given = planned(shapes.llama3_70b(), LAYOUT | {"tp_pieces": 3})
    assert from_json(to_json(given)).parallel.tp_pieces == 3
    chosen = planned(shapes.llama3_70b(), LAYOUT)
    assert chosen.parallel.tp_pieces == 4 == tensor_pieces(chosen)
    whole = planned(shapes.llama3_8b(), {"dp": 64})
    assert whole.parallel.tp_pieces is UNSET and b"tp_pieces" not in to_json(whole)
    for pieces in (0, -1):
        parallel = structs.replace(chosen.parallel, tp_pieces=pieces)
        with pytest.raises(PlanError, match=f"tp_pieces {pieces} must be at least 1"):
            seal(structs.replace(chosen, parallel=parallel))


def test_the_planned_seconds_are_those_of_two_queues():
    """A layer gathers before a product, and sums behind one."""
    exposed = {}
    for pieces in (1, 2, 4):
        plan = planned(shapes.llama3_70b(), LAYOUT | {"tp_pieces": pieces, "micro_batch_size": 4})
        context = context_of(plan)
        compute = context.compute(plan.parallel)
        path = cost_of(plan).paths[("tp",), "ring"]
        operations = tensor_operations(Workload.of_plan(plan), moe=False)
        exposed[pieces] = tensor_seconds(
            Workload.of_plan(plan), context.rate, compute, {(("tp",), "ring"): path}
        ).dense
        total = 0.0
        for operation in operations:
            piece_s = collective.seconds(
                operation.operation,
                operation.size / operation.pieces,
                operation.ranks,
                path,
                context.rate.tensor,
            )
            product_s = compute.overlap_s[operation.overlap]
            if operation.pieces == 1:
                total += operation.times * max(0.0, piece_s - product_s)
            else:
                total += operation.times * exposed_by_queues(operation.pieces, piece_s, product_s)
        assert exposed[pieces] == pytest.approx(context.rate.tp_exposed * total)
    assert exposed[4] < exposed[2] < exposed[1]


def exposed_by_queues(pieces: int, piece_s: float, product_s: float) -> float:
    """The seconds that a product waits for the pieces of its input, which arrive in a row."""
    arrived = 0.0
    multiplied = 0.0
    for _ in range(pieces):
        arrived += piece_s
        multiplied = max(multiplied, arrived) + product_s / pieces
    return multiplied - product_s
