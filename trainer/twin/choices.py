"""Which experts the tokens of a twin go to: it has no values, so that is set, and all experts are
chosen equally often. A real rank whose routers choose so, too, sends and keeps exactly what its
twin does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from random import Random

import torch
from torch import Tensor, nn

from orchestrator.plan.document import Moe
from orchestrator.plan.expert_capacity import taken_choices
from trainer.compat import real_tensors
from trainer.model.experts import MixtureOfExperts, OfSequences


def choose_evenly(module: nn.Module) -> None:
    """Have the routers of `module` score as ever, and choose evenly. Where experts drop tokens,
    they take theirs at even distances. Every rank and layer does alike."""
    for mixture in module.modules():
        if isinstance(mixture, MixtureOfExperts):
            router = mixture.router
            router.choose = _evenly(router.choose, router.moe)  # type: ignore[assignment]
            mixture.of_sequences = _taken_evenly(mixture.of_sequences, router.moe)


def _evenly(choose: Callable[[Tensor], Tensor], moe: Moe) -> Callable[[Tensor], Tensor]:
    def chosen(scores: Tensor) -> Tensor:
        return even_choices(moe, len(choose(scores))).clone()

    return chosen


def _taken_evenly(of_sequences: OfSequences, moe: Moe) -> OfSequences:
    def taken(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        lengths = list[int]()  # of whole sequences

        def of_whole(rows: Tensor) -> Tensor:
            lengths.append(rows.shape[1])
            return function(rows)

        found = of_sequences(rows, of_whole)
        return even_taken(moe, rows.shape[0] * rows.shape[1], lengths[0]).clone().view_as(found)

    return taken


@cache
def even_choices(moe: Moe, tokens: int) -> Tensor:
    """int64 [tokens, top_k], with values. Each run of as many tokens as there are groups (experts,
    where all groups may be chosen) takes the groups equally often, and each group its experts in
    turn. Which of them share a token is drawn, as `orchestrator.plan.hierarchy.landings` expects
    it."""
    limited = moe.top_groups < moe.groups
    groups, each = (moe.groups, moe.experts // moe.groups) if limited else (moe.experts, 1)
    taken = moe.top_groups if limited else moe.top_k
    draw = Random(0)
    turn = [0] * groups
    rows = list[list[int]]()
    for start in range(0, tokens, groups):
        order = draw.sample(range(groups), groups)
        of_groups = [place // each for place in draw.sample(range(taken * each), moe.top_k)]
        for token in range(min(groups, tokens - start)):
            row = []
            for at in of_groups:
                group = order[(token + at * groups // taken) % groups]
                row.append(group * each + turn[group] % each)
                turn[group] += 1
            rows.append(row)
    with real_tensors():
        return torch.tensor(rows)


@cache
def even_taken(moe: Moe, tokens: int, length: int) -> Tensor:
    """bool [tokens, top_k], with values: of `even_choices`, those that experts take of sequences of
    this length."""
    share = taken_choices(moe, length) / moe.top_k
    seen = Counter[int]()
    flags = list[bool]()
    for expert in even_choices(moe, tokens).flatten().tolist():
        flags.append(int((seen[expert] + 1) * share) > int(seen[expert] * share))
        seen[expert] += 1
    with real_tensors():
        return torch.tensor(flags).view(tokens, moe.top_k)
