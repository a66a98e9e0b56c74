"""The one place for torch API that torch does not promise to keep. Each name says why it is needed.

Checked with torch 2.11 to 2.15. When one of these breaks, this file is where to mend it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator: the memory tracker on CPU

__all__ = [
    "DispatchMode",
    "bound_to_device",
    "fake_tensors",
    "fake_world",
    "flash_backward",
    "flash_forward",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norms",
    "fused_adamw_",
    "has_flash",
    "real_tensors",
    "split_group",
    "storage_key",
    "top_saved_tensors_hook",
    "watch_resizes",
]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import torch._dynamo (900 modules, a second a process) to hide from the compiler:
    it is never on while something compiles."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of a storage while it lives. `data_ptr` will not do: empty storages all have pointer 0."""
    return storage._cdata


def top_saved_tensors_hook() -> Callable[[torch.Tensor], Any] | None:
    """The innermost function that autograd calls with each tensor that it saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


@contextlib.contextmanager
def watch_resizes(callback: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `callback` after every `storage.resize_`, which no dispatch mode sees; FSDP2 gathers weights with it."""
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, *args: Any) -> Any:
        result = original(self, *args)
        callback(self)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


# ----------------------------------------------------------- one call for many tensors: a kernel each would cost 10 us


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by a 0-d `factor` of the same dtype and device."""
    torch._foreach_mul_(tensors, factor)


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, which may be narrower."""
    torch._foreach_copy_(targets, sources)


def foreach_norms(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The 2-norm of each tensor, computed in `dtype`."""
    return list(torch._foreach_norm(tensors, 2, dtype))


def fused_adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    step: torch.Tensor,
    *,
    skip: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update number `step` (from 1) of all tensors, on one device and of one dtype, as `torch.optim.AdamW(fused=True)`
    makes it; without a counter for each tensor, which that increments by a kernel of its own. Where `skip` is 1 and not
    0, nothing changes. Both are 0-d fp32 on the device, so the host need not know them."""
    steps = [step] * len(params)
    torch._fused_adamw_(
        *(params, grads, exp_avgs, exp_avg_sqs, [], steps),
        found_inf=skip,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


# ------------------------------------------------------------------- attention with its log-sum-exp (context parallel)


def has_flash(q: torch.Tensor) -> bool:
    """Whether the fused attention that also returns its log-sum-exp serves this tensor [b, h, s, d]."""
    if q.is_cuda:  # the fused kernel is 16-bit only and wants head dimensions in steps of 8
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.dtype.is_floating_point


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse [b, h, s_q]); equal head counts. SDPA proper does not return the log-sum-exp."""
    if q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return found[0], found[1]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) from any output and log-sum-exp, not only those of this block."""
    if q.is_cuda:
        # As the forward returns them for sequences of one length, without dropout: no lengths, a random state unread.
        state, offset = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in ((2,), ()))
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, offset), scale=scale
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


# ---------------------------------------------------------------------------------------------------- process groups


def bound_to_device() -> bool:
    """Whether the default group is bound to a GPU, so that its communicator exists and groups can be split from it."""
    import torch.distributed as dist

    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def split_group(
    parent: torch.distributed.ProcessGroup | None,
    ranks: Sequence[int],
    name: str,
    timeout: timedelta | None,
    urgent: bool,
) -> torch.distributed.ProcessGroup | None:
    """The group of the global `ranks`, split from `parent` (None: the default group), whose members all must call this
    together; None on those that are not among `ranks`. Of several backends of the parent it keeps NCCL alone; its
    kernels run on a stream of high priority if they are `urgent`."""
    import torch.distributed as dist

    inside = dist.get_process_group_ranks(parent)
    options: dict[str, Any] = {}
    if bound_to_device():
        own = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        own._timeout = timeout or own._timeout
        options["pg_options"] = own
        if "backend" in inspect.signature(dist.split_group).parameters:  # since torch 2.14
            options["backend"] = "nccl"
    positions = [inside.index(rank) for rank in ranks]
    made = dist.split_group(parent, [positions], timeout=timeout, group_desc=name, **options)
    return made if isinstance(made, dist.ProcessGroup) else None


# -------------------------------------------------------------- ranks without data and without peers (the digital twin)


class _Numbers(DispatchMode):
    """Every number that is read from a fake tensor is one: a norm is finite, a loss is there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else True if dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have shapes, dtypes, autograd and storages of the right size, but no memory and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), _Numbers():
        yield


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors are real again: for torch's own book-keeping in tensors, such as the ranks of a DeviceMesh."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is one rank of a default group in which messages go nowhere and receives bring nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
