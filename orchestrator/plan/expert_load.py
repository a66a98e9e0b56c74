"""How evenly the tokens of a step were spread over the experts of a layer: what a worker reports,
and ratios of it."""

from __future__ import annotations

from math import log

from msgspec import Struct


class ExpertLoad(Struct, omit_defaults=True):
    """One layer, one step, the whole job."""

    tokens: list[int]  # copies of tokens that chose each expert
    # of a token's scores, mean over tokens, as a share of log(experts): 1 if all are equal
    entropy: float
    dropped: float = 0.0  # share of the copies that no expert took
    bias: tuple[float, float] | None = (
        None  # lowest and highest balancing bias, where the router has one
    )

    @property
    def ratio(self) -> float:
        """Tokens of the expert that got most, over the mean; 1 is even."""
        return most_over_mean(self.tokens)

    def rank_ratio(self, ranks: int) -> float:
        """The same of the `ranks` ranks that hold equal runs of the experts: a layer takes as long
        as the fullest."""
        experts_per_rank = len(self.tokens) // ranks
        return most_over_mean(
            [
                sum(self.tokens[at : at + experts_per_rank])
                for at in range(0, len(self.tokens), experts_per_rank)
            ]
        )

    def balance(self, top_k: int) -> float:
        """Entropy of the load between its bounds: 1 if every expert got as many, 0 if all tokens
        chose the same."""
        total = sum(self.tokens)
        highest = log(len(self.tokens))
        lowest = log(top_k)
        if total == 0 or highest <= lowest:
            return 1.0
        entropy = -sum(count / total * log(count / total) for count in self.tokens if count)
        return max(0.0, (entropy - lowest) / (highest - lowest))


def most_over_mean(counts: list[int]) -> float:
    """1.0 where nothing was counted."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
