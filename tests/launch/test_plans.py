"""The hand-made plans that other tests stand on are themselves valid."""

from __future__ import annotations

import pytest

from orchestrator.plan import PlanError, from_json, to_json
from tests.plans import make_plan, tiny_model


@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "pp": 2, "dp": 2, "nodes": 2, "zero": 1}, {"cp": 2, "ep": 2}])
def test_a_made_plan_survives_the_codec(degrees):
    plan = make_plan(**degrees)
    assert from_json(to_json(plan)) == plan


def test_tiny_parameters_of_a_known_shape():
    shape = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "ffn_hidden": 3072}
    words = {"vocab": 50257, "max_seq_len": 1024, "norm": "layer", "position": "learned", "mlp": "plain", "bias": True}
    assert tiny_model(**shape, **words, tied_embeddings=True).parameters == 124_439_808  # gpt2, as published


@pytest.mark.parametrize("raw", [b"", b'{"\xed":1}', b'{"schema":' + b"[" * 100_000, b"[" * 100_000, b"\xff", b"null"])
def test_damaged_bytes_are_refused_in_one_line(raw):
    with pytest.raises(PlanError):
        from_json(raw)
