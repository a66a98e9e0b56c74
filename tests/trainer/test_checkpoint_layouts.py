"""Every layout's state comes back from its files to the bit, into an engine that started from other
weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from orchestrator.plan import Plan, seal
from orchestrator.plan.document import Moe, Mtp
from orchestrator.plan.worker import MANIFEST
from tests.beds.plans import make_plan, tiny_model
from tests.reference import single
from tests.trainer.samples import engine_of
from tests.trainer.states import checkpoints, opened
from trainer.checkpoint.format import decode, step_name
from trainer.comm.mesh import Mesh
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.precision import recipe
from trainer.verify.ranks import run_ranks

TIED = tiny_model(tied_embeddings=True)
AHEAD = tiny_model(mtp=Mtp(depth=2))
SMALL_BUCKETS = {"bucket_bytes": 1 << 10}

CASES: dict[str, dict] = {
    "one process": {},
    "bf16": {"precision": "bf16"},
    "dp2 zero0": {"dp": 2},
    "dp4 zero1 many buckets": {"dp": 4, "zero": 1, **SMALL_BUCKETS},
    "dp2 zero1 bf16": {"dp": 2, "zero": 1, "precision": "bf16"},
    "dp2 zero2": {"dp": 2, "zero": 2, **SMALL_BUCKETS},
    "dp2 zero1 cut parameters": {"dp": 2, "zero": 1, "comm_buffer_bytes": 1 << 12},
    "dp2 zero2 cut parameters": {"dp": 2, "zero": 2, "comm_buffer_bytes": 1 << 12},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "dp2 tp2 zero3 tied bf16": {"dp": 2, "tp": 2, "zero": 3, "model": TIED, "precision": "bf16"},
    "dp4 zero1 hybrid": {"dp": 4, "zero": 1, "zero_group": 2},
    "tp2": {"tp": 2},
    "tp4 fewer kv heads": {"tp": 4, "model": tiny_model(kv_heads=1)},
    "pp2 tied": {"pp": 2, "model": TIED},
    "pp2 interleaved tied": {"pp": 2, "vpp": 2, "schedule": "interleaved", "model": TIED},
    "pp2 zbv tied": {"pp": 2, "vpp": 2, "schedule": "zbv", "model": TIED},
    "pp2 dualpipe tied": {"pp": 2, "schedule": "dualpipe", "model": TIED},
    "tp2 pp2 zbv, further predictions": {
        "tp": 2,
        "pp": 2,
        "vpp": 2,
        "schedule": "zbv",
        "model": AHEAD,
    },
    "dp2 zero3, further predictions": {"dp": 2, "zero": 3, "model": AHEAD},
    "cp2 zero1": {"cp": 2, "zero": 1},
    "tp2 cp2 dp2 etp1 ep4 zero1": {
        "tp": 2,
        "cp": 2,
        "dp": 2,
        "etp": 1,
        "fold_cp": True,
        "zero": 1,
        "model": tiny_model(moe=Moe(experts=4, top_k=2, ffn_hidden=12)),
    },
    "tp2 pp2 dp2 zero1 uneven tied bf16": {
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "zero": 1,
        "precision": "bf16",
        "stage_layers": [3, 1],
        "model": TIED,
        **SMALL_BUCKETS,
    },
}


def advance(engine: Engine, plan: Plan, step: int) -> None:
    size = plan.parallel.global_batch_samples
    indices = samples_of_step(plan.parallel, engine.mesh.coord, (step - 1) * size)
    _, norm = engine.gradients(
        [single.micro_batch(plan, samples) for samples in indices], valid_tokens=100
    )
    engine.update(norm, lr=1e-2)


def state(engine: Engine) -> dict[str, torch.Tensor]:
    engine.buckets.wait_params()
    result = {
        f"param {name}": param.detach().clone() for name, param, _ in engine.part.parameters()
    }
    for piece in engine.state_pieces(to_write=False):
        result[f"{piece.kind} {piece.info.name} {piece.offset}"] = piece.data.clone()
    return result


def save_resume_compare(rank: int, plan: Plan, resuming_plan: Plan, folder: Path) -> list[str]:
    """Names of what differs after: step, save, step; against: resume into other weights, step."""
    engine = engine_of(plan, rank)
    advance(engine, plan, 1)
    opened(folder, 0, rank, plan).save(
        list(engine.state_pieces(to_write=True)), step=1, samples=plan.parallel.global_batch_samples
    )
    saved = state(engine)
    advance(engine, plan, 2)

    resumed = engine_of(resuming_plan, rank)
    fresh = state(resumed)
    manifest = checkpoints(folder, 1, rank, plan).resume(
        lambda: list(resumed.state_pieces(to_write=False))
    )
    resumed.resumed(manifest.step)
    loaded = state(resumed)
    assert any(not torch.equal(fresh[key], loaded[key]) for key in fresh), (
        "the other seed starts elsewhere"
    )
    advance(resumed, plan, 2)
    after = state(resumed)
    expected = state(engine)
    return [
        *(f"loaded {key}" for key in saved if not torch.equal(saved[key], loaded[key])),
        *(f"next step {key}" for key in expected if not torch.equal(expected[key], after[key])),
    ]


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_state_survives_its_files_to_the_bit(tmp_path, case):
    plan = make_plan(**CASES[case])
    train = msgspec.structs.replace(plan.job.train, seed=99)
    other_seed_plan = seal(
        msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, train=train))
    )
    assert run_ranks(
        save_resume_compare, plan.parallel.world_size, plan, other_seed_plan, tmp_path
    ) == [[] for _ in plan.ranks]
    manifest = decode((tmp_path / step_name(1) / MANIFEST).read_bytes())
    stored = sum(record.count for _, record in manifest.slices())
    assert stored == 3 * plan.model.parameters, "master and two moments of every parameter, once"


@pytest.mark.parametrize(("saved", "resumed"), [("fp32", "bf16"), ("fp16", "fp32")])
def test_another_precision_starts_from_the_same_master_weights(tmp_path, saved, resumed):
    def engine(precision: str, seed: int) -> Engine:
        plan = make_plan(precision=precision, seed=seed)
        return Engine(plan, Mesh.alone(plan), torch.device("cpu"), recipe(plan.job.train))

    first = engine(saved, 1)
    second = engine(resumed, 2)
    advance(first, first.plan, 1)
    opened(tmp_path, plan=make_plan()).save(
        list(first.state_pieces(to_write=True)), 1, 2, first.scalars()
    )
    manifest = checkpoints(tmp_path, 1, plan=make_plan()).resume(
        lambda: list(second.state_pieces(to_write=False))
    )
    second.resumed(manifest.step, manifest.scalars)
    pieces = zip(
        first.state_pieces(to_write=False), second.state_pieces(to_write=False), strict=True
    )
    assert all(torch.equal(piece.data, resumed_piece.data) for piece, resumed_piece in pieces)
    master = {
        piece.info.name: piece.data
        for piece in second.state_pieces(to_write=False)
        if piece.kind == "master"
    }
    for name, param, _ in second.part.parameters():
        assert torch.equal(param.detach().view(-1), master[name].to(param.dtype))
