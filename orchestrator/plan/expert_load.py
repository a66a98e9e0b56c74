"""The distribution of a step's tokens over the experts of a layer, which workers report, and its
ratios."""

from __future__ import annotations

from math import log

from msgspec import Struct


class ExpertLoad(Struct, omit_defaults=True):
    """The load of one layer's experts in one step of the whole job."""

    tokens: list[int]  # copies of tokens that chose each expert
    #: entropy of a token's scores, mean over tokens, as a share of log(experts): 1 if all are equal
    entropy: float
    dropped: float = 0.0  # share of the copies that no expert took
    #: lowest and highest balancing bias, if the router has biases
    bias: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        """The tokens of the fullest expert over the mean; 1 for an even load."""
        return most_over_mean(self.tokens)

    def rank_ratio(self, ranks: int) -> float:
        """The tokens of the fullest rank over the mean, with equal runs of experts on `ranks`
        ranks. A layer takes as long as its fullest rank."""
        experts_per_rank = len(self.tokens) // ranks
        return most_over_mean(
            [
                sum(self.tokens[at : at + experts_per_rank])
                for at in range(0, len(self.tokens), experts_per_rank)
            ]
        )

    def balance(self, top_k: int) -> float:
        """The entropy of the load between its bounds: 1 if all experts got equally many tokens, 0
        if all tokens chose the same experts."""
        total = sum(self.tokens)
        highest = log(len(self.tokens))
        lowest = log(top_k)
        if total == 0 or highest <= lowest:
            return 1.0
        entropy = -sum(count / total * log(count / total) for count in self.tokens if count)
        return max(0.0, (entropy - lowest) / (highest - lowest))


def most_over_mean(counts: list[int]) -> float:
    """The largest count over the mean; 1.0 if all counts are zero."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
