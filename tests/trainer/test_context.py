"""Context parallelism: every method equals attention on one rank, and zig-zag balances the work."""

from __future__ import annotations

import functools
from itertools import product
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan.document import CpMethod
from tests.reference.attention import attention
from tests.trainer.operations import LargestTensor
from tests.trainer.together import run_together, told
from trainer.comm.collectives import CommCounter
from trainer.compat import Segments
from trainer.model.attention import SDPA
from trainer.model.documents import Documents
from trainer.parallel.context import block
from trainer.parallel.context.allgather import AllGatherAttention
from trainer.parallel.context.order import natural_order, positions, visible
from trainer.parallel.context.ring import RingAttention
from trainer.parallel.context.ulysses import UlyssesAttention
from trainer.verify.ranks import run_ranks

METHODS = get_args(CpMethod)
SEQ = 16
BATCH = 2
HEADS = 4
DIM = 8


def inputs(kv_heads: int, packed: bool, dtype=torch.float64):
    make = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(BATCH, SEQ, heads, DIM, dtype=dtype, generator=make)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    grad = torch.randn(BATCH, SEQ, HEADS, DIM, dtype=dtype, generator=make)
    # borders inside chunks, on chunk edges, and a document of one token
    documents = (
        torch.tensor([[0] * 5 + [1] * 3 + [2] * 8, [0] + [1] * 12 + [2] * 3]) if packed else None
    )
    return q, k, v, grad, documents


@functools.cache
def on_one_rank(kv_heads: int, packed: bool) -> dict[str, torch.Tensor]:
    q, k, v, grad, documents = inputs(kv_heads, packed)
    full = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attention(*full, documents)
    out.backward(grad)
    return {"out": out.detach(), **dict(zip("qkv", (t.grad for t in full), strict=True))}


def core_of(method: str, rank: int, size: int, counter: CommCounter):
    group = dist.group.WORLD
    ranks = tuple(range(size))
    if method == "allgather":
        return AllGatherAttention(group, size, rank, counter)
    if method == "ulysses":
        return UlyssesAttention(SDPA(causal=True), group, size, counter)
    return RingAttention(method, group, ranks, rank, counter)


def one_rank(rank: int, method: str, size: int, kv_heads: int, packed: bool) -> dict:
    q, k, v, grad, documents = inputs(kv_heads, packed)
    own_positions = torch.tensor(positions(method, SEQ, size, rank))
    local = [t[:, own_positions].clone().requires_grad_() for t in (q, k, v)]
    counter = CommCounter()
    batch_positions = own_positions.expand(BATCH, -1)
    mine_of = (
        None
        if documents is None
        else Documents.of(documents).each(lambda numbers: numbers[:, own_positions])
    )
    out = core_of(method, rank, size, counter)(*local, batch_positions, mine_of)
    out.backward(grad[:, own_positions])
    return {
        "out": out,
        **dict(zip("qkv", (t.grad for t in local), strict=True)),
        "sent": counter.bytes["cp"],
    }


def joined(results: list[dict], key: str, method: str, size: int) -> torch.Tensor:
    return torch.cat([r[key] for r in results], dim=1)[:, natural_order(method, SEQ, size)]


@pytest.mark.process
@pytest.mark.parametrize("size", [2, 4])
def test_every_method_equals_one_rank(size):
    variants = list(product(METHODS, (4, 2, 1), (False, True)))
    cases = {
        f"{method}, {kv_heads} kv heads, packed {packed}": (method, size, kv_heads, packed)
        for method, kv_heads, packed in variants
    }
    for case, results in run_together(one_rank, size, cases).items():
        with told(case):
            method, _, kv_heads, packed = cases[case]
            for key, expected in on_one_rank(kv_heads, packed).items():
                torch.testing.assert_close(
                    joined(results, key, method, size), expected, rtol=0, atol=1e-12
                )


@pytest.mark.process
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_equal_the_formulas(size):
    """fp64; |k| = b * kv_heads * s/n * d elements of 8 bytes."""
    piece = BATCH * 2 * SEQ // size * DIM * 8
    hops = 2 * 2 * (size - 1) + 2 * size
    cases = {method: (method, size, 2, False) for method in ("zigzag", "ring", "allgather")}
    answers = run_together(one_rank, size, cases)
    sent = {method: {result["sent"] for result in results} for method, results in answers.items()}
    assert sent["zigzag"] == sent["ring"] == {hops * piece}
    assert sent["allgather"] == {
        6 * (size - 1) * piece
    }  # k and v: gathered twice, gradients scattered once


def causal_pairs(method: str, length: int, size: int) -> list[int]:
    """(query, key) pairs that each rank has to compute."""
    return [
        sum(position + 1 for position in positions(method, length, size, rank))
        for rank in range(size)
    ]


def computed_pairs(rank: int, method: str, size: int, length: int) -> int:
    """(query, key) pairs of the blocks that a rank's core really computes, forward and backward."""
    pairs = 0

    def counting(original, at: int):
        def count(*args, **options):
            nonlocal pairs
            (*_, queries, _), (*_, keys, _) = args[at].shape, args[at + 1].shape
            causal = args[4] if at == 0 else options["causal"]
            pairs += queries * (queries + 1) // 2 if causal else queries * keys
            return original(*args, **options)

        return count

    block.forward, block.backward = (
        counting(block.forward, 0),
        counting(block.backward, 1),
    )  # in this process alone
    make = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(1, length // size, 1, 8, generator=make).requires_grad_() for _ in range(3)
    )
    core_of(method, rank, size, CommCounter())(q, k, v, None, None).sum().backward()
    return pairs


@pytest.mark.process
def test_zigzag_ranks_compute_equally_much():
    """Measured on the blocks that are computed: less than 2 % apart, and as many as the formula
    says."""
    for method in ("zigzag", "allgather", "ring"):
        rank_pairs = run_ranks(computed_pairs, 4, method, 4, 512)
        assert rank_pairs == [2 * pairs for pairs in causal_pairs(method, 512, 4)]
        assert (max(rank_pairs) / min(rank_pairs) < 1.02) == (method != "ring")


def test_zigzag_balances_causal_work_within_two_percent():
    for size in (2, 4, 8, 16):
        pairs = causal_pairs("zigzag", 8192, size)
        assert (max(pairs) - min(pairs)) / max(pairs) < 0.02
        assert (
            max(causal_pairs("ring", 8192, size)) / min(causal_pairs("ring", 8192, size)) > size / 2
        )
        for method in ("zigzag", "allgather", "ring"):
            assert sum(causal_pairs(method, 8192, size)) == 8192 * 8193 // 2


@given(st.sampled_from(METHODS), st.integers(1, 6), st.integers(1, 4))
def test_visible_blocks_are_exactly_the_causal_mask(method, size, half):
    seq = 2 * size * half
    if method == "ulysses":
        return
    order = [positions(method, seq, size, index) for index in range(size)]
    assert sorted(p for rank_positions in order for p in rank_positions) == list(range(seq))
    for index in range(size):
        for source in range(size):
            own_positions = order[index]
            theirs = order[source]
            see = visible(method, 2 * half, index, source)
            expected = {(i, j) for i in own_positions for j in theirs if j <= i}
            if see is None:
                assert not expected
                continue
            rows = own_positions[see.queries]
            keys = theirs[see.keys]
            visible_pairs = {
                (i, j)
                for a, i in enumerate(rows)
                for b, j in enumerate(keys)
                if not see.causal or b <= a
            }
            assert visible_pairs == expected


def seen_by(sight_kind: str, queries: int, keys: int, heads: int) -> block.Sight:
    """Everything, in one of the ways in which a block of two samples is computed."""
    if sight_kind == "segments":
        return block.Sight(segments=Segments.of([(queries, keys)] * 2, torch.device("cpu")))
    if sight_kind == "explicit":
        mask = torch.ones(2, queries, keys, dtype=torch.bool)
        return block.Sight(mask, torch.ones(2, heads, queries, keys, dtype=torch.float64))
    return block.Sight()


@pytest.mark.parametrize("sight_kind", ["fused", "explicit", "segments"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys"), [(8, 2, 4, 40), (6, 3, 3, 50), (8, 1, 2, 64)]
)
def test_a_block_computes_with_grouped_heads_and_does_not_repeat_them(
    sight_kind, heads, kv_heads, queries, keys
):
    make = torch.Generator().manual_seed(5)
    shapes = [(2, heads, queries, DIM), *2 * [(2, kv_heads, keys, DIM)], (2, heads, queries, DIM)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64, generator=make) for shape in shapes)
    sight = seen_by(sight_kind, queries, keys, heads)
    with LargestTensor() as largest:
        out, lse = block.forward(q, k, v, 0.3, False, sight)
        gradients = block.backward(grad, q, k, v, out, lse, 0.3, False, sight)
    repeated = 2 * heads * keys * DIM
    assert largest.elements <= max(2 * kv_heads * keys * DIM, 2 * heads * queries * keys) < repeated
    full = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [full[0], *(x.repeat_interleave(heads // kv_heads, dim=1) for x in full[1:])]
    scores = wide[0] @ wide[1].transpose(-1, -2) * 0.3
    expected = scores.softmax(-1) @ wide[2]
    expected.backward(grad)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)
    for gradient, right in zip(gradients, full, strict=True):
        assert gradient.dtype == right.dtype
        torch.testing.assert_close(gradient, right.grad, rtol=0, atol=1e-12)


def test_gradients_of_grouped_heads_in_bf16_are_summed_wide():
    make = torch.Generator().manual_seed(5)
    shapes = [(1, 16, 64, DIM), *2 * [(1, 1, 64, DIM)], (1, 16, 64, DIM)]
    q, k, v, grad = (torch.randn(shape, generator=make).bfloat16() for shape in shapes)
    out, lse = block.forward(q, k, v, 0.3, True)
    narrow = block.backward(grad, q, k, v, out, lse, 0.3, True)
    wide = [x.double() for x in (grad, q, k, v)]
    exact = block.backward(*wide, *block.forward(*wide[1:], 0.3, True), 0.3, True)
    for gradient, right in zip(narrow, exact, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - right).norm() < 2**-7 * right.norm()


def test_a_sequence_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="divisible by 8"):
        positions("zigzag", 12, 4, 0)
