"""Private API of FSDP2, torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def carry_grad_dtype(module: Any, dtype: torch.dtype) -> None:
    """Makes a module that FSDP2 has sharded keep its gradients in `dtype`, the `grad_dtype` of its
    narrower parameters. Torch 2.11 does not pass that dtype on to the shards, and rounds each sum
    to the dtype of the weights."""
    if all(param.grad_dtype == dtype for param in module.parameters()):
        return
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:  # all parameters belong to inner modules
        return

    def init_mp_dtypes() -> None:
        type(group)._init_mp_dtypes(group)
        group._orig_dtype = dtype

    group._init_mp_dtypes = init_mp_dtypes
    for sharded_param in group.fsdp_params:
        sharded_param.sharded_param.grad_dtype = dtype


def move_shards(
    module: Any, allocate: Callable[[int, torch.dtype], torch.Tensor]
) -> list[tuple[torch.nn.Parameter, int]]:
    """Moves the shards of the parameters that FSDP2 has just sharded with `module` into one new 1-D
    tensor, which `allocate` makes from elements and dtype. FSDP2 itself allocates one tensor per
    parameter, and nobody can choose the memory.

    Returns the parameters, with the elements of their shards including padding, in the order in
    which FSDP2 sends their gradients.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:  # all parameters belong to inner modules
        return []
    shards = [sharded._sharded_param_data for sharded in group.fsdp_params]
    total = sum(shard.numel() for shard in shards)
    flat = allocate(total, shards[0].dtype)
    moved = list[tuple[torch.nn.Parameter, int]]()
    start = 0
    for sharded in group.fsdp_params:
        shard = sharded._sharded_param_data
        size = shard.numel()
        stop = start + size
        run = flat[start:stop]
        start = stop
        run.copy_(shard)
        sharded._sharded_param_data = run
        param = sharded.sharded_param
        rows = param._local_tensor.shape[0]
        padded = run.view(sharded.padded_sharded_param_size)
        param._local_tensor = padded[:rows]
        moved.append((param, size))
    return moved
