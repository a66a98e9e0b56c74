"""Control messages reach every rank over a tree whose groups stay small."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.comm.control import (
    FAN_OUT,
    WORLD,
    ControlPath,
    first_problem,
    levels_of,
    run_all,
)
from trainer.verify.ranks import run_ranks


@given(st.integers(1, 400), st.integers(1, 9), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_every_rank_reaches_rank_0_through_leaders(world, node, fan_out):
    levels = [levels_of(rank, world, node, fan_out) for rank in range(world)]
    groups: dict[str, list[int]] = {}
    for rank, own_levels in enumerate(levels):
        assert all(at.index == 0 for at in own_levels[:-1]), (
            "a rank leads all its groups but the last"
        )
        assert not own_levels or own_levels[-1].covers(world) or own_levels[-1].index > 0
        assert [at.stride for at in own_levels] == sorted({at.stride for at in own_levels})
        for at in own_levels:
            assert at.first + at.index * at.stride == rank
            assert at.size <= max(node, fan_out)
            groups.setdefault(at.name, []).append(rank)
    for own_levels in levels:
        for at in own_levels:
            assert len(groups[at.name]) == at.size, "all members know of the group"
    for rank in range(1, world):
        assert [at.index > 0 for at in levels[rank]].count(True) == 1 or levels[rank][-1].covers(
            world
        )


def test_a_large_world_has_few_groups_and_levels():
    """Connections a rank and hops, at 16,384 ranks."""
    levels = [levels_of(rank, 16384, 8) for rank in range(16384)]
    assert max(sum(at.size - 1 for at in own_levels) for own_levels in levels) <= 7 + 3 * (
        FAN_OUT - 1
    )
    assert max(map(len, levels)) == 4
    assert sum(at.index == 0 for own_levels in levels for at in own_levels) == 2048 + 128 + 8 + 1


def join(rank, world, home, node, fan_out):
    return ControlPath.join(
        dist.FileStore(f"{home}/store"), rank, world, node, timedelta(seconds=30), fan_out
    )


@pytest.mark.process
@pytest.mark.parametrize(("world", "node", "fan_out"), [(7, 2, 2), (9, 8, 4), (4, 1, 3), (1, 8, 2)])
def test_messages_over_a_tree(tmp_path, world, node, fan_out):
    """Uneven lengths, empty ones, any source, incomplete groups; and as one group of all."""

    def work(rank):
        answers = []
        for control in (join(rank, world, tmp_path, node, fan_out), WORLD):
            texts = [f"{rank}" * rank for rank in range(world)]
            answers.append(
                {
                    "size": control.world_size,
                    "sum": control.sum_ints([rank, 2**40 + rank, -1]),
                    "most": control.maximum(float(-rank - 1)),
                    "gather": [raw.decode() for raw in control.gather_bytes(texts[rank].encode())],
                    "all": [raw.decode() for raw in control.all_gather_bytes(texts[rank].encode())],
                    "from": [
                        control.broadcast_bytes(f"{rank}!".encode(), src).decode()
                        for src in range(world)
                    ],
                    "none": control.broadcast_bytes(b"" if rank == 0 else b"x").decode(),
                    "judged": control.judge(b"bad" if rank in (2, 3) else b"", first_problem),
                }
            )
            control.barrier()
        return answers

    for rank, (tree, flat) in enumerate(run_ranks(work, world)):
        assert tree == flat
        texts = [f"{source}" * source for source in range(world)]
        assert tree["size"] == world
        assert tree["sum"] == [sum(range(world)), world * 2**40 + sum(range(world)), -world]
        assert tree["most"] == -1.0
        assert tree["gather"] == (texts if rank == 0 else []) and tree["all"] == texts
        assert tree["from"] == [f"{src}!" for src in range(world)] and tree["none"] == ""
        assert tree["judged"] == ("rank 2: bad" if world > 2 else "")


@pytest.mark.process
def test_a_group_closes_although_one_of_its_operations_failed(tmp_path, monkeypatch):
    """Rank 1 leaves. Rank 0 cannot send to it, while a long message from rank 2 arrives: it is
    received whole, and both leave, too."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")  # as `connect` does

    def work(rank):
        store = dist.FileStore(f"{tmp_path}/store")
        group = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=30))
        group.allreduce([torch.zeros(1)]).wait()
        message = torch.full((1 << 23,), float(rank))
        error = ""
        try:
            if rank == 0:
                run_all(
                    [partial(group.send, [message], 1, 0), partial(group.recv, [message], 2, 0)]
                )
            elif rank == 2:
                run_all([partial(group.send, [message], 0, 0)])
        except RuntimeError as caught:
            error = str(caught)
        del group  # waits for its threads
        return {"error": error, "message": message.unique().tolist()}

    zeroth, first, second = run_ranks(work, 3)
    assert zeroth["error"] and zeroth["message"] == [2.0]
    assert first == {"error": "", "message": [1.0]}
    assert second == {"error": "", "message": [2.0]}
