"""`orch export`: one file with the whole weights, the bits of the checkpoint, or one clear line."""

from __future__ import annotations

import json
import os

import pytest
import torch
from msgspec import structs
from safetensors import safe_open
from safetensors.torch import load_file

from orchestrator.cli.main import main as orch
from orchestrator.plan import Exit, seal, to_json
from tests.beds.plans import make_plan
from tests.reference.assemble import assemble
from tests.trainer.samples import engine_of
from tests.trainer.states import opened, saved, shapes
from trainer.checkpoint.files import sha256
from trainer.checkpoint.format import rank_file, step_name
from trainer.export import main
from trainer.precision import DTYPES
from trainer.verify.ranks import run_ranks


def exported(capsys, *arguments: object) -> dict:
    assert main([str(argument) for argument in arguments]) == Exit.DONE
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    error_text = capsys.readouterr().err
    assert error_text.count("\n") == 1
    return code, error_text


def save_some(rank: int, plan: object, folder: object) -> None:
    torch.manual_seed(rank)
    engine = engine_of(plan, rank)
    manager = opened(folder, rank=rank, plan=plan)
    manager.save(list(engine.state_pieces(to_write=True)), 3, 12, engine.scalars())


@pytest.mark.process
def test_the_file_holds_the_whole_weights_to_the_bit(tmp_path, capsys):
    plan = make_plan(tp=2, pp=2, dp=2, zero=1, bucket_bytes=1 << 12)
    run_ranks(save_some, 8, plan, tmp_path / "run")
    report = exported(capsys, tmp_path / "run", tmp_path / "out")
    tensors = load_file(report["file"])
    weights = {
        name: tensor
        for (kind, name), tensor in assemble(tmp_path / "run" / step_name(3)).items()
        if kind == "master"
    }
    assert tensors.keys() == weights.keys() and len(tensors) == report["tensors"]
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    assert report["parameters"] == plan.model.parameters and (
        report["step"],
        report["samples"],
    ) == (
        3,
        12,
    )
    assert report["sha256"] == sha256(tmp_path / "out" / "model.safetensors")
    with safe_open(report["file"], framework="pt") as file:
        assert file.metadata()["step"] == "3" and "tp2" in file.metadata()["trained_on"]
    half = load_file(
        exported(capsys, tmp_path / "run", tmp_path / "half", "--dtype", "bf16")["file"]
    )
    assert all(torch.equal(half[name], weights[name].bfloat16()) for name in weights)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.process
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_run_of_any_precision_is_exported_as_it_is_saved_or_narrower(tmp_path, capsys, precision):
    plan = make_plan(tp=2, dp=2, zero=1, precision=precision, bucket_bytes=1 << 12)
    if precision == "fp64":
        train = structs.replace(plan.job.train, grad_dtype="fp64")
        plan = seal(structs.replace(plan, job=structs.replace(plan.job, train=train)))
    run_ranks(save_some, 4, plan, tmp_path / "run")
    saved_as = "fp64" if precision == "fp64" else "fp32"
    state = assemble(tmp_path / "run" / step_name(3))
    weights = {name: tensor for (kind, name), tensor in state.items() if kind == "master"}
    assert {tensor.dtype for tensor in weights.values()} == {DTYPES[saved_as]}
    for dtype_name in (None, "fp64", "fp32", "bf16", "fp16"):
        options = ["--dtype", dtype_name] if dtype_name else []
        report = exported(capsys, tmp_path / "run", tmp_path / str(dtype_name), *options)
        assert report["dtype"] == (dtype_name or saved_as)
        tensors = load_file(report["file"])
        expected_dtype = DTYPES[dtype_name or saved_as]
        assert tensors.keys() == weights.keys()
        assert all(torch.equal(tensors[name], weights[name].to(expected_dtype)) for name in weights)


def test_the_newest_good_one_or_the_one_that_was_asked_for(tmp_path, capsys):
    saved(tmp_path / "run", 1, 2, 3)
    os.truncate(tmp_path / "run" / step_name(3) / rank_file(0), 100)
    report = exported(capsys, tmp_path / "run", tmp_path / "newest")
    assert report["step"] == 2 and report["rejected"][0].startswith(
        "step-00000003: rank-00000.safetensors has 100 bytes"
    )
    assert exported(capsys, tmp_path / "run", tmp_path / "first", "--step", 1)["step"] == 1
    code, error_text = refused(capsys, tmp_path / "run", tmp_path / "third", "--step", 3)
    assert (
        code == Exit.CONFIG and "step-00000003: rank-00000.safetensors has 100 bytes" in error_text
    )
    assert not (tmp_path / "third").exists()
    assert (tmp_path / "run" / step_name(3)).is_dir(), "export only reads"
    assert load_file(tmp_path / "first" / "model.safetensors").keys() == shapes().keys()


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys):
    (tmp_path / "none").mkdir()
    assert refused(capsys, tmp_path / "none", tmp_path / "out") == (
        Exit.CONFIG,
        f"trainer.export: no checkpoint in {tmp_path / 'none'}\n",
    )
    saved(tmp_path / "run", 1)
    exported(capsys, tmp_path / "run", tmp_path / "out")
    code, error_text = refused(capsys, tmp_path / "run", tmp_path / "out")
    assert code == Exit.USER and "model.safetensors exists" in error_text
    (tmp_path / "file").touch()
    code, error_text = refused(capsys, tmp_path / "run", tmp_path / "file")
    assert code == Exit.USER and ("File exists" in error_text or "Not a directory" in error_text)
    code, error_text = refused(capsys, tmp_path / "run", tmp_path / "other", "--step", 9)
    assert (
        code == Exit.CONFIG
        and "manifest.json: No such file" in error_text
        and not (tmp_path / "other").exists()
    )


@pytest.mark.process
def test_orch_export_finds_the_run_and_says_what_it_wrote(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    run = tmp_path / "runs" / "mine-1"
    saved(run / "checkpoints", 7)
    (run / "plan.json").write_bytes(to_json(make_plan()))
    (run / "request.json").write_text("{}")
    assert orch(["export", "mine", "--out", str(tmp_path / "out"), "--json"]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == 7 and report["file"] == str(tmp_path / "out" / "model.safetensors")
    assert (
        orch(["export", "mine", "--out", str(tmp_path / "again"), "--dtype", "fp16"]) == Exit.DONE
    )
    assert "2,128 parameters in 3 tensors, fp16" in capsys.readouterr().out
    assert orch(["export", "mine", "--out", str(tmp_path / "out")]) == Exit.USER
    error = capsys.readouterr().err
    assert (
        "model.safetensors exists: remove it, or export to another folder" in error
        and error.count("\n") == 1
    )
