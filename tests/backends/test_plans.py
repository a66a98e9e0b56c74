"""The hand-made plans that other tests stand on are themselves valid."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from orchestrator.plan import PlanError, from_json, to_json
from tests.beds.plans import make_plan, tiny_model


@pytest.mark.parametrize(
    "degrees", [{}, {"tp": 2, "pp": 2, "dp": 2, "nodes": 2, "zero": 1}, {"cp": 2, "ep": 2}]
)
def test_a_made_plan_survives_the_codec(degrees):
    plan = make_plan(**degrees)
    assert from_json(to_json(plan)) == plan


def test_tiny_parameters_of_a_known_shape():
    shape = {
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "kv_heads": 12,
        "head_dim": 64,
        "ffn_hidden": 3072,
    }
    options = {
        "vocab": 50257,
        "max_seq_len": 1024,
        "norm": "layer",
        "position": "learned",
        "mlp": "plain",
        "bias": True,
    }
    assert (
        tiny_model(**shape, **options, tied_embeddings=True).parameters == 124_439_808
    )  # gpt2, as published


@pytest.mark.parametrize(
    "raw", [b"", b'{"\xed":1}', b'{"schema":' + b"[" * 100_000, b"[" * 100_000, b"\xff", b"null"]
)
def test_damaged_bytes_are_refused_in_one_line(raw):
    with pytest.raises(PlanError):
        from_json(raw)


def sealed(document: dict) -> bytes:
    """The plan as a version of orch with these fields would have written it."""
    content = msgspec.json.encode(document | {"hash": ""}, order="sorted")
    return msgspec.json.encode(document | {"hash": hashlib.sha256(content).hexdigest()})


def test_a_plan_of_another_version_is_told_from_one_that_was_changed():
    older = msgspec.json.decode(to_json(make_plan(dp=2)))
    assert from_json(sealed(older)) == make_plan(dp=2)
    del older["job"]["checkpoint"]["memory_every_steps"]
    with pytest.raises(
        PlanError,
        match=r"does not have job\.checkpoint\.memory_every_steps; another version of orch",
    ):
        from_json(sealed(older))
    newer = msgspec.json.decode(to_json(make_plan(dp=2)))
    newer["parallel"]["folding"] = 3
    with pytest.raises(PlanError, match=r"unknown field `folding`.*; another version of orch"):
        from_json(sealed(newer))
    older["job"]["train"]["seed"] = 7  # by hand: neither old nor new
    with pytest.raises(PlanError, match="does not match its content"):
        from_json(msgspec.json.encode(older))
