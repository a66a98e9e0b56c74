"""The kernels that a steady step of Llama 3.2 1B launches, ours and torchtitan's.

Runs in a process with fake GPUs, as `benchmarks.compiled_kernels` does; `benchmarks.kernels` calls
it and prints its table. Both sides compile block by block and their loss, in bf16, one sequence,
with gradient clipping and a fused AdamW. Ours also adds gradients up in fp32 and keeps fp32 master
weights; torchtitan's model has bf16 alone, as it would have behind the casts of FSDP2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_node.cases import SMALL, Where, plan_of
from benchmarks.gpu_single import ours, random_batch
from benchmarks.kernels import Sdpa
from orchestrator.plan import Plan
from tests.beds import fakegpu

LENGTH = 4096
#: Of a plan for one GPU.
WORDS = (
    "parallel=dp1",
    "parallel.micro_batch_size=1",
    f"train.seq_len={LENGTH}",
    "train.global_batch_samples=1",
    "train.compile=true",
)
#: Steps before the one that is counted: they compile, and make the optimizer's state.
WARM_UP = 3
Step = Callable[[], Any]


def measured(titan: str = "") -> dict[str, Any]:
    """{whose: {"kernels": of a step, "generated": of them by the compiler}}; `titan`: a folder with
    torchtitan."""
    import torch._inductor.config as config

    config.fx_graph_cache = False
    config.compile_threads = 1
    plan = plan_of(SMALL, WORDS, 1, Where(dry=False, cuda=True))
    device = torch.device("cuda", 0)
    makes: dict[str, Callable[[], Step]] = {
        "ours": lambda: ours(plan, device, random_batch(plan, device))
    }
    if titan:
        makes["torchtitan"] = lambda: _of_torchtitan(titan, plan, device)
    return {name: _counted(make()) for name, make in makes.items()}


def _counted(step: Step) -> dict[str, int]:
    for _ in range(WARM_UP):
        step()
    with fakegpu.recording() as recording:
        step()
    launched = recording.names("K")
    torch._dynamo.reset()
    return {
        "kernels": len(launched),
        "generated": sum(name.startswith("triton_") for name in launched),
    }


def _of_torchtitan(folder: str, plan: Plan, device: torch.device) -> Step:
    sys.path.append(folder)
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3 import model_registry

    with torch.device("meta"):
        model = model_registry("1B").model.build()
    model.to_empty(device=device).to(torch.bfloat16)
    for block in model.layers.values():
        block.attention.inner_attention = Sdpa()
        block.compile(fullgraph=True)
    batch = random_batch(plan, device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)
    loss_of = torch.compile(cross_entropy_loss)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(batch.tokens, batch.positions, None)
        loss = loss_of(logits, batch.targets)
        (loss / batch.targets.numel()).backward()
        nn.utils.clip_grad_norm_(parameters, plan.job.train.clip_grad_norm)
        optimizer.step()

    return step
