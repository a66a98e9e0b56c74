"""Training state without gradient: a router's balancing bias, the history of a low precision's
largest values.

A module declares it with `add_state`. It is a buffer of the module, and is saved, resharded,
restored, replicated and counted in memory like the optimizer's state. Modules keep shared state
equal on all ranks, and update it outside of code that recomputation runs a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class State:
    """The declaration of a state."""

    shape: tuple[int, ...]  # in the whole model
    dtype: torch.dtype = torch.float32
    start: float = 0.0  # value of every element before the first step
    #: The dimension that tensor parallelism cuts evenly; None: equal on all ranks.
    tp_dim: int | None = None


def add_state(module: nn.Module, name: str, state: State) -> None:
    """Adds the buffer `name` to `module`. Building the model gives it the rank's local shape."""
    module.register_buffer(
        name,
        torch.full(state.shape, state.start, dtype=state.dtype),
    )
    module.__dict__.setdefault("states", {})[name] = state


def states(stage: nn.Module) -> Iterator[tuple[str, nn.Module, str, State]]:
    """Yields (full name, module, name of its buffer, declaration) of all state in a stage."""
    for path, module in stage.named_modules():
        for name, state in module.__dict__.get("states", {}).items():
            full_name = f"{path}.{name}" if path else name
            yield full_name, module, name, state
