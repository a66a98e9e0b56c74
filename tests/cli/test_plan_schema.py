"""The published schema file is the schema of the code, and real plans obey it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import orchestrator.plan
from orchestrator.config.compose import load
from orchestrator.plan import json_schema, to_json
from tests.planner.configs import build_plan

SCHEMA_FILE = Path(orchestrator.plan.__file__).with_name("plan.schema.json")
TOP_LEVEL = {
    "schema",
    "hash",
    "cluster",
    "model",
    "parallel",
    "ranks",
    "groups",
    "placement",
    "memory",
    "time",
    "mfu",
    "tokens_per_s_per_gpu",
    "warnings",
}


def test_the_file_equals_the_code():
    """When this fails on purpose: write `json.dumps(json_schema(), indent=1)` to the file, and
    raise the version."""
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema()


def test_the_schema_is_a_schema_with_the_promised_keys():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["$defs"]["Plan"]["properties"]) >= TOP_LEVEL


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+cluster=h100x64", "parallel=tp8_pp4_zero1"],
        ["cluster=gb200_nvl72x8"],
        ["cluster=h100x64", "model=mixtral_8x7b", "parallel=ep8_pp2_zero1", "train.seq_len=8192"],
    ],
    ids=lambda overrides: "_".join(overrides) or "defaults",
)
def test_real_plans_obey_the_schema(overrides):
    document = json.loads(to_json(build_plan(load(overrides))))
    validator = jsonschema.Draft202012Validator(json_schema())
    assert [error.message for error in validator.iter_errors(document)] == []
    del document["memory"]["total"]
    assert not validator.is_valid(document)
