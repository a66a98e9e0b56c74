"""Training state without gradient: declared by a module, saved by any layout, resumed by any other,
to the bit."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import engine_of
from tests.trainer.states import checkpoints, opened
from trainer.checkpoint.format import decode
from trainer.comm.mesh import Mesh
from trainer.errors import CheckpointError, LayoutError, SaveError
from trainer.metrics.memory import StepMemory
from trainer.model.stage import Stage
from trainer.model.state import State, add_state
from trainer.parallel import apply
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import step_batches

MODEL = tiny_model()
LAYOUTS = {
    "one process": {},
    "tp4": {"tp": 4},
    "dp2 tp2 zero3": {"dp": 2, "tp": 2, "zero": 3},
    "pp2 dualpipe": {"pp": 2, "schedule": "dualpipe"},
    "tp2 pp2 cp2": {"tp": 2, "pp": 2, "cp": 2, "recompute": "full"},
}


class Router(nn.Module):
    """States of several dtypes: a vector, a scalar, and one that tensor parallelism cuts along its
    second dimension."""

    def __init__(self):
        super().__init__()
        add_state(self, "bias", State((6,), start=0.5))
        add_state(self, "seen", State((), torch.int64))
        add_state(self, "amax", State((3, 8), torch.float64, tp_dim=1))


class WithState(Stage):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for block in self.blocks.values():
            block.router = Router()
        if self.last:
            add_state(self, "head_amax", State((4,), tp_dim=0))


@pytest.fixture(autouse=True)
def stages_have_state(monkeypatch):
    monkeypatch.setattr(apply, "Stage", WithState)


def value(info, dtype):
    """What the whole state is in this test: numbers that depend on its name."""
    start = sum(info.name.encode())
    return (torch.arange(prod(info.global_shape)) + start).view(info.global_shape).to(dtype)


def plan_of(name):
    return make_plan(model=MODEL, micro_batches=2, **LAYOUTS[name])


def save(rank, plan, folder):
    engine = engine_of(plan, rank)
    for info, tensor in engine.part.states():
        start = 0.5 if info.name.endswith("bias") else 0.0
        assert tensor.shape == info.local_shape and bool((tensor == start).all()), "as declared"
        tensor.copy_(info.take(value(info, tensor.dtype)))
    batches, tokens = step_batches(plan, engine.mesh.coord, 0)
    _, norm = engine.gradients(batches, tokens)
    engine.update(norm, 1e-3)
    opened(folder, 0, rank, plan).save(
        list(engine.state_pieces(to_write=True)), 1, 2, engine.scalars()
    )


def resume(rank, plan, folder, epoch):
    engine = engine_of(plan, rank)
    manifest = checkpoints(folder, epoch, rank, plan).resume(
        lambda: list(engine.state_pieces(to_write=False))
    )
    assert manifest.step == 1
    engine.resumed(manifest.step, manifest.scalars)
    states = list(engine.part.states())
    held = {tensor.data_ptr() for tensor in StepMemory.of_engine(engine).registered["optimizer"]()}
    for info, tensor in states:
        assert torch.equal(tensor, info.take(value(info, tensor.dtype))), info.name
        assert tensor.data_ptr() in held, "counted in memory"
    return sorted(info.name for info, _ in states)


@pytest.mark.process
@pytest.mark.parametrize("written", LAYOUTS)
def test_what_any_layout_has_saved_any_other_resumes(tmp_path, written):
    plan = plan_of(written)
    run_ranks(save, plan.parallel.world_size, plan, tmp_path)
    manifest = decode((tmp_path / "step-00000001" / "manifest.json").read_bytes())
    assert (
        manifest.states["layers.3.router.amax"] == [3, 8]
        and manifest.states["layers.0.router.seen"] == []
    )
    assert not any("router" in name for name in manifest.parameters), "an export has weights alone"
    for epoch, name in enumerate(LAYOUTS, start=1):
        resuming_plan = plan_of(name)
        resumed_names = run_ranks(
            resume, resuming_plan.parallel.world_size, resuming_plan, tmp_path, epoch
        )
        assert {state_name for names in resumed_names for state_name in names} == set(
            manifest.states
        )


def _declares(monkeypatch, name, state):
    """Routers have this state alone."""

    def init(self):
        nn.Module.__init__(self)
        add_state(self, name, state)

    monkeypatch.setattr(Router, "__init__", init)


def test_state_that_nobody_saved_is_an_error_that_names_it(tmp_path, monkeypatch):
    save(0, plan_of("one process"), tmp_path)
    _declares(monkeypatch, "new", State((2,)))
    with pytest.raises(CheckpointError, match=r"has no state layers\.0\.router\.new"):
        resume(0, plan_of("one process"), tmp_path, 1)


def test_a_save_that_misses_a_part_of_the_state_is_refused(tmp_path):
    plan = plan_of("one process")
    engine = engine_of(plan, 0)
    pieces = [
        replace(piece, data=piece.data[:-1]) if piece.info.name == "head_amax" else piece
        for piece in engine.state_pieces(True)
    ]
    with pytest.raises(SaveError, match="state of head_amax: nobody holds 3 to 4"):
        opened(tmp_path, 0, 0, plan).save(pieces, 1, 2, engine.scalars())


def test_a_dimension_that_tp_does_not_divide_is_refused(monkeypatch):
    _declares(monkeypatch, "x", State((3,), tp_dim=0))
    plan = make_plan(model=MODEL, tp=2)
    with pytest.raises(
        LayoutError, match=r"tp=2 does not divide dimension 0 of layers\.0\.router\.x, \[3\]"
    ):
        apply.allocate_states(
            WithState(MODEL, range(4), True, True), Mesh.alone(plan), torch.device("cpu")
        )
