"""In how many pieces tensor parallelism communicates."""

from __future__ import annotations

import pytest
from msgspec import UNSET, structs

from orchestrator.plan import from_json, to_json
from orchestrator.plan.trained import tensor_pieces
from tests.beds.plans import make_plan, tiny_model
from tests.planner import shapes
from tests.planner.configs import main_line, planned


def on(device, seq_len, matmul="", **layout):
    model = structs.replace(tiny_model(), hidden=4096)
    plan = make_plan(seq_len=seq_len, model=model, **layout)
    job = structs.replace(plan.job, matmul=matmul)
    return structs.replace(plan, cluster=structs.replace(plan.cluster, device=device), job=job)


@pytest.mark.parametrize(
    ("pieces", "device", "seq_len", "layout"),
    [
        (1, "cuda", 4096, {"tp": 2}),  # a half would cost more than it hides
        (2, "cuda", 8192, {"tp": 2}),
        (4, "cuda", 1 << 17, {"tp": 2}),
        (2, "cuda", 1 << 14, {"tp": 2, "cp": 2}),
        (4, "cuda", 4096, {"tp": 2, "micro_batch_size": 4}),
        (1, "cpu", 1 << 17, {"tp": 2}),
        (1, "cuda", 1 << 17, {"dp": 2}),
        (8, "cpu", 16, {"tp": 2, "tp_pieces": 8}),
        (1, "cuda", 1 << 17, {"tp": 2, "tp_pieces": 1}),
        (1, "cpu", 16, {"tp": 2, "tp_pieces": 8, "schedule": "zb_h1"}),
        (1, "cpu", 16, {"tp": 2, "tp_pieces": 8, "matmul": "fp8_tensor"}),
    ],
)
def test_pieces_of_a_plan(pieces, device, seq_len, layout):
    assert tensor_pieces(on(device, seq_len, **layout)) == pieces


def test_the_number_comes_from_the_configuration_and_older_plans_have_none():
    plan = planned(shapes.llama3_70b(), {"tp": 8, "pp": 4, "zero": 1, "tp_pieces": 3})
    assert from_json(to_json(plan)).parallel.tp_pieces == 3
    assert main_line().parallel.tp_pieces is UNSET and b"tp_pieces" not in to_json(main_line())
