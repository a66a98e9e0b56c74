"""Packed documents as runs of tokens: every pair that a mask would allow, and no other; no mask is
built."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.beds import fakegpu
from tests.reference.attention import attention
from tests.trainer import gpu_steps
from tests.trainer.operations import LargestTensor
from trainer import compat
from trainer.compat import Segments
from trainer.data.batch import from_windows
from trainer.model.attention import SDPA
from trainer.model.documents import Documents, pairs
from trainer.parallel.context import block
from trainer.parallel.context.order import chunks, part, visible

SAMPLES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3)


def same_length(lengths):
    """Every sample filled up to the longest, and to a multiple of 8, with a last document."""
    longest = -(-max(map(sum, lengths)) // 8) * 8
    return tuple(
        tuple(document_lengths)
        + ((longest - sum(document_lengths),) if sum(document_lengths) < longest else ())
        for document_lengths in lengths
    ), longest


def numbers_of(lengths):
    return torch.stack(
        [
            torch.repeat_interleave(
                torch.arange(len(document_lengths)), torch.tensor(document_lengths)
            )
            for document_lengths in lengths
        ]
    )


def allowed(runs, queries, keys):
    """bool [queries, keys] of all samples end to end, from the runs."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for rows, columns in Segments.of(tuple(runs), torch.device("cpu")).slices():
        mask[rows, columns] = True
    return mask


@given(SAMPLES, st.sampled_from(("zigzag", "ring")), st.sampled_from((1, 2, 4)))
def test_runs_are_the_mask(lengths, method, size):
    """The runs cover one rank, and each block of keys that comes to each rank of a ring."""
    lengths, length = same_length(lengths)
    numbers = numbers_of(lengths)
    for index in range(size):
        own_chunks = chunks(method, length, size, index)
        for source in range(size):
            see = visible(method, length // size, index, source)
            if see is None:
                continue
            queries = part(own_chunks, see.queries)
            keys = part(chunks(method, length, size, source), see.keys)
            rows, columns = ([at for span in side for at in span] for side in (queries, keys))
            runs = pairs(lengths, queries, keys)
            assert sum(run[0] for run in runs) == len(lengths) * len(rows)
            assert sum(run[1] for run in runs) == len(lengths) * len(columns)
            mask = allowed(runs, len(lengths) * len(rows), len(lengths) * len(columns))
            same_document = numbers[:, rows, None] == numbers[:, None, columns]
            assert torch.equal(mask, torch.block_diag(*same_document.float()).bool())
            if source != index:
                assert len(runs) <= 3 * len(lengths), "runs without a partner are joined"


def test_documents_of_a_batch_are_those_of_its_text():
    batch = from_windows(torch.tensor([[5, 9, 1, 1, 9, 9, 2, 3], [1, 2, 3, 4, 5, 6, 7, 9]]), eod=9)
    assert batch.documents is not None
    assert batch.documents.lengths == ((2, 3, 1, 1), (7,))
    half = batch.each(lambda x: x[:, :4])
    assert half.documents.lengths == batch.documents.lengths and half.documents.numbers.shape == (
        2,
        4,
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_of_documents_equals_the_twin_and_builds_no_mask(causal, kv_heads):
    lengths = ((5, 3, 8), (1, 12, 3))
    documents = Documents.of(numbers_of(lengths))
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 16, h, 8, dtype=torch.float64, generator=make)
        for h in (4, kv_heads, kv_heads)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    twins = [x.clone().requires_grad_() for x in (q, k, v)]
    out = SDPA(causal)(*leaves, None, documents)
    expected = attention(*twins, documents.numbers, causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    for gradient, twin in zip(
        torch.autograd.grad(out.sin().sum(), leaves),
        torch.autograd.grad(expected.sin().sum(), twins),
        strict=True,
    ):
        torch.testing.assert_close(gradient, twin, rtol=0, atol=1e-12)
    documents = Documents.of(numbers_of(((256,) * 4,)))
    with LargestTensor() as largest:
        x = torch.randn(1, 1024, 1, 8, requires_grad=True)
        SDPA(causal)(x, x, x, None, documents).sum().backward()
    assert largest.elements < 1024 * 64, "nothing of s x s"


def test_blocks_of_documents_have_the_same_output_and_gradients_as_a_mask():
    """Queries without a key give zeros and a log-sum-exp of minus infinity, which joins as
    nothing."""
    lengths = ((5, 3, 8), (1, 12, 3))
    queries = (range(8, 16),)
    keys = (range(8),)
    documents = Documents.of(numbers_of(lengths))
    make = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, 4, 8, 8, dtype=torch.float64, generator=make) for _ in range(4))
    labels = documents.numbers[None]
    sights = [
        block.inside(documents, queries, keys),
        block.between(labels[:, :, 8:], labels[:, :, :8], q, None),
    ]
    outputs = [block.forward(q, k, v, 0.3, False, sight) for sight in sights]
    assert outputs[0][1].isinf().any() and not outputs[0][1].isinf().all()
    own_output = block.forward(q, q, q, 0.3, True, block.inside(documents, queries, queries))
    out, lse = block.join(*own_output, *outputs[1])
    results = [
        block.backward(grad, q, k, v, out, lse.contiguous(), 0.3, False, sight) for sight in sights
    ]
    for by_segments, by_mask in zip(
        (*outputs[0], *results[0]), (*outputs[1], *results[1]), strict=True
    ):
        torch.testing.assert_close(by_segments, by_mask, rtol=0, atol=1e-12)


def test_a_block_whose_documents_do_not_meet_is_not_computed():
    documents = Documents.of(numbers_of(((8, 8),)))
    assert block.inside(documents, (range(8, 16),), (range(8),)).nothing
    assert not block.inside(documents, (range(8, 16),), (range(8, 16),)).nothing


@pytest.mark.process
@pytest.mark.skipif(bool(fakegpu.missing()), reason=fakegpu.missing() or "there are fake GPUs")
def test_documents_take_the_flash_kernel_of_a_gpu():
    """Forward and backward, alone and under context parallelism: its kernels, no mask, no wait for
    the device."""
    record = fakegpu.call(gpu_steps.packed_attention)
    assert record["waits"] == []
    assert record["kernels"]["alone"] and record["kernels"]["blocks"]
    for names in record["kernels"].values():
        assert any("flash_fwd" in name for name in names) and any(
            "flash_bwd" in name for name in names
        )
    assert record["most_bytes"] < record["mask_bytes"]


def test_flash_knows_which_gpus_it_serves():
    assert compat.has_flash(torch.empty(1, 1, 1, 8))
    assert not compat.has_flash(torch.empty(1, 1, 1, 8, dtype=torch.int64))
