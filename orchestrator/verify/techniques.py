"""The techniques of the matrix: a technique is a row of AXES, what it asks of a configuration.

It enters the matrix here and is measured as soon as the trainer runs it; until then its cells say
why they are refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import structs

from orchestrator.plan.document import Mla, Moe, Mtp


class Technique(NamedTuple):
    name: str
    parallel: dict[str, Any]  # keys of `parallel`
    recompute: str = "none"
    even: bool = False  # wants an even number of micro-batches
    deep: bool = False  # also among the triples
    pairs: str = "all"  # with which techniques of other axes: "all", "deep", or "none" (alone only)
    compile: bool = False
    dropout: float = 0.0
    model: dict[str, Any] = {}  # fields of the model that it needs
    train: dict[str, Any] = {}  # further keys of `train`
    nodes: int = 1  # that its ranks lie on


def _pipeline(schedule: str, vpp: int = 1, **settings: Any) -> Technique:
    return Technique(f"pp2 {schedule}", {"pp": 2, "vpp": vpp, "schedule": schedule}, **settings)


#: Latent attention of a small model.
MLA = Mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
_PLAIN = {"bias": False, "position": "rope"}
MIXTURE = {**_PLAIN, "moe": Moe(experts=4, top_k=2, ffn_hidden=24, balance_loss=0.1, z_loss=0.01)}
#: DeepSeek-V3's block: a dense layer first, shared experts, choice among groups and moved by biases
#: (by so much that the next step chooses otherwise), latent attention.
DEEPSEEK = {
    **_PLAIN,
    "moe": Moe(
        experts=8,
        top_k=3,
        ffn_hidden=16,
        shared_ffn_hidden=24,
        first_dense_layers=1,
        score="sigmoid",
        routed_scale=2.5,
        groups=4,
        top_groups=2,
        balance_loss=0.1,
        bias_update=0.05,
    ),
    "mla": MLA,
}


def _with(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The model with another mixture of experts."""
    return {**model, "moe": structs.replace(model["moe"], **changes)}


#: Experts that take less than an equal share of each sequence, so that some choices are dropped
#: wherever they fall.
CAPPED = _with(MIXTURE, capacity_factor=0.75)
CAPPED_DEEPSEEK = _with(DEEPSEEK, capacity_factor=0.7)
#: One choice a token. The second step's biases, far beyond any score, leave to choose only what the
#: first step chose less often than the mean: with two experts one gets all tokens, the other none.
ONE_TAKES_ALL = _with(
    MIXTURE, experts=2, top_k=1, score="sigmoid", norm_topk=False, bias_update=10.0
)
IDLE = _with(ONE_TAKES_ALL, experts=8)
#: More experts than a micro-batch has tokens, and experts that all tokens go to.
FEW_TOKENS = _with(MIXTURE, experts=64, ffn_hidden=8)
ALL_CHOSEN = _with(MIXTURE, top_k=4)


def _folded(name: str, model: dict[str, Any] = MIXTURE, **parallel: Any) -> Technique:
    recompute = parallel.pop("recompute", "none")
    return Technique(
        name,
        parallel,
        recompute,
        even=parallel.get("schedule") == "dualpipe",
        model=model,
        pairs="none",
    )


#: Queries, keys and values are made from latents again.
_AGAIN = {"recompute_latents": True}
_EVERY: dict[str, Any] = {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "etp": 1, "fold_cp": True}
_VIRTUAL: dict[str, Any] = {"vpp": 2, "schedule": "interleaved"}
#: Experts on a mesh of their own, folded over tp and cp.
_FOLDED = (
    _folded("tp2 etp1 ep2", tp=2, etp=1),
    _folded("tp2 etp1 ep4 deepseek", DEEPSEEK, tp=2, etp=1, ep=2),
    _folded("tp4 etp2 ep2", tp=4, etp=2),
    _folded("tp4 etp2 ep2 zero1", tp=4, etp=2, zero=1, dp=2),
    *(
        _folded(f"cp2 {method}, ep2 over it", cp=2, cp_method=method, fold_cp=True)
        for method in ("zigzag", "ring", "allgather", "ulysses")
    ),
    *(
        _folded(
            f"tp2 cp2 etp1 ep4 zero{zero}",
            DEEPSEEK,
            tp=2,
            cp=2,
            dp=2,
            etp=1,
            fold_cp=True,
            zero=zero,
        )
        for zero in range(4)
    ),
    _folded("cp2 ep2 over it, zero2 hybrid", cp=2, dp=4, fold_cp=True, zero=2, zero_group=4),
    _folded("tp2 pp2 etp1 ep4, zb_h1", DEEPSEEK, tp=2, pp=2, ep=2, etp=1, schedule="zb_h1"),
    _folded(
        "tp2 cp2 pp2 etp1 ep4, dualpipe", tp=2, cp=2, pp=2, etp=1, fold_cp=True, schedule="dualpipe"
    ),
)

#: All five axes at once, on sixteen processes: with expert parallelism on an axis of its own, and
#: folded.
_FIVE_AXES = (
    _folded("tp2 cp2 ep2 pp2, 1f1b, zero1", tp=2, cp=2, ep=2, pp=2, schedule="1f1b", zero=1),
    _folded(
        "tp2 cp2 ep2 pp2 deepseek, zb_h1, zero2",
        DEEPSEEK,
        tp=2,
        cp=2,
        ep=2,
        pp=2,
        schedule="zb_h1",
        zero=2,
    ),
    _folded(
        "tp2 cp2 pp2 dp2 etp1 ep4 deepseek, 1f1b, zero1",
        DEEPSEEK,
        **_EVERY,
        schedule="1f1b",
        zero=1,
    ),
    _folded(
        "tp2 cp2 pp2 dp2 etp1 ep4, interleaved, zero3, full",
        recompute="full",
        **_EVERY,
        **_VIRTUAL,
        zero=3,
    ),
    _folded(
        "tp2 cp2 pp2 dp2 etp1 ep4 capacity, dualpipe",
        CAPPED_DEEPSEEK,
        **_EVERY,
        schedule="dualpipe",
    ),
)

#: A bounded number of tokens an expert, where ranks hold parts of sequences, or send tokens by
#: other ways.
_CAPPED = (
    _folded("cp2 ring, ep2 capacity", CAPPED, cp=2, cp_method="ring", ep=2),
    *(
        _folded(
            f"cp4 {method}, ep2 over it, capacity",
            CAPPED_DEEPSEEK,
            cp=4,
            cp_method=method,
            fold_cp=True,
        )
        for method in ("zigzag", "ulysses")
    ),
    _folded("tp2 etp1 ep4 capacity", CAPPED_DEEPSEEK, tp=2, etp=1, ep=2),
    _folded("tp4 etp2 ep2 capacity", CAPPED, tp=4, etp=2),
    _folded(
        "tp2 cp2 etp1 ep4 zero2 capacity", CAPPED, tp=2, cp=2, dp=2, etp=1, fold_cp=True, zero=2
    ),
    _folded("tp2 sp capacity", CAPPED, tp=2, sp=True),
    _folded("tp2 capacity", CAPPED, tp=2, sp=False),
    _folded("dp2 zero3 capacity, deepseek", CAPPED_DEEPSEEK, dp=2, zero=3),
)

_LATENTS = tuple(
    Technique(
        f"{name}, latents".strip(", "),
        parallel,
        "selective",
        model=DEEPSEEK,
        pairs="none",
        train=_AGAIN,
    )
    for name, parallel in (
        ("selective", {}),
        ("ep2 tp2 sp selective", {"ep": 2, "tp": 2, "sp": True}),
        (
            "ep2 tp2 pp2 zb_h1 selective",
            {"ep": 2, "tp": 2, "sp": False, "pp": 2, "schedule": "zb_h1"},
        ),
        ("cp2 zigzag selective", {"cp": 2, "cp_method": "zigzag"}),
    )
)

#: Routers read noise with their input.
_NOISY = _with(MIXTURE, jitter=0.3)
_NOISY_DEEPSEEK = _with(DEEPSEEK, jitter=0.3)
_JITTER = (
    _folded("ep2 jitter", _NOISY, ep=2),
    _folded("ep2 tp2 sp jitter, deepseek", _NOISY_DEEPSEEK, ep=2, tp=2),
    _folded("ep2 tp2 jitter", _NOISY, ep=2, tp=2, sp=False),
    _folded("ep2 cp2 zigzag jitter", _NOISY, ep=2, cp=2, cp_method="zigzag"),
    Technique("ep2 pp2 full, jitter", {"ep": 2, "pp": 2}, "full", model=_NOISY, pairs="none"),
    _folded("ep2 pp2 dualpipe jitter", _NOISY, ep=2, pp=2, schedule="dualpipe"),
)

#: The load of the whole batch is balanced, with a term of the loss, and with biases beside it.
_BATCH, _BATCH_DEEPSEEK = (_with(model, balance_over="batch") for model in (MIXTURE, DEEPSEEK))
_BALANCED = (
    _folded("ep2, balance of the batch", _BATCH, ep=2),
    _folded("tp2 sp cp2 dp2 zero1, balance of the batch", _BATCH, tp=2, cp=2, dp=2, zero=1),
    _folded(
        "tp2 etp1 ep4 full, balance of the batch",
        _BATCH_DEEPSEEK,
        tp=2,
        etp=1,
        ep=2,
        recompute="full",
    ),
    _folded(
        "ep2 tp2 pp2 dualpipe, balance of the batch",
        _BATCH,
        ep=2,
        tp=2,
        sp=False,
        pp=2,
        schedule="dualpipe",
    ),
)

#: Where the numbers of tokens are extreme.
_CORNERS = (
    *(
        _folded(f"{layout}, {what}", model, **parallel)
        for what, model in (
            ("all tokens to one expert", ONE_TAKES_ALL),
            ("experts without a token", IDLE),
            ("fewer tokens than experts", FEW_TOKENS),
            ("all experts chosen", ALL_CHOSEN),
        )
        for layout, parallel in (
            ("ep2", {"ep": 2}),
            ("ep2 tp2", {"ep": 2, "tp": 2}),
            ("tp2 etp1 ep2 pp2 zb_h1", {"tp": 2, "etp": 1, "pp": 2, "schedule": "zb_h1"}),
            (
                "ep2 cp2 dp2 zero2, full",
                {"ep": 2, "cp": 2, "dp": 2, "zero": 2, "recompute": "full"},
            ),
        )
    ),
    _folded("ep2, one takes all and drops most", _with(ONE_TAKES_ALL, capacity_factor=0.5), ep=2),
    _folded(
        "ep2 tp2, one takes all and drops most",
        _with(ONE_TAKES_ALL, capacity_factor=0.5),
        ep=2,
        tp=2,
    ),
)


def _by_domain(
    name: str, model: dict[str, Any] = MIXTURE, nodes: int = 2, **parallel: Any
) -> Technique:
    recompute = parallel.pop("recompute", "none")
    parallel |= {"expert_all_to_all": "hierarchical", "allow_tp_across_nvlink": True}
    return Technique(name, parallel, recompute, model=model, pairs="none", nodes=nodes)


#: Tokens go once to each of several NVLink domains.
_BY_DOMAIN = (
    _by_domain("ep4 hierarchical", ep=4),
    _by_domain("ep2 hierarchical, full", recompute="full", ep=2),
    _by_domain("ep4 hierarchical deepseek, dp2 zero2", DEEPSEEK, nodes=4, ep=4, dp=2, zero=2),
    _by_domain("tp2 ep4 hierarchical", DEEPSEEK, tp=2, ep=4),
    _by_domain("tp2 etp1 ep8 hierarchical", DEEPSEEK, tp=2, etp=1, ep=4),
    _by_domain("cp4 ep4 over it, hierarchical", cp=4, fold_cp=True),
    _by_domain("ep4 pp2 hierarchical, zb_h1", nodes=4, ep=4, pp=2, schedule="zb_h1"),
    _by_domain("ep4 hierarchical capacity", CAPPED, ep=4),
    _by_domain("tp2 ep4 hierarchical capacity", CAPPED_DEEPSEEK, tp=2, ep=4),
    _by_domain("ep2 hierarchical, experts without a token", IDLE, ep=2),
)

#: Gradients, master weights and moments in the memory of the host.
_HOST = {"offload": "host"}
#: There while the next step computes with weights that lack the update.
_DELAYED = {"offload": "host", "offload_delayed": True}
#: On a disk, through so little memory that every bucket is several chunks.
_DISK = {"offload": "disk", "offload_buffer_mib": 0.1}
#: Inputs of recomputed layers there.
_INPUTS = {"offload_activations": "host"}
#: Tensor-parallel ranks that share the inputs of recomputed layers.
_SHARE = {"partition_activations": True}
_SHARED = {"tp": 2, "sp": False, "pp": 2, "vpp": 2, "schedule": "interleaved"}


def _away(mode: str, storage: str, name: str = "", **train: Any) -> Technique:
    parallel = {"pp": 2, "schedule": "zb_h1"} if name else {}
    train = {"offload_activations": storage, **train}
    return Technique(
        f"{name}{mode}, inputs on the {storage}", parallel, mode, pairs="none", train=train
    )


def _fp8(name: str, matmul: str = "fp8_tensor", **parallel: Any) -> Technique:
    recompute = parallel.pop("recompute", "none")
    model = parallel.pop("model", {})
    even = parallel.get("schedule") == "dualpipe"
    train = {"matmul": matmul}
    return Technique(
        f"{matmul} {name}".strip(),
        parallel,
        recompute,
        even,
        model=model,
        pairs="none",
        train=train,
    )


#: Blocks of 128 lie inside of the slices of two ranks.
_BLOCKS = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn_hidden": 256}
_FP8 = (
    _fp8(""),
    *(_fp8(f"{mode}", recompute=mode) for mode in ("selective", "full", "budget")),
    *(_fp8(f"dp2 zero{zero}", dp=2, zero=zero) for zero in (0, 1, 2, 3)),
    _fp8("tp2", tp=2, sp=False),
    _fp8("tp4 sp", tp=4, sp=True, model={"kv_heads": 4}),
    _fp8("tp4, shared key-value heads", tp=4),
    _fp8("tp2 sp selective", tp=2, sp=True, recompute="selective"),
    *(
        _fp8(f"cp2 {method}", cp=2, cp_method=method)
        for method in ("zigzag", "ring", "allgather", "ulysses")
    ),
    *(
        _fp8(f"pp2 {schedule}", pp=2, schedule=schedule)
        for schedule in ("1f1b", "zb_h1", "zb_h2", "dualpipe")
    ),
    *(
        _fp8(f"pp2 {schedule}", pp=2, vpp=2, schedule=schedule)
        for schedule in ("interleaved", "zbv", "dualpipev")
    ),
    _fp8("tp2 sp cp2 dp2 zero1", tp=2, cp=2, dp=2, zero=1),
    _fp8("tp2 sp cp2 pp2, zb_h1, full", tp=2, cp=2, pp=2, schedule="zb_h1", recompute="full"),
    _fp8("", "fp8_block"),
    _fp8("selective", "fp8_block", recompute="selective"),
    _fp8("pp2 zb_h1, full", "fp8_block", pp=2, schedule="zb_h1", recompute="full"),
    *(_fp8(f"dp2 zero{zero}", "fp8_block", dp=2, zero=zero) for zero in (1, 2, 3)),
    _fp8("tp2 sp, blocks in slices", "fp8_block", tp=2, sp=True, model=_BLOCKS),
    _fp8("tp2, blocks in slices", "fp8_block", tp=2, sp=False, model=_BLOCKS),
    _fp8("tp2, blocks cut", "fp8_block", tp=2),
    _fp8("cp2 zigzag, blocks cut", "fp8_block", cp=2, cp_method="zigzag"),
)

#: Techniques of one axis exclude each other. ZeRO shards over cp where there is cp, else over dp of
#: its own.
AXES: dict[str, tuple[Technique, ...]] = {
    "data": (
        Technique("dp2", {"dp": 2}, deep=True),
        Technique("zero1", {"zero": 1}, deep=True),
        Technique("zero2", {"zero": 2}, deep=True),
        Technique("zero3", {"zero": 3}, deep=True),
        Technique("zero1 hybrid", {"zero": 1, "dp": 4, "zero_group": 2}),
        Technique("zero2 hybrid", {"zero": 2, "dp": 4, "zero_group": 2}),
        Technique("zero3 hybrid", {"zero": 3, "dp": 4, "zero_group": 2}),
        Technique("dp4 zero1", {"zero": 1, "dp": 4}, pairs="none"),
        Technique("zero1 on the host", {"zero": 1}, pairs="deep", train=_HOST),
        *(
            Technique(f"zero{zero} on the host", {"zero": zero, "dp": 2}, pairs="none", train=_HOST)
            for zero in (0, 2, 3)
        ),
        *(
            Technique(
                f"zero{zero} on the host, delayed",
                {"zero": zero, "dp": 2},
                pairs="none",
                train=_DELAYED,
            )
            for zero in range(4)
        ),
        Technique(
            "zero1 tp2 pp2, delayed",
            {"zero": 1, "dp": 2, "tp": 2, "pp": 2},
            pairs="none",
            train=_DELAYED,
        ),
        *(
            Technique(f"zero{zero} on a disk", {"zero": zero, "dp": 2}, pairs="none", train=_DISK)
            for zero in (1, 2, 3)
        ),
        Technique(
            "zero2 hybrid on the host",
            {"zero": 2, "dp": 4, "zero_group": 2},
            pairs="none",
            train=_HOST,
        ),
    ),
    "tensor": (
        Technique("tp2 sp", {"tp": 2, "sp": True}, deep=True),
        Technique("tp2", {"tp": 2, "sp": False}, deep=True),
        Technique("tp4 sp", {"tp": 4, "sp": True}, pairs="none"),
        Technique("tp4", {"tp": 4, "sp": False}, pairs="none"),
    ),
    "context": (
        Technique("cp2 zigzag", {"cp": 2, "cp_method": "zigzag"}, deep=True),
        Technique("cp2 ring", {"cp": 2, "cp_method": "ring"}),
        Technique("cp2 allgather", {"cp": 2, "cp_method": "allgather"}, deep=True),
        Technique("cp2 ulysses", {"cp": 2, "cp_method": "ulysses"}, deep=True),
        *(
            Technique(f"cp4 {method}", {"cp": 4, "cp_method": method}, pairs="none")
            for method in ("zigzag", "ring", "allgather", "ulysses")
        ),
    ),
    "pipeline": (
        _pipeline("afab"),
        _pipeline("1f1b", deep=True),
        _pipeline("interleaved", vpp=2, deep=True),
        _pipeline("zb_h1", deep=True),
        _pipeline("zb_h2"),
        _pipeline("zbv", vpp=2),
        _pipeline("dualpipe", even=True, deep=True),
        _pipeline("dualpipev", vpp=2),
        *(
            Technique(
                f"pp4 {schedule}",
                {"pp": 4, "schedule": schedule},
                pairs="none",
                even=schedule == "dualpipe",
            )
            for schedule in ("1f1b", "zb_h1", "zb_h2", "dualpipe")
        ),
    ),
    "recompute": (
        Technique("selective", {}, recompute="selective", deep=True),
        Technique("full", {}, recompute="full", deep=True),
        Technique("budget", {}, recompute="budget", pairs="deep"),
        *_LATENTS,
        *(
            Technique(
                f"tp2 pp2 {mode}, inputs shared",
                _SHARED,
                recompute=mode,
                pairs="none",
                train=_SHARE,
            )
            for mode in ("selective", "full")
        ),
        *(_away(mode, place) for mode, place in (("selective", "host"), ("full", "disk"))),
        Technique(
            "tp2 pp2 full, inputs shared and on the host",
            _SHARED,
            "full",
            pairs="none",
            train=_SHARE | _INPUTS,
        ),
        _away("selective", "disk", "pp2 zb_h1 ", **_DISK),
    ),
    # A compiled block costs its ranks half a minute: how it composes is shown in
    # tests/trainer/test_compile.py.
    "compile": (Technique("compile", {}, compile=True, pairs="none"),),
    "experts": (
        Technique("ep2", {"ep": 2}, model=MIXTURE, deep=True),
        Technique("ep2 deepseek", {"ep": 2}, model=DEEPSEEK, deep=True),
        Technique("ep4", {"ep": 4}, model=MIXTURE, pairs="deep"),
        Technique("ep2 capacity", {"ep": 2}, model=CAPPED, pairs="deep"),
        *_FOLDED,
        *_FIVE_AXES,
        *_BY_DOMAIN,
        *_CAPPED,
        *_JITTER,
        *_BALANCED,
        *_CORNERS,
        Technique("experts on every rank", {}, model=DEEPSEEK, pairs="deep"),
    ),
    "prediction": (Technique("mtp", {}, model={"mtp": Mtp(depth=2, weight=0.4)}, deep=True),),
    "products": _FP8,
    "dropout": (Technique("dropout", {}, dropout=0.1, pairs="deep"),),
}

#: Pairs that the trainer refuses. They stay cells of their own, which say why; products leave them
#: out.
REFUSED = {
    ("zero3", f"pp2 {schedule}") for schedule in ("zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipev")
}
REFUSED |= {("zero2", "pp2 dualpipe")}
#: Two ranks that shard an expert are none of those that hold two, or four.
REFUSED |= {("zero3 hybrid", "ep2"), ("zero3 hybrid", "ep2 deepseek")}
REFUSED |= {(f"zero{zero} hybrid", "ep4") for zero in (1, 2, 3)}

#: Replicas that take unequal numbers of micro-batches, and what they are combined with.
UNEQUAL = tuple(
    Technique(f"dp3 zero{zero} unequal", {"dp": 3, "zero": zero, "uneven": True}, pairs="none")
    for zero in range(4)
)
BESIDE_UNEQUAL = (
    "tp2 sp",
    "cp2 zigzag",
    "pp2 1f1b",
    "pp2 interleaved",
    "pp2 zb_h1",
    "pp2 zbv",
    "full",
    "dropout",
)
#: Techniques that are refused by themselves: 8-bit products whose rounding no layout of ranks
#: repeats.
REFUSED_ALONE = {
    "fp8_tensor tp4, shared key-value heads",
    "fp8_block tp2, blocks cut",
    "fp8_block cp2 zigzag, blocks cut",
}
