"""The matrix of `orch verify`: every technique alone, every pair of techniques, a covering set of
triples, and products on up to eight processes. The entries are spread over models, bucket sizes,
sizes and numbers of micro-batches, masks, and whole or packed samples.

The techniques are in `techniques.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple

from .cover import Row, cover
from .technique import Technique
from .techniques import AXES, REFUSED, UNEQUAL, UNEQUAL_PARTNERS

MOST_PROCESSES = 8

_SMALL = {
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden": 48,
    "vocab": 257,
    "max_seq_len": 64,
}
#: No tp divides the vocabulary of 257 tokens, and no pp divides the five layers of "uneven".
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {**_SMALL, "layers": 4},
    "tied": {**_SMALL, "layers": 4, "tied_embeddings": True},
    "gpt": {
        **_SMALL,
        "layers": 4,
        "kv_heads": 4,
        "norm": "layer",
        "position": "learned",
        "mlp": "plain",
        "activation": "gelu",
        "bias": True,
        "tied_embeddings": True,
    },
    "uneven": {**_SMALL, "layers": 5, "kv_heads": 1, "tied_embeddings": True},
}
BUCKET_MIB = {"one bucket": 25.0, "many buckets": 2.0**-10}
#: Micro-batches of a replica: as many as the longest pipeline has stages, one, and numbers that no
#: degree divides.
ACCUMULATION = (4, 1, 3, 5)


class Variation(NamedTuple):
    model: str
    buckets: str
    accumulation: int
    packing: str  # "whole" samples of one document, or "packed" documents
    size: int  # samples of a micro-batch
    #: "uneven": every micro-batch has targets, some more than others; "empty": some have none
    masks: str


_SETTINGS: tuple[Sequence[Any], ...] = (
    tuple(MODELS),
    tuple(BUCKET_MIB),
    ACCUMULATION,
    ("whole", "packed"),
    (1, 2, 3),
    ("uneven", "empty"),
)
#: Variations in which every pair of settings occurs.
VARIATIONS = tuple(
    Variation(
        *(
            choices[(choice or at) % len(choices)]
            for choices, choice in zip(_SETTINGS, row, strict=True)
        )
    )
    for at, row in enumerate(
        cover(
            [len(choices) for choices in _SETTINGS],
            2,
            lambda row: True,
        )
    )
)
PLAIN = Variation(
    model="gqa",
    buckets="one bucket",
    accumulation=4,
    packing="whole",
    size=1,
    masks="uneven",
)


def _merged(settings: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the keys of all settings together; later ones win."""
    return {key: value for keys in settings for key, value in keys.items()}


class Entry(NamedTuple):
    """The description of a cell: techniques of different axes, in a variation."""

    section: str  # a key of SECTIONS
    techniques: tuple[Technique, ...]
    variation: Variation

    @property
    def name(self) -> str:
        layout = " + ".join(technique.name for technique in self.techniques) or "one process"
        return f"{layout} [{', '.join(self.settings)}]"

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings as the page shows them: model, buckets, micro-batches, text, masks."""
        model, buckets, _, packing, size, masks = self.variation
        return model, buckets, f"{self.accumulation} x {size}", packing, masks

    @property
    def accumulation(self) -> int:
        """Micro-batches of a replica; the largest number if replicas take unequal numbers."""
        least = 2 if self._unequal or self._even else 1
        count = max(self.variation.accumulation, least)
        return count + count % 2 if self._even else count

    @property
    def samples(self) -> int:
        """Samples of the global batch."""
        replicas = self.degrees["dp"] * self.degrees["ep"]
        count = (
            replicas * (self.accumulation - 1) + 1
            if self._unequal
            else replicas * self.accumulation
        )
        return count * self.variation.size

    @property
    def _even(self) -> bool:
        return any(technique.even for technique in self.techniques)

    @property
    def _unequal(self) -> bool:
        return any(technique in UNEQUAL for technique in self.techniques)

    @property
    def degrees(self) -> dict[str, Any]:
        """Keys of `parallel`, with every degree."""
        degrees: dict[str, Any] = dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "vpp"), 1)
        degrees["zero"] = 0
        for technique in self.techniques:
            degrees |= technique.parallel
        if degrees["zero"] and degrees["cp"] == 1 and degrees["dp"] == 1:
            degrees["dp"] = 2
        return degrees

    @property
    def processes(self) -> int:
        degrees = self.degrees
        return prod(degrees[axis] for axis in ("dp", "tp", "pp", "cp", "ep"))

    @property
    def nodes(self) -> int:
        return max((technique.nodes for technique in self.techniques), default=1)

    @property
    def recompute(self) -> str:
        return next((t.recompute for t in self.techniques if t.recompute != "none"), "none")

    @property
    def model(self) -> dict[str, Any]:
        """The fields of the model that the techniques and the variation set."""
        fields = {
            **MODELS[self.variation.model],
            "dropout": max((t.dropout for t in self.techniques), default=0.0),
        }
        for technique in self.techniques:
            fields |= technique.model
        return fields

    @property
    def train(self) -> dict[str, Any]:
        """The further keys of `train` that the techniques set."""
        return _merged(technique.train for technique in self.techniques)

    @property
    def optim(self) -> dict[str, Any]:
        """The further keys of `optim` that the techniques set."""
        return _merged(technique.optim for technique in self.techniques)

    @property
    def compile(self) -> bool:
        return any(technique.compile for technique in self.techniques)


SECTIONS = {
    "alone": "Every technique alone",
    "pair": "Every pair",
    "product": "A covering set of triples, and products up to eight processes",
    "unequal": "Replicas that take unequal numbers of micro-batches",
}


def full() -> list[Entry]:
    """Returns the entries of docs/parity.md."""
    alone = [
        Entry("alone", (), variation) for variation in dict.fromkeys((PLAIN, *VARIATIONS[::3]))
    ]
    techniques = [technique for axis in AXES.values() for technique in axis]
    alone += [Entry("alone", (technique,), PLAIN) for technique in techniques]
    together = [
        *_spread("pair", pairs()),
        *_spread("pair", few_pairs()),
        *_spread("product", triples()),
    ]
    return [*alone, *together, *_spread("unequal", unequal())]


def quick() -> list[Entry]:
    """Returns every deep technique alone, and a few products."""
    deep = [technique for axis in AXES for technique in _deep(axis)]
    alone = [Entry("alone", (), PLAIN)]
    alone += [Entry("alone", (technique,), PLAIN) for technique in deep]
    products = [techniques for techniques in _covering(1) if len(techniques) > 1]
    return [*alone, *_spread("product", products)]


def pairs() -> Iterator[tuple[Technique, ...]]:
    """Yields every pair of techniques of different axes that are combined with all others."""
    for axis, second_axis in combinations(AXES.values(), 2):
        for pair in product(axis, second_axis):
            if all(technique.pairs == "all" for technique in pair):
                yield pair


def few_pairs() -> Iterator[tuple[Technique, ...]]:
    """Yields the pairs of techniques that are combined with deep techniques alone."""
    for axis, techniques in AXES.items():
        for technique in techniques:
            deep_techniques = (
                deep for deep_axis in AXES if deep_axis != axis for deep in _deep(deep_axis)
            )
            yield from ((deep, technique) for deep in deep_techniques if technique.pairs == "deep")


def triples() -> list[tuple[Technique, ...]]:
    """Returns products that contain every legal triple of deep techniques; most have four or five
    techniques on eight processes."""
    return _covering(3)


def _covering(strength: int) -> list[tuple[Technique, ...]]:
    """Returns products that contain every legal combination of `strength` deep techniques."""
    levels = [len(_deep(axis)) for axis in AXES]
    return [_techniques_of(row) for row in cover(levels, strength, _fits)]


def unequal() -> Iterator[tuple[Technique, ...]]:
    """Yields the techniques with unequal replicas, alone and with each partner."""
    partners = [
        technique
        for axis in AXES.values()
        for technique in axis
        if technique.name in UNEQUAL_PARTNERS
    ]
    for one in UNEQUAL:
        yield (one,)
        yield from (
            (one, partner)
            for partner in partners
            if (f"zero{one.parallel['zero']}", partner.name) not in REFUSED
        )


def _deep(axis: str) -> list[Technique]:
    return [technique for technique in AXES[axis] if technique.deep]


def _techniques_of(row: Row) -> tuple[Technique, ...]:
    choices = zip(AXES, row, strict=True)
    return tuple(_deep(axis)[choice - 1] for axis, choice in choices if choice)


def _fits(row: Row) -> bool:
    """Whether the trainer runs the techniques of the row together, on few enough processes."""
    techniques = _techniques_of(row)
    refused = any(
        (first.name, second.name) in REFUSED for first, second in combinations(techniques, 2)
    )
    return not refused and _processes(techniques) <= MOST_PROCESSES


def _processes(techniques: Sequence[Technique]) -> int:
    return Entry("", tuple(techniques), PLAIN).processes


def _spread(section: str, cells: Iterable[tuple[Technique, ...]]) -> Iterator[Entry]:
    """Gives each entry the variation whose settings its techniques have met least, so that every
    technique meets every setting."""
    met: Counter[tuple[str, tuple[int, Any]]] = Counter()
    for techniques in cells:

        def times_met(
            variation: Variation, techniques: tuple[Technique, ...] = techniques
        ) -> tuple[int, int]:
            settings = list(enumerate(variation))
            by_techniques = sum(met[t.name, setting] for t in techniques for setting in settings)
            return by_techniques, sum(met["", setting] for setting in settings)

        chosen = min(VARIATIONS, key=times_met)
        for setting in enumerate(chosen):
            met["", setting] += 1
            for technique in techniques:
                met[technique.name, setting] += 1
        yield Entry(section, techniques, chosen)
