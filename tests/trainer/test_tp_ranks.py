"""The fork harness, the mesh and the counted collectives, on real processes."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.run.processes import identity, is_alive
from tests.beds.plans import make_plan
from tests.patience import wait_for
from tests.trainer.samples import LLAMA, batch, small
from trainer.comm.collectives import (
    CommCounter,
    Message,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_messages,
)
from trainer.comm.mesh import Mesh, groups_used
from trainer.parallel.apply import build
from trainer.verify.ranks import RankError, run_ranks

pytestmark = pytest.mark.process
#: Whether torch splits groups that are bound to no device: 2.11 does not. `Mesh` then splits none;
#: those on fake GPUs are split with every torch (test_gpu.py).
SPLITS_ON_CPUS = "backend" in inspect.signature(dist.split_group).parameters


def alive(pid: int) -> bool:
    """Running: one that is dead, but that whoever adopted it has not waited for yet, is not."""
    process = identity(pid)
    return process is not None and is_alive(process)


# ------------------------------------------------------------------------------------------------
#     harness


def test_results_of_any_nesting_come_back_exactly():
    def work(rank, message):
        tensors = [torch.tensor(rank, dtype=torch.bfloat16), torch.arange(3)[::2]]
        return {
            "t": tensors,
            "none": None,
            "text": message,
            "deep": {"x": {"y": torch.zeros(0, 2)}},
            "f": 0.1 + rank,
        }

    results = run_ranks(work, 3, "söme\n")
    for rank, result in enumerate(results):
        assert result["text"] == "söme\n" and result["none"] is None and result["f"] == 0.1 + rank
        assert result["t"][0].dtype == torch.bfloat16 and result["t"][0] == rank
        assert result["t"][1].tolist() == [0, 2] and result["deep"]["x"]["y"].shape == (0, 2)


def test_the_first_failing_rank_is_named_with_its_traceback(tmp_path):
    def work(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 1:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(RankError, match="the cause") as error:
        run_ranks(work, 3)
    assert error.value.rank == 1 and str(error.value).startswith("rank 1: Traceback")
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


def test_a_rank_that_cannot_join_the_group_is_named_with_its_traceback():
    def join(**rendezvous):
        raise ValueError(f"rank {rendezvous['rank']} of {rendezvous['world_size']} has no way in")

    with pytest.raises(RankError, match="rank 0 of 1 has no way in"):
        run_ranks(lambda rank: rank, 1, join=join)


def test_a_killed_rank_is_named():
    with pytest.raises(RankError, match="rank 0: ended with code -9 and no result"):
        run_ranks(
            lambda rank: os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else dist.barrier(), 2
        )


def test_a_hanging_rank_shows_where_it_stands(tmp_path):
    def stand_still(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 1:
            time.sleep(600)

    with pytest.raises(RankError, match="rank 1 did not finish") as error:
        run_ranks(stand_still, 2, timeout=2.0)  # from when both have begun
    assert "stand_still" in str(error.value)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(map(alive, pids))


def test_ranks_die_with_their_parent(tmp_path):
    code = f"""
import os, time
from pathlib import Path
from trainer.verify.ranks import run_ranks
def work(rank):
    (Path({str(tmp_path)!r}) / str(rank)).write_text(str(os.getpid()))
    time.sleep(600)
run_ranks(work, 2)
"""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root) as parent:
        try:
            wait_for(
                lambda: sum(bool(path.read_text()) for path in tmp_path.iterdir()) == 2,
                what="both ranks",
            )
            pids = [int(path.read_text()) for path in tmp_path.iterdir()]
            assert all(map(alive, pids))
        finally:
            parent.kill()
    wait_for(lambda: not any(map(alive, pids)), what="end of both ranks")


# ------------------------------------------------------------------------------------------------
#     mesh


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(False, id="made by members"),
        pytest.param(
            True,
            id="split from a larger group",
            marks=pytest.mark.skipif(
                not SPLITS_ON_CPUS,
                reason="this torch splits a group that is bound to a GPU, and no other",
            ),
        ),
    ],
)
@pytest.mark.parametrize(
    "degrees",
    [{"tp": 2, "pp": 2, "dp": 2}, {"pp": 4, "dp": 2}, {"dp": 4, "zero_group": 2}],
    ids=str,
)
def test_every_group_reaches_exactly_its_members(degrees, split):
    plan = make_plan(**degrees, zero=1, model=small(kv_heads=1, layers=4, tied_embeddings=True))

    def work(rank):
        mesh = Mesh.from_plan(plan, rank, split=split)
        sums = {}
        for name in groups_used(plan):
            value = torch.tensor([2**rank])
            sums[name] = int(all_reduce(value, mesh.group(name), name, CommCounter()))
        group_ids = {"pp": id(mesh.group("pp")), "embedding": id(mesh.group("embedding"))}
        return {
            "sums": sums,
            "sizes": {name: mesh.size(name) for name in mesh.members},
            "own": group_ids,
        }

    for rank, result in enumerate(run_ranks(work, plan.parallel.world_size)):
        for name, total in result["sums"].items():
            members = Mesh.alone(plan, rank).ranks(name)
            assert total == sum(2**member for member in members or (rank,)), (rank, name)
            assert result["sizes"][name] == max(1, len(members))
        assert result["sums"]["kv"] == result["sums"]["tp"], (
            "one key/value head: all tp ranks share it"
        )
        if plan.parallel.pp > 1:
            assert result["own"]["pp"] != result["own"]["embedding"], (
                "point-to-point has a group of its own"
            )


def test_a_middle_stage_is_in_no_embedding_group():
    plan = make_plan(pp=4)
    mesh = Mesh.alone(plan, 1)
    assert (
        mesh.ranks("embedding") == ()
        and mesh.group("embedding") is None
        and mesh.size("embedding") == 1
    )
    assert Mesh.alone(plan, 3).ranks("embedding") == (0, 3) and Mesh.alone(plan, 3).index("pp") == 3


# ------------------------------------------------------------------------------------------------
#     collectives


def test_collectives_are_right_and_counted_by_the_ring_formulas():
    def work(rank):
        counter = CommCounter()
        group = dist.group.WORLD
        n = 4
        out = {"sum": all_reduce(torch.full((6,), rank + 1.0), group, "a", counter)}
        out["gathered"] = all_gather(torch.tensor([[rank]]), group, "b", counter)
        out["mine"] = reduce_scatter(torch.arange(8.0) + rank, group, "c", counter)
        to = (rank + 1) % n
        source = (rank - 1) % n
        both = (
            Message(torch.tensor([rank]), to, False),
            Message(torch.empty(1, dtype=torch.int64), source, True),
        )
        out["from"] = [handle.wait() for handle in start_messages(both, group, "d", counter)][1]
        handle = start_all_reduce(torch.ones(2), group, "e", counter, op=dist.ReduceOp.MAX)
        out["late"] = handle.wait() + handle.wait()
        sent, seconds = counter.take()
        return {**out, "sent": sent, "seconds": seconds, "after": counter.take()}

    for rank, result in enumerate(run_ranks(work, 4)):
        assert result["sum"].tolist() == [10.0] * 6 and result["gathered"].tolist() == [
            [0],
            [1],
            [2],
            [3],
        ]
        assert result["mine"].tolist() == [4.0 * (2 * rank) + 6, 4.0 * (2 * rank + 1) + 6]
        assert result["from"].item() == (rank - 1) % 4 and result["late"].tolist() == [2.0, 2.0]
        assert result["sent"] == {
            "a": 2 * 24 * 3 // 4,
            "b": 32 * 3 // 4,
            "c": 32 * 3 // 4,
            "d": 8,
            "e": 2 * 8 * 3 // 4,
        }
        assert (
            result["seconds"].keys() == result["sent"].keys()
            and min(result["seconds"].values()) > 0
        )
        assert result["after"] == [{}, {}]
        json.dumps(result["seconds"])


def test_without_a_group_nothing_moves_and_nothing_is_counted():
    counter = CommCounter()
    x = torch.arange(4.0)
    assert all_reduce(x, None, "tp", counter) is x and all_gather(x, None, "tp", counter) is x
    assert reduce_scatter(x, None, "tp", counter) is x
    out = torch.empty(4)
    assert all_gather(x, None, "tp", counter, out=out) is out and torch.equal(out, x)
    assert counter.take() == ({}, {})


@pytest.mark.parametrize("sp", [False, True])
def test_bytes_sent_are_those_of_the_formula(sp):
    """A layer takes 4 all-reduces a micro-batch, or 4 all-gathers and 4 reduce-scatters: the same
    bytes (2205.05198). With SP 2 all-gathers more: inputs are gathered again in backward."""
    b = 3
    s = 8
    tp = 4
    item = 8
    micro_batches = 2
    plan = make_plan(model=small(**LLAMA), tp=tp, sp=sp, micro_batch_size=b, seq_len=s)

    def work(rank):
        counter = CommCounter()
        model_part = build(plan, Mesh.from_plan(plan, rank), counter, dtype=torch.float64)
        for seed in range(micro_batches):
            micro_batch = batch(plan.model, b, s, seed)
            model_part.loss(model_part.stages[0](None, micro_batch), micro_batch.targets).backward()
        return counter.bytes["tp"]

    hidden = b * s * plan.model.hidden * item
    pairs = (
        2 * plan.model.layers + 1
    )  # attention and MLP of every block, embedding out with head in
    loss = 2 * b * s * item * (tp - 1)  # one all-gather of two numbers a token and rank
    gathers = 2 * 2 * pairs + (pairs if sp else 0)
    assert run_ranks(work, tp) == [micro_batches * (gathers * hidden * (tp - 1) // tp + loss)] * tp
