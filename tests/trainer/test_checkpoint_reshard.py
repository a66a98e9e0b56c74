"""What any layout has saved, any other resumes: to the bit, and then it is the run that one process
would be."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from orchestrator.plan import Plan
from orchestrator.plan.document import Mtp
from orchestrator.plan.learning_rate import learning_rate
from tests.beds.plans import make_plan, tiny_model
from tests.reference import single
from tests.reference.assemble import assemble
from tests.trainer.samples import GPT, engine_of
from tests.trainer.states import checkpoints, opened
from trainer.checkpoint.format import StatePiece, step_name
from trainer.precision import FP64
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import step_batches

pytestmark = pytest.mark.process

BATCH = 4
SAVED = 2
STEPS = 4
#: Biases, positions, tied embeddings and a further prediction: every kind of parameter; 257 rows of
#: vocabulary, which tp pads.
MODEL = tiny_model(**GPT, tied_embeddings=True, mtp=Mtp(depth=1))
SMALL_BUCKETS = {"bucket_bytes": 1 << 12}

LAYOUTS: dict[str, dict] = {
    "one process": {},
    "dp4 zero1": {"dp": 4, "zero": 1, **SMALL_BUCKETS},
    "dp2 zero0": {"dp": 2},
    "dp2 zero2": {"dp": 2, "zero": 2, **SMALL_BUCKETS},
    "dp2 tp2 zero3": {"dp": 2, "tp": 2, "zero": 3},
    "pp2 dp2 zero3 zb_h1": {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb_h1", **SMALL_BUCKETS},
    "dp4 zero1 hybrid": {"dp": 4, "zero": 1, "zero_group": 2},
    "tp4 shared kv heads": {"tp": 4},
    "pp3 uneven": {"pp": 3, "stage_layers": [1, 2, 1]},
    "pp2 interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "pp2 dualpipe": {"pp": 2, "schedule": "dualpipe"},
    "cp2 zero1": {"cp": 2, "zero": 1},
    "tp2 pp2 dp2 zero1": {
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "zero": 1,
        "stage_layers": [3, 1],
        **SMALL_BUCKETS,
    },
}


def plan_of(name: str, seed: int = 1234) -> Plan:
    layout = LAYOUTS[name]
    options = {"model": MODEL, "micro_batches": BATCH // layout.get("dp", 1)} | layout
    return make_plan(steps=STEPS, seed=seed, **options)


class Trained:
    """One rank's engine and checkpoints, in double precision."""

    def __init__(self, plan: Plan, rank: int):
        self.plan = plan
        self.rank = rank
        self.engine = engine_of(plan, rank, FP64)

    def advance(self, step: int) -> float | None:
        """The mean loss of step number `step`, where the last stage is."""
        batches, tokens = step_batches(self.plan, self.engine.mesh.coord, (step - 1) * BATCH)
        loss_sum, norm = self.engine.gradients(batches, tokens)
        self.engine.update(norm, learning_rate(step, self.plan.job.optim, STEPS))
        return self.engine.mean_loss(loss_sum, tokens)

    def save(self, folder: Path, epoch: int = 0) -> None:
        manager = opened(folder, epoch, self.rank, self.plan)
        manager.save(
            list(self.engine.state_pieces(to_write=True)),
            SAVED,
            SAVED * BATCH,
            self.engine.scalars(),
        )

    def resume(self, folder: Path, epoch: int) -> None:
        manifest = checkpoints(folder, epoch, self.rank, self.plan).resume(
            lambda: list(self.engine.state_pieces(to_write=False))
        )
        assert (manifest.step, manifest.samples) == (SAVED, SAVED * BATCH)
        self.engine.resumed(manifest.step, manifest.scalars)


def run_to_save(rank: int, plan: Plan, folder: Path) -> None:
    run = Trained(plan, rank)
    for step in range(1, SAVED + 1):
        run.advance(step)
    run.save(folder)


class Save(NamedTuple):
    folder: Path
    tensors: dict[tuple[str, str], torch.Tensor]  # what is in it, by the naive twin


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> dict[str, Save]:
    """Every layout's own run, saved after two steps."""
    result = {}
    for name in LAYOUTS:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        plan = plan_of(name)
        run_ranks(run_to_save, plan.parallel.world_size, plan, folder)
        result[name] = Save(folder, assemble(folder / step_name(SAVED)))
    return result


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return [outcome.loss for outcome in single.train(plan_of("one process"), STEPS, torch.float64)]


def as_stored(piece: StatePiece, save: Save) -> bool:
    """Whether a piece, padding left out, has the elements that are in the files."""
    stored = piece.unpadded()
    if stored is None:
        return True
    expected = save.tensors[stored.kind, stored.info.name][stored.info.global_slices].reshape(-1)
    return torch.equal(stored.data, expected[stored.offset : stored.offset + stored.data.numel()])


def resume_each(rank: int, plan: Plan, saves: dict[str, Save], number: int, again: Path) -> dict:
    """Resumes all saves into one engine of this layout, one after the other: what differs from the
    files, and what losses follow."""
    run = Trained(plan, rank)
    wrong = []
    losses = {}
    for at, (name, save) in enumerate(saves.items()):
        run.resume(save.folder, epoch=number + 1)
        pieces = list(run.engine.state_pieces(to_write=False))
        wrong += [
            f"{piece.kind} {piece.info.name} of {name}"
            for piece in pieces
            if not as_stored(piece, save)
        ]
        if at == 1:
            run.save(again)
        if at % 4 == 1:
            losses[name] = [run.advance(step) for step in range(SAVED + 1, STEPS + 1)]
    return {"wrong": wrong, "losses": losses}


@pytest.mark.parametrize("save_count", [4, pytest.param(len(LAYOUTS), marks=pytest.mark.full)])
def test_each_layout_resumes_what_any_has_saved(save_count, saves, undisturbed, tmp_path):
    """All in one test: else each worker of pytest would make all the saves. Four others: of every
    layout, by four."""
    for number, name in enumerate(
        LAYOUTS, start=save_count * len(LAYOUTS)
    ):  # the number is its epoch, which only grows
        names = [list(saves)[(number + 5 * step) % len(saves)] for step in range(save_count)]
        resumes_all(
            name,
            number,
            {source: saves[source] for source in names},
            undisturbed,
            tmp_path / str(number),
        )


def resumes_all(
    name: str, number: int, saves: dict[str, Save], undisturbed: list[float], again: Path
) -> None:
    """The state of each save to the bit, the losses after every fourth, and its own files of that
    of the second."""
    plan = plan_of(name, seed=77)
    again.mkdir()
    results = run_ranks(resume_each, plan.parallel.world_size, plan, saves, number, again)
    assert [result["wrong"] for result in results] == [[] for _ in results], name
    assert len(results[0]["losses"]) == len(saves) // 4
    for source in results[0]["losses"]:
        losses = next(
            step_losses
            for step_losses in (result["losses"][source] for result in results)
            if step_losses[0] is not None
        )
        assert losses == pytest.approx(undisturbed[SAVED:], rel=1e-10), (
            f"saved by {source}, resumed as {name}"
        )
    there = list(saves.values())[1].tensors
    back = assemble(again / step_name(SAVED))
    assert there.keys() == back.keys() and all(torch.equal(there[key], back[key]) for key in there)
