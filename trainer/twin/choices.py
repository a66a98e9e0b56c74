"""The choices of a twin's routers: a twin has no values, so they are set, and all experts are
chosen equally often. A real rank whose routers choose like that sends and keeps exactly the same
bytes."""

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
    """Makes the routers of `module` choose evenly; they still compute scores. Experts that drop
    tokens take theirs at even distances. Every rank and layer makes the same choices."""
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

        output = of_sequences(rows, of_whole)
        return even_taken(moe, rows.shape[0] * rows.shape[1], lengths[0]).clone().view_as(output)

    return taken


@cache
def even_choices(moe: Moe, tokens: int) -> Tensor:
    """Returns choices int64 [tokens, top_k], with values. As many consecutive tokens as there are
    groups choose each group equally often, and each group its experts in turn; if all groups may be
    chosen, each expert counts as a group. The groups that share a token are drawn at random, as
    `orchestrator.plan.hierarchy.landings` expects."""
    groups = moe.experts
    group_size = 1
    chosen_groups = moe.top_k
    if moe.top_groups < moe.groups:
        groups = moe.groups
        group_size = moe.experts // moe.groups
        chosen_groups = moe.top_groups
    draw = Random(0)
    turn = [0] * groups
    rows = list[list[int]]()
    for start in range(0, tokens, groups):
        order = draw.sample(range(groups), groups)
        slots = draw.sample(range(chosen_groups * group_size), moe.top_k)
        positions = [slot // group_size for slot in slots]
        for token in range(min(groups, tokens - start)):
            row = []
            for position in positions:
                group = order[(token + position * groups // chosen_groups) % groups]
                row.append(group * group_size + turn[group] % group_size)
                turn[group] += 1
            rows.append(row)
    with real_tensors():
        return torch.tensor(rows)


@cache
def even_taken(moe: Moe, tokens: int, length: int) -> Tensor:
    """Returns bool [tokens, top_k], with values: whether an expert takes a choice of
    `even_choices`, for sequences of this length."""
    share = taken_choices(moe, length) / moe.top_k
    counts = Counter[int]()
    flags = list[bool]()
    for expert in even_choices(moe, tokens).flatten().tolist():
        flags.append(int((counts[expert] + 1) * share) > int(counts[expert] * share))
        counts[expert] += 1
    with real_tensors():
        return torch.tensor(flags).view(tokens, moe.top_k)
