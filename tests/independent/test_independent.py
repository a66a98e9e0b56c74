"""The oracle shares nothing, says what is missing, and judges what `python -m tests.independent`
runs."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
import torch

from orchestrator.cli.main import main as orch
from tests.beds.plans import tiny_model
from trainer.model.init import init_stage
from trainer.model.stage import Stage

from . import cases, runner
from .__main__ import main
from .oracle import state


def test_it_imports_nothing_of_the_trainer():
    files = sorted(Path(state.__file__).parent.glob("*.py"))
    assert len(files) >= 6
    foreign = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                foreign += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level < 2, f"{file.name} imports from outside of the oracle"
                foreign += [node.module] if node.level == 0 else []
    packages = {module.split(".")[0] for module in foreign}
    assert packages & {"trainer", "orchestrator", "tests"} == set()


@pytest.mark.parametrize("option", [["--against", "independent"], ["--precision", "fp64"]])
def test_the_old_option_says_in_one_line_where_the_oracle_is(option, capsys):
    assert orch(["verify", *option, "parallel=dp2"]) == 64
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "python -m tests.independent parallel=" in lines[0]


def test_without_transformers_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    assert main(["parallel=dp2"]) == 64
    error_lines = capsys.readouterr().err.strip().splitlines()
    assert len(error_lines) == 1 and "pip install 'transformers>=" in error_lines[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["parallel=dp2", "train.steps=3"], "train.steps"),
        (["parallel=dp2", "--precision", "fp8"], "legal: fp64, fp32, bf16, fp16"),
        (["parallel=dp2", "--matrix", "quick"], "--matrix"),
        ([], "parallel="),
        (["parallel=auto"], "degrees"),
    ],
)
def test_bad_input_is_one_line(arguments, complaint, capsys):
    assert main([*arguments]) == 64
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and complaint in lines[0]


def test_initial_weights_have_the_documented_statistics():
    """These weights are the oracle's, and so those of every run that it passes: sqrt(2 / 5h), the
    residual's writers over sqrt(2 layers)."""
    model = cases.LLAMA | {"layers": 4, "causal": True}
    tensors = state.initial(model, 3, torch.float64).tensors["master"]
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            assert bool((tensor == 1).all()), name
            continue
        expected_std = (2 / (5 * model["hidden"])) ** 0.5 / (
            math.sqrt(8) if name.endswith(("wo.weight", "down.weight")) else 1
        )
        off = 5 / math.sqrt(2 * tensor.numel())
        assert float(tensor.std()) == pytest.approx(expected_std, rel=off), name
        assert abs(float(tensor.mean())) < 5 * expected_std / math.sqrt(tensor.numel()), name


@pytest.mark.parametrize(
    "changes", [{}, {"bias": True, "qk_norm": True}, {"norm": "layer", "mlp": "plain"}]
)
def test_names_shapes_and_initial_weights_are_those_of_the_trainer(changes):
    """The documentation alone gives them; a model with more than 4,096 rows draws from two
    generators."""
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
    arguments = ["parallel=tp2_dp2_zero1", "--precision", "fp64,bf16", "--json"]
    code = main([*arguments])
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0, verdicts
    assert [(row["verdict"], row["precision"], row["steps"]) for row in verdicts] == [
        ("equal", "fp64", 9),
        ("equal", "bf16", 9),
    ]
    assert {"gradient", "weight", "rounding", "narrow"} <= verdicts[1]["worst"].keys()
    assert verdicts[0]["worst"]["gradient"]["error"] < 1e-11


@pytest.mark.full
def test_every_technique_in_every_precision():
    layouts = "dp4_zero2,tp4,pp4_zero1,cp2_dp2_zero1,dp2_zero3,tp2_pp2_vpp2,cp4,tp2_cp2_dp2_zero3,pp2_dp2_zero1"
    assert main([f"parallel={layouts}"]) == 0
