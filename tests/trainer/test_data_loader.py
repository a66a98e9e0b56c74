"""The loader gives every layout the same global batch, at any step, without memory."""

from __future__ import annotations

import pytest
import torch

from tests.beds.plans import make_plan, tiny_model
from trainer.data.build import open_tokens
from trainer.data.fingerprint import fingerprint, signed
from trainer.data.loader import Loader
from trainer.data.order import SampleOrder
from trainer.errors import DataError


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(300)))
    return tmp_path


def plan_for(corpus, **changes):
    return make_plan(data_paths=[str(corpus / "a.txt")], cache_dir=str(corpus / "cache"), **changes)


def rows(batches) -> list[tuple[int, ...]]:
    return [
        tuple(row)
        for batch in batches
        for row in torch.cat([batch.tokens, batch.targets[:, -1:]], 1).tolist()
    ]


def global_batch(plan, store, consumed: int) -> list[tuple[int, ...]]:
    """The union over data-parallel replicas."""
    result = []
    for rank in plan.ranks:
        if (rank.coord.tp, rank.coord.pp, rank.coord.cp) == (0, 0, 0):
            result += rows(Loader(plan, rank.coord, store).step(consumed))
    return sorted(result)


def fingerprint_of(plan, store, consumed) -> int:
    """The sum over the replicas, as a step boundary makes it."""
    coords = [
        rank.coord
        for rank in plan.ranks
        if (rank.coord.tp, rank.coord.pp, rank.coord.cp) == (0, 0, 0)
    ]
    return signed(
        sum(
            batch.fingerprint
            for coord in coords
            for batch in Loader(plan, coord, store).step(consumed)
        )
    )


LAYOUTS = [
    {"micro_batches": 8},
    {"micro_batches": 2, "micro_batch_size": 4},
    {"dp": 2, "micro_batches": 4},
    {"dp": 4, "micro_batches": 1, "micro_batch_size": 2},
    {"dp": 2, "ep": 2, "micro_batches": 2},
    {"dp": 2, "tp": 2, "pp": 2, "micro_batches": 2, "micro_batch_size": 2},
]


def test_every_layout_sees_the_same_global_batches(corpus):
    plans = [plan_for(corpus, **layout) for layout in LAYOUTS]
    store = open_tokens(plans[0].job.data)
    for consumed in (0, 8, 800):
        batches = [global_batch(plan, store, consumed) for plan in plans]
        assert all(batch == batches[0] for batch in batches) and len(batches[0]) == 8
        order = SampleOrder(store.samples(16), plans[0].job.data.seed)
        positions = list(range(consumed, consumed + 8))
        expected_fingerprint = fingerprint(
            positions, [store.window(order(position), 16) for position in positions]
        )
        assert [fingerprint_of(plan, store, consumed) for plan in plans] == [
            expected_fingerprint
        ] * len(plans)
        altered_windows = [store.window(order(position), 16).copy() for position in positions]
        altered_windows[3][5] ^= 1  # one token; and the same samples at each other's places
        assert expected_fingerprint not in (
            fingerprint(positions, altered_windows),
            fingerprint(positions[::-1], altered_windows),
        )


def test_an_epoch_reads_every_sample_once(corpus):
    plan = plan_for(corpus, micro_batches=1)
    store = open_tokens(plan.job.data)
    loader = Loader(plan, plan.ranks[0].coord, store)
    count = store.samples(16)
    for epoch in range(2):
        seen = [row for step in range(count) for row in rows(loader.step(epoch * count + step))]
        assert sorted(seen) == sorted(
            tuple(store.window(index, 16).tolist()) for index in range(count)
        )
    loader.close()


def test_jumping_around_is_the_same_as_going_through(corpus):
    plan = plan_for(corpus, dp=2)
    store = open_tokens(plan.job.data)
    through = Loader(plan, plan.ranks[1].coord, store)
    straight = {consumed: rows(through.step(consumed)) for consumed in range(0, 40, 4)}
    jumping = Loader(plan, plan.ranks[1].coord, store)
    for consumed in (20, 0, 4, 36, 20, 24):
        assert rows(jumping.step(consumed)) == straight[consumed]


def test_shapes_and_kinds(corpus):
    plan = plan_for(corpus, micro_batches=3, micro_batch_size=2)
    store = open_tokens(plan.job.data)
    batches = Loader(plan, plan.ranks[0].coord, store).step(0)
    assert len(batches) == 3
    for batch in batches:
        assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == (2, 16)
        assert (
            batch.tokens.dtype == torch.int64
            and batch.documents is None
            and batch.valid_tokens == 32
        )


def test_documents_can_be_kept_apart(corpus):
    (corpus / "b.txt").write_text("x" * 30)
    plan = make_plan(
        data_paths=[str(corpus / "a.txt"), str(corpus / "b.txt")],
        cache_dir=str(corpus / "cache"),
        isolate_documents=True,
    )
    store = open_tokens(plan.job.data)
    loader = Loader(plan, plan.ranks[0].coord, store)
    batches = [batch for step in range(store.samples(16) // 2) for batch in loader.step(2 * step)]
    assert any(
        int(batch.documents.numbers.max()) > 0 and batch.valid_tokens < 16 for batch in batches
    )


def test_too_small_a_corpus_or_vocabulary_is_one_line(corpus):
    plan = plan_for(corpus, seq_len=100_000)
    store = open_tokens(plan.job.data)
    with pytest.raises(
        DataError, match=r"corpus has \d+ tokens, one sample needs 100001 \(train.seq_len \+ 1\)"
    ):
        Loader(plan, plan.ranks[0].coord, store)
    plan = plan_for(corpus, model=tiny_model(vocab=256))
    with pytest.raises(
        DataError, match=r"tokenizer 'bytes' has 257 ids, model test only 256 \(model.vocab\)"
    ):
        Loader(plan, plan.ranks[0].coord, store)
