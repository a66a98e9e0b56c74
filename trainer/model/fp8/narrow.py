"""The modules that compute in 8 bits: the linears and experts of blocks, without those that
`train.matmul_wide` names."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.plan.document import Train
from orchestrator.plan.rounding.wide import is_wide, wide_patterns

from ..experts import Experts, GroupedLinear
from ..linear import Linear
from ..stage import Stage


def narrow_linears(stage: Stage, train: Train) -> Iterator[tuple[str, Linear]]:
    """Yields the linears of a stage that compute in 8 bits, with their names in the stage."""
    patterns = wide_patterns(train)
    for layer, block in stage.blocks.items():
        for name, module in block.named_modules():
            if not isinstance(module, Linear):
                continue
            if not is_wide(patterns, layer, name, stage.model.layers):
                yield f"layers.{layer}.{name}", module


def narrow_experts(
    stage: Stage,
    train: Train,
) -> Iterator[tuple[str, GroupedLinear, bool]]:
    """Yields (name in the stage, matrices of all experts, whether they are in 8 bits) for layers
    whose experts have some in 8 bits."""
    patterns = wide_patterns(train)
    for layer, block in stage.blocks.items():
        for name, module in block.named_modules():
            if not isinstance(module, Experts):
                continue
            matrices = {f"{name}.{matrix}": linear for matrix, linear in module.named_children()}
            narrow = {
                path: not is_wide(patterns, layer, path, stage.model.layers) for path in matrices
            }
            for path, linear in matrices.items():
                assert isinstance(linear, GroupedLinear)
                if any(narrow.values()):
                    yield f"layers.{layer}.{path}", linear, narrow[path]
