"""`orch precision` on a run whose weights have outliers in one linear: that linear is proposed, and
helps."""

from __future__ import annotations

import json
import shutil

import pytest
from msgspec import structs

from orchestrator.cli.main import main as orch
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.rounding.measurement import Request
from orchestrator.style import Style
from orchestrator.verify.rounding import document, measure, price, prices, with_matmul
from orchestrator.verify.rounding_lines import lines
from orchestrator.verify.rounding_page import page
from tests.beds import recorded_runs
from tests.beds.plans import make_plan, tiny_model
from tests.planner import shapes
from tests.planner.configs import planned
from tests.trainer.samples import engine_of
from tests.trainer.states import opened
from trainer.verify.ranks import run_ranks

#: A feature of the MLP that is always zero: its weights in `down` change nothing, but one scale for
#: all weights leaves nothing of the others.
UNUSED = 5
OUTLIER = 1e4


def save_with_outliers(rank: int, plan: object, folder: object) -> None:
    engine = engine_of(plan, rank)
    pieces = list(engine.state_pieces(to_write=True))
    for piece in pieces:
        layer = piece.info.name.removeprefix("layers.1.mlp.")
        if piece.kind != "master" or layer not in ("gate.weight", "up.weight", "down.weight"):
            continue
        weights = piece.data[: piece.info.global_shape[0] * piece.info.global_shape[1]]
        matrix = weights.view(piece.info.global_shape)
        if layer == "down.weight":
            matrix[:, UNUSED] = OUTLIER
        else:
            matrix[UNUSED] = 0.0
    opened(folder, rank=rank, plan=plan).save(pieces, 3, 12, engine.scalars())


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "text.py").write_text("".join(f"line {number * 7919}\n" for number in range(400)))
    made = make_plan(
        model=tiny_model(),
        micro_batch_size=2,
        data_paths=[str(tmp_path / "text.py")],
        cache_dir=str(tmp_path / "tokens"),
    )
    return with_matmul(made, "fp8_tensor")


@pytest.mark.process
def test_the_linear_with_outliers_is_proposed_and_helps(plan, tmp_path):
    run_ranks(save_with_outliers, 1, plan, tmp_path / "run")
    seen: list[tuple[int, int, str]] = []
    request = Request(plan=plan, checkpoints=str(tmp_path / "run"), batches=2)
    measurement = measure(request, lambda *progress: seen.append(progress))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1]
    assert measurement.step == 3
    assert [proposal.pattern for proposal in measurement.proposals] == ["1.mlp.down"]
    without = abs(measurement.narrow_loss - measurement.wide_loss)
    with_proposal = abs(measurement.proposal_loss - measurement.wide_loss)
    assert with_proposal < without / 2
    shown = "\n".join(lines(plan, measurement, Style()))
    assert "proposal: train.matmul_wide=[1.mlp.down]" in shown and "by the plan a step" in shown
    drawn = page(plan, measurement, lambda linear: (linear.layer, linear.name) == (1, "mlp.down"))
    assert drawn.startswith("<!doctype html>") and drawn.count("class=wide") == 4
    printed = json.loads(json.dumps(document(plan, measurement)))
    assert printed["matmul_wide"] == ["1.mlp.down"] and len(printed["linears"]) == 28


def test_a_proposal_has_the_price_of_the_plan():
    narrow = planned(shapes.llama3_8b(), {"dp": 64}, matmul="fp8_tensor", compile=False)
    wide = planned(
        shapes.llama3_8b(), {"dp": 64}, matmul="fp8_tensor", compile=False, matmul_wide=["down"]
    )
    assert price(narrow, []).step_s == pytest.approx(narrow.time.step_s)
    assert price(narrow, ["down"]).step_s == pytest.approx(wide.time.step_s)
    assert price(narrow, ["down"]).memory_bytes == pytest.approx(wide.memory.total, rel=1e-3)


def test_recipes_and_programs_that_the_trainer_does_not_run_are_refused(plan):
    assert with_matmul(structs.replace(plan, job=structs.replace(plan.job, matmul=""))).job.matmul
    with pytest.raises(OrchError, match="fp8_row: the trainer does not run it"):
        with_matmul(plan, "fp8_row")
    with pytest.raises(OrchError, match="without a model"):
        with_matmul(structs.replace(plan, program=True))


def test_a_gpu_without_8_bits_has_no_price(plan):
    gpu = structs.replace(plan.cluster.gpu, peak_flops={"fp32": 1e12}, name="old")
    cluster = structs.replace(plan.cluster, gpu=gpu, device="cuda")
    measurement = structs.replace(_nothing(), proposals=[])
    problem = prices(structs.replace(plan, cluster=cluster), measurement)
    assert isinstance(problem, str) and "has no rate for fp8" in problem


def _nothing():
    from orchestrator.plan.rounding.measurement import Measurement

    return Measurement(
        step=None,
        tokens=1,
        dtype="float64",
        wide_loss=1.0,
        narrow_loss=1.0,
        names={},
        linears=[],
        proposals=[],
        proposal_loss=1.0,
    )


@pytest.mark.process
def test_data_that_is_gone_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "orch"))
    words = ["model=tiny", "data=text", f"data.paths=[{tmp_path / 'gone'}]"]
    assert orch(["precision", *words]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert error.startswith("orch: error: data path") and error.count("\n") == 1


def test_a_run_without_a_checkpoint_is_refused(capsys, tmp_path, monkeypatch):
    for name, value in recorded_runs.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    folder = recorded_runs.restore("local", tmp_path)
    shutil.rmtree(folder / "checkpoints")
    assert orch(["precision"]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert "has no checkpoint in" in error and error.count("\n") == 1
