"""The cases of the key proof (test_parity.py). A case is what the plan says; a name says what it is
for."""

from __future__ import annotations

from itertools import product

import msgspec
from msgspec import structs

from orchestrator.plan.document import Mla, Moe, Mtp, Yarn
from tests.beds.plans import tiny_model
from tests.trainer import samples

#: 257 tokens: no tp divides them. Every layer kind appears in some case.
GQA = tiny_model()
TIED = tiny_model(tied_embeddings=True)
GPT = tiny_model(**samples.GPT, **samples.MHA, tied_embeddings=True)
ONE_KV_HEAD = tiny_model(kv_heads=1)
THREE_LAYERS = tiny_model(layers=3, tied_embeddings=True)
EIGHT = tiny_model(layers=8)
EIGHT_TIED = tiny_model(layers=8, tied_embeddings=True)
NINE = tiny_model(layers=9)  # no pp divides it
MODES = ["full", "none", "selective", "full"]
#: Shards of weights and gradients outside the device's memory, beside the optimizer's state.
ON_HOST = {"optimizer": "host", "weights": True}
ON_DISK = {"optimizer": "disk", "weights": True, "buffer_bytes": 1 << 18}


LAYOUTS = {
    "one process, accumulation 4": dict(micro_batches=4),
    "dp2": dict(dp=2),
    "dp4 accumulation 3": dict(dp=4, micro_batches=3),
    "dp2 many buckets": dict(dp=2, bucket_bytes=1 << 10),
    "dp2 zero1": dict(dp=2, zero=1),
    "dp4 zero1 many buckets": dict(dp=4, zero=1, bucket_bytes=1 << 10, micro_batches=4),
    "dp2 zero1 tied": dict(dp=2, zero=1, model=TIED),
    "tp2 sp": dict(tp=2),
    "tp2 without sp": dict(tp=2, sp=False),
    "tp4 sp, fewer kv heads than tp": dict(tp=4, model=ONE_KV_HEAD),
    "tp4 sp gpt": dict(tp=4, model=GPT),
    "tp2 tied": dict(tp=2, model=TIED),
    "pp2": dict(pp=2),
    "pp2 afab": dict(pp=2, schedule="afab", micro_batches=3),
    "pp4 fewer micro-batches than stages": dict(pp=4),
    "pp4 micro-batches not a multiple": dict(pp=4, micro_batches=7),
    "pp2 tied, uneven layers": dict(pp=2, model=THREE_LAYERS, stage_layers=[1, 2], micro_batches=3),
    "pp2 first stage without layers": dict(pp=2, stage_layers=[0, 4]),
    "pp2 gpt": dict(pp=2, model=GPT, micro_batches=4),
    "pp2 interleaved": dict(pp=2, vpp=2, schedule="interleaved", micro_batches=4),
    "pp2 interleaved, embedding and head alone": dict(
        pp=2, vpp=3, schedule="interleaved", micro_batches=4, stage_layers=[0, 1, 1, 1, 1, 0]
    ),
    "tp2 pp2": dict(tp=2, pp=2),
    "tp2 pp2 tied, uneven layers": dict(tp=2, pp=2, model=THREE_LAYERS, stage_layers=[2, 1]),
    "tp2 pp2 without sp, gpt": dict(tp=2, pp=2, sp=False, model=GPT, micro_batches=3),
    "tp2 dp2 zero1": dict(tp=2, dp=2, zero=1, micro_batches=3),
    "pp2 dp2 zero1 tied": dict(pp=2, dp=2, zero=1, model=TIED, micro_batches=4),
    "tp2 pp2 dp2 zero0": dict(tp=2, pp=2, dp=2, model=TIED),
    "tp2 pp2 dp2 zero1 accumulation 4, uneven, tied, gpt": dict(
        tp=2,
        pp=2,
        dp=2,
        zero=1,
        micro_batches=4,
        micro_batch_size=2,
        model=GPT,
        stage_layers=[3, 1],
        bucket_bytes=1 << 12,
    ),
    "dp3 zero1 unequal, many buckets": dict(
        dp=3, zero=1, replica_micro_batches=[2, 1, 1], bucket_bytes=1 << 10, model=TIED
    ),
    "dp3 zero3 unequal": dict(dp=3, zero=3, replica_micro_batches=[2, 1, 1]),
    "tp2 dp3 zero2 unequal, gpt": dict(
        tp=2, dp=3, zero=2, replica_micro_batches=[2, 1, 1], model=GPT, micro_batch_size=2
    ),
    "pp2 dp3 zero1 unequal, tied": dict(
        pp=2, dp=3, zero=1, replica_micro_batches=[4, 3, 3], model=TIED
    ),
    "pp2 dp3 zero2 unequal, interleaved": dict(
        pp=2,
        vpp=2,
        schedule="interleaved",
        dp=3,
        zero=2,
        bucket_bytes=1 << 10,
        replica_micro_batches=[2, 1, 1],
    ),
    "pp2 dp3 zero1 unequal, split backward": dict(
        pp=2, schedule="zb_h1", dp=3, zero=1, replica_micro_batches=[1, 3, 2]
    ),
    "tp2 pp2 dp2 zero1 uneven, tied, one kv head": dict(
        tp=2,
        pp=2,
        dp=2,
        zero=1,
        micro_batches=3,
        bucket_bytes=1 << 10,
        model=tiny_model(layers=3, kv_heads=1, tied_embeddings=True),
        stage_layers=[2, 1],
    ),
}

KINDS = {"llama": samples.LLAMA, "gpt": samples.GPT}
HEADS = {"mha": samples.MHA, "gqa": samples.GQA, "mqa": samples.MQA}
FIVE_TOKENS = samples.small(
    **samples.LLAMA, vocab=5
)  # over 4 ranks: shards of 2, the last one empty

TENSOR = {
    **{
        f"{kind} {heads} tp{tp}{' sp' * sp}{' tied' * tied}": dict(
            tp=tp,
            sp=sp,
            micro_batch_size=2,
            model=samples.small(**KINDS[kind], **HEADS[heads], tied_embeddings=tied),
        )
        for kind, heads, tp, sp, tied in product(KINDS, HEADS, (2, 4), (False, True), (False, True))
    },
    **{f"packed tp2{' sp' * sp}": dict(tp=2, sp=sp, packed=True) for sp in (False, True)},
    "tp2 sp, 2 pieces": dict(tp=2, tp_pieces=2),
    "tp2 sp, 2 samples in 4 pieces, gpt": dict(tp=2, tp_pieces=4, micro_batch_size=2, model=GPT),
    "tp4 sp, 4 samples in 2 pieces, one kv head": dict(
        tp=4, tp_pieces=2, micro_batch_size=4, model=ONE_KV_HEAD
    ),
    "tp2 without sp, 4 pieces, gpt": dict(tp=2, tp_pieces=4, sp=False, model=GPT),
    "tp2 dp2 zero3, 4 pieces": dict(tp=2, dp=2, zero=3, tp_pieces=4),
    "tp2 cp2 pp2, 2 pieces, tied": dict(tp=2, cp=2, pp=2, tp_pieces=2, model=TIED),
    "a rank with only padding, tp4 sp": dict(tp=4, model=FIVE_TOKENS),
    "a rank with only padding, tp4 tied": dict(
        tp=4, sp=False, model=samples.small(**samples.LLAMA, vocab=5, tied_embeddings=True)
    ),
}

RECOMPUTE = {
    "selective": dict(recompute="selective"),
    "full": dict(recompute="full"),
    "by layer": dict(recompute="budget", recompute_layers=MODES, model=GPT),
    "full, tp2 sp": dict(recompute="full", tp=2),
    "selective, tp2 sp gpt": dict(recompute="selective", tp=2, model=GPT),
    "full, tp2 sp, 4 pieces": dict(recompute="full", tp=2, tp_pieces=4),
    "full, tp2 without sp, 2 pieces, gpt": dict(
        recompute="full", tp=2, sp=False, tp_pieces=2, model=GPT
    ),
    "selective, tp2 sp, 4 pieces": dict(recompute="selective", tp=2, tp_pieces=4),
    "full, tp2 without sp": dict(recompute="full", tp=2, sp=False),
    "selective, tp2 without sp": dict(recompute="selective", tp=2, sp=False),
    "full, dp2 zero1": dict(recompute="full", dp=2, zero=1),
    "full, 1f1b tied": dict(recompute="full", pp=2, model=TIED, micro_batches=3),
    "full, zb_h1": dict(recompute="full", pp=2, schedule="zb_h1", micro_batches=4),
    "selective, zb_h2": dict(recompute="selective", pp=2, schedule="zb_h2", micro_batches=5),
    "by layer, zbv": dict(
        recompute="budget", recompute_layers=MODES, pp=2, vpp=2, schedule="zbv", micro_batches=4
    ),
    "full, dualpipe": dict(recompute="full", pp=2, schedule="dualpipe", micro_batches=4),
    "selective, tp2 pp2 interleaved": dict(
        recompute="selective", tp=2, pp=2, vpp=2, schedule="interleaved", micro_batches=4
    ),
}

CONTEXT = {
    **{
        f"cp2 {method}": dict(cp=2, cp_method=method)
        for method in ("zigzag", "ring", "allgather", "ulysses")
    },
    **{
        f"cp2 {method} packed gpt": dict(cp=2, cp_method=method, model=GPT, packed=True)
        for method in ("zigzag", "ring", "allgather", "ulysses")
    },
    "cp4 zigzag": dict(cp=4, model=ONE_KV_HEAD),
    "cp4 ulysses packed": dict(cp=4, cp_method="ulysses", packed=True),
    "cp2 tp2 sp": dict(cp=2, tp=2),
    "cp2 tp2 without sp, ulysses": dict(cp=2, tp=2, sp=False, cp_method="ulysses", model=GPT),
    "cp2 dp2 zero1": dict(cp=2, dp=2, zero=1, bucket_bytes=1 << 10),
    "cp2 pp2 tied": dict(cp=2, pp=2, model=TIED, micro_batches=3),
    "cp2 pp2 zb_h1 full recompute, allgather": dict(
        cp=2, pp=2, schedule="zb_h1", recompute="full", cp_method="allgather", micro_batches=4
    ),
    "cp2 selective recompute, ulysses": dict(cp=2, recompute="selective", cp_method="ulysses"),
    "cp2 selective recompute, ring, packed": dict(
        cp=2, recompute="selective", cp_method="ring", packed=True
    ),
    "tp2 cp2 pp2 zero1": dict(tp=2, cp=2, pp=2, zero=1, model=TIED, micro_batches=3),
    "cp2 pp2 dp2 zero1 interleaved": dict(
        cp=2, pp=2, dp=2, zero=1, vpp=2, schedule="interleaved", micro_batches=2
    ),
}

TIED_KINDS = {"tied": TIED, "gpt, uneven": GPT}
TABLE = [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]

SCHEDULES = {
    **{
        f"{name} pp{pp} vpp{vpp} m{m} {label}": dict(
            schedule=name, pp=pp, vpp=vpp, micro_batches=m, model=model
        )
        for name, pp, vpp, m in [
            ("afab", 2, 2, 3),
            ("interleaved", 2, 2, 3),
            ("zb_h1", 2, 1, 5),
            ("zb_h2", 2, 1, 3),
            ("zbv", 2, 2, 4),
            ("dualpipe", 2, 1, 4),
            ("dualpipev", 2, 2, 3),
        ]
        for label, model in TIED_KINDS.items()
    },
    # micro-batches below, equal to and above pp, and not a multiple of it
    **{
        f"{name} pp{pp} vpp{vpp} m{m}, nine layers": dict(
            schedule=name, pp=pp, vpp=vpp, micro_batches=m, model=NINE
        )
        for name, pp, vpp, m in [
            *[("1f1b", pp, 1, m) for pp in (1, 2, 4) for m in (1, 3, 4, 7)],
            ("afab", 2, 1, 3),
            ("afab", 4, 1, 5),
            ("afab", 2, 2, 3),
            ("interleaved", 2, 2, 4),
            ("interleaved", 2, 2, 3),
            ("interleaved", 4, 2, 6),
            ("zb_h1", 1, 1, 2),
            ("zb_h1", 2, 1, 5),
            ("zb_h1", 4, 1, 3),
            ("zb_h1", 4, 1, 8),
            ("zb_h2", 2, 1, 5),
            ("zb_h2", 4, 1, 8),
            ("zbv", 2, 2, 2),
            ("zbv", 4, 2, 8),
            ("dualpipev", 2, 2, 6),
            ("dualpipev", 4, 2, 9),
            ("dualpipev", 2, 2, 1),
        ]
    },
    **{
        f"{name}{' sp' * sp}, tp2 pp2, {kind}": dict(
            schedule=name, pp=2, vpp=vpp, tp=2, sp=sp, model=model, micro_batches=4
        )
        for name, vpp, sp in [
            ("1f1b", 1, False),
            ("1f1b", 1, True),
            ("interleaved", 2, True),
            ("zb_h1", 1, False),
            ("zbv", 2, True),
        ]
        for kind, model in {"llama": GQA, "gpt": tiny_model(**samples.GPT)}.items()
    },
    # head and lookup share one parameter: its gradient must arrive once a micro-batch, not in two
    # parts
    **{f"{name} pp1 gpt": dict(schedule=name, model=GPT) for name in ("1f1b", "zb_h1")},
    **{
        f"1f1b pp4 {kind}": dict(pp=4, model=model, micro_batches=4)
        for kind, model in TIED_KINDS.items()
    },
    # a stage of embedding only, one that hands its input on, one with all the rest
    "1f1b pp4 empty stages": dict(pp=4, stage_layers=[0, 3, 0, 1], model=GPT),
    "zb_h1 pp4 empty stages": dict(schedule="zb_h1", pp=4, stage_layers=[3, 0, 1, 0], model=GPT),
    "table": dict(schedule="table", schedule_rows=TABLE, pp=2, micro_batches=3, model=TIED),
    "interleaved pp4 vpp2": dict(
        schedule="interleaved", pp=4, vpp=2, micro_batches=5, model=EIGHT_TIED
    ),
    "zb_h2 pp4": dict(schedule="zb_h2", pp=4, micro_batches=7, model=EIGHT),
    "zbv pp4": dict(schedule="zbv", pp=4, vpp=2, micro_batches=6, model=EIGHT_TIED),
    "dualpipe pp4": dict(schedule="dualpipe", pp=4, micro_batches=10, model=EIGHT_TIED),
    "dualpipe pp4 zero1": dict(
        schedule="dualpipe", pp=4, micro_batches=4, model=EIGHT_TIED, zero=1, bucket_bytes=1 << 11
    ),
    "dualpipe pp2 dp2 zero1": dict(
        schedule="dualpipe", pp=2, dp=2, micro_batches=4, zero=1, model=TIED
    ),
    "dualpipe pp2 tp2": dict(schedule="dualpipe", pp=2, tp=2, micro_batches=2, model=TIED),
    "dualpipev pp4": dict(schedule="dualpipev", pp=4, vpp=2, micro_batches=9, model=EIGHT),
    "interleaved pp2 dp2 zero1": dict(
        schedule="interleaved",
        pp=2,
        vpp=2,
        dp=2,
        zero=1,
        micro_batches=3,
        model=TIED,
        bucket_bytes=1 << 10,
    ),
    "zbv pp2 dp2 zero1": dict(
        schedule="zbv", pp=2, vpp=2, dp=2, zero=1, micro_batches=4, model=TIED, bucket_bytes=1 << 10
    ),
    "dualpipev pp2 tp2": dict(schedule="dualpipev", pp=2, vpp=2, tp=2, micro_batches=4, model=GPT),
    "zb_h1 pp2 dp2 zero1 tp2": dict(
        schedule="zb_h1", pp=2, dp=2, tp=2, zero=1, micro_batches=3, model=TIED
    ),
}

SHARDING = {
    **{
        f"dp{dp} zero{zero} m{m}, buckets of {size}": dict(
            dp=dp, zero=zero, micro_batches=m, bucket_bytes=size
        )
        for dp, zero, m, size in [
            *product((1, 2, 4), (0, 1), (1, 4), (1 << 20,)),
            *product((2, 3), (0, 1), (4,), (1, 3000)),
        ]
    },
    "dp2 cp2": dict(dp=2, cp=2),
    **{
        f"pp3 tied zero{zero}": dict(pp=3, zero=zero, stage_layers=[1, 2, 1], model=TIED)
        for zero in (0, 1)
    },
    "pp2 dp2 tied, one parameter a bucket": dict(pp=2, dp=2, model=TIED, bucket_bytes=1),
    "zero2": dict(dp=2, zero=2),
    "zero2 accumulation 4, many buckets, tied": dict(
        dp=2, zero=2, micro_batches=4, bucket_bytes=1 << 10, model=TIED
    ),
    "zero2 dp4": dict(dp=4, zero=2, micro_batches=3, bucket_bytes=1 << 12),
    "zero2 tp2 sp": dict(dp=2, tp=2, zero=2, model=ONE_KV_HEAD),
    "zero2 cp2": dict(dp=2, cp=2, zero=2),
    "zero2 pp2 tied": dict(dp=2, pp=2, zero=2, model=TIED, micro_batches=3, bucket_bytes=1 << 10),
    "zero2 pp2 interleaved": dict(
        dp=2, pp=2, vpp=2, schedule="interleaved", zero=2, model=TIED, micro_batches=4
    ),
    "zero2 pp2 zb_h1 full recompute": dict(
        dp=2,
        pp=2,
        schedule="zb_h1",
        zero=2,
        micro_batches=4,
        recompute="full",
        bucket_bytes=1 << 11,
    ),
    "zero2 pp2 zbv tied": dict(
        dp=2, pp=2, vpp=2, schedule="zbv", zero=2, model=TIED, micro_batches=3
    ),
    "hybrid zero1": dict(dp=4, zero=1, zero_group=2, bucket_bytes=1 << 12, micro_batches=3),
    "hybrid zero2": dict(dp=4, zero=2, zero_group=2, bucket_bytes=1 << 12, model=TIED),
    "hybrid zero1 over cp": dict(dp=2, cp=2, zero=1, zero_group=2),
    "zero1, dp nested inside cp": dict(dp=2, cp=2, zero=1, order=("tp", "dp", "cp", "ep", "pp")),
    "hybrid zero1, dp nested inside cp": dict(
        dp=2, cp=2, zero=1, zero_group=2, order=("tp", "dp", "cp", "ep", "pp")
    ),
    "zero1, pp innermost": dict(
        dp=2, pp=2, zero=1, order=("pp", "dp", "tp", "cp", "ep"), model=TIED
    ),
    "hybrid of one": dict(dp=2, zero=1, zero_group=1),
    "zero3": dict(dp=2, zero=3),
    "zero3 accumulation 4, tied": dict(dp=2, zero=3, micro_batches=4, model=TIED),
    "zero3 dp4 gpt": dict(dp=4, zero=3, micro_batches=3, model=GPT),
    "zero3 full recompute": dict(dp=2, zero=3, recompute="full"),
    "zero3 selective recompute": dict(dp=2, zero=3, recompute="selective", model=GPT),
    "zero3 cp2": dict(cp=2, zero=3, model=TIED),
    "zero3 tp2 sp": dict(dp=2, tp=2, zero=3, model=ONE_KV_HEAD),
    "zero3 tp2 without sp": dict(dp=2, tp=2, zero=3, sp=False, model=GPT),
    "zero3 pp2 tied": dict(dp=2, pp=2, zero=3, model=TIED, micro_batches=4),
    "zero3 pp2 interleaved": dict(
        dp=2, pp=2, vpp=2, schedule="interleaved", zero=3, model=TIED, micro_batches=4
    ),
    "zero3 pp2 afab": dict(dp=2, pp=2, schedule="afab", zero=3, model=GPT, micro_batches=3),
    "hybrid zero3": dict(dp=4, zero=3, zero_group=2, model=TIED),
    "zero3 tp2 pp2": dict(dp=2, tp=2, pp=2, zero=3, model=GPT, micro_batches=3),
    "zero3 pp2 zb_h1, tied": dict(
        dp=2, pp=2, schedule="zb_h1", zero=3, model=TIED, micro_batches=4, bucket_bytes=1 << 10
    ),
    "zero3 pp2 zbv": dict(dp=2, pp=2, vpp=2, schedule="zbv", zero=3, model=GPT, micro_batches=3),
    "hybrid zero3 pp2 zb_h2": dict(
        dp=4, pp=2, schedule="zb_h2", zero=3, zero_group=2, micro_batches=3
    ),
    "zero3 tp2 pp2 dualpipev": dict(
        dp=2, tp=2, pp=2, vpp=2, schedule="dualpipev", zero=3, micro_batches=4
    ),
    "zero2 tp2 pp2": dict(dp=2, tp=2, pp=2, zero=2, model=GPT, micro_batches=3),
    "zero3 weights on the host": dict(dp=2, zero=3, micro_batches=3, offload=ON_HOST),
    "zero3 weights on the host, tp2 tied": dict(dp=2, tp=2, zero=3, model=TIED, offload=ON_HOST),
    "zero3 weights on the host, pp2 tied": dict(
        dp=2, pp=2, zero=3, model=TIED, micro_batches=4, offload=ON_HOST
    ),
    "hybrid zero3 weights on the host, gpt": dict(
        dp=4, zero=3, zero_group=2, model=GPT, offload=ON_HOST
    ),
    "zero3 weights on a disk": dict(dp=2, zero=3, micro_batches=3, offload=ON_DISK),
}

#: Every token, head and feature draws what one process draws for it, however they are spread.
DROPPED = tiny_model(dropout=0.1)
DROPPED_GPT = msgspec.structs.replace(GPT, dropout=0.3)

DROPOUT = {
    "alone, gpt": dict(model=DROPPED_GPT, micro_batches=4),
    "alone, packed": dict(packed=True),
    "full": dict(recompute="full"),
    "selective, gpt": dict(recompute="selective", model=DROPPED_GPT),
    "dp2 zero1": dict(dp=2, zero=1, micro_batches=3),
    "dp2 zero3": dict(dp=2, zero=3),
    "tp2 sp": dict(tp=2, micro_batch_size=2),
    "tp2 sp, 4 pieces": dict(tp=2, tp_pieces=4),
    "tp2 sp, gpt, full": dict(tp=2, model=DROPPED_GPT, recompute="full"),
    "gpt, tp2 without sp": dict(tp=2, sp=False, model=DROPPED_GPT),
    **{
        f"cp2 {method}": dict(cp=2, cp_method=method)
        for method in ("zigzag", "ring", "allgather", "ulysses")
    },
    "cp2 zigzag packed, full": dict(cp=2, packed=True, recompute="full"),
    "cp2 allgather packed": dict(cp=2, packed=True, cp_method="allgather", model=DROPPED_GPT),
    "dropout, pp2 interleaved": dict(pp=2, vpp=2, schedule="interleaved", micro_batches=4),
    "pp2 zb_h1 full": dict(pp=2, schedule="zb_h1", micro_batches=3, recompute="full"),
    "pp2 dualpipe": dict(pp=2, schedule="dualpipe", micro_batches=4),
    "tp2 cp2 ulysses pp2": dict(tp=2, cp=2, pp=2, cp_method="ulysses", micro_batches=2),
    "tp2 pp2 dp2 zero1": dict(tp=2, pp=2, dp=2, zero=1, model=DROPPED_GPT, micro_batches=3),
}
DROPOUT = {name: {"model": DROPPED, **case} for name, case in DROPOUT.items()}

MIXTURE = tiny_model(
    moe=Moe(experts=5, top_k=2, ffn_hidden=12, balance_loss=0.1, z_loss=0.01),
    qk_norm=True,
    kv_heads=1,
)
#: A dense layer first, shared experts, experts in groups, latent attention.
DEEPSEEK = tiny_model(
    moe=Moe(
        experts=6,
        top_k=2,
        ffn_hidden=8,
        shared_ffn_hidden=16,
        first_dense_layers=1,
        score="sigmoid",
        routed_scale=2.5,
        groups=3,
        top_groups=2,
        balance_loss=0.2,
    ),
    mla=Mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
    yarn=Yarn(factor=8.0, original_seq_len=4, beta_fast=4.0),
)
FOUR_EXPERTS = tiny_model(moe=Moe(experts=4, top_k=2, ffn_hidden=12, balance_loss=0.1, z_loss=0.01))
MANY_EXPERTS = tiny_model(moe=Moe(experts=40, top_k=1, ffn_hidden=4))
EVERY_EXPERT = tiny_model(moe=Moe(experts=2, top_k=2, ffn_hidden=12))
FULL_RANK_QUERIES = tiny_model(mla=structs.replace(DEEPSEEK.mla, q_lora_rank=0))

EXPERTS = {
    **{
        f"{kind} {name}": dict(model=model, **case)
        for kind, model in {"mixture": MIXTURE, "deepseek": DEEPSEEK}.items()
        for name, case in {
            "accumulation 3, packed": dict(micro_batches=3, packed=True),
            "dp2 zero1": dict(dp=2, zero=1, bucket_bytes=1 << 10),
            "dp2 zero2": dict(dp=2, zero=2),
            "dp2 zero3": dict(dp=2, zero=3),
            "tp2 sp": dict(tp=2, micro_batch_size=2),
            "tp2 without sp": dict(tp=2, sp=False),
            "tp2 sp, 2 pieces": dict(tp=2, tp_pieces=2),
            "tp4 sp": dict(tp=4),
            "cp2 zigzag": dict(cp=2, packed=True),
            "cp2 ulysses": dict(cp=2, cp_method="ulysses"),
            "cp2 allgather tp2": dict(cp=2, tp=2, cp_method="allgather"),
            "pp2": dict(pp=2, micro_batches=3),
            "pp2 zb_h1 tp2": dict(pp=2, tp=2, schedule="zb_h1", micro_batches=4),
            "pp2 zbv tp2 without sp": dict(
                pp=2, vpp=2, tp=2, sp=False, schedule="zbv", micro_batches=3
            ),
            "pp2 dualpipe dp2 zero1": dict(
                pp=2, dp=2, zero=1, schedule="dualpipe", micro_batches=2
            ),
            "pp2 tp2 dp2 zero2, selective": dict(pp=2, tp=2, dp=2, zero=2, recompute="selective"),
            "tp2 cp2 full": dict(tp=2, cp=2, recompute="full"),
            "dp4 zero3 hybrid, full": dict(dp=4, zero=3, zero_group=2, recompute="full"),
        }.items()
    },
    **{
        f"{kind} {name}": dict(model=model, **case)
        for kind, model in {"four experts": FOUR_EXPERTS, "deepseek": DEEPSEEK}.items()
        for name, case in {
            "ep2": dict(ep=2, micro_batches=3, packed=True),
            "ep2 dp2 zero1": dict(ep=2, dp=2, zero=1, bucket_bytes=1 << 10),
            "ep2 dp2 zero2": dict(ep=2, dp=2, zero=2),
            "ep2 dp2 zero3": dict(ep=2, dp=2, zero=3),
            "ep2 zero1": dict(ep=2, zero=1),
            "ep2 tp2 sp": dict(ep=2, tp=2, micro_batch_size=2),
            "ep2 tp2 without sp": dict(ep=2, tp=2, sp=False),
            "ep2 cp2 zigzag": dict(ep=2, cp=2),
            "ep2 pp2 zero3 zb_h1": dict(ep=2, pp=2, zero=3, schedule="zb_h1", micro_batches=3),
            "ep2 cp2 zero3, ulysses": dict(ep=2, cp=2, zero=3, cp_method="ulysses"),
            "ep2 pp2": dict(ep=2, pp=2, micro_batches=3),
            "ep2 pp2 interleaved full": dict(
                ep=2, pp=2, vpp=2, schedule="interleaved", recompute="full"
            ),
            "ep2 pp2 zb_h1 tp2": dict(ep=2, pp=2, tp=2, schedule="zb_h1", micro_batches=4),
            "ep2 pp2 zbv selective": dict(
                ep=2, pp=2, vpp=2, schedule="zbv", micro_batches=3, recompute="selective"
            ),
            "ep2 pp2 dualpipe zero1": dict(
                ep=2, pp=2, zero=1, schedule="dualpipe", micro_batches=2
            ),
            "ep2 pp2 dualpipe full": dict(
                ep=2, pp=2, schedule="dualpipe", micro_batches=4, recompute="full"
            ),
            "ep2 tp2 cp2": dict(ep=2, tp=2, cp=2),
            "ep2 tp2 dp2 zero1, dp inside ep": dict(
                ep=2, tp=2, dp=2, zero=1, order=("tp", "dp", "cp", "ep", "pp")
            ),
            "ep2 dp4 zero1 hybrid": dict(ep=2, dp=4, zero=1, zero_group=4),
        }.items()
    },
    **{
        f"four experts {name}": dict(model=FOUR_EXPERTS, **case)
        for name, case in {
            "ep4": dict(ep=4),
            "ep4 tp2 sp": dict(ep=4, tp=2),
            "ep2 tp2 pp2, five axes but cp": dict(ep=2, tp=2, pp=2, dp=1, zero=1),
        }.items()
    },
    "experts folded over tp and cp, cp inside tp": dict(
        tp=2,
        cp=2,
        dp=2,
        zero=1,
        etp=1,
        fold_cp=True,
        order=("cp", "tp", "dp", "ep", "pp"),
        model=FOUR_EXPERTS,
    ),
    "an expert takes every token, ep2": dict(ep=2, model=EVERY_EXPERT),
    "fewer tokens than experts, ep4": dict(ep=4, model=MANY_EXPERTS),
    **{
        f"queries of full rank {name}": dict(model=FULL_RANK_QUERIES, **case)
        for name, case in {
            "tp2 sp": dict(tp=2),
            "tp2 without sp selective": dict(tp=2, sp=False, recompute="selective"),
        }.items()
    },
}

#: Two further tokens predicted; of experts, latent attention, tied embeddings, biases, dropout.
AHEAD = {
    name: structs.replace(model, mtp=Mtp(depth=2, weight=0.4))
    for name, model in {
        "deepseek": DEEPSEEK,
        "mixture": FOUR_EXPERTS,
        "tied": TIED,
        "gpt": DROPPED_GPT,
    }.items()
}
PREDICTION = {
    f"{kind} {name}": dict(model=AHEAD[kind], **case)
    for kind, name, case in (
        ("deepseek", "packed, accumulation 3", dict(packed=True, micro_batches=3)),
        ("tied", "one process", dict(micro_batch_size=2)),
        ("gpt", "pp2, packed", dict(pp=2, micro_batches=3, packed=True)),
        ("deepseek", "ep2 tp2 sp", dict(ep=2, tp=2, micro_batch_size=2)),
        ("mixture", "ep2 cp2 zigzag, packed", dict(ep=2, cp=2, packed=True)),
        ("deepseek", "pp2 zb_h1 tp2", dict(pp=2, tp=2, schedule="zb_h1", micro_batches=4)),
        (
            "mixture",
            "ep2 pp2 dualpipe zero1",
            dict(ep=2, pp=2, zero=1, schedule="dualpipe", micro_batches=2),
        ),
        (
            "tied",
            "pp2 zbv tp2 without sp",
            dict(pp=2, vpp=2, tp=2, sp=False, schedule="zbv", micro_batches=3),
        ),
        ("gpt", "dp3 zero3 unequal", dict(dp=3, zero=3, replica_micro_batches=[2, 1, 1])),
        ("deepseek", "ep2 dp2 zero3, full", dict(ep=2, dp=2, zero=3, recompute="full")),
    )
}

TECHNIQUES = {
    "experts": EXPERTS,
    "prediction": PREDICTION,
    "layouts": LAYOUTS,
    "tensor": TENSOR,
    "sharding": SHARDING,
    "recompute": RECOMPUTE,
    "context": CONTEXT,
    "schedules": SCHEDULES,
    "dropout": DROPOUT,
}


#: Those that are also compared in fp32, the precision of real runs; the other "layouts" with `make
#: verify`.
IN_FP32 = (
    "dp4 accumulation 3", "tp4 sp gpt", "tp2 dp3 zero2 unequal, gpt",
    "pp2 tied, uneven layers", "tp2 pp2 tied, uneven layers",
    "tp2 pp2 dp2 zero1 accumulation 4, uneven, tied, gpt", "tp2 pp2 dp2 zero1 uneven, tied, one kv head",
    "llama gqa tp4", "llama gqa tp4 sp", "1f1b pp2 vpp1 m4, nine layers", "zb_h1 pp2 vpp1 m5, nine layers",
)  # fmt: skip
