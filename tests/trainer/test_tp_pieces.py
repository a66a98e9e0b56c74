"""Pure parts of tensor parallelism: who holds what, the loss over a sharded vocabulary, what is
refused."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, structs

from orchestrator.plan import Exit, seal
from orchestrator.plan.document import Mla, Moe
from orchestrator.plan.trained import problems
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import GPT, LLAMA, small
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh, members_of
from trainer.errors import LayoutError
from trainer.model.loss import cross_entropy_sum
from trainer.model.stage import Stage
from trainer.parallel import vocab
from trainer.parallel.apply import build
from trainer.parallel.params import Shard, whole
from trainer.parallel.tensor import shard
from trainer.parallel.vocab import ShardedLookup, VocabParallelLoss

DEGREES = st.sampled_from([1, 2, 4, 8])


def shapes(model):
    with torch.device("meta"):
        stage = Stage(model, range(model.layers), True, True)
    return {name: tuple(param.shape) for name, param in stage.named_parameters()}


@given(
    tp=DEGREES,
    kv=DEGREES,
    vocabulary=st.integers(1, 40),
    sp=st.booleans(),
    kind=st.sampled_from([LLAMA, GPT]),
)
def test_owners_hold_every_element_once_and_replicas_agree(tp, kv, vocabulary, sp, kind):
    model = small(
        **kind,
        layers=1,
        heads=8,
        kv_heads=kv,
        vocab=vocabulary,
        hidden=16,
        head_dim=4,
        ffn_hidden=16,
    )
    for name, shape in shapes(model).items():
        full = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
        infos = [shard(name, shape, model, tp=tp, index=index, sp=sp) for index in range(tp)]
        covered = torch.zeros(shape)
        for index, info in enumerate(infos):
            local = info.take(full)
            assert local.shape == info.local_shape and local.numel() == info.numel
            assert torch.equal(info.valid(local), full[info.global_slices])
            assert local.sum() == info.valid(local).sum(), "padding is zero"
            assert index in info.replicas
            assert all(
                infos[replica].global_slices == info.global_slices for replica in info.replicas
            )
            if info.owner:
                covered[info.global_slices] += 1
            # A gradient is partial exactly where ranks see other queries (shared heads) or other
            # tokens (SP).
            shared_head = ".wk." in name or ".wv." in name
            expected = len(info.replicas) > 1 and (sp or shared_head)
            assert info.sums == (("kv" if shared_head else "tp",) if expected else ())
        assert bool((covered == 1).all()), name


def test_registry_helpers():
    info = whole("norm.weight", (8,))
    assert (info.local_shape, info.owner, info.decay, info.sums) == ((8,), True, False, ())
    assert whole("head.weight", (8, 4)).decay
    empty = dataclasses.replace(info, shards=(Shard(0, 8, 8, 3),))
    assert (
        empty.take(torch.ones(8)).tolist() == [0, 0, 0] and empty.valid(torch.ones(3)).numel() == 0
    )


def test_key_value_groups_follow_the_plan():
    plan = make_plan(tp=4, dp=2, model=small(kv_heads=2))
    assert [members_of(plan, "kv", rank) for rank in range(8)] == [(0, 1)] * 2 + [(2, 3)] * 2 + [
        (4, 5)
    ] * 2 + [(6, 7)] * 2
    one_each = make_plan(tp=2, model=small(kv_heads=2))
    assert members_of(one_each, "kv", 1) == (1,)


# ------------------------------------------------------------------------------------------------
#     vocabulary


def loss_of(valid, one_pass):
    """`one_pass`: as it is compiled, without the compiler."""
    loss = VocabParallelLoss(0, valid, None, CommCounter())
    loss.passes = vocab.IN_ONE_PASS if one_pass else vocab.IN_CHUNKS
    return loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "chunk", [1, 40, 1 << 24, 0], ids=["by-row", "some-rows", "at-once", "one-pass"]
)
def test_loss_without_a_group_equals_the_plain_loss(monkeypatch, dtype, chunk):
    monkeypatch.setattr(vocab, "CHUNK", chunk or vocab.CHUNK)
    logits = (4 * torch.randn(3, 5, 17, generator=torch.Generator().manual_seed(1))).to(dtype)
    targets = torch.randint(0, 17, (3, 5), generator=torch.Generator().manual_seed(2))
    targets[0, 1:3] = -100
    ours = logits.clone().requires_grad_()
    plain = logits.clone().requires_grad_()
    loss = loss_of(17, not chunk)(ours, targets)
    expected = cross_entropy_sum(plain, targets)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, plain.grad)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not ours.grad[0, 1:3].any()


@pytest.mark.parametrize("one_pass", [False, True])
def test_loss_of_no_valid_token_is_zero_and_padding_columns_do_not_count(one_pass):
    logits = torch.randn(1, 2, 6, requires_grad=True)
    loss = loss_of(4, one_pass)
    assert loss(logits, torch.full((1, 2), -100)) == 0
    targets = torch.tensor([[3, 0]])
    torch.testing.assert_close(loss(logits, targets), cross_entropy_sum(logits[..., :4], targets))
    loss(logits, targets).backward()
    assert not logits.grad[..., 4:].any()


@pytest.mark.parametrize("one_pass", [False, True])
def test_extreme_logits_stay_finite(one_pass):
    logits = torch.tensor([[[1e4, -1e4, 0.0], [-3e38, 3e38, 0.0]]], requires_grad=True)
    loss = loss_of(3, one_pass)(logits, torch.tensor([[0, 1]]))
    loss.backward()
    assert loss == 0 and bool(logits.grad.isfinite().all())


@given(tp=st.integers(1, 5), vocabulary=st.integers(1, 30))
def test_lookups_of_all_shards_sum_to_the_lookup(tp, vocabulary):
    model = small(vocab=vocabulary)
    table = torch.randn(vocabulary, 4)
    tokens = torch.arange(vocabulary)[None]
    total = torch.zeros(1, vocabulary, 4)
    for index in range(tp):
        info = shard("embed.weight", (vocabulary, 4), model, tp=tp, index=index, sp=False)
        total += ShardedLookup(*info.along(0))(tokens, info.take(table))
    assert torch.equal(total[0], table)


# ------------------------------------------------------------------------------------------------
#     refusals


def predicting(objective, causal):
    plan = make_plan(model=tiny_model(causal=causal))
    train = structs.replace(plan.job.train, objective=objective)
    return seal(structs.replace(plan, job=structs.replace(plan.job, train=train)))


MLA = Mla(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
REFUSED = {
    "tp=3 does not divide 4 attention heads$": make_plan(tp=3),
    "tp=8 does not divide 4 attention heads$": make_plan(tp=8),
    r"kv_heads=3 must divide model.heads=4": make_plan(model=tiny_model(kv_heads=3)),
    "tp=2 neither divides 3 key-value heads nor": make_plan(
        tp=2, model=tiny_model(heads=6, kv_heads=3, ffn_hidden=48)
    ),
    "head_dim=7 must be even": make_plan(model=tiny_model(head_dim=7)),
    "18 tokens does not cut into 4 equal parts .*sequence parallelism": make_plan(tp=4, seq_len=18),
    "train.seq_len=65, test has 64 learned positions": make_plan(
        seq_len=65, model=tiny_model(position="learned")
    ),
    "experts do not have biases": make_plan(
        model=tiny_model(moe=Moe(experts=4, top_k=2, ffn_hidden=16), bias=True)
    ),
    "latent attention does not have biases": make_plan(model=tiny_model(mla=MLA, bias=True)),
    "legal: train.objective=masked": predicting(UNSET, causal=False),
    "predicted from both sides": predicting("masked", causal=True),
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_refused_with_one_line(pattern):
    plan = REFUSED[pattern]
    with pytest.raises(LayoutError, match=pattern) as error:
        build(plan, Mesh.alone(plan), CommCounter(), device="meta")
    assert "\n" not in str(error.value) and error.value.exit is Exit.CONFIG


def test_sequence_length_only_matters_to_sequence_parallelism():
    assert not list(problems(make_plan(tp=4, seq_len=18, sp=False)))
    assert not list(problems(make_plan(seq_len=64, model=tiny_model(position="learned"))))


# ------------------------------------------------------------------------------------------------
#     stages of a rank


def parts(plan, rank, **options):
    return build(plan, Mesh.alone(plan, rank), CommCounter(), device="meta", **options)


def test_uneven_stages_and_the_tied_copy():
    plan = make_plan(pp=2, stage_layers=[3, 1], model=tiny_model(tied_embeddings=True))
    first = parts(plan, 0)
    last = parts(plan, 1)
    assert [list(model_part.stages[0].layers) for model_part in (first, last)] == [
        ["0", "1", "2"],
        ["3"],
    ]
    assert first.table["embed.weight"].sums == last.table["embed.weight"].sums == ("embedding",)
    assert (first.table["embed.weight"].owner, last.table["embed.weight"].owner) == (True, False)
    with pytest.raises(AssertionError):
        first.loss(torch.zeros(1), torch.zeros(1))


def test_looped_and_chosen_stages_of_a_rank():
    plan = make_plan(pp=2, vpp=2, schedule="interleaved", model=tiny_model(tied_embeddings=True))
    assert [list(stage.layers) for stage in parts(plan, 1).stages] == [["1"], ["3"]]
    both_ends = parts(plan, 0, indices=(0, 3))  # the V of zero-bubble schedules
    assert both_ends.stages[1].head.weight is both_ends.stages[0].embed.weight
    names = [name for name, _, _ in both_ends.parameters()]
    assert names.count("embed.weight") == 1 and len(names) == len(set(names)) == len(
        both_ends.table
    )
    info = both_ends.table["embed.weight"]
    assert info.owner and not info.sums, "no copy, so no gradient to exchange"


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    kind=st.sampled_from([LLAMA, GPT]),
)
def test_owned_elements_of_all_ranks_are_the_model(tp, pp, tied, kind):
    plan = make_plan(tp=tp, pp=pp, model=tiny_model(**kind, tied_embeddings=tied))
    owned = 0
    for rank in range(tp * pp):
        for _, param, info in parts(plan, rank).parameters():
            assert tuple(param.shape) == info.local_shape
            owned += info.valid(param).numel() if info.owner else 0
    assert owned == plan.model.parameters
