"""Our gloo collectives against gloo's own: small and large, several in progress at once, in place,
in bf16."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from trainer.comm.collectives import CommCounter, start_all_gather, start_reduce_scatter
from trainer.verify.ranks import run_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_equal_gloos_own_at_any_size_and_in_place(world):
    sizes = [5, 300_007]  # elements a rank

    def work(rank):
        torch.manual_seed(rank)
        group = dist.group.WORLD
        counter = CommCounter()
        checked = 0
        for dtype in (torch.float32, torch.float64):
            buffers = [torch.randn(world * size, dtype=dtype) for size in sizes for _ in range(3)]
            expected_shards = []
            for buffer in buffers:
                total = buffer.clone()
                dist.all_reduce(total)
                expected_shards.append(total.chunk(world)[rank])
            shards = [
                buffer.chunk(world)[rank] for buffer in buffers
            ]  # the result may lie in the buffer itself
            started = [
                start_reduce_scatter(buffer, group, "a", counter, out=out)
                for buffer, out in zip(buffers, shards, strict=True)
            ]
            for handle, want in zip(started, expected_shards, strict=True):
                assert torch.allclose(handle.wait(), want, atol=1e-5)
            started = [
                start_all_gather(out, group, "b", counter, out=buffer)
                for buffer, out in zip(buffers, shards, strict=True)
            ]
            for handle, shard in zip(started, shards, strict=True):
                gathered = torch.empty_like(handle.wait())
                dist.all_gather_into_tensor(gathered, shard.clone())
                assert torch.equal(handle.wait(), gathered)
                checked += 1
        addends = torch.ones(world, 1000, 1, dtype=torch.bfloat16) * (1 + rank / 128)
        summed = start_reduce_scatter(addends, group, "c", counter).wait()
        exact = sum(1 + peer / 128 for peer in range(world))
        assert torch.equal(summed, torch.full_like(summed, exact)), "bf16 pieces are added in fp32"
        return checked

    assert run_ranks(work, world) == [12] * world
