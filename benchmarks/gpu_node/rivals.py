"""What ours stands beside: a plain loop of torch's modules on DDP or FSDP2, and torchtitan's model
parallelised by torchtitan. Each takes (plan, device, micro-batches) and gives a step: forward,
backward, clipping, fused AdamW."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_node.cases import TITAN
from benchmarks.kernels import Sdpa
from benchmarks.vs_torch.common import adamw, new_stage
from benchmarks.vs_torch.tensor import with_torchs_modules
from orchestrator.plan import Plan
from trainer.data.batch import MicroBatch
from trainer.model.loss import cross_entropy_sum

Step = Callable[[], Tensor]


def loop(plan: Plan, device: torch.device, batches: list[MicroBatch]) -> Step:
    """ZeRO-0 as DistributedDataParallel under autocast, the others as FSDP2, a unit a block,
    weights and optimizer in fp32; `nn.Linear`, `nn.RMSNorm`, `scaled_dot_product_attention`,
    compiled block by block where ours is."""
    model = with_torchs_modules(new_stage(plan, device))
    if plan.job.train.compile:
        for block in model.layers.values():
            block.compile()
    replicated = plan.parallel.zero == 0
    if replicated:
        # Every rank has made the same weights: they need not be sent.
        parallel: Any = DistributedDataParallel(
            model, gradient_as_bucket_view=True, init_sync=False
        )
    else:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        reshard = plan.parallel.zero == 3
        for block in model.layers.values():
            fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
        parallel = fully_shard(model, reshard_after_forward=False, mp_policy=policy)
    optimizer = adamw(plan, list(parallel.parameters()), fused=True)
    scale = plan.parallel.world_size / plan.parallel.global_batch_tokens  # both average over ranks

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch in batches:
            last = batch is batches[-1]
            if not replicated:
                cast(FSDPModule, parallel).set_requires_gradient_sync(
                    last or plan.parallel.zero > 1
                )
            waits = parallel.no_sync() if replicated and not last else nullcontext()
            with waits, torch.autocast(device.type, torch.bfloat16, enabled=replicated):
                logits = parallel(None, batch)
            with waits:
                loss = cross_entropy_sum(logits, batch.targets)
                (loss * scale).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parallel.parameters(), plan.job.train.clip_grad_norm)
        optimizer.step()
        return total

    return step


def titan(plan: Plan, device: torch.device, batches: list[MicroBatch]) -> Step:
    """torchtitan's Llama 3 in torchtitan's own parallelisation (FSDP2, or its tensor parallelism),
    its default attention, block-by-block compilation and recomputation; the loss is that of its
    plain, unchunked configuration."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed import utils as titan_utils
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.llama3 import model_registry

    parallel_dims.device_type = device.type  # else that of torch's build
    par = plan.parallel
    train = plan.job.train
    spec = model_registry(TITAN.get(plan.model.name, "debugmodel"))
    parallelism = ParallelismConfig(tensor_parallel_degree=par.tp, spmd_backend="partial_dtensor")
    titan_utils.set_spmd_backend(parallelism.spmd_backend)  # as its trainer does
    dims = ParallelDims.from_config(parallelism, par.world_size)
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    recompute = {"full": FullAC.Config(), "selective": SelectiveAC.Config()}.get(train.recompute)
    parallel: Any = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=train.seq_len, disable_cuda_graphs=True),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=train.compile),
        ac_config=recompute,
        dump_folder="",
    )
    parallel.to_empty(device=device)
    with torch.no_grad():
        parallel.init_weights(buffer_device=device)
    if device.type == "cpu":  # its attention is compiled for GPUs
        for block in parallel.layers.values():
            block.attention.inner_attention = Sdpa()
    optimizer = adamw(plan, list(parallel.parameters()), fused=True)
    vocab = min(plan.model.vocab, spec.model.vocab_size)
    masks = [
        None if device.type == "cpu" else parallel.get_attention_masks(batch.positions)
        for batch in batches
    ]

    def step() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch, mask in zip(batches, masks, strict=True):
            logits = parallel(batch.tokens % vocab, batch.positions, mask)
            loss = cross_entropy_sum(logits, batch.targets.clamp(max=vocab - 1))
            (loss / par.global_batch_tokens).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parallel.parameters(), train.clip_grad_norm)
        optimizer.step()
        return total

    return step


RIVALS = {"loop": loop, "titan": titan}


def available(folder: str) -> dict[str, Callable[..., Step]]:
    """The rivals that can be imported; `folder`: where torchtitan is, if it is not installed."""
    sys.path += [folder] if folder else []
    try:
        import torchtitan  # noqa: F401
    except ImportError:
        return {"loop": loop}
    return RIVALS
