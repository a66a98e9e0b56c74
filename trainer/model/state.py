"""Training state without gradient: a router's balancing bias, the history of a low precision's
largest values.

A module declares it with `add_state`. It is a buffer of the module and follows the model: saved,
resharded, restored, replicated and counted in memory like the optimizer's state. Modules keep what
ranks share equal on them, and update it where recomputation does not run a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class State:
    shape: tuple[int, ...]  # in the whole model
    dtype: torch.dtype = torch.float32
    start: float = 0.0  # value of every element before the first step
    tp_dim: int | None = (
        None  # dimension that tensor parallelism cuts evenly; None: equal on all ranks
    )


def add_state(module: nn.Module, name: str, state: State) -> None:
    """Give `module` the buffer `name`. On a rank it has the local shape once the model is built."""
    module.register_buffer(name, torch.full(state.shape, state.start, dtype=state.dtype))
    module.__dict__.setdefault("states", {})[name] = state


def states(stage: nn.Module) -> Iterator[tuple[str, nn.Module, str, State]]:
    """(full name, module, name of its buffer, declaration) of all state in a stage."""
    for path, module in stage.named_modules():
        for name, state in module.__dict__.get("states", {}).items():
            yield f"{path}.{name}" if path else name, module, name, state
