"""Checkpoints on disk: bit-exact round trips, and every kind of damage found, named and survived."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from orchestrator.plan import Exit, Plan
from orchestrator.plan.worker import EventReport
from tests.plans import make_plan
from trainer.checkpoint import save as save_module
from trainer.checkpoint.fence import Fence
from trainer.checkpoint.files import sha256, write_tensors
from trainer.checkpoint.format import MANIFEST, Piece, rank_file, step_name
from trainer.checkpoint.load import overlap
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.save import committed, prune
from trainer.errors import CheckpointError, Fenced, SaveError
from trainer.parallel.params import ParamInfo, whole
from trainer.verify.ranks import run_ranks

PLAN = make_plan(dp=2)
KINDS = ("master", "exp_avg", "exp_avg_sq")


class Recorder:
    """Takes the reporter's place and remembers."""

    def __init__(self) -> None:
        self.events: list[EventReport] = []

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        self.events.append(EventReport(rank=0, epoch=0, name=name, step=step, fields=fields))

    def named(self, name: str) -> list[EventReport]:
        return [event for event in self.events if event.name == name]


def checkpoints(folder: Path, epoch: int = 0, rank: int = 0, plan: Plan = PLAN, run: str = "run") -> Checkpoints:
    return Checkpoints(folder, plan, Fence(run, epoch), rank, Recorder())


def shapes() -> dict[str, tuple[int, ...]]:
    return {"embed.weight": (257, 8), "layers.0.attn.wq.weight": (8, 8), "norm.weight": (8,)}


def state(seed: int, dtype: torch.dtype = torch.float32) -> list[Piece]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Piece(kind, whole(name, shape), 0, torch.randn(shape, generator=generator).to(dtype).view(-1))
        for name, shape in shapes().items()
        for kind in KINDS
    ]


def equal(left: list[Piece], right: list[Piece]) -> bool:
    return all(torch.equal(a.data, b.data) for a, b in zip(left, right, strict=True))


def saved(folder: Path, *steps: int, keep_last: int = 9) -> Checkpoints:
    """A folder with a checkpoint of `state(step)` for each step."""
    manager = checkpoints(folder, plan=make_plan(dp=2))
    manager.resume(lambda: state(0))
    for step in steps:
        save_module.save(folder, PLAN, manager.token, 0, state(step), step=step, samples=step * 10, keep_last=keep_last)
    return manager


def resume(folder: Path, epoch: int = 1, **options: object) -> tuple[list[Piece], Checkpoints, object]:
    live, manager = state(999), checkpoints(folder, epoch, **options)
    return live, manager, manager.resume(lambda: live)


# ---------------------------------------------------------------------------------------------- round trips


def test_an_empty_folder_is_a_fresh_start(tmp_path):
    assert resume(tmp_path / "new")[2] is None


def test_state_comes_back_to_the_bit_with_step_samples_scalars_and_random_state(tmp_path):
    manager = checkpoints(tmp_path)
    manager.resume(lambda: [])
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    manager.save(state(7), step=7, samples=70, scalars={"loss_scale": 1024.0})
    torch.manual_seed(6)
    live, _, manifest = resume(tmp_path)
    assert equal(live, state(7))
    assert (manifest.step, manifest.samples, manifest.scalars) == (7, 70, {"loss_scale": 1024.0})
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_files_are_plain_safetensors_under_full_names(tmp_path, dtype):
    manager = checkpoints(tmp_path)
    manager.resume(lambda: [])
    manager.save(state(3, dtype), step=3, samples=0)
    tensors = load_file(tmp_path / step_name(3) / rank_file(0))
    for piece in state(3, dtype):
        assert torch.equal(tensors[f"{piece.kind}/{piece.info.name}@0"], piece.data)
    manifest = json.loads((tmp_path / step_name(3) / MANIFEST).read_text())
    assert manifest["parameters"]["embed.weight"] == [257, 8]
    assert manifest["plan_hash"] == PLAN.hash
    assert manifest["files"][0]["sha256"] == sha256(tmp_path / step_name(3) / rank_file(0))


def test_files_and_folders_are_private(tmp_path):
    saved(tmp_path / "c", 1)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "c" / step_name(1)).stat().st_mode & 0o777 == 0o700


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=5), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
def test_own_writer_makes_what_the_library_reads(tmp_path_factory, sizes, dtype):
    path = tmp_path_factory.mktemp("w") / "x.safetensors"
    tensors = {f"näme {i}": (torch.arange(size) * 3).to(dtype) for i, size in enumerate(sizes)}
    size, digest = write_tensors(path, tensors)
    assert (size, digest) == (path.stat().st_size, sha256(path))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensors[key]) and read[key].dtype == dtype for key in tensors)


def vocabulary(rank: int) -> ParamInfo:
    """Rows of rank 0 or 1 of tp=2 over 257 rows, 129 each: the last of rank 1 is padding."""
    start, stop = (0, 129) if rank == 0 else (129, 257)
    return ParamInfo("embed.weight", (257, 4), 0, start, stop, 129, False, (rank,), True, True)


def test_padding_rows_are_not_stored_and_stay_as_they_are(tmp_path):
    pieces = [Piece("master", vocabulary(rank), 0, torch.arange(129 * 4.0) + rank) for rank in (0, 1)]
    manager = checkpoints(tmp_path)
    manager.resume(lambda: [])
    manager.save(pieces, step=1, samples=0)
    stored = load_file(tmp_path / step_name(1) / rank_file(0))
    assert stored["master/embed.weight[0:129:257]@0"].numel() == 128 * 4
    live = Piece("master", vocabulary(1), 0, torch.zeros(129 * 4))
    checkpoints(tmp_path, 1).resume(lambda: [live])
    assert torch.equal(live.data[: 128 * 4], pieces[1].data[: 128 * 4]) and not live.data[128 * 4 :].any()


def test_a_shard_of_padding_only_is_neither_stored_nor_asked_for(tmp_path):
    """tp=4 over 5 rows, 2 each: ranks 0 and 1 have two, rank 2 one, rank 3 none."""
    rows = [(0, 2), (2, 4), (4, 5), (6, 5)]
    infos = [
        ParamInfo("embed.weight", (5, 4), 0, start, stop, 2, False, (rank,), True, True)
        for rank, (start, stop) in enumerate(rows)
    ]
    pieces = [Piece("master", info, 0, torch.ones(8)) for info in infos]
    manager = checkpoints(tmp_path)
    manager.resume(lambda: [])
    manager.save(pieces, step=1, samples=0)
    assert len(load_file(tmp_path / step_name(1) / rank_file(0))) == 3 + 1, "three slices and the random state"
    live = [Piece("master", info, 0, torch.zeros(8)) for info in infos]
    assert checkpoints(tmp_path, 1).resume(lambda: live).step == 1
    assert [int(piece.data.sum()) for piece in live] == [8, 8, 4, 0]


@pytest.mark.parametrize(("wrong", "found"), [("dropped", 1000), ("twice", 3112)])
def test_a_save_that_would_not_hold_everything_once_is_refused(tmp_path, wrong, found):
    """A shard that nobody writes, or a replica that two ranks write: Megatron-LM saved such files (its PR 5077)."""
    embed = state(1)[0]
    halves = [Piece("master", embed.info, 0, embed.data[:1056]), Piece("master", embed.info, 1056, embed.data[1056:])]
    pieces = [halves[1]] if wrong == "dropped" else [*halves, Piece("master", embed.info, 1, embed.data[1:1057])]
    manager = checkpoints(tmp_path)
    manager.resume(lambda: [])
    with pytest.raises(SaveError, match=f"master of embed.weight has 2056 elements, the ranks have written {found}"):
        manager.save(pieces, step=1, samples=0)
    assert committed(tmp_path) == [] and not list(tmp_path.glob(".tmp-*"))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_overlap_is_set_intersection(offset, count, other, other_count):
    begin, end = overlap(offset, count, other, other_count)
    assert set(range(begin, end)) == set(range(offset, offset + count)) & set(range(other, other + other_count))


# ---------------------------------------------------------------------------------------------- damage


def damage_flip(step: Path) -> None:
    """One bit, in the middle of the data: sizes and headers stay right (torch's DCP loads this silently)."""
    file = step / rank_file(0)
    raw = bytearray(file.read_bytes())
    raw[len(raw) * 3 // 4] ^= 1
    file.write_bytes(raw)


def damage_truncate(step: Path) -> None:
    os.truncate(step / rank_file(0), 1000)


def damage_empty(step: Path) -> None:
    (step / rank_file(0)).write_bytes(b"")


def damage_missing(step: Path) -> None:
    (step / rank_file(0)).unlink()


def damage_swap(step: Path) -> None:
    """A good file of another step: readable, right size, wrong content."""
    shutil.copy(step.parent / step_name(1) / rank_file(0), step / rank_file(0))


def damage_manifest_missing(step: Path) -> None:
    (step / MANIFEST).unlink()


def damage_manifest_cut(step: Path) -> None:
    os.truncate(step / MANIFEST, 100)


def damage_manifest_schema(step: Path) -> None:
    (step / MANIFEST).write_text('{"schema": "orch.checkpoint/99"}')


def damage_manifest_path(step: Path) -> None:
    text = (step / MANIFEST).read_text().replace(rank_file(0), "../../secret", 1)
    (step / MANIFEST).write_text(text)


DAMAGE = {
    damage_flip: "rank-00000.safetensors does not have the sha256",
    damage_truncate: "rank-00000.safetensors has 1000 bytes",
    damage_empty: "rank-00000.safetensors has 0 bytes",
    damage_missing: "rank-00000.safetensors: No such file",
    damage_swap: "rank-00000.safetensors does not have the sha256",
    damage_manifest_missing: "manifest.json: No such file",
    damage_manifest_cut: "manifest.json: ",
    damage_manifest_schema: "schema is 'orch.checkpoint/99'",
    damage_manifest_path: "is not a plain file name",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_the_newest_good_checkpoint_is_taken(tmp_path, damage):
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path / step_name(3))
    live, manager, manifest = resume(tmp_path)
    assert manifest.step == 2 and equal(live, state(2))
    (event,) = manager.reporter.named("checkpoint_rejected")
    assert step_name(3) in event.fields["path"] and DAMAGE[damage] in event.fields["problem"]
    assert [step for step, _ in committed(tmp_path)] == [2, 1], "the bad one is set aside"
    assert (tmp_path / f"{step_name(3)}.rejected-e1").is_dir()


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_when_nothing_can_be_trusted_the_run_does_not_start_over_silently(tmp_path, damage):
    saved(tmp_path, 1, 2)
    damage(tmp_path / step_name(2))
    (damage_flip if damage is damage_swap else damage)(tmp_path / step_name(1))
    with pytest.raises(CheckpointError) as caught:
        resume(tmp_path)
    assert caught.value.exit == Exit.CONFIG
    assert step_name(1) in str(caught.value) and step_name(2) in str(caught.value) and "\n" not in str(caught.value)


def test_every_single_bit_of_a_small_file_matters(tmp_path):
    saved(tmp_path, 1)
    file = tmp_path / step_name(1) / rank_file(0)
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
    other = [Piece("master", whole("norm.weight", (16,)), 0, torch.zeros(16))]
    with pytest.raises(CheckpointError, match=r"norm.weight with shape \(8,\), the plan's model has \(16,\)"):
        checkpoints(tmp_path, 1).resume(lambda: other)
    other = [Piece("master", whole("layers.9.norm.weight", (8,)), 0, torch.zeros(8))]
    with pytest.raises(CheckpointError, match=r"has no parameter layers.9.norm.weight"):
        checkpoints(tmp_path, 1).resume(lambda: other)
    with pytest.raises(CheckpointError, match="holds master state as F32, this plan trains with F64"):
        checkpoints(tmp_path, 1).resume(lambda: state(0, torch.float64))


# ---------------------------------------------------------------------------------------------- crashes


def test_what_a_killed_save_leaves_is_never_loaded_and_is_swept_up(tmp_path):
    saved(tmp_path, 1)
    half = tmp_path / f".tmp-{step_name(2)}.e0"
    shutil.copytree(tmp_path / step_name(1), half)
    _, _, manifest = resume(tmp_path)
    assert manifest.step == 1 and not half.exists()


@pytest.mark.process
@pytest.mark.parametrize("moment", ["write_tensors", "write_atomic", "rename", "prune"])
def test_sigkill_at_any_moment_of_a_save_leaves_a_checkpoint_that_loads(tmp_path, monkeypatch, moment):
    """The child dies by SIGKILL in the middle of saving step 2; the parent resumes from what is on disk."""
    saved(tmp_path, 1)

    def die(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), 9)

    pid = os.fork()
    if pid == 0:
        if moment == "rename":
            Path.rename = die
        else:
            setattr(save_module, moment, die)
        manager = checkpoints(tmp_path)
        manager.saved_step = 1
        manager.save(state(2), step=2, samples=20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    live, manager, manifest = resume(tmp_path)
    expected = 2 if moment == "prune" else 1
    assert manifest.step == expected and equal(live, state(expected))
    assert not manager.reporter.named("checkpoint_rejected")
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_full_disk_is_one_clear_line_and_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    manager = saved(tmp_path, 1)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_module, "write_tensors", full)
    with pytest.raises(SaveError, match=r"step 2: rank 0: rank-00000\.safetensors: No space left on device"):
        manager.save(state(2), step=2, samples=0)
    assert not list(tmp_path.glob(".tmp-*"))
    assert resume(tmp_path)[2].step == 1


def test_a_step_reached_again_replaces_what_was_there(tmp_path):
    manager = saved(tmp_path, 1, 2)
    manager.save(state(22), step=2, samples=20)
    live, _, _ = resume(tmp_path)
    assert equal(live, state(22)) and not list(tmp_path.glob(".trash-*"))


def test_a_step_already_on_disk_is_not_written_twice(tmp_path):
    manager = checkpoints(tmp_path)
    manager.resume(lambda: [])
    manager.save(state(1), step=1, samples=0)
    manager.save(state(1), step=1, samples=0)
    assert len(manager.reporter.named("checkpoint_saved")) == 1


# ---------------------------------------------------------------------------------------------- fencing, retention


def test_an_older_epoch_can_neither_claim_nor_commit(tmp_path):
    old = saved(tmp_path, 1)
    _, new, _ = resume(tmp_path, epoch=3)
    with pytest.raises(Fenced, match="belongs to epoch 3 of run 'run', this is epoch 0") as caught:
        old.save(state(2), step=2, samples=0)
    assert caught.value.exit == Exit.FENCED
    with pytest.raises(Fenced):
        resume(tmp_path, epoch=2)
    new.save(state(2), step=2, samples=0)
    assert [step for step, _ in committed(tmp_path)] == [2, 1]


def test_a_claim_during_a_save_stops_its_commit(tmp_path, monkeypatch):
    """The newer epoch appears after the old one has written its files and before it renames."""
    old = saved(tmp_path, 1)
    write = save_module.write_atomic

    def claim_first(path: Path, data: bytes) -> None:
        write(path, data)
        write(tmp_path / "fence.json", b'{"run_id": "run", "epoch": 1}')

    monkeypatch.setattr(save_module, "write_atomic", claim_first)
    with pytest.raises(Fenced):
        old.save(state(2), step=2, samples=0)
    assert [step for step, _ in committed(tmp_path)] == [1]


def test_another_run_takes_the_folder_over(tmp_path):
    old = saved(tmp_path, 1)
    live, _, manifest = resume(tmp_path, epoch=0, run="other")
    assert manifest.step == 1 and equal(live, state(1))
    with pytest.raises(Fenced, match="'other'"):
        old.save(state(2), step=2, samples=0)


def test_a_broken_fence_is_refused(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "fence.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"fence\.json"):
        resume(tmp_path)


def test_only_the_newest_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 3, 4, keep_last=2)
    assert [step for step, _ in committed(tmp_path)] == [4, 3]


@given(st.sets(st.integers(1, 30), min_size=1, max_size=6), st.integers(-1, 7), st.none() | st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_pruning_keeps_the_newest_and_the_protected(tmp_path_factory, steps, keep_last, protected):
    folder = tmp_path_factory.mktemp("p")
    for step in steps:
        (folder / step_name(step)).mkdir()
    prune(folder, keep_last, protected)
    left = {step for step, _ in committed(folder)}
    newest = sorted(steps, reverse=True)[: max(keep_last, 1)]
    assert left == set(newest) | ({protected} & steps)


# ---------------------------------------------------------------------------------------------- many ranks


def sharded(rank: int, world: int, seed: int) -> list[Piece]:
    """Flat shards that cut through parameters, as ZeRO-1 makes them; unequal on purpose."""
    pieces = []
    for piece in state(seed):
        size = piece.data.numel()
        edges = [size * (index**2) // world**2 for index in range(world + 1)]
        low, high = edges[rank], edges[rank + 1]
        if low < high:
            pieces.append(Piece(piece.kind, piece.info, low, piece.data[low:high]))
    return pieces


@pytest.mark.process
@pytest.mark.parametrize(("writers", "readers"), [(4, 4), (4, 2), (1, 3)])
def test_ranks_write_their_shards_and_any_number_of_ranks_reads_them(tmp_path, writers, readers):
    def write(rank: int) -> None:
        manager = checkpoints(tmp_path, rank=rank)
        manager.resume(lambda: [])
        manager.save(sharded(rank, writers, seed=5), step=5, samples=50)

    def read(rank: int) -> list:
        live = sharded(rank, readers, seed=0)
        manifest = checkpoints(tmp_path, 1, rank).resume(lambda: live)
        return [manifest.step, equal(live, sharded(rank, readers, seed=5))]

    run_ranks(write, writers)
    assert len(list((tmp_path / step_name(5)).glob("*.safetensors"))) == writers
    assert run_ranks(read, readers) == [[5, True]] * readers


@pytest.mark.process
def test_all_ranks_walk_back_together_when_one_file_is_bad(tmp_path):
    def write(rank: int) -> None:
        manager = checkpoints(tmp_path, rank=rank)
        manager.resume(lambda: [])
        for step in (1, 2):
            manager.save(sharded(rank, 4, seed=step), step=step, samples=0)

    run_ranks(write, 4)
    raw = bytearray((tmp_path / step_name(2) / rank_file(2)).read_bytes())
    raw[-1] ^= 0x80
    (tmp_path / step_name(2) / rank_file(2)).write_bytes(raw)

    def read(rank: int) -> list:
        live, manager = sharded(rank, 4, seed=0), checkpoints(tmp_path, 1, rank)
        manifest = manager.resume(lambda: live)
        problems = [event.fields["problem"] for event in manager.reporter.named("checkpoint_rejected")]
        return [manifest.step, equal(live, sharded(rank, 4, seed=1)), problems]

    problem = "rank-00002.safetensors does not have the sha256 in the manifest: its content has changed"
    assert run_ranks(read, 4) == [[1, True, [problem]]] + [[1, True, []]] * 3


@pytest.mark.process
def test_one_rank_that_cannot_write_fails_the_save_on_all(tmp_path):
    def write(rank: int) -> list:
        manager = checkpoints(tmp_path, rank=rank)
        manager.resume(lambda: [])
        if rank == 2:
            save_module.write_tensors = lambda *args: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        try:
            manager.save(sharded(rank, 4, seed=1), step=1, samples=0)
        except SaveError as error:
            return [str(error)]
        return []

    line = "checkpoint of step 1: rank 2: rank-00002.safetensors: Input/output error"
    assert run_ranks(write, 4) == [[line]] * 4
    assert committed(tmp_path) == []


@pytest.mark.process
def test_a_stale_epoch_is_told_on_every_rank(tmp_path):
    saved(tmp_path, 1)
    resume(tmp_path, epoch=5)

    def write(rank: int) -> str:
        try:
            checkpoints(tmp_path, 4, rank).resume(lambda: [])
        except Fenced as error:
            return str(int(error.exit))
        return ""

    assert run_ranks(write, 2) == ["77", "77"]
