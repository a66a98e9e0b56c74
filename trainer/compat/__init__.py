"""The only place for torch API that torch does not promise to keep. Each function says why it is
needed. `sharded` has those of FSDP2.

Checked with torch 2.11 to 2.15. When one of these functions breaks, repair it here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


class DispatchMode(TorchDispatchMode):
    """A dispatch mode, which sees every operator, without the import of torch._dynamo (900 modules,
    a second per process) that hides modes from the compiler: it is never on while something
    compiles."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def import_compiler() -> None:
    """Imports torch._dynamo, which compiled blocks, checkpointing and FSDP2 need: seconds of
    processor time.

    `torch.compiler.reset` imports it as well, but up to torch 2.11 it then asks the driver for GPUs
    and starts threads, after which a process cannot fork others that use a GPU.
    """
    import torch._dynamo  # noqa: F401


def storage_key(storage: torch.UntypedStorage) -> int:
    """Returns the identity of a storage while it lives. `data_ptr` does not identify it: all empty
    storages have pointer 0."""
    return storage._cdata


def top_saved_tensors_hook() -> Callable[[torch.Tensor], Any] | None:
    """Returns the innermost function that autograd calls with each tensor that it saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


@contextlib.contextmanager
def watch_resizes(callback: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Calls `callback` after every `storage.resize_`, which no dispatch mode sees; FSDP2 gathers
    weights with it."""
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


# -------------------------------------------------------------------------------------------
#     one call for many tensors: one kernel per tensor would cost 10 us each


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies each tensor by a 0-d `factor` of the same dtype and device."""
    torch._foreach_mul_(tensors, factor)


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source to its target, which may be narrower."""
    torch._foreach_copy_(targets, sources)


def foreach_norms(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the 2-norm of each tensor, computed in `dtype`."""
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
    """Makes update number `step` (from 1) of all tensors, which have one device and one dtype, like
    `torch.optim.AdamW(fused=True)`, but without that class's counters, which cost one kernel per
    tensor. If `skip` is 1, nothing changes. Both are 0-d fp32 on the device, so the host need not
    know them."""
    steps = [step] * len(params)
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        found_inf=skip,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


# -------------------------------------------------------------------------------------------
#     attention with its log-sum-exp (context parallelism)


def has_flash(q: torch.Tensor) -> bool:
    """Whether the fused attention that also returns its log-sum-exp supports this tensor [b, h, s,
    d]. On a GPU it needs 16 bits, head dimensions in steps of 8, and an Ampere or later."""
    if not q.is_cuda:
        return q.dtype.is_floating_point
    narrow = q.dtype in (torch.float16, torch.bfloat16)
    head_dim = q.shape[-1]
    return narrow and head_dim % 8 == 0 and head_dim <= 256 and _capability(q.device)[0] >= 8


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out like q, lse [b, h, s_q]), which SDPA itself does not return. k and v may have
    fewer heads, by which h is divisible."""
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p=0.0, is_causal=causal, return_debug_mask=False, scale=scale
        )
        return out, lse
    # The CPU's kernel needs equal head counts.
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if q.shape[1] == k.shape[1]:
        return attend(q, k, v, 0.0, causal, scale=scale)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=_lse_dtype(q))
    members = (_members(x, k.shape[1]) for x in (q, out, lse))
    for queries, *results in zip(*members, strict=True):
        foreach_copy_(results, list(attend(queries, k, v, 0.0, causal, scale=scale)))
    return out, lse


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
    """Returns (dq, dk, dv) from any output and log-sum-exp, not only those of this block."""
    if q.is_cuda:
        # Sequences of one length need no lengths, and the forward returns none.
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            *_unread(q.device),
            scale=scale,
        )
    # The CPU's kernel needs equal head counts.
    attend_backward = functools.partial(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
        dropout_p=0.0,
        is_causal=causal,
        scale=scale,
    )
    if q.shape[1] == k.shape[1]:
        return attend_backward(grad, q, k, v, out, logsumexp=lse)
    dq = torch.empty_like(q)
    sums = [torch.zeros_like(x, dtype=_lse_dtype(x)) for x in (k, v)]
    members = (_members(x, k.shape[1]) for x in (dq, grad, q, out, lse))
    for dq_member, grad_member, queries, out_member, lse_member in zip(*members, strict=True):
        member_lse = lse_member.contiguous()
        member_grads = attend_backward(grad_member, queries, k, v, out_member, logsumexp=member_lse)
        dq_member.copy_(member_grads[0])
        for total, member_sum in zip(sums, member_grads[1:], strict=True):
            total += member_sum
    return dq, sums[0].to(k.dtype), sums[1].to(v.dtype)


def _unread(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a random state and its offset like the kernels' forward, which reads none without
    dropout."""
    state = torch.empty(2, dtype=torch.uint64, device=device)
    return state, torch.empty((), dtype=torch.uint64, device=device)


def _members(x: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """Returns views [b, kv_heads, ...] of a tensor [b, heads, ...]: the first query head of each
    key head, the second, ..."""
    return x.unflatten(1, (kv_heads, -1)).unbind(2)


# -------------------------------------------------------------------------------------------
#     attention within runs of tokens


@dataclass(frozen=True)
class Segments:
    """Runs of queries and of keys, laid end to end. The n-th run of queries sees only the n-th run
    of keys."""

    runs: tuple[tuple[int, int], ...]  # (queries, keys) of each pair, on the host
    longest: tuple[int, int]
    #: On a GPU: int32 [2, n + 1], where runs of queries and of keys begin and the last ones end.
    begins: torch.Tensor | None

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], device: torch.device) -> Segments:
        """Makes the segments of `runs` for a device. The host does not wait for a copy."""
        begins = None
        if device.type == "cuda":
            rows = [[0, *accumulate(side)] for side in zip(*runs, strict=True)]
            begins = torch.tensor(rows, dtype=torch.int32).pin_memory()
            begins = begins.to(device, non_blocking=True)
        queries, keys = (max(side) for side in zip(*runs, strict=True))
        return cls(tuple(runs), (queries, keys), begins)

    @property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """The lengths of runs, in the form of the kernels' arguments."""
        assert self.begins is not None
        return self.begins[0], self.begins[1], *self.longest

    @property
    def meet(self) -> bool:
        """Whether any query sees a key."""
        return any(queries and keys for queries, keys in self.runs)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yields the rows of queries and of keys of each pair whose queries see keys."""
        query = key = 0
        for queries, keys in self.runs:
            if queries and keys:
                yield slice(query, query + queries), slice(key, key + keys)
            query = query + queries
            key = key + keys


def segment_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """q [n, heads, d], k and v [m, kv_heads, d] -> like q, differentiable. Every run of queries
    must have keys."""
    if q.is_cuda:
        return _flash_segments(q, k, v, segments, causal, scale=scale)[0]
    grouped = q.shape[1] != k.shape[1]
    outputs = [
        torch.nn.functional.scaled_dot_product_attention(
            _sample(q[rows]),
            _sample(k[keys]),
            _sample(v[keys]),
            is_causal=causal,
            scale=scale,
            enable_gqa=grouped,
        )
        for rows, keys in segments.slices()
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def segments_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out like q, lse [heads, n]) of q [n, heads, d], k and v [m, kv_heads, d]. Queries
    without keys have zeros and a log-sum-exp of minus infinity."""
    if q.is_cuda:
        out, lse = _flash_segments(q, k, v, segments, causal, scale=scale)[:2]
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)  # the kernel returns inf
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], len(q)), -torch.inf, dtype=_lse_dtype(q))
    for rows, keys in segments.slices():
        run_out, run_lse = flash_forward(
            _sample(q[rows]), _sample(k[keys]), _sample(v[keys]), causal, scale
        )
        out[rows] = run_out[0].transpose(0, 1)
        lse[:, rows] = run_lse[0]
    return out, lse


def segments_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv) from any output and log-sum-exp, not only those of these keys; zeros
    where nothing was seen."""
    if q.is_cuda:
        return torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            *segments.lengths,
            0.0,
            causal,
            *_unread(q.device),
            scale=scale,
        )
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, keys in segments.slices():
        run_dq, run_dk, run_dv = flash_backward(
            _sample(grad[rows]),
            _sample(q[rows]),
            _sample(k[keys]),
            _sample(v[keys]),
            _sample(out[rows]),
            lse=lse[:, rows][None].contiguous(),
            causal=causal,
            scale=scale,
        )
        dq[rows] = run_dq[0].transpose(0, 1)
        dk[keys] = run_dk[0].transpose(0, 1)
        dv[keys] = run_dv[0].transpose(0, 1)
    return dq, dk, dv


def _flash_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> Any:
    """Calls the kernel, which accepts fewer heads of keys than of queries."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *segments.lengths, 0.0, causal, False, scale=scale
    )


def _sample(x: torch.Tensor) -> torch.Tensor:
    """[n, heads, d] -> [1, heads, n, d]"""
    return x.transpose(0, 1)[None]


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


# -------------------------------------------------------------------------------------------
#     process groups


def bound_to_device() -> bool:
    """Whether the default group is bound to a GPU, so that its communicator exists and groups can
    be split from it."""
    import torch.distributed as dist

    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def split_group(
    parent: torch.distributed.ProcessGroup | None,
    ranks: Sequence[int],
    name: str,
    timeout: timedelta | None,
    urgent: bool,
) -> torch.distributed.ProcessGroup | None:
    """Returns the group of the global `ranks`, split from `parent` (None: the default group), or
    None on ranks that are not among `ranks`. All members of `parent` must call this together. Of
    the parent's backends the group keeps only NCCL, whose kernels run on a stream of high priority
    if they are `urgent`. Torch 2.11 keeps all backends, splits only groups that are bound to a
    device, and dies if the default group is the second one of its process."""
    import torch.distributed as dist

    inside = dist.get_process_group_ranks(parent)
    options: dict[str, Any] = {}
    if bound_to_device():
        nccl_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        nccl_options._timeout = timeout or nccl_options._timeout
        options["pg_options"] = nccl_options
        if "backend" in inspect.signature(dist.split_group).parameters:  # since torch 2.14
            options["backend"] = "nccl"
    positions = [inside.index(rank) for rank in ranks]
    group = dist.split_group(parent, [positions], timeout=timeout, group_desc=name, **options)
    return group if isinstance(group, dist.ProcessGroup) else None


# -------------------------------------------------------------------------------------------
#     ranks without data and without peers (the digital twin)


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Context manager in which tensors have shapes, dtypes, autograd and storages of the right
    size, but no memory and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager in which tensors are real within `fake_tensors`: for torch's own
    book-keeping in tensors, such as the ranks of a DeviceMesh, and to read a real tensor's number,
    which torch 2.11 refuses outside it."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Context manager in which this process is one rank of a default group that drops messages and
    whose receives bring nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
