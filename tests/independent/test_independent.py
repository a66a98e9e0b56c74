"""The oracle shares nothing, says what is missing, and judges what `orch verify --against
independent` runs."""

from __future__ import annotations

import json
import math

import pytest
import torch

from orchestrator.cli.main import main
from orchestrator.verify import independent
from orchestrator.verify import independent_cases as cases
from tests.beds.plans import tiny_model
from tests.house.rooms import MODULES, imports
from trainer.independent import state
from trainer.model.init import init_stage
from trainer.model.stage import Stage


def test_it_imports_nothing_of_the_trainer():
    names = [name for name in MODULES if name.startswith("trainer.independent")]
    assert len(names) >= 6
    foreign = {found for name in names for found in imports(name)} - set(names)
    assert [
        one
        for one in foreign
        if one.split(".")[0] in ("trainer", "orchestrator", "tests") and one != "trainer"
    ] == []


def test_without_transformers_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(independent, "find_spec", lambda name: None)
    assert main(["verify", "--against", "independent", "parallel=dp2"]) == 64
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "pip install 'transformers>=" in said[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel=dp2", "train.steps=3"], "train.steps"),
        (["parallel=dp2", "--precision", "fp8"], "legal: fp64, fp32, bf16, fp16"),
        (["parallel=dp2", "--matrix", "quick"], "matrix"),
        ([], "parallel="),
        (["parallel=auto"], "degrees"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert main(["verify", "--against", "independent", *words]) == 64
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]


def test_initial_weights_have_the_documented_statistics():
    """Of the oracle, and so of every run that it passes: sqrt(2 / 5h), the residual's writers over
    sqrt(2 layers)."""
    model = cases.LLAMA | {"layers": 4, "causal": True}
    tensors = state.initial(model, 3, torch.float64).tensors["master"]
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            assert bool((tensor == 1).all()), name
            continue
        wanted = (2 / (5 * model["hidden"])) ** 0.5 / (
            math.sqrt(8) if name.endswith(("wo.weight", "down.weight")) else 1
        )
        off = 5 / math.sqrt(2 * tensor.numel())
        assert float(tensor.std()) == pytest.approx(wanted, rel=off), name
        assert abs(float(tensor.mean())) < 5 * wanted / math.sqrt(tensor.numel()), name


@pytest.mark.parametrize(
    "changes", [{}, {"bias": True, "qk_norm": True}, {"norm": "layer", "mlp": "plain"}]
)
def test_names_shapes_and_initial_weights_are_those_of_the_trainer(changes):
    """By the documentation alone; a model with more than 4,096 rows draws from two generators."""
    model = tiny_model(vocab=4100, position="learned", tied_embeddings=True, **changes)
    stage = Stage(model, range(model.layers), first=True, last=True)
    init_stage(stage, model, seed=11)
    plain = {name: getattr(model, name) for name in FIELDS} | {"qk_norm": bool(model.qk_norm)}
    ours = state.initial(plain, 11, torch.float32)
    theirs = dict(stage.named_parameters())
    assert ours.tensors["master"].keys() == theirs.keys()
    assert [
        name
        for name, tensor in ours.tensors["master"].items()
        if not torch.equal(tensor, theirs[name])
    ] == []


FIELDS = [
    "hidden",
    "ffn_hidden",
    "bias",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "max_seq_len",
    "layers",
    "norm",
]
FIELDS += ["position", "mlp", "tied_embeddings"]


@pytest.mark.process
def test_a_layout_is_judged_from_the_command_line(capsys):
    words = ["parallel=tp2_dp2_zero1", "--precision", "fp64,bf16", "--json"]
    code = main(["verify", "--against", "independent", *words])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0, found
    assert [(one["verdict"], one["precision"], one["steps"]) for one in found] == [
        ("equal", "fp64", 9),
        ("equal", "bf16", 9),
    ]
    assert {"gradient", "weight", "rounding", "narrow"} <= found[1]["worst"].keys()
    assert found[0]["worst"]["gradient"]["error"] < 1e-11


@pytest.mark.full
def test_every_technique_in_every_precision():
    words = "dp4_zero2,tp4,pp4_zero1,cp2_dp2_zero1,dp2_zero3,tp2_pp2_vpp2,cp4,tp2_cp2_dp2_zero3,pp2_dp2_zero1"
    assert main(["verify", "--against", "independent", f"parallel={words}"]) == 0
