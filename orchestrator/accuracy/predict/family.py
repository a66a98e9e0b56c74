"""Finds the software that ran a row from its `framework`, and the age and kernels of that software
from its `notes`, GPU, precision and shape."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from msgspec import structs

from orchestrator.cost.software import SOFTWARE, Software


class Facts(NamedTuple):
    """The facts that decide a row's software. They are hashable, because tables repeat them and the
    software is cached."""

    framework: str
    notes: str
    gpu: str  # A name in `hardware.GPUS`.
    gated: bool  # True for Llama-like models, which came in 2023.
    seq_len: int
    zero: int | None
    source: str = ""  # The publisher of the row.


#: (pattern of a word in `framework`, family). The first match counts.
_FAMILIES: tuple[tuple[str, str], ...] = (
    (r"\borch\b", "orch"),
    (r"hai-?llm|deepseek.{0,4}(internal|ai\b)", "deepseek"),
    (r"composer|foundry|mosaic", "fsdp_triton"),
    (r"torch ?titan", "torchtitan"),
    (r"maxtext|pax|\bjax\b|t5x|levanter|easylm|\bxla\b|praxis|axlearn", "maxtext"),
    (r"nanotron|picotron", "nanotron"),
    (r"megatron.?deepspeed|gpt.?neox|bigscience", "megatron_deepspeed"),
    (
        r"nemo|megatron.?bridge|megatron.?core|mcore|mlperf|megascale|megatron.?hub|pai.?megatron",
        "nemo",
    ),
    (r"megatron|primus|zero.?bubble|simumax|flagscale|internevo|paddle|mindspeed", "megatron"),
    (r"sagemaker|\bmics\b", "fsdp"),
    (r"deepspeed|zero-?[123]|\bzero\b", "deepspeed"),
    (
        r"\bhf\b|hugging|transformers|accelerate|\btrl\b|peft|axolotl|factory|swift|fastchat",
        "transformers",
    ),
    (r"fsdp|torch|fairscale|metaseq|lightning|lit-?gpt", "fsdp"),
    (
        r"unsloth|fairseq|\bddp\b|vescale|\bfms\b|oumi|nanogpt|open_?lm|olmo|llm\.c\b|prime-?rl"
        r"|verl\b",
        "fsdp",
    ),
    (r"colossal|alpa|oneflow|merak|bmtrain|galvatron|hetu|mindspore|hivemind|slapo", "fsdp"),
)
#: Matches the release in "container 25.09", "v24.11.1" and "NeMo 24.07", but not "28.29 GiB".
_RELEASE = re.compile(
    r"(?:container|nemo|framework|bridge|release|ngc|image|tag|\bv)[ :=]*(2[3-9])\.(\d{2})(?!\d)"
)
#: Matches fused attention, years from 2023 on, and software that did not exist before.
_SINCE_2023 = re.compile(
    r"flash|\bfa-?[23]\b|fused attention|202[3-9]|megatron.?core|mcore|bridge|megascale|titan"
)
#: The first container whose MoE layers launch without waiting for the CPU.
_MODERN_RELEASE = (26, 6)
#: The first container whose recipes dispatch tokens with DeepEP or HybridEP.
_DISPATCHER_RELEASE = (26, 4)
#: Matches the sources of Megatron-LM's own benchmarks, which ran with `--tp-comm-overlap` (README
#: of r0.8, "Training Speed and Scalability"). Without that option Megatron-LM does not overlap the
#: communication of tensor parallelism.
_OWN_BENCHMARKS = re.compile(r"(nvidia )?megatron-lm (readme|examples)")
_HOPPER = ("H", "GH", "B", "GB")
_OLD = ("V100", "A100", "A800")


_NAMED = re.compile(
    r"megatron.?(?:deepspeed|bridge|core)|mcore|megatron|foundry|nemo|torch"
    r" ?titan|maxtext|nanotron|fsdp|deepspeed",
    re.I,
)


def named_in(description: str) -> str:
    """Returns the first software that a description names; an empty string if it names none."""
    match = _NAMED.search(description)
    return match[0] if match else ""


@lru_cache(maxsize=4096)
def software_of(facts: Facts) -> tuple[Software, str]:
    """Returns (the family with the row's own traits, the assumption that was made). The assumption
    is an empty string if none was made."""
    framework = facts.framework.lower()
    name = next(
        (family for pattern, family in _FAMILIES if re.search(pattern, framework)),
        "",
    )
    if not name:
        assumption = "framework: taken as PyTorch's kernels"
        if framework:
            shown = repr(facts.framework[:40])
            assumption = f"framework={shown}: unknown, taken as PyTorch's kernels"
        return SOFTWARE["eager"], assumption
    description = f"{framework}; {facts.notes.lower()}"
    hopper = facts.gpu.startswith(_HOPPER)
    before_2023 = _before_2023(facts, description)
    base = name
    if name == "deepspeed":
        base = _deepspeed_base(facts, before_2023)
    elif name == "megatron" and before_2023:
        base = "megatron_2021"
    elif name == "fsdp_triton" and hopper:
        base = "fsdp"  # The Triton kernel of 2023 ran on A100.
    elif name == "fsdp" and re.search(r"fms|compile|torch ?tune|llm\.c\b", description):
        base = "fsdp_compile"
    assumption = ""
    if base.endswith("_2021"):
        assumption = "software of 2021: attention is not fused"
    elif before_2023 and name in ("fsdp", "nemo"):
        assumption = "software of 2022: attention is not fused"
    software = SOFTWARE[base]
    traits = _family_traits(name, facts, description, before_2023)
    traits |= _stated(description, software, hopper)
    return (structs.replace(software, **traits) if traits else software), assumption


def _deepspeed_base(facts: Facts, before_2023: bool) -> str:
    """Returns the software whose models a row of DeepSpeed trained; it has none of its own."""
    if not before_2023:
        return "transformers"
    return "deepspeed_2021" if facts.zero == 3 else "megatron_2021"


def _family_traits(
    name: str,
    facts: Facts,
    description: str,
    before_2023: bool,
) -> dict[str, object]:
    """Returns the traits of a family that follow from the age, GPU and source of the row."""
    traits: dict[str, object] = {}
    if name == "deepspeed" and before_2023:
        traits["memory"] = "deepspeed"
    if name == "fsdp" and before_2023:
        traits["attention"] = "unfused"
    if name == "nemo" and before_2023:
        traits |= {"attention": "unfused", "tp_overlap": False, "pp_overlap": False}
    if name in ("nemo", "megatron") and not before_2023 and not facts.gpu.startswith(_HOPPER):
        traits["attention"] = "flash"
    if name == "nemo" and not re.search(r"nemo|bridge|mlperf", description):
        traits["grad_bytes"] = None  # Megatron-Core by itself sums gradients in fp32.
        traits["tp_overlap"] = bool(_OWN_BENCHMARKS.match(facts.source.lower()))
    if re.search(r"internevo|paddle", facts.framework.lower()):
        traits["growing_buckets"] = False  # Both sum gradients with code of their own.
    if name == "megatron_deepspeed" and not before_2023:
        traits["attention"] = "flash"
    if facts.gpu.startswith("V100") and name != "fsdp" and "flash" not in description:
        traits["attention"] = "unfused"  # Flash kernels need Ampere or later.
    return traits


def _before_2023(facts: Facts, description: str) -> bool:
    """Returns True for a row that was probably measured before fused attention was common: a
    GPT-like model with short samples on V100 or A100."""
    if _SINCE_2023.search(description) or _RELEASE.search(description):
        return False
    if re.search(r"20(19|20|21|22)\b", description):
        return True
    return facts.gpu.startswith(_OLD) and not facts.gated and facts.seq_len <= 2048


def _stated(description: str, software: Software, hopper: bool) -> dict[str, object]:
    """Returns the software traits that a row's own words state."""
    traits: dict[str, object] = {}
    if re.search(
        r"no flash|without flash|unfused attention|w/o flash|eager attention", description
    ):
        traits["attention"] = "unfused"
    elif re.search(r"flash.?attention.?3|\bfa-?3\b|cudnn", description) and hopper:
        traits["attention"] = "cudnn"
    elif re.search(r"triton flash|triton attention", description):
        traits["attention"] = "triton"
    elif re.search(r"flash|\bfa-?2\b", description) and software.attention in ("unfused", "triton"):
        traits["attention"] = "flash"
    if re.search(r"no compile|without compile|not compiled|eager mode|compile off", description):
        traits["elementwise"] = "eager"
    elif "compile" in description or "liger" in description:
        traits["elementwise"] = "fused"
    if "hybridep" in description or re.search(
        r"deepep|ep overlap on|overlap.{0,12}(all-?to-?all|a2a|ep\b)", description
    ):
        traits["ep_overlap"] = True
    dropping = re.search(
        r"(?<!no )(?:token[ -]?drop|capacity factor|drop and pad|padded to capacity)", description
    )
    graphs = (
        dropping
        or "hybridep" in description
        or re.search(r"(?<!no )(?<!without )(?<!w/o )cuda.?graph", description)
    )
    release = _RELEASE.search(description)
    if release and (int(release[1]), int(release[2])) >= _DISPATCHER_RELEASE:
        traits["ep_overlap"] = True
    if graphs or (release and (int(release[1]), int(release[2])) >= _MODERN_RELEASE):
        traits["host"] = "modern"
    if re.search(
        r"no (communication |comm |tp |tensor.parallel )?overlap|overlap: none|without overlap",
        description,
    ):
        traits |= {"tp_overlap": False, "pp_overlap": False, "dp_overlap": "early"}
    elif re.search(r"async.?tp|tp.?(comm)?.?overlap|user.?buffers|overlap tp", description):
        traits["tp_overlap"] = True
    if re.search(
        r"pure mixed|(bf16|16-bit) (grad|reduc)|grads? (in )?(bf16|fp16)|bf16 params\+reduce",
        description,
    ):
        traits["grad_bytes"] = 2
    elif re.search(
        r"(fp32|32-bit) (grad|reduc)|grads? (in )?fp32|; amp$|reduce in fp32", description
    ):
        traits["grad_bytes"] = 4
    return traits
