"""Memory recipes of training software: bytes per parameter, kept activations and the allocator.

A family of `cost.software` names its recipe (`Software.memory`). The recipe "orch" is this
project's trainer. A published peak of memory is one of three measurements: the bytes of tensors
("allocated", of `torch.cuda.max_memory_allocated`), the bytes that PyTorch's allocator took for
them ("reserved"), or the bytes that the process took of the card ("process", of `nvidia-smi`).

Each number has a physical meaning and a source next to it; docs/accuracy.md has the errors of each
recipe.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from msgspec import Struct, structs

from orchestrator.config.schema import OptimSpec
from orchestrator.cost.software import Software, software_named
from orchestrator.plan.document import Cluster, Model, Optim, Parallel
from orchestrator.plan.trained import STATE_BLOCK

from .kernels import Kernels, trainer_kernels

GIB = 1 << 30
#: Bytes of an element of optimizer state by `Optim.state`; 8 bits have a scale of 4 bytes per
#: block.
MOMENT = {"bf16": 2.0, "8bit": 1 + 4 / STATE_BLOCK}
#: What this project's trainer takes of a device before ranks communicate: the driver's context and
#: the loaded kernels, of torch and of NCCL. An H100 had lost 1.06 GB outside of PyTorch's allocator
#: (NCCL's issue 1685). `communicators.py` has the rest. A CPU rank's share of memory has none.
CONTEXT_BYTES = {"cuda": GIB, "cpu": 0}
#: The share of a device's memory that this trainer's account, tensors and context, may fill. The
#: driver and the allocator's last segments take 3 % of a card, and the allocator reserves 4 % more
#: than tensors take (`_PYTORCH`). Its growing segments may leave smaller holes, which nobody has
#: measured. A CPU rank's share of memory is a setting.
FILLED = {"cuda": 0.97 / 1.04, "cpu": 1.0}
#: Standard deviation of the relative error of that account. On a GPU, two of them are the 5 % to
#: which tests hold it, and the one measured run is 1.4 % off (docs/gpu.md). On a CPU, gloo's copies
#: are added, which are no constant share.
ACCOUNT_SD = {"cuda": 0.025, "cpu": 0.0}
#: Kinds of measurement. model: parameters, gradients, optimizer state and activations alone, as
#: formulas count them.
Kind = Literal["model", "allocated", "reserved", "process"]


class Recipe(Struct, frozen=True, kw_only=True):
    """The memory recipe of one family of training software.

    Its optimizer keeps moments in fp32, and an fp32 master copy of narrower weights.
    """

    name: str
    #: Tensors of the weights' shape that the optimizer keeps besides a master copy; AdamW has two.
    moments: int = 2
    moment: float | None = None  # bytes of an element of a moment, if narrower than a master weight
    wide_vectors: bool = False  # moments of norms and biases stay wide
    whole_matrices: bool = False  # matrices of blocks have a moment fewer (Muon)
    #: The kept tensors; None: this project's trainer, whose kernels depend on device and layout.
    kernels: Kernels | None = None
    #: Bytes of a gradient; None: as the software sends it, or the plan's `grad_dtype`.
    gradient: float | None = None
    #: Bytes of each parameter's gradient of one micro-batch, in addition to the sum.
    more_gradient: float = 0.0
    #: Bytes per parameter in addition to master copy and moments, sharded with them.
    more_optimizer: float = 0.0
    #: ZeRO-3 keeps a 16-bit shard in addition to the fp32 one.
    own_master: bool = False
    more_bf16: float = 0.0  # bytes per parameter that only training in bf16 adds, never sharded
    trained: bool = True  # False: weights are frozen, as with LoRA, whose own parameters are few
    buckets: int = 0  # bytes of communication buffers with ZeRO
    by_matrix: bool = False  # ZeRO-3 gathers a matrix at a time, not a layer
    #: ZeRO-3 in a pipeline sums gradients unsharded over the micro-batches.
    whole_gradients: bool = False
    narrow: bool = False  # with 8-bit matrix products their kept inputs have 8 bits too
    #: Bytes that libraries allocate in addition to the model: cuBLAS, attention, collectives.
    workspace: int = 0
    fragmentation: float = 1.0  # reserved / allocated
    #: Bytes of device context and communicators; None: `CONTEXT_BYTES` and those of the layout's
    #: groups, among the buffers.
    context: int | None = None
    usable: float = 1.0  # share of the card that a job can take; without `context`: `FILLED`
    # the kind of measurement that its users publish if they do not name one
    printed: Kind = "allocated"
    #: Standard deviation of the relative error on sources that had no part in choosing the numbers;
    #: without `context`: `ACCOUNT_SD`.
    sd: float = 0.0

    def process_bytes(self, tensors: float) -> float:
        """Returns the bytes that the process takes of the card for these bytes of tensors."""
        return (tensors + self.workspace) * self.fragmentation + (self.context or 0)

    def tensor_bytes(self, process: float) -> float:
        """Returns the bytes of tensors with which a process takes `process` bytes.

        This is the inverse of `process_bytes`.
        """
        return (process - (self.context or 0)) / self.fragmentation - self.workspace

    def capacity(self, cluster: Cluster) -> int:
        """Returns the bytes of a card that a job can take."""
        usable = FILLED[cluster.device] if self.context is None else self.usable
        return int(cluster.gpu.memory_bytes * usable)

    def account_sd(self, cluster: Cluster) -> float:
        """Returns the standard deviation of the relative error of an account's total."""
        return ACCOUNT_SD[cluster.device] if self.context is None else self.sd


ORCH = Recipe(name="orch")  # docs/accuracy.md, "Memory against the trainer's own"

#: The numbers that all PyTorch software on GPUs shares. workspace: cuBLAS, attention and NCCL's
#: staging inside the allocator; fragmentation: reserved is 3 to 9 % above allocated in 43 runs
#: (planning.md C3); context: CUDA's own 0.6 GiB, and 1 GiB for a few NCCL communicators; usable: of
#: 80 GB, without the driver and the allocator's last segments. sd: root mean square over six
#: sources, each predicted as if nothing had been learned from it (docs/accuracy.md).
_PYTORCH = Recipe(
    name="pytorch",
    workspace=GIB // 2,
    fragmentation=1.04,
    context=int(1.6 * GIB),
    usable=0.97,
    sd=0.105,
)
#: One kernel per operation: the gated activation also keeps its output; the matrix product that
#: reads a gathered sequence keeps it; the loss holds fp32 log-probabilities, their gradient and the
#: logits' gradient (3 x 4 bytes).
_EAGER = Kernels(
    keep_sent=False,
    keep_gathered=True,
    loss_width=12,
    selective="ops",
)
#: Megatron-LM: bias and activation run in one kernel, sequence-parallel inputs are gathered again
#: (arXiv 2205.05198), sent outputs are freed. The loss works in place on fp32 logits next to the
#: 16-bit ones and their gradient (4 + 2 + 2). Experts' weights are applied before the last product
#: (Megatron-Core since 0.12).
_MEGATRON = Kernels(
    fused_activation=True,
    expert_outputs=False,
    keep_sent=False,
    loss_width=8,
    selective="core",
    fills_limit=True,
)
#: Before fused attention, and with dropout (arXiv 2205.05198, equation 2: 34 + 5as/h).
_EARLY = structs.replace(_MEGATRON, fused_attention=False, dropout=True)

# Megatron-LM's table: 2 + 4 + 12 bytes per parameter.
_LISTED = (
    ORCH,
    structs.replace(
        _PYTORCH, kernels=_EAGER, sd=0.23
    ),  # unknown software; sd: all six sources predicted with it
    # sharded fp32 weights, gradients and moments: 16 bytes (PyTorch FSDP, arXiv 2304.11277)
    structs.replace(_PYTORCH, name="fsdp", kernels=_EAGER, gradient=4, whole_gradients=True),
    # LLM-Foundry of 2023: fused cross-entropy overwrites the 16-bit logits with their gradient
    structs.replace(
        _PYTORCH,
        name="llm_foundry",
        kernels=structs.replace(_EAGER, loss_width=4),
        gradient=4,
        whole_gradients=True,
    ),
    # gradients in 16 bits as autograd makes them, and their fp32 sum; values are views of the fused
    # projection's output
    structs.replace(
        _PYTORCH,
        name="nanotron",
        kernels=structs.replace(_EAGER, copied_heads=True, keep_gathered=False),
        gradient=4,
        more_gradient=2,
    ),
    structs.replace(_PYTORCH, name="megatron", kernels=_MEGATRON, narrow=True),
    # DeepSeek-V3's own: moments in bf16 (arXiv 2412.19437, section 3.3.3)
    structs.replace(
        _PYTORCH,
        name="deepseek",
        kernels=_MEGATRON,
        gradient=4,
        more_optimizer=-4,
        narrow=True,
    ),
    # 18 bytes per parameter (arXiv 2205.05198, figure 1): gradients summed in fp32
    structs.replace(_PYTORCH, name="megatron_fp16", kernels=_EARLY, gradient=4),
    # DeepSpeed's pipeline keeps sent outputs; ZeRO-1: 16-bit gradients whole, an fp32 copy of the
    # rank's share; the bf16 optimizer sums in fp32, unsharded (BigScience chronicles: 4 bytes);
    # three buckets of 5e8 numbers, two to reduce and one to gather; PyTorch before segments could
    # grow lost 10 % (planning.md C3)
    structs.replace(
        _PYTORCH,
        name="megatron_deepspeed",
        kernels=structs.replace(_EARLY, keep_sent=True),
        gradient=2,
        more_optimizer=4,
        more_bf16=4,
        buckets=3 * 10**9,
        fragmentation=1.1,
        printed="process",
    ),
    # ZeRO and ZeRO-R (arXiv 1910.02054, sections 5 and 6): tensor-parallel ranks share checkpoints,
    # buffers of constant size, memory arranged beforehand against fragmentation
    structs.replace(
        _PYTORCH,
        name="deepspeed",
        kernels=structs.replace(_EARLY, shared_inputs=True),
        gradient=2,
        own_master=True,
        buckets=10**9,
        by_matrix=True,
        fragmentation=1.0,
    ),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _LISTED}


def recipe_of(software: str, optim: Optim | OptimSpec | None = None) -> Recipe:
    """Returns the recipe of a family of `cost.software` with an optimizer (None: AdamW).

    Muon's state is counted as AdamW's, which its embeddings, head, vectors and experts have. Its
    other matrices have half of that: on the host a plan counts it, on the device it gives an upper
    limit. Raises OrchError (65) for an unknown name.
    """
    recipe = recipe_for(software_named(software))
    if optim is None:
        return recipe
    if optim.state in MOMENT:
        recipe = structs.replace(
            recipe,
            moment=MOMENT[optim.state],
            wide_vectors=optim.state == "8bit",
        )
    if optim.kind == "muon":
        return structs.replace(recipe, whole_matrices=True)
    return structs.replace(recipe, moments=1) if optim.kind == "sgd" else recipe


@lru_cache(maxsize=512)
def recipe_for(software: Software) -> Recipe:
    """Returns the recipe of a family with its traits, which a row of a table may have changed."""
    recipe = RECIPES[software.memory]
    if recipe.kernels is None:
        return recipe
    kernels = structs.replace(recipe.kernels, fused_attention=software.attention != "unfused")
    if software.elementwise == "fused" and not kernels.fused_activation:  # torch.compile, XLA
        kernels = structs.replace(kernels, fused_activation=True, compiled=True)
    gradient = software.grad_bytes if recipe.gradient is None else recipe.gradient
    return structs.replace(recipe, kernels=kernels, gradient=gradient)


def adapters_only(recipe: Recipe) -> Recipe:
    """Returns the recipe of fine-tuning a few added parameters (LoRA).

    Weights have no gradients and no optimizer state.
    """
    return structs.replace(recipe, trained=False)


def kernels_of(
    recipe: Recipe,
    cluster: Cluster,
    model: Model,
    parallel: Parallel,
    matmul: str = "",
) -> Kernels:
    """Returns the tensors that a layout keeps with this recipe. `matmul` is `Job.matmul`."""
    if recipe.kernels is None:
        return trainer_kernels(model, parallel, cluster.device, matmul)
    if recipe.narrow and matmul.startswith(("fp8", "mxfp8", "nvfp4")):
        # Its authors keep the inputs of SwiGLU in 8 bits (arXiv 2412.19437, section 3.3.3).
        deepseek = matmul == "fp8_block"
        width = 9 / 16 if matmul == "nvfp4" else 1.0
        return structs.replace(recipe.kernels, product_width=width, narrow_activation=deepseek)
    return recipe.kernels


#: Words in a table's column about memory -> the kind of measurement; the first match counts.
_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"state.*activation|analytic|theor|estimat|formula", "model"),
    (r"reserved|cached|caching", "reserved"),
    (
        (
            r"nvidia-?smi|nvml|dcgm|process|node|\bdevice|\bgpu"
            r" (memory|usage)|\bused|\bhbm|\bvram|\bcard"
        ),
        "process",
    ),
    (r"alloc|torch|active", "allocated"),
)


def measured_kind(description: str, recipe: Recipe) -> tuple[Kind, bool]:
    """Returns (kind of measurement that a table's words name, whether they name one).

    If they do not, the kind is the one that the recipe's users print.
    """
    lowered = description.lower()
    for pattern, kind in _KINDS:
        if re.search(pattern, lowered):
            return kind, True
    return recipe.printed, False
