"""Precision recipes: which dtype holds what (Micikevicius et al., arXiv 1710.03740; bf16: arXiv
1905.12322)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orchestrator.plan.document import Train

from .errors import LayoutError

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Recipe:
    """`param`: weights, activations, pipeline messages. `reduce`: gradient accumulation and
    sums. `master`: the optimizer's weights and moments. `wire`: gradients on their way to the rank
    that sums them in `reduce`; None: they are summed as they travel, in `reduce`."""

    param: torch.dtype
    reduce: torch.dtype
    master: torch.dtype
    wire: torch.dtype | None = None


def recipe(train: Train) -> Recipe:
    """The plan's precision. `grad_dtype` bf16 with fp32 weights is refused: it would only lose
    digits.

    Raises LayoutError.
    """
    param = DTYPES[train.precision]
    reduce = DTYPES[train.grad_dtype]
    if train.precision == "fp32" and reduce != torch.float32:
        raise LayoutError(
            f"grad_dtype {train.grad_dtype} with precision fp32 loses digits and saves nothing; use"
            " fp32"
        )
    master = torch.promote_types(param, torch.float32)
    return Recipe(
        param,
        reduce,
        master,
        wire=DTYPES.get(train.grad_wire or ""),
    )


#: For parity tests: everything in double, where a real bug cannot hide behind rounding.
FP64 = Recipe(torch.float64, torch.float64, torch.float64)
