"""Checks `train.matmul_wide` against the model: each word must name a linear of it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from orchestrator.config.schema import Config
from orchestrator.cost.model.layers import resolve
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan import Exit
from orchestrator.plan.rounding.wide import legal_patterns, unknown_patterns


def wide_products(config: Config) -> list[str] | UnsetType:
    """Returns the plan's `matmul_wide`, each word once; UNSET if there is none.

    Raises OrchError (65) for a word that names no linear of the model, and for wide linears among
    wide ones.
    """
    patterns = list(dict.fromkeys(config.train.matmul_wide))
    if not patterns:
        return UNSET
    key = f"train.matmul_wide=[{','.join(patterns)}]"
    if not config.train.matmul:
        raise OrchError(
            f"{key} keeps linears wide while train.matmul narrows the others:"
            " train.matmul=fp8_tensor, fp8_delayed or fp8_block",
            Exit.CONFIG,
        )
    model = resolve(config.model)
    for pattern in unknown_patterns(patterns, model):
        choices = legal_patterns(model)
        example = f"0.{choices[0]} to {model.layers - 1}.{choices[0]} for single layers"
        raise OrchError(
            f"{key}: {model.name} has no linear {pattern!r};"
            f" {did_you_mean(pattern, choices)}, and {example}",
            Exit.CONFIG,
        )
    return patterns
