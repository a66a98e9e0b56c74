"""Every kind of damage to a checkpoint: found, named and survived."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from orchestrator.plan import Exit
from orchestrator.plan.worker import MANIFEST, committed
from tests.trainer.states import checkpoints, equal, flip_bit, opened, resume, saved, state
from trainer.checkpoint.format import StatePiece, decode, encode, rank_file, step_name
from trainer.checkpoint.load import at_step, newest_committed
from trainer.checkpoint.save import Contents, save
from trainer.errors import CheckpointError
from trainer.parallel.params import whole


def damage_manifest_digit(step: Path) -> None:
    """One digit: a manifest that decodes, and says something else."""
    manifest_text = (step / MANIFEST).read_text()
    (step / MANIFEST).write_text(manifest_text.replace('"samples": ', '"samples": 9'))


def damage_manifest_path(step: Path) -> None:
    """Names a file outside, as somebody does who can make the hash right too."""
    manifest = decode((step / MANIFEST).read_bytes())
    files = [msgspec.structs.replace(manifest.files[0], file="../../secret")]
    (step / MANIFEST).write_bytes(encode(msgspec.structs.replace(manifest, files=files)))


#: A good file of another step: readable, right size, wrong content.
SWAPPED = "swapped"
COPIED = "copy of an older one"
#: What is done to the folder of a step, and what is then said of it.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (
        lambda step: flip_bit(step / rank_file(0)),
        "rank-00000.safetensors does not have the sha256",
    ),
    "truncated": (
        lambda step: os.truncate(step / rank_file(0), 1000),
        "rank-00000.safetensors has 1000 bytes",
    ),
    "empty": (
        lambda step: (step / rank_file(0)).write_bytes(b""),
        "rank-00000.safetensors has 0 bytes",
    ),
    "missing": (
        lambda step: (step / rank_file(0)).unlink(),
        "rank-00000.safetensors: No such file",
    ),
    SWAPPED: (
        lambda step: shutil.copy(step.parent / step_name(1) / rank_file(0), step / rank_file(0)),
        "rank-00000.safetensors does not have the sha256",
    ),
    "no manifest": (lambda step: (step / MANIFEST).unlink(), "manifest.json: No such file"),
    "cut manifest": (lambda step: os.truncate(step / MANIFEST, 100), "manifest.json: "),
    "other schema": (
        lambda step: (step / MANIFEST).write_text('{"schema": "orch.checkpoint/99"}'),
        "schema is 'orch.checkpoint/99'",
    ),
    "changed digit": (damage_manifest_digit, "manifest.json: its content is not what was hashed"),
    "deeply nested": (
        lambda step: (step / MANIFEST).write_text(
            '{"schema": "orch.checkpoint/2", "x": ' + "[" * 10**5 + "]" * 10**5 + "}"
        ),
        "manifest.json: ",
    ),
    COPIED: (
        lambda step: (shutil.rmtree(step), shutil.copytree(step.parent / step_name(1), step)),
        "it holds step 1: copied or renamed",
    ),
    "file outside": (damage_manifest_path, "is not a plain file name"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_newest_good_checkpoint_is_taken(tmp_path, damage):
    saved(tmp_path, 1, 2, 3)
    DAMAGE[damage][0](tmp_path / step_name(3))
    live, manager, manifest = resume(tmp_path)
    assert manifest.step == 2 and equal(live, state(2))
    (event,) = manager.reporter.named("checkpoint_rejected")
    assert step_name(3) in event.fields["path"] and DAMAGE[damage][1] in event.fields["problem"]
    assert [step for step, _ in committed(tmp_path)] == [2, 1], "the bad one is set aside"
    assert (tmp_path / f"{step_name(3)}.rejected-e1").is_dir()


@pytest.mark.parametrize("damage", DAMAGE)
def test_when_nothing_can_be_trusted_the_run_does_not_start_over_silently(tmp_path, damage):
    saved(tmp_path, 1, 2)
    DAMAGE[damage][0](tmp_path / step_name(2))
    DAMAGE["flipped bit" if damage in (SWAPPED, COPIED) else damage][0](tmp_path / step_name(1))
    with pytest.raises(CheckpointError) as caught:
        resume(tmp_path)
    assert caught.value.exit == Exit.CONFIG
    assert (
        step_name(1) in str(caught.value)
        and step_name(2) in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_a_copy_under_a_later_name_neither_wins_nor_keeps_newer_ones_out_nor_is_exported(tmp_path):
    manager = saved(tmp_path, 1)
    shutil.copytree(tmp_path / step_name(1), tmp_path / step_name(9000))
    (tmp_path / step_name(1)).rename(tmp_path / step_name(5))
    with pytest.raises(CheckpointError, match=r"step-00000005: it holds step 1: copied or renamed"):
        at_step(tmp_path, 5, 0)
    (tmp_path / step_name(5)).rename(tmp_path / step_name(1))
    assert newest_committed(tmp_path, 0) == (0, 1)
    for step in (2, 3):
        save(manager.target, Contents(step, step, state(step), read_back=False), keep_last=2)
    assert [step for step, _ in committed(tmp_path)] == [9000, 3, 2]
    live, _, manifest = resume(tmp_path)
    assert manifest.step == 3 and equal(live, state(3))
    assert [step for step, _ in committed(tmp_path)] == [3, 2]


@pytest.mark.parametrize("name", [rank_file(0), MANIFEST])
def test_every_single_bit_of_a_small_file_matters(tmp_path, name):
    saved(tmp_path, 1)
    file = tmp_path / step_name(1) / name
    raw = file.read_bytes()
    for at in range(0, len(raw), max(1, len(raw) // 50)):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << (at % 8)
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            resume(tmp_path)
        file.write_bytes(raw)
    assert resume(tmp_path)[2].step == 1


def test_a_checkpoint_of_another_model_or_precision_is_refused(tmp_path):
    saved(tmp_path, 1)
    foreign_pieces = [StatePiece("master", whole("norm.weight", (16,)), 0, torch.zeros(16))]
    with pytest.raises(
        CheckpointError, match=r"norm.weight with shape \(8,\), the plan's model has \(16,\)"
    ):
        checkpoints(tmp_path, 1).resume(lambda: foreign_pieces)
    foreign_pieces = [StatePiece("master", whole("layers.9.norm.weight", (8,)), 0, torch.zeros(8))]
    with pytest.raises(CheckpointError, match=r"has no parameter layers.9.norm.weight"):
        checkpoints(tmp_path, 1).resume(lambda: foreign_pieces)
    with pytest.raises(
        CheckpointError, match="holds master state as F32, this plan trains with F64"
    ):
        checkpoints(tmp_path, 1).resume(lambda: state(0, torch.float64))


def test_a_step_reached_again_replaces_what_was_there(tmp_path):
    manager = saved(tmp_path, 1, 2)
    manager.save(state(22), step=2, samples=20)
    live, _, _ = resume(tmp_path)
    assert equal(live, state(22)) and not list(tmp_path.glob(".trash-*"))


def test_a_step_already_on_disk_is_not_written_twice(tmp_path):
    manager = opened(tmp_path)
    manager.save(state(1), step=1, samples=0)
    manager.save(state(1), step=1, samples=0)
    assert len(manager.reporter.named("checkpoint_saved")) == 1
