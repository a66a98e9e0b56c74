"""What is run: layouts in the words of `orch plan`, each with what it stands beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.cluster.build import build_cluster
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.planner.build import build_plan

#: Of a model that GPUs run: its name in conf/model -> that in torchtitan.
TITAN = {"llama3_8b": "8B", "llama32_1b": "1B"}
SMALL = "llama32_1b"
LARGE = "llama3_8b"
EXPERTS = "qwen3_30b_a3b"


@dataclass(frozen=True)
class Case:
    """`words`: beside those of cluster and model. `rivals`: "loop" (plain torch on DDP or FSDP2),
    "titan"."""

    name: str
    model: str
    words: tuple[str, ...]
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Where:
    """`dry`: small models; `cuda`: on GPUs, which a dry run may be too (tests/beds/fakegpu);
    `card`: the words of `card_words`."""

    dry: bool
    cuda: bool
    card: tuple[str, ...] = ()


#: Dry: the same layouts of small models, which trains in seconds.
DRY_MODEL = {SMALL: "tiny", LARGE: "tiny", EXPERTS: "tiny_moe"}
DRY_WORDS = (
    "train.seq_len=64",
    "train.steps=2",
    "train.global_batch_samples=16",
    "train.precision=bf16",
)
WORDS = ("train.seq_len=8192", "train.global_batch_samples=32")
#: Of a case's words those that a dry run keeps; the others are about sizes.
LAYOUT_WORDS = (
    "parallel",
    "train.recompute=",
    "train.compile=",
    "data.isolate",
    "optim.kind",
    "train.offload",
)


def plan_of(model: str, words: tuple[str, ...], gpus: int, where: Where) -> Plan:
    """The plan that `orch plan` makes of these words. Raises OrchError."""
    if where.dry:
        kept = [word for word in words if word.startswith(LAYOUT_WORDS)]
        place = ["cluster=local", "cluster.nodes=1", f"cluster.gpus_per_node={gpus}"]
        layers = [f"model.layers={2 * gpus}"]  # for the deepest pipeline
        place += (
            ["cluster.device=cuda", *_without(("train.compile=false",), words)]
            if where.cuda
            else []
        )
        config = load([*place, f"model={DRY_MODEL[model]}", *layers, *DRY_WORDS, *kept])
    else:
        place = [
            "cluster=h100x8",
            f"cluster.gpus_per_node={gpus}",
            f"model={model}",
            "train=pretrain",
            *where.card,
        ]
        config = load([*place, *_without(WORDS, words), *words])
    return build_plan(config, build_cluster(config.cluster))


def _without(defaults: tuple[str, ...], words: tuple[str, ...]) -> list[str]:
    given = {word.partition("=")[0] for word in words}
    return [word for word in defaults if word.partition("=")[0] not in given]


#: What is measured first, since time may end: one case of each kind of parallelism, beside the
#: rivals; then what is built of them.
FIRST = (
    "ZeRO-3",
    "TP + SP",
    "ZeRO-1",
    "PP 1f1b",
    "CP zigzag",
    "experts",
    "TP + ZeRO-1",
    "TP + PP + ZeRO-1",
    "ZeRO-0",
    "ZeRO-2",
)


def cases(gpus: int) -> list[Case]:
    """Every technique on `gpus`, a power of two from 2 on, in the order of what matters; those that
    need more are left out."""
    possible = [case for case in _all(gpus) if case is not None]
    return sorted(possible, key=lambda case: (*FIRST, case.name).index(case.name))


def _all(n: int) -> Iterator[Case | None]:
    """n = 8 in the numbers below."""
    half = n // 2
    quarter = n // 4
    deep = max(2, half)  # pipelines, and ranks that share a sequence
    shallow = f"dp{n // deep}"
    both = ("loop", "titan")
    yield Case("ZeRO-0", SMALL, (f"parallel=dp{n}_zero0",), ("loop",))
    yield Case("ZeRO-1", SMALL, (f"parallel=dp{n}_zero1",), ("loop",))
    yield Case("ZeRO-2", SMALL, (f"parallel=dp{n}_zero2",), ("loop",))
    yield Case("ZeRO-3", LARGE, (f"parallel=dp{n}_zero3", "train.recompute=selective"), both)
    yield Case("ZeRO-3, not compiled", LARGE, (f"parallel=dp{n}_zero3", "train.compile=false"))
    yield Case(
        "hybrid shards", SMALL, (f"parallel=dp{n}_zero1", f"parallel.zero_group={half}"), ("loop",)
    )
    yield Case("TP + SP", LARGE, (f"parallel=tp{n}",), ("titan",))
    yield Case("TP", LARGE, (f"parallel=tp{n}_sp0",))
    yield Case("TP + ZeRO-1", LARGE, (f"parallel=tp2_dp{half}_zero1",), ("titan",))
    for schedule in ("afab", "1f1b", "zb_h1"):
        few = ("train.global_batch_samples=8",) if schedule == "afab" else ()  # it keeps them all
        yield Case(
            f"PP {schedule}", LARGE, (f"parallel=pp{n}", f"parallel.schedule={schedule}", *few)
        )
    kept_less = "parallel.schedule=interleaved", "train.recompute=selective"
    yield Case("PP interleaved", LARGE, (f"parallel=pp{deep}_vpp2_{shallow}_zero1", *kept_less))
    for schedule in ("zbv", "dualpipev"):
        yield Case(
            f"PP {schedule}",
            LARGE,
            (f"parallel=pp{deep}_vpp2_{shallow}_zero1", f"parallel.schedule={schedule}"),
        )
    held_twice = (
        f"parallel=pp{deep}_{shallow}_zero1",
        "parallel.schedule=dualpipe",
        "train.recompute=selective",
    )
    yield Case("PP dualpipe", LARGE, held_twice)
    long = "train.seq_len=32768", "train.global_batch_samples=8", "train.recompute=full"
    for method in ("zigzag", "ring", "allgather", "ulysses"):
        yield Case(
            f"CP {method}",
            LARGE,
            (f"parallel=cp{deep}_{shallow}_zero3", f"parallel.cp_method={method}", *long),
        )
    yield Case("experts", EXPERTS, (f"parallel=ep{n}_zero1", "model.layers=12"))
    yield Case("experts + TP", EXPERTS, (f"parallel=tp2_ep{half}_zero1", "model.layers=12"))
    three_axes = (f"parallel=tp2_pp2_dp{quarter}_zero1",)
    yield Case("TP + PP + ZeRO-1", LARGE, three_axes) if n >= 8 else None
    yield Case("TP + CP + PP", LARGE, (f"parallel=tp2_cp2_pp{quarter}", *long)) if n >= 8 else None
    yield Case("full recomputation", LARGE, (f"parallel=dp{n}_zero3", "train.recompute=full"), both)
    yield Case("packed documents", SMALL, (f"parallel=dp{n}_zero1", "data.isolate_documents=true"))
    yield Case(
        "packed documents + CP",
        SMALL,
        (f"parallel=cp2_dp{half}_zero1", "data.isolate_documents=true"),
    )
    yield Case("Muon", SMALL, (f"parallel=dp{n}_zero1", "optim.kind=muon"))
    yield Case("optimizer on the host", SMALL, (f"parallel=dp{n}_zero2", "train.offload=host"))


def planned(case: Case, gpus: int, where: Where) -> Plan | str:
    """The plan, or why there is none."""
    try:
        return plan_of(case.model, case.words, gpus, where)
    except OrchError as error:
        return str(error)
