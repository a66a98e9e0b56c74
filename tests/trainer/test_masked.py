"""Masked tokens: which tokens are hidden, the same ones on every layout and after a resume, and
what a tokenizer and a model need for it."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import BERT, MHA
from tests.trainer.test_data_tokenizer import word_level
from trainer.data.batch import IGNORED, from_windows
from trainer.data.build import open_tokens
from trainer.data.loader import Loader
from trainer.data.objectives.masked import MaskedTokens
from trainer.errors import DataError
from trainer.verify.plain_masked import plain_masked

MASK = 257
EOD = 256
WORDS = {"seed": 3, "mask": MASK, "vocabulary": 257, "eod": EOD}
MODEL = tiny_model(**BERT, **MHA | {"vocab": 258})


def tokens_of(samples: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(257, (samples, length + 1), generator=generator)


def test_hidden_tokens_are_those_of_the_definition():
    windows = tokens_of(6, 40)
    windows[1] = EOD  # nothing to hide
    windows[2, :-2] = EOD  # one token to hide
    indices = [0, 1, 2, 900, 10**12, 5]
    batch = MaskedTokens(**WORDS)(from_windows(windows), indices)
    inputs, targets = plain_masked(windows[:, :-1], indices, **WORDS)
    assert torch.equal(batch.tokens, inputs) and torch.equal(batch.targets, targets)
    assert [int((row != IGNORED).sum()) for row in batch.targets[1:3]] == [0, 1]


def test_shares_are_those_of_the_paper():
    windows = tokens_of(256, 512)
    tokens = windows[:, :-1]
    batch = MaskedTokens(**WORDS)(from_windows(windows), range(256))
    chosen = batch.targets != IGNORED
    assert torch.equal(batch.targets[chosen], tokens[chosen]) and not (tokens[chosen] == EOD).any()
    assert torch.equal(batch.tokens[~chosen], tokens[~chosen])
    hidden = batch.tokens[chosen]
    shares = {
        "chosen": float(chosen.double().mean()),
        "masked": float((hidden == MASK).double().mean()),
        "as they are": float((hidden == tokens[chosen]).double().mean()),
    }
    # 131,000 tokens, of which 20,000 are chosen: five standard deviations.
    assert shares["chosen"] == pytest.approx(0.15, abs=0.005)
    assert shares["masked"] == pytest.approx(0.8, abs=0.015)
    assert shares["as they are"] == pytest.approx(0.1, abs=0.012)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(300)))
    return tmp_path


def plan_for(corpus, **changes):
    data = {"data_paths": [str(corpus / "a.txt")], "cache_dir": str(corpus / "cache")}
    return make_plan(**data, **{"model": MODEL} | changes)


def rows(plan, store, consumed: int) -> list[list[int]]:
    """The inputs and targets of a step, over all data-parallel replicas."""
    result = []
    for rank in plan.ranks:
        if (rank.coord.tp, rank.coord.pp, rank.coord.cp) == (0, 0, 0):
            batches = Loader(plan, rank.coord, store).step(consumed)
            pairs = [torch.cat([batch.tokens, batch.targets], 1) for batch in batches]
            result += torch.cat(pairs).tolist()
    return sorted(result)


def test_every_layout_and_every_start_hide_the_same_tokens(corpus):
    layouts = [
        {"micro_batches": 8},
        {"micro_batches": 2, "micro_batch_size": 4},
        {"dp": 4, "micro_batches": 1, "micro_batch_size": 2},
        {"dp": 2, "tp": 2, "pp": 2, "micro_batches": 2, "micro_batch_size": 2},
    ]
    plans = [plan_for(corpus, **layout) for layout in layouts]
    store = open_tokens(plans[0].job.data)
    for consumed in (0, 8, 800):
        first, *others = [rows(plan, store, consumed) for plan in plans]
        assert all(other == first for other in others)
    loader = Loader(plans[0], plans[0].ranks[0].coord, store)
    through = [loader.step(consumed) for consumed in range(0, 32, 8)]
    resumed = Loader(plans[0], plans[0].ranks[0].coord, store).step(24)
    assert torch.equal(through[-1][0].tokens, resumed[0].tokens)


def test_each_pass_over_the_corpus_hides_other_tokens(corpus):
    plan = plan_for(corpus, micro_batches=1)
    store = open_tokens(plan.job.data)
    loader = Loader(plan, plan.ranks[0].coord, store)
    count = store.samples(16)
    hidden = []
    for first in (0, count):
        texts = dict[tuple, list[int]]()
        for index in range(first, first + count):
            (batch,) = loader.step(index)
            assert batch.valid_tokens > 0
            chosen = batch.targets[0] != IGNORED
            text = torch.where(chosen, batch.targets[0], batch.tokens[0])
            texts[tuple(text.tolist())] = chosen.tolist()
        hidden.append(texts)
    loader.close()
    assert hidden[0].keys() == hidden[1].keys()
    assert sum(hidden[0][text] == hidden[1][text] for text in hidden[0]) < len(hidden[0]) / 4


def test_a_mask_token_that_is_missing_is_one_line(corpus):
    plan = plan_for(corpus, model=tiny_model(**BERT, **MHA))
    store = open_tokens(plan.job.data)
    message = r"'bytes' has the mask token at id 257, model test only 257 ids \(model.vocab\)"
    with pytest.raises(DataError, match=message):
        Loader(plan, plan.ranks[0].coord, store)


@pytest.mark.parametrize("name", ["[MASK]", "[HIDE]"])
def test_mask_token_of_a_tokenizer_file(corpus, name):
    (corpus / "t.json").write_text(word_level().replace('"world"', f'"{name}"'))
    plan = plan_for(corpus)
    data = structs.replace(plan.job.data, tokenizer=str(corpus / "t.json"))
    plan = structs.replace(plan, job=structs.replace(plan.job, data=data))
    store = open_tokens(data)
    if name == "[HIDE]":
        with pytest.raises(DataError, match=r"has no mask token, .*; known names: \[MASK\], "):
            Loader(plan, plan.ranks[0].coord, store)
    else:
        assert Loader(plan, plan.ranks[0].coord, store).objective.mask == 2
