"""Checkpoints on disk: bit-exact round trips, alone and over ranks."""

import itertools
import json
from dataclasses import replace
from math import prod

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from orchestrator.plan.worker import MANIFEST, committed
from tests.trainer.states import PLAN, checkpoints, equal, flip_bit, opened, resume, saved, state
from trainer.checkpoint import save as save_module
from trainer.checkpoint.files import sha256, write_tensors
from trainer.checkpoint.format import Slice, StatePiece, rank_file, step_name
from trainer.checkpoint.geometry import BlockRange
from trainer.errors import Fenced, SaveError
from trainer.parallel.params import ParamInfo, Shard, even_shard
from trainer.verify.ranks import run_ranks

# ----------------------------------------------------------------------------------------------
#     round trips


def test_an_empty_folder_is_a_fresh_start(tmp_path):
    assert resume(tmp_path / "new")[2] is None


def test_state_comes_back_to_the_bit_with_step_samples_scalars_and_random_state(tmp_path):
    manager = opened(tmp_path)
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
    manager = opened(tmp_path)
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
@given(
    st.lists(st.integers(0, 40), max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
def test_own_writer_makes_what_the_library_reads(tmp_path_factory, sizes, dtype):
    path = tmp_path_factory.mktemp("w") / "x.safetensors"
    tensors = {f"näme {i}": (torch.arange(size) * 3).to(dtype) for i, size in enumerate(sizes)}
    size, digest = write_tensors(path, tensors)
    assert (size, digest) == (path.stat().st_size, sha256(path))
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, (
        "tensors begin where they can be mapped"
    )
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[key], tensors[key]) and read[key].dtype == dtype for key in tensors)


def vocabulary(rank: int) -> ParamInfo:
    """Rows of rank 0 or 1 of tp=2 over 257 rows, 129 each: the last of rank 1 is padding."""
    start, stop = (0, 129) if rank == 0 else (129, 257)
    return ParamInfo(
        "embed.weight", (257, 4), True, (Shard(0, start, stop, 129),), replicas=(rank,)
    )


def test_padding_rows_are_not_stored_and_stay_as_they_are(tmp_path):
    pieces = [
        StatePiece("master", vocabulary(rank), 0, torch.arange(129 * 4.0) + rank) for rank in (0, 1)
    ]
    manager = opened(tmp_path)
    manager.save(pieces, step=1, samples=0)
    stored = load_file(tmp_path / step_name(1) / rank_file(0))
    assert stored["master/embed.weight[0:129:257]@0"].numel() == 128 * 4
    live = StatePiece("master", vocabulary(1), 0, torch.zeros(129 * 4))
    checkpoints(tmp_path, 1).resume(lambda: [live])
    assert (
        torch.equal(live.data[: 128 * 4], pieces[1].data[: 128 * 4])
        and not live.data[128 * 4 :].any()
    )


def test_a_shard_of_padding_only_is_neither_stored_nor_asked_for(tmp_path):
    """tp=4 over 5 rows, 2 each: ranks 0 and 1 have two, rank 2 one, rank 3 none."""
    rows = [(0, 2), (2, 4), (4, 5), (6, 5)]
    infos = [
        ParamInfo("embed.weight", (5, 4), True, (Shard(0, start, stop, 2),), replicas=(rank,))
        for rank, (start, stop) in enumerate(rows)
    ]
    pieces = [StatePiece("master", info, 0, torch.ones(8)) for info in infos]
    manager = opened(tmp_path)
    manager.save(pieces, step=1, samples=0)
    assert len(load_file(tmp_path / step_name(1) / rank_file(0))) == 3 + 1, (
        "three slices and the random state"
    )
    live = [StatePiece("master", info, 0, torch.zeros(8)) for info in infos]
    assert checkpoints(tmp_path, 1).resume(lambda: live).step == 1
    assert [int(piece.data.sum()) for piece in live] == [8, 8, 4, 0]


def cut(shape: tuple[int, ...], *divisions: tuple[int, int], ranges: int = 1) -> list[StatePiece]:
    """All ranks' pieces of a parameter cut along (dimension, parts) each, and each part into flat
    ranges, as ZeRO does; their elements are numbered, padding is -1."""
    full = torch.arange(1.0, prod(shape) + 1).view(shape)
    pieces = []
    for coord in itertools.product(*(range(count) for _, count in divisions)):
        shards = [
            even_shard(dim, shape[dim], at, count)
            for (dim, count), at in zip(divisions, coord, strict=True)
        ]
        info = ParamInfo("experts.weight", shape, True, tuple(shards))
        local = torch.where(info.take(full) == 0, -1.0, info.take(full)).view(-1)
        edges = [local.numel() * at // ranges for at in range(ranges + 1)]
        pieces += [
            StatePiece("master", info, low, local[low:high])
            for low, high in itertools.pairwise(edges)
        ]
    return pieces


SEVERAL = {
    (4, 6, 8): [
        ((0, 2), (2, 4)),
        ((0, 4), (1, 3)),
        ((1, 2), (2, 2)),
        ((0, 2), (1, 3), (2, 2)),
        ((1, 6),),
        (),
    ],
    (5, 6): [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((1, 2),), ((0, 4),), ()],  # rows are padded
}


@pytest.mark.parametrize("shape", SEVERAL)
def test_a_parameter_cut_along_several_dimensions_is_read_in_any_other_layout(tmp_path, shape):
    for number, (written, ranges) in enumerate(itertools.product(SEVERAL[shape], (1, 3))):
        folder = tmp_path / str(number)
        opened(folder).save(cut(shape, *written, ranges=ranges), step=1, samples=0)
        for divisions, range_count in itertools.product(SEVERAL[shape], (1, 5)):
            expected = cut(shape, *divisions, ranges=range_count)
            live = [replace(piece, data=torch.full_like(piece.data, -1.0)) for piece in expected]
            assert checkpoints(folder, 1).resume(lambda live=live: live).step == 1
            assert equal(live, expected), (written, ranges, divisions, range_count)


def test_a_block_that_nobody_wrote_is_named(tmp_path):
    pieces = cut((4, 6), (0, 2), (1, 3))
    with pytest.raises(SaveError, match="nobody holds 0 to 4 of its block 2:4, 2:4"):
        opened(tmp_path).save(pieces[:4] + pieces[5:], step=1, samples=0)


def test_a_manifest_of_one_cut_dimension_reads_as_it_always_did():
    raw = b'{"key":"k","name":"n","kind":"master","dim":1,"start":2,"stop":4,"offset":5,"count":6}'
    decoded = msgspec.json.decode(raw, type=Slice)
    assert (
        decoded.block_range == BlockRange(((1, 2, 4),), 5, 6)
        and msgspec.json.encode(decoded) == raw
    )


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [("dropped", "nobody holds 0 to 1056"), ("twice", "more than one hold 1 to 1056")],
)
def test_a_save_that_would_not_hold_everything_once_is_refused(tmp_path, wrong, problem):
    """A shard that nobody writes, or a replica that two ranks write: Megatron-LM saved such files
    (its PR 5077)."""
    embed = state(1)[0]
    halves = [
        StatePiece("master", embed.info, 0, embed.data[:1056]),
        StatePiece("master", embed.info, 1056, embed.data[1056:]),
    ]
    pieces = (
        [halves[1]]
        if wrong == "dropped"
        else [*halves, StatePiece("master", embed.info, 1, embed.data[1:1057])]
    )
    manager = opened(tmp_path)
    with pytest.raises(SaveError, match=f"master of embed.weight: {problem}"):
        manager.save(pieces, step=1, samples=0)
    assert committed(tmp_path) == [] and not list(tmp_path.glob(".tmp-*"))


# ----------------------------------------------------------------------------------------------
#     many ranks


def sharded(rank: int, world: int, seed: int) -> list[StatePiece]:
    """Flat shards that cut through parameters, as ZeRO-1 makes them; unequal on purpose."""
    pieces = []
    for piece in state(seed):
        size = piece.data.numel()
        edges = [size * (index**2) // world**2 for index in range(world + 1)]
        low = edges[rank]
        high = edges[rank + 1]
        if low < high:
            pieces.append(StatePiece(piece.kind, piece.info, low, piece.data[low:high]))
    return pieces


@pytest.mark.process
@pytest.mark.parametrize(("writers", "readers"), [(4, 4), (4, 2), (1, 3)])
def test_ranks_write_their_shards_and_any_number_of_ranks_reads_them(tmp_path, writers, readers):
    def write(rank: int) -> None:
        manager = opened(tmp_path, rank=rank)
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
        manager = opened(tmp_path, rank=rank)
        for step in (1, 2):
            manager.save(sharded(rank, 4, seed=step), step=step, samples=0)

    run_ranks(write, 4)
    flip_bit(tmp_path / step_name(2) / rank_file(2))

    def read(rank: int) -> list:
        live = sharded(rank, 4, seed=0)
        manager = checkpoints(tmp_path, 1, rank)
        manifest = manager.resume(lambda: live)
        problems = [
            event.fields["problem"] for event in manager.reporter.named("checkpoint_rejected")
        ]
        return [manifest.step, equal(live, sharded(rank, 4, seed=1)), problems]

    problem = (
        "rank-00002.safetensors does not have the sha256 in the manifest: its content has changed"
    )
    assert run_ranks(read, 4) == [[1, True, [problem]]] + [[1, True, []]] * 3


@pytest.mark.process
def test_one_rank_that_cannot_write_fails_the_save_on_all(tmp_path):
    def write(rank: int) -> list:
        manager = opened(tmp_path, rank=rank)
        if rank == 2:
            save_module.write_tensors = lambda *args: (_ for _ in ()).throw(
                OSError(5, "Input/output error")
            )
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
            opened(tmp_path, 4, rank)
        except Fenced as error:
            return str(int(error.exit))
        return ""

    assert run_ranks(write, 2) == ["77", "77"]
