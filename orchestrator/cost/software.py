"""Families of training software as traits: their kernels, their overlap and their memory.

A trait chooses between parameters of the profile; it is never a fitted number itself.
`Software.name` is the value of `cost.software`, and `software_of` reads it from a table's
`framework`. Sources: the papers and repositories named with each family; accuracy.md sections 2 and
5.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from orchestrator.errors import OrchError, nearest
from orchestrator.plan.exits import Exit

#: unfused: scores are written out; triton: the flash kernel of 2023; flash: FlashAttention-2, as
#: torch's SDPA has it; cudnn: cuDNN's or FlashAttention-3 on Hopper and later.
Attention = Literal["unfused", "triton", "flash", "cudnn"]
#: Class of the memory-bound kernels: fused by hand or by a compiler, one kernel per operation, or
#: several of them, as in Hugging Face's modules, which compute norms and rotary positions in fp32.
Elementwise = Literal["fused", "eager", "modules"]
#: The work that selective recomputation repeats: this trainer's norms, rotary and activation;
#: attention's core (Korthikanti et al. 2022); everything that PyTorch's per-operation policy does
#: not keep; every other layer.
Selective = Literal["orch", "core", "ops", "alternate"]
#: The way in which communication of gradients and weights hides behind compute.
Overlap = Literal["modern", "early", "fsdp", "jax", "zero_2021"]


class Software(Struct, frozen=True, kw_only=True):
    """The traits of one family."""

    name: str
    attention: Attention = "flash"
    elementwise: Elementwise = "eager"
    #: The way in which weight gradients are summed over micro-batches.
    accumulate: Literal["fused", "separate"] = "fused"
    dp_overlap: Overlap = "fsdp"
    tp_overlap: bool = False  # tensor-parallel communication overlaps with matrix products
    tp_pieces: bool = False  # it does so in the plan's pieces
    pp_overlap: bool = False  # transfers between stages overlap
    #: Zero-bubble schedules begin a step before all ranks have ended the last one.
    overlapped_steps: bool = False
    ep_overlap: bool = False  # the all-to-all of experts overlaps
    grad_bytes: int | None = None  # bytes of a gradient on the wire; None: the plan's `grad_dtype`
    #: Gradients are summed in Megatron-Core's buckets, which grow with the replicas.
    growing_buckets: bool = False
    #: ZeRO-2 sums gradients after the micro-batches that a virtual stage runs in a row, not after
    #: each.
    reduces_by_round: bool = False
    #: ZeRO-3 without a pipeline gathers tables and last norm once, not again for backward.
    keeps_tables: bool = False
    selective: Selective = "ops"
    #: CPU time of launching a layer; modern: CUDA graphs or fewer launches.
    host: Literal["eager", "modern"] = "eager"
    memory: str = "orch"  # recipe of model states and activations: `cost.memory.recipe`


_LISTED = (
    # This project's trainer, not yet measured on GPUs: PyTorch's kernels, buckets overlap.
    Software(
        name="orch",
        selective="orch",
        accumulate="separate",
        tp_pieces=True,
        keeps_tables=True,
    ),
    Software(
        # Narayanan et al. 2021, Korthikanti et al. 2022, and forks of that time
        name="megatron_2021",
        overlapped_steps=True,
        attention="unfused",
        elementwise="fused",
        dp_overlap="early",
        selective="core",
        memory="megatron_fp16",
    ),
    Software(
        name="megatron_deepspeed",  # BLOOM: BigScience's fork of Megatron-DeepSpeed
        accumulate="separate",
        attention="unfused",
        elementwise="fused",
        dp_overlap="early",
        selective="core",
        memory="megatron_deepspeed",
    ),
    Software(
        # Megatron-LM's own scripts since 2023: overlap with tensor parallelism is off by default
        name="megatron",
        overlapped_steps=True,
        attention="cudnn",
        elementwise="fused",
        dp_overlap="modern",
        pp_overlap=True,
        growing_buckets=True,
        selective="core",
        memory="megatron",
    ),
    Software(
        # NeMo, Megatron-Bridge and Megatron-Core with its recipes: gradients in 16 bits
        name="nemo",
        attention="cudnn",
        elementwise="fused",
        dp_overlap="modern",
        tp_overlap=True,
        pp_overlap=True,
        growing_buckets=True,
        selective="core",
        grad_bytes=2,
        memory="megatron",
    ),
    Software(
        # DeepSeek-V3's: DualPipe hides all-to-all and sends behind the other direction's compute
        name="deepseek",
        attention="cudnn",
        elementwise="fused",
        dp_overlap="modern",
        pp_overlap=True,
        ep_overlap=True,
        selective="core",
        host="modern",
        memory="deepseek",
    ),
    # Meta's software for Llama 3 (arXiv 2407.21783, section 3.3.2): asynchronous sends; each output
    # is freed once it is used.
    Software(name="llama3", pp_overlap=True, reduces_by_round=True, memory="megatron"),
    Software(name="torchtitan", elementwise="eager", memory="fsdp"),
    Software(name="fsdp", memory="fsdp"),  # PyTorch FSDP
    Software(
        name="transformers", elementwise="modules", memory="fsdp"
    ),  # Hugging Face's models and trainers
    Software(name="fsdp_compile", elementwise="fused", memory="fsdp"),  # with torch.compile
    Software(
        name="fsdp_triton", attention="triton", memory="llm_foundry"
    ),  # MosaicML LLM-Foundry of 2023
    Software(
        name="nanotron", accumulate="separate", dp_overlap="early", memory="nanotron"
    ),  # Hugging Face's playbook
    Software(
        name="deepspeed_2020",  # ZeRO-100B: Megatron-LM of its time, with DeepSpeed's sharding
        attention="unfused",
        elementwise="fused",
        dp_overlap="early",
        selective="core",
        memory="deepspeed",
    ),
    Software(
        # ZeRO-3 as Narayanan et al. measured it: bound by its own communication
        name="deepspeed_2021",
        attention="unfused",
        elementwise="fused",
        dp_overlap="zero_2021",
        memory="deepspeed",
    ),
    Software(
        name="maxtext", elementwise="fused", attention="cudnn", dp_overlap="jax", memory="fsdp"
    ),  # MaxText, PaxML
    Software(name="eager", accumulate="separate", memory="pytorch"),  # unknown software
)
SOFTWARE: dict[str, Software] = {software.name: software for software in _LISTED}


def software_named(name: str) -> Software:
    """Returns the family with this name. Raises OrchError (65) with the known names otherwise."""
    family = SOFTWARE.get(name)
    if family is None:
        near = nearest(name, SOFTWARE)
        hint = f"; did you mean {near}?" if near else ""
        raise OrchError(f"cost.software={name}: legal: {', '.join(SOFTWARE)}{hint}", Exit.CONFIG)
    return family
