"""The matrix: every technique alone, every pair of techniques, a covering set of triples and products of up to eight
processes, spread over models, bucket sizes, sizes and numbers of micro-batches, masks and kinds of text.

A technique is a row of AXES: what it asks of a configuration. It enters the matrix here and is measured as soon as the
trainer runs it; until then its cells say why they are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from orchestrator.plan.document import Mla, Moe

from .cover import Row, cover

MOST_PROCESSES = 8


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


def _pipeline(schedule: str, vpp: int = 1, **more: Any) -> Technique:
    return Technique(f"pp2 {schedule}", {"pp": 2, "vpp": vpp, "schedule": schedule}, **more)


#: Latent attention of a small model.
MLA = Mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
_PLAIN = {"bias": False, "position": "rope"}
MIXTURE = {**_PLAIN, "moe": Moe(experts=4, top_k=2, ffn_hidden=24, balance_loss=0.1, z_loss=0.01)}
#: DeepSeek-V3's block: a dense layer first, shared experts, choice among groups, latent attention.
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
    ),
    "mla": MLA,
}

#: Gradients, master weights and moments in the memory of the host.
_HOST = {"offload": "host"}
#: On a disk, through so little memory that every bucket is several chunks.
_DISK = {"offload": "disk", "offload_buffer_mib": 0.1}
#: Tensor-parallel ranks that share the inputs of recomputed layers.
_SHARE = {"partition_activations": True}
_SHARED = {"tp": 2, "sp": False, "pp": 2, "vpp": 2, "schedule": "interleaved"}

#: Techniques of one axis exclude each other. ZeRO shards over cp where there is cp, else over dp of its own.
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
        *(Technique(f"zero{zero} on a disk", {"zero": zero, "dp": 2}, pairs="none", train=_DISK) for zero in (1, 2, 3)),
        Technique("zero2 hybrid on the host", {"zero": 2, "dp": 4, "zero_group": 2}, pairs="none", train=_HOST),
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
            Technique(f"pp4 {schedule}", {"pp": 4, "schedule": schedule}, pairs="none", even=schedule == "dualpipe")
            for schedule in ("1f1b", "zb_h1", "zb_h2", "dualpipe")
        ),
    ),
    "recompute": (
        Technique("selective", {}, recompute="selective", deep=True),
        Technique("full", {}, recompute="full", deep=True),
        Technique("budget", {}, recompute="budget", pairs="deep"),
        *(
            Technique(f"tp2 pp2 {mode}, inputs shared", _SHARED, recompute=mode, pairs="none", train=_SHARE)
            for mode in ("selective", "full")
        ),
    ),
    # A compiled block costs its ranks half a minute: how it composes is shown in tests/trainer/test_compile.py.
    "compile": (Technique("compile", {}, compile=True, pairs="none"),),
    "experts": (
        Technique("ep2", {"ep": 2}, model=MIXTURE, deep=True),
        Technique("ep2 deepseek", {"ep": 2}, model=DEEPSEEK, deep=True),
        Technique("ep4", {"ep": 4}, model=MIXTURE, pairs="deep"),
        Technique("tp2 etp1 ep2", {"tp": 2, "etp": 1}, model=MIXTURE, pairs="none"),
        Technique("tp2 etp1 ep4 deepseek", {"tp": 2, "etp": 1, "ep": 2}, model=DEEPSEEK, pairs="none"),
        Technique("tp4 etp2 ep2", {"tp": 4, "etp": 2}, model=MIXTURE, pairs="none"),
        Technique("tp4 etp2 ep4 zero1", {"tp": 4, "etp": 2, "ep": 2, "dp": 2, "zero": 1}, model=MIXTURE, pairs="none"),
        *(
            Technique(
                f"cp2 {method}, ep2 over it",
                {"cp": 2, "cp_method": method, "fold_cp": True},
                model=MIXTURE,
                pairs="none",
            )
            for method in ("zigzag", "ring", "allgather", "ulysses")
        ),
        *(
            Technique(
                f"tp2 cp2 etp1 ep4 zero{zero}",
                {"tp": 2, "cp": 2, "dp": 2, "etp": 1, "fold_cp": True, "zero": zero},
                model=DEEPSEEK,
                pairs="none",
            )
            for zero in range(4)
        ),
        Technique(
            "tp2 cp2 etp1 ep4 zero2 hybrid",
            {"tp": 2, "cp": 2, "dp": 4, "etp": 1, "fold_cp": True, "zero": 2, "zero_group": 4},
            model=MIXTURE,
            pairs="none",
        ),
        Technique(
            "tp2 pp2 etp1 ep4, zb_h1",
            {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "schedule": "zb_h1"},
            model=DEEPSEEK,
            pairs="none",
        ),
        Technique(
            "tp2 cp2 pp2 etp1 ep4, dualpipe",
            {"tp": 2, "cp": 2, "pp": 2, "etp": 1, "fold_cp": True, "schedule": "dualpipe"},
            model=MIXTURE,
            pairs="none",
        ),
        Technique("experts on every rank", {}, model=DEEPSEEK, pairs="deep"),
    ),
    "dropout": (Technique("dropout", {}, dropout=0.1, pairs="deep"),),
}

#: Pairs that the trainer refuses. They stay cells of their own, which say why; products leave them out.
REFUSED = {("zero3", f"pp2 {schedule}") for schedule in ("zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipev")}
REFUSED |= {("zero2", "pp2 dualpipe")}
#: Two ranks that shard an expert are none of those that hold two, or four.
REFUSED |= {("zero3 hybrid", "ep2"), ("zero3 hybrid", "ep2 deepseek")}
REFUSED |= {(f"zero{zero} hybrid", "ep4") for zero in (1, 2, 3)}

#: Replicas that take unequal numbers of micro-batches, and what they are combined with.
UNEQUAL = tuple(
    Technique(f"dp3 zero{zero} unequal", {"dp": 3, "zero": zero, "uneven": True}, pairs="none") for zero in range(4)
)
BESIDE_UNEQUAL = ("tp2 sp", "cp2 zigzag", "pp2 1f1b", "pp2 interleaved", "pp2 zb_h1", "pp2 zbv", "full", "dropout")

_SMALL = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_hidden": 48, "vocab": 257, "max_seq_len": 64}
#: 257 tokens: no tp divides them. Five layers: no pp does.
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {**_SMALL, "layers": 4},
    "tied": {**_SMALL, "layers": 4, "tied_embeddings": True},
    "gpt": {
        **{**_SMALL, "layers": 4, "kv_heads": 4, "norm": "layer", "position": "learned", "mlp": "plain"},
        **{"activation": "gelu", "bias": True, "tied_embeddings": True},
    },
    "uneven": {**_SMALL, "layers": 5, "kv_heads": 1, "tied_embeddings": True},
}
BUCKET_MIB = {"one bucket": 25.0, "many buckets": 2.0**-10}
#: Micro-batches of a replica: as many as any pipeline has stages, one, and numbers that no degree divides.
ACCUMULATION = (4, 1, 3, 5)


class Variation(NamedTuple):
    model: str
    buckets: str
    accumulation: int
    text: str
    size: int  # samples of a micro-batch
    masks: str  # "uneven": every micro-batch has targets, some more than others; "empty": some have none


_SETTINGS: tuple[Sequence[Any], ...] = (
    *(tuple(MODELS), tuple(BUCKET_MIB), ACCUMULATION, ("whole", "packed"), (1, 2, 3), ("uneven", "empty")),
)
#: Every two settings are together in one.
VARIATIONS = tuple(
    Variation(*(choices[(choice or at) % len(choices)] for choices, choice in zip(_SETTINGS, row, strict=True)))
    for at, row in enumerate(cover([len(choices) for choices in _SETTINGS], 2, lambda row: True))
)
PLAIN = Variation("gqa", "one bucket", 4, "whole", 1, "uneven")


class Entry(NamedTuple):
    """One cell to be: techniques of different axes, in a variation."""

    part: str  # of PARTS
    techniques: tuple[Technique, ...]
    variation: Variation

    @property
    def name(self) -> str:
        layout = " + ".join(technique.name for technique in self.techniques) or "one process"
        return f"{layout} [{', '.join(self.settings)}]"

    @property
    def settings(self) -> tuple[str, ...]:
        """The variation as it is: model, buckets, micro-batches, text, masks."""
        model, buckets, _, text, size, masks = self.variation
        return model, buckets, f"{self.accumulation} x {size}", text, masks

    @property
    def accumulation(self) -> int:
        """Micro-batches of a replica; the most, where they take unequal numbers."""
        least = 2 if self._unequal or self._even else 1
        most = max(self.variation.accumulation, least)
        return most + most % 2 if self._even else most

    @property
    def samples(self) -> int:
        """Of the global batch."""
        replicas = self.degrees["dp"] * self.degrees["ep"]
        count = replicas * (self.accumulation - 1) + 1 if self._unequal else replicas * self.accumulation
        return count * self.variation.size

    @property
    def _even(self) -> bool:
        return any(technique.even for technique in self.techniques)

    @property
    def _unequal(self) -> bool:
        return any(technique in UNEQUAL for technique in self.techniques)

    @property
    def degrees(self) -> dict[str, Any]:
        """Keys of `parallel`; every degree is set."""
        found: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0, "vpp": 1}
        for technique in self.techniques:
            found |= technique.parallel
        if found["zero"] and found["cp"] == 1 and found["dp"] == 1:
            found["dp"] = 2
        return found

    @property
    def processes(self) -> int:
        degrees = self.degrees
        return degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"] * degrees["ep"]

    @property
    def recompute(self) -> str:
        return next((t.recompute for t in self.techniques if t.recompute != "none"), "none")

    @property
    def model(self) -> dict[str, Any]:
        """Fields of the model."""
        found = {**MODELS[self.variation.model], "dropout": max((t.dropout for t in self.techniques), default=0.0)}
        for technique in self.techniques:
            found |= technique.model
        return found

    @property
    def train(self) -> dict[str, Any]:
        """Further keys of `train`."""
        found = dict[str, Any]()
        for technique in self.techniques:
            found |= technique.train
        return found

    @property
    def compile(self) -> bool:
        return any(technique.compile for technique in self.techniques)


PARTS = {
    "alone": "Every technique alone",
    "pair": "Every pair",
    "product": "A covering set of triples, and products up to eight processes",
    "unequal": "Replicas that take unequal numbers of micro-batches",
}


def full() -> list[Entry]:
    """Every cell of docs/parity.md."""
    alone = [Entry("alone", (), variation) for variation in dict.fromkeys((PLAIN, *VARIATIONS[::3]))]
    techniques = [technique for axis in AXES.values() for technique in axis]
    alone += [Entry("alone", (technique,), PLAIN) for technique in techniques]
    together = [*_spread("pair", pairs()), *_spread("pair", few_pairs()), *_spread("product", triples())]
    return [*alone, *together, *_spread("unequal", unequal())]


def quick() -> list[Entry]:
    """Every deep technique alone, and a few products."""
    deep = [technique for axis in AXES for technique in _deep(axis)]
    few = [_of(row) for row in cover([len(_deep(axis)) for axis in AXES], 1, _fits)]
    products = _spread("product", (techniques for techniques in few if len(techniques) > 1))
    return [Entry("alone", (), PLAIN), *(Entry("alone", (t,), PLAIN) for t in deep), *products]


def pairs() -> Iterator[tuple[Technique, ...]]:
    for one, other in combinations(AXES.values(), 2):
        for pair in product(one, other):
            if all(technique.pairs == "all" for technique in pair):
                yield pair


def few_pairs() -> Iterator[tuple[Technique, ...]]:
    for axis, techniques in AXES.items():
        for technique in techniques:
            others = (deep for other in AXES if other != axis for deep in _deep(other))
            yield from ((deep, technique) for deep in others if technique.pairs == "deep")


def triples() -> list[tuple[Technique, ...]]:
    """Every triple of deep techniques that is legal is in one of these; most hold four or five on eight processes."""
    return [_of(row) for row in cover([len(_deep(axis)) for axis in AXES], 3, _fits)]


def unequal() -> Iterator[tuple[Technique, ...]]:
    others = [technique for axis in AXES.values() for technique in axis if technique.name in BESIDE_UNEQUAL]
    for one in UNEQUAL:
        yield (one,)
        yield from ((one, other) for other in others if (f"zero{one.parallel['zero']}", other.name) not in REFUSED)


def _deep(axis: str) -> list[Technique]:
    return [technique for technique in AXES[axis] if technique.deep]


def _of(row: Row) -> tuple[Technique, ...]:
    return tuple(_deep(axis)[choice - 1] for axis, choice in zip(AXES, row, strict=True) if choice)


def _fits(row: Row) -> bool:
    techniques = _of(row)
    known = any((one.name, other.name) in REFUSED for one, other in combinations(techniques, 2))
    return not known and _processes(techniques) <= MOST_PROCESSES


def _processes(techniques: Sequence[Technique]) -> int:
    return Entry("", tuple(techniques), PLAIN).processes


def _spread(part: str, cells: Iterable[tuple[Technique, ...]]) -> Iterator[Entry]:
    """Give each cell the variation whose parts its techniques have met least, so that all meet all."""
    met: Counter[tuple[str, tuple[int, Any]]] = Counter()
    for techniques in cells:

        def times(variation: Variation, techniques: tuple[Technique, ...] = techniques) -> tuple[int, int]:
            counts = [met[t.name, part] for t in techniques for part in enumerate(variation)]
            return sum(counts), sum(met["", part] for part in enumerate(variation))

        chosen = min(VARIATIONS, key=times)
        for what in enumerate(chosen):
            met["", what] += 1
            for technique in techniques:
                met[technique.name, what] += 1
        yield Entry(part, techniques, chosen)
