"""Lists the shapes of published models by name, for rows that name a `model` without its shape.

There is one line per model: the pattern of its family's name and its sizes, then its layers, hidden
size, heads, key-value heads, head dimension (0 for hidden / heads), width of the MLP, vocabulary,
and the positions that it was trained on. The source of a model is its paper or its published
configuration, named above its lines. Cells of a row win over these shapes; a row whose hidden size
differs has another model. `conf/model` holds the shapes that plans use; these are only for rows of
tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from msgspec import Struct

from orchestrator.plan.document import Mla, Moe


class Shape(Struct, frozen=True):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    seq_len: int
    gated: bool = True
    tied: bool = False
    position: Literal["rope", "learned", "none"] = "rope"
    moe: Moe | None = None
    mla: Mla | None = None


#: Models with plain MLPs with a GELU, LayerNorm and biases, whose head is the token table.
_GPT = {"gated": False, "tied": True, "position": "learned"}
_GPT_ROPE = {"gated": False, "tied": False, "position": "rope"}
_ALIBI = {"gated": False, "tied": True, "position": "none"}
_TIED = {"tied": True}
_MLA_V2 = Mla(
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
_MLA_LITE = Mla(
    q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)


def _moe(experts: int, top_k: int, width: int, shared: int = 0, dense: int = 0) -> dict[str, Moe]:
    moe = Moe(
        experts=experts,
        top_k=top_k,
        ffn_hidden=width,
        shared_ffn_hidden=shared,
        first_dense_layers=dense,
    )
    return {"moe": moe}


#: (family, its sizes in billions of parameters, the eight numbers, the differences from a gated MLP
#: with rotary positions and an untied head). The first match counts: the family's pattern must
#: occur in the name without its size, and a size must be within 3 %; "?" also matches a name
#: without a size.
_LISTED: list[tuple[str, str, tuple[int, ...], Mapping[str, object]]] = [
    # Llama 4 (model card): Maverick has experts in every second layer; here half of its layers are
    # dense.
    (r"llama-?4", "109 17 ?", (48, 5120, 40, 8, 128, 16384, 202048, 8192), _moe(16, 1, 8192, 8192)),
    (
        r"llama-?4.*maverick|llama-?4",
        "400",
        (48, 5120, 40, 8, 128, 16384, 202048, 8192),
        _moe(128, 1, 8192, 8192, 24),
    ),
    # Llama 3.x (arXiv 2407.21783 table 3; model cards)
    (r"llama-?3", "405", (126, 16384, 128, 8, 0, 53248, 128256, 8192), {}),
    (r"llama-?3", "70", (80, 8192, 64, 8, 0, 28672, 128256, 8192), {}),
    (r"llama-?3", "8 ?", (32, 4096, 32, 8, 0, 14336, 128256, 8192), {}),
    (r"llama-?3", "3", (28, 3072, 24, 8, 128, 8192, 128256, 8192), _TIED),
    (r"llama-?3", "1 1.24", (16, 2048, 32, 8, 64, 8192, 128256, 8192), _TIED),
    # Llama, Llama 2, Code Llama, TinyLlama (arXiv 2302.13971, 2307.09288, 2401.02385)
    (r"tiny-?llama", "1.1 ?", (22, 2048, 32, 4, 0, 5632, 32000, 2048), {}),
    (r"llama", "70", (80, 8192, 64, 8, 0, 28672, 32000, 4096), {}),
    (r"llama", "65", (80, 8192, 64, 64, 0, 22016, 32000, 2048), {}),
    (r"llama", "34", (48, 8192, 64, 8, 0, 22016, 32000, 4096), {}),
    (r"llama", "30 32.5 33", (60, 6656, 52, 52, 0, 17920, 32000, 2048), {}),
    (r"llama-?2", "13", (40, 5120, 40, 40, 0, 13824, 32000, 4096), {}),
    (r"llama-?2", "7", (32, 4096, 32, 32, 0, 11008, 32000, 4096), {}),
    (r"llama|vicuna|alpaca", "13", (40, 5120, 40, 40, 0, 13824, 32000, 2048), {}),
    (r"llama|vicuna|alpaca", "6.7 7 ?", (32, 4096, 32, 32, 0, 11008, 32000, 2048), {}),
    (r"llama", "8", (32, 4096, 32, 8, 0, 14336, 128256, 8192), {}),
    # Mistral AI (model cards)
    (r"8x22b", "141 ?", (56, 6144, 48, 8, 0, 16384, 32768, 4096), _moe(8, 2, 16384)),
    (r"mixtral", "141", (56, 6144, 48, 8, 0, 16384, 32768, 4096), _moe(8, 2, 16384)),
    (r"8x7b|mixtral", "46.7 ?", (32, 4096, 32, 8, 0, 14336, 32000, 4096), _moe(8, 2, 14336)),
    (r"mistral.*nemo|mistral", "12", (40, 5120, 32, 8, 128, 14336, 131072, 8192), {}),
    (r"mistral", "123", (88, 12288, 96, 8, 0, 28672, 32768, 8192), {}),
    (r"mistral", "22 24", (40, 5120, 32, 8, 128, 32768, 131072, 8192), {}),
    (r"mistral", "7 7.24 ?", (32, 4096, 32, 8, 0, 14336, 32000, 8192), {}),
    # Qwen3 (arXiv 2505.09388)
    (
        r"qwen-?3.*next|qwen-?3",
        "80",
        (48, 2048, 16, 2, 256, 5120, 151936, 4096),
        _moe(512, 10, 512, 512),
    ),
    (r"qwen-?3", "480", (62, 6144, 96, 8, 128, 8192, 151936, 4096), _moe(160, 8, 2560)),
    (r"qwen-?3", "235", (94, 4096, 64, 4, 128, 12288, 151936, 4096), _moe(128, 8, 1536)),
    (r"qwen-?3", "30", (48, 2048, 32, 4, 128, 6144, 151936, 4096), _moe(128, 8, 768)),
    (r"qwen-?3", "32", (64, 5120, 64, 8, 128, 25600, 151936, 4096), {}),
    (r"qwen-?3", "14", (40, 5120, 40, 8, 128, 17408, 151936, 4096), {}),
    (r"qwen-?3", "8", (36, 4096, 32, 8, 128, 12288, 151936, 4096), {}),
    (r"qwen-?3", "4", (36, 2560, 32, 8, 128, 9728, 151936, 4096), _TIED),
    (r"qwen-?3", "1.7", (28, 2048, 16, 8, 128, 6144, 151936, 4096), _TIED),
    (r"qwen-?3", "0.6", (28, 1024, 16, 8, 128, 3072, 151936, 4096), _TIED),
    # Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115), Qwen 1.5 and Qwen (arXiv 2309.16609)
    (r"qwen", "57", (28, 3584, 28, 4, 0, 18944, 151936, 4096), _moe(64, 8, 2560, 20480)),
    (r"qwen-?2", "72", (80, 8192, 64, 8, 0, 29568, 152064, 4096), {}),
    (r"qwen-?2", "32", (64, 5120, 40, 8, 0, 27648, 152064, 4096), {}),
    (r"qwen-?2", "14", (48, 5120, 40, 8, 0, 13824, 152064, 4096), {}),
    (r"qwen-?2", "7", (28, 3584, 28, 4, 0, 18944, 152064, 4096), {}),
    (r"qwen-?2", "3", (36, 2048, 16, 2, 0, 11008, 151936, 4096), _TIED),
    (r"qwen-?2", "1.5", (28, 1536, 12, 2, 0, 8960, 151936, 4096), _TIED),
    (r"qwen-?2", "0.5", (24, 896, 14, 2, 0, 4864, 151936, 4096), _TIED),
    (r"qwen", "110", (80, 8192, 64, 8, 0, 49152, 152064, 4096), {}),
    (r"qwen", "72", (80, 8192, 64, 64, 0, 24576, 152064, 4096), {}),
    (r"qwen", "32", (64, 5120, 40, 8, 0, 27392, 152064, 4096), {}),
    (r"qwen", "14", (40, 5120, 40, 40, 0, 13696, 152064, 4096), {}),
    (r"qwen", "7", (32, 4096, 32, 32, 0, 11008, 151936, 4096), {}),
    (r"qwen", "1.8", (24, 2048, 16, 16, 0, 5504, 151936, 4096), {}),
    # Gemma (arXiv 2403.08295, 2408.00118, 2503.19786)
    (r"gemma-?3", "27", (62, 5376, 32, 16, 128, 21504, 262208, 4096), _TIED),
    (r"gemma-?3", "12", (48, 3840, 16, 8, 256, 15360, 262208, 4096), _TIED),
    (r"gemma-?3", "4", (34, 2560, 8, 4, 256, 10240, 262208, 4096), _TIED),
    (r"gemma-?3", "1", (26, 1152, 4, 1, 256, 6912, 262144, 4096), _TIED),
    (r"gemma-?2", "27", (46, 4608, 32, 16, 128, 36864, 256000, 8192), _TIED),
    (r"gemma-?2", "9", (42, 3584, 16, 8, 256, 14336, 256000, 8192), _TIED),
    (r"gemma-?2-", "2 2.6", (26, 2304, 8, 4, 256, 9216, 256000, 8192), _TIED),
    (r"gemma", "7 8.5", (28, 3072, 16, 16, 256, 24576, 256000, 8192), _TIED),
    (r"gemma", "2 2.5", (18, 2048, 8, 1, 256, 16384, 256000, 8192), _TIED),
    # DeepSeek (arXiv 2401.02954, 2401.06066, 2405.04434, 2412.19437), Moonlight and Kimi K2 (model
    # cards)
    (
        r"deepseek(?!.*v2)",
        "671 685 ?",
        (61, 7168, 128, 128, 192, 18432, 129280, 4096),
        {**_moe(256, 8, 2048, 2048, 3), "mla": _MLA_V2},
    ),
    (
        r"deepseek.*v2.*lite",
        "16 15.7 ?",
        (27, 2048, 16, 16, 192, 10944, 102400, 4096),
        {**_moe(64, 6, 1408, 2816, 1), "mla": _MLA_LITE},
    ),
    (
        r"deepseek",
        "236 ?",
        (60, 5120, 128, 128, 192, 12288, 102400, 4096),
        {**_moe(160, 6, 1536, 3072, 1), "mla": _MLA_V2},
    ),
    (r"deepseek", "16", (28, 2048, 16, 16, 0, 10944, 102400, 4096), _moe(64, 6, 1408, 2816, 1)),
    (r"deepseek", "67", (95, 8192, 64, 8, 0, 22016, 102400, 4096), {}),
    (r"deepseek", "7", (30, 4096, 32, 32, 0, 11008, 102400, 4096), {}),
    (
        r"kimi",
        "1000 1040 ?",
        (61, 7168, 64, 64, 192, 18432, 163840, 4096),
        {**_moe(384, 8, 2048, 2048, 1), "mla": _MLA_V2},
    ),
    (
        r"moonlight",
        "16 ?",
        (27, 2048, 16, 16, 192, 11264, 163840, 8192),
        {**_moe(64, 6, 1408, 2816, 1), "mla": _MLA_LITE},
    ),
    # Other mixtures of experts (model cards): Grok-1, DBRX, Phi-3.5-MoE, gpt-oss, GLM-4.5, OLMoE,
    # Arctic
    (r"grok", "314 ?", (64, 6144, 48, 8, 128, 32768, 131072, 8192), _moe(8, 2, 32768)),
    (r"dbrx", "132 ?", (40, 6144, 48, 8, 0, 10752, 100352, 4096), _moe(16, 4, 10752)),
    (r"phi-?3[.]5-?moe", "42 ?", (32, 4096, 32, 8, 0, 6400, 32064, 4096), _moe(16, 2, 6400)),
    (r"gpt-?oss", "120", (36, 2880, 64, 8, 64, 2880, 201088, 4096), _moe(128, 4, 2880)),
    (r"gpt-?oss", "20 21 ?", (24, 2880, 64, 8, 64, 2880, 201088, 4096), _moe(32, 4, 2880)),
    (
        r"glm-?4\.5.*air|glm",
        "106",
        (46, 4096, 96, 8, 128, 10944, 151552, 4096),
        _moe(128, 8, 1408, 1408, 1),
    ),
    (
        r"glm-?4\.5|glm",
        "355",
        (92, 5120, 96, 8, 128, 12288, 151552, 4096),
        _moe(160, 8, 1536, 1536, 3),
    ),
    (r"olmoe", "7 ?", (16, 2048, 16, 16, 0, 1024, 50304, 4096), _moe(64, 8, 1024)),
    (r"arctic", "480 ?", (35, 7168, 56, 8, 0, 4864, 32000, 4096), _moe(128, 2, 4864, 4864)),
    # Phi (arXiv 2309.05463, 2404.14219, 2412.08905)
    (r"phi-?4.*mini", "3.8 ?", (32, 3072, 24, 8, 0, 8192, 200064, 4096), _TIED),
    (r"phi-?4", "14 ?", (40, 5120, 40, 10, 0, 17920, 100352, 4096), {}),
    (r"phi-?3", "14", (40, 5120, 40, 10, 0, 17920, 32064, 4096), {}),
    (r"phi-?3", "3.8 ?", (32, 3072, 32, 32, 0, 8192, 32064, 4096), {}),
    (r"phi-?2", "2.7 ?", (32, 2560, 32, 32, 0, 10240, 51200, 2048), _GPT_ROPE),
    (r"phi-?1", "1.3 ?", (24, 2048, 32, 32, 0, 8192, 51200, 2048), _GPT_ROPE),
    # Nemotron (arXiv 2402.16819, 2406.11704; NeMo's recipes): plain MLPs, squared ReLU
    (r"nemotron", "340", (96, 18432, 96, 8, 0, 73728, 256000, 4096), _GPT_ROPE),
    (r"nemotron", "22", (40, 6144, 48, 48, 0, 24576, 256000, 4096), _GPT_ROPE),
    (r"nemotron", "15", (32, 6144, 48, 8, 0, 24576, 256000, 4096), _GPT_ROPE),
    (r"nemotron-?[34]?", "8", (32, 4096, 32, 32, 0, 16384, 256000, 4096), _GPT_ROPE),
    # Falcon (arXiv 2311.16867)
    (r"falcon", "180", (80, 14848, 232, 8, 64, 59392, 65024, 2048), {**_GPT_ROPE, **_TIED}),
    (r"falcon", "40", (60, 8192, 128, 8, 64, 32768, 65024, 2048), {**_GPT_ROPE, **_TIED}),
    (r"falcon", "7", (32, 4544, 71, 1, 64, 18176, 65024, 2048), {**_GPT_ROPE, **_TIED}),
    # GPT-NeoX and GPT-J, Pythia (arXiv 2204.06745, 2304.01373)
    (r"neox", "20 20.6 ?", (44, 6144, 64, 64, 0, 24576, 50432, 2048), _GPT_ROPE),
    (r"gpt-?j", "6 ?", (28, 4096, 16, 16, 0, 16384, 50400, 2048), _GPT_ROPE),
    (r"pythia", "12", (36, 5120, 40, 40, 0, 20480, 50688, 2048), _GPT_ROPE),
    (r"pythia", "6.9", (32, 4096, 32, 32, 0, 16384, 50432, 2048), _GPT_ROPE),
    (r"pythia", "2.8", (32, 2560, 32, 32, 0, 10240, 50304, 2048), _GPT_ROPE),
    (r"pythia", "1.4", (24, 2048, 16, 16, 0, 8192, 50304, 2048), _GPT_ROPE),
    (r"pythia", "1", (16, 2048, 8, 8, 0, 8192, 50304, 2048), _GPT_ROPE),
    (r"pythia", "0.41", (24, 1024, 16, 16, 0, 4096, 50304, 2048), _GPT_ROPE),
    (r"pythia", "0.16", (12, 768, 12, 12, 0, 3072, 50304, 2048), _GPT_ROPE),
    # OPT (arXiv 2205.01068), BLOOM (arXiv 2211.05100), MPT (model cards)
    (r"(^|-)opt", "175", (96, 12288, 96, 96, 0, 49152, 50272, 2048), _GPT),
    (r"(^|-)opt", "66", (64, 9216, 72, 72, 0, 36864, 50272, 2048), _GPT),
    (r"(^|-)opt", "30", (48, 7168, 56, 56, 0, 28672, 50272, 2048), _GPT),
    (r"(^|-)opt", "13", (40, 5120, 40, 40, 0, 20480, 50272, 2048), _GPT),
    (r"(^|-)opt", "6.7", (32, 4096, 32, 32, 0, 16384, 50272, 2048), _GPT),
    (r"(^|-)opt", "2.7", (32, 2560, 32, 32, 0, 10240, 50272, 2048), _GPT),
    (r"(^|-)opt", "1.3", (24, 2048, 32, 32, 0, 8192, 50272, 2048), _GPT),
    (r"bloom", "176 ?", (70, 14336, 112, 112, 0, 57344, 250880, 2048), _ALIBI),
    (r"bloom", "7 7.1", (30, 4096, 32, 32, 0, 16384, 250880, 2048), _ALIBI),
    (r"bloom", "3", (30, 2560, 32, 32, 0, 10240, 250880, 2048), _ALIBI),
    (r"bloom", "1.7", (24, 2048, 16, 16, 0, 8192, 250880, 2048), _ALIBI),
    (r"mpt", "30", (48, 7168, 64, 64, 0, 28672, 50432, 8192), _ALIBI),
    (r"mpt", "7", (32, 4096, 32, 32, 0, 16384, 50432, 2048), _ALIBI),
    # Other dense models (model cards): Yi, InternLM, Baichuan, OLMo, StarCoder, Command R, SmolLM
    (r"(^|-)yi", "34", (60, 7168, 56, 8, 0, 20480, 64000, 4096), {}),
    (r"(^|-)yi", "6", (32, 4096, 32, 4, 0, 11008, 64000, 4096), {}),
    (r"internlm-?2", "20", (48, 6144, 48, 8, 0, 16384, 92544, 4096), {}),
    (r"internlm-?2", "7 ?", (32, 4096, 32, 8, 0, 14336, 92544, 4096), {}),
    (r"internlm", "7", (32, 4096, 32, 32, 0, 11008, 103168, 2048), {}),
    (r"baichuan", "13", (40, 5120, 40, 40, 0, 13696, 125696, 4096), {}),
    (r"baichuan", "7", (32, 4096, 32, 32, 0, 11008, 125696, 4096), {}),
    (r"olmo-?2", "32", (64, 5120, 40, 8, 0, 27648, 100352, 4096), {}),
    (r"olmo-?2", "13", (40, 5120, 40, 40, 0, 13824, 100352, 4096), {}),
    (r"olmo-?2", "7", (32, 4096, 32, 32, 0, 11008, 100352, 4096), {}),
    (r"olmo", "7", (32, 4096, 32, 32, 0, 11008, 50304, 2048), {}),
    (r"olmo", "1 1.2", (16, 2048, 16, 16, 0, 8192, 50304, 2048), _TIED),
    (r"starcoder-?2", "15", (40, 6144, 48, 4, 0, 24576, 49152, 4096), _GPT_ROPE),
    (r"starcoder-?2", "7", (32, 4608, 36, 4, 0, 18432, 49152, 4096), _GPT_ROPE),
    (r"starcoder-?2", "3", (30, 3072, 24, 2, 0, 12288, 49152, 4096), {**_GPT_ROPE, **_TIED}),
    (r"starcoder", "15.5 15 ?", (40, 6144, 48, 1, 0, 24576, 49152, 8192), _GPT),
    (r"command-?r-?(\+|plus)|command", "104", (64, 12288, 96, 8, 0, 33792, 256000, 4096), _TIED),
    (r"command-?r", "35 ?", (40, 8192, 64, 64, 0, 22528, 256000, 4096), _TIED),
    (r"smollm", "1.7", (24, 2048, 32, 32, 0, 8192, 49152, 2048), _TIED),
    (r"smollm-?3", "3 ?", (36, 2048, 16, 4, 0, 11008, 128256, 4096), _TIED),
    # PaLM, Gopher, Chinchilla (arXiv 2204.02311, 2112.11446, 2203.15556)
    (r"palm", "540", (118, 18432, 48, 1, 256, 73728, 256000, 2048), _TIED),
    (r"palm", "62", (64, 8192, 32, 1, 256, 32768, 256000, 2048), _TIED),
    (r"palm", "8", (32, 4096, 16, 1, 256, 16384, 256000, 2048), _TIED),
    (r"gopher", "280 ?", (80, 16384, 128, 128, 0, 65536, 32000, 2048), _GPT),
    (r"chinchilla", "70 ?", (80, 8192, 64, 64, 0, 32768, 32000, 2048), _GPT),
    # GPT-2, GPT-3, Megatron's and NeMo's GPTs (arXiv 1909.08053, 2005.14165, 2104.04473,
    # 2205.05198), MT-NLG, BERT
    (r"bert.*large", "0.34 ?", (24, 1024, 16, 16, 0, 4096, 30522, 512), _GPT),
    (r"gpt-?2-xl|gpt-?2", "1.5", (48, 1600, 25, 25, 0, 6400, 50257, 1024), _GPT),
    (r"gpt-?2", "0.774", (36, 1280, 20, 20, 0, 5120, 50257, 1024), _GPT),
    (r"gpt-?2", "0.345 0.355", (24, 1024, 16, 16, 0, 4096, 50257, 1024), _GPT),
    (r"gpt-?2", "0.117 0.124 ?", (12, 768, 12, 12, 0, 3072, 50257, 1024), _GPT),
    (r"(turing|t)-nlg", "17", (78, 4256, 28, 28, 0, 17024, 50257, 1024), _GPT),
    (r"gpt|mt-nlg|megatron", "530", (105, 20480, 128, 128, 0, 81920, 51200, 2048), _GPT),
    (r"gpt|megatron", "1008", (128, 25600, 160, 160, 0, 102400, 51200, 2048), _GPT),
    (r"gpt|megatron", "310", (96, 16384, 128, 128, 0, 65536, 51200, 2048), _GPT),
    (r"gpt-?3|gpt|megatron", "175", (96, 12288, 96, 96, 0, 49152, 51200, 2048), _GPT),
    (r"gpt|megatron", "145.6", (80, 12288, 96, 96, 0, 49152, 51200, 2048), _GPT),
    (r"gpt|megatron", "76.1", (60, 10240, 80, 80, 0, 40960, 51200, 2048), _GPT),
    (r"gpt|megatron", "39.1", (48, 8192, 64, 64, 0, 32768, 51200, 2048), _GPT),
    (r"gpt|megatron", "22", (48, 6144, 64, 64, 0, 24576, 51200, 2048), _GPT),
    (r"gpt|megatron", "20", (44, 6144, 48, 48, 0, 24576, 51200, 2048), _GPT),
    (r"gpt|megatron", "18.4", (40, 6144, 48, 48, 0, 24576, 51200, 2048), _GPT),
    (r"gpt|megatron", "13", (40, 5120, 40, 40, 0, 20480, 51200, 2048), _GPT),
    (r"gpt|megatron", "8.3", (72, 3072, 24, 24, 0, 12288, 51200, 1024), _GPT),
    (r"gpt|megatron", "7.5", (36, 4096, 32, 32, 0, 16384, 51200, 2048), _GPT),
    (r"gpt|megatron", "6.7", (32, 4096, 32, 32, 0, 16384, 51200, 2048), _GPT),
    (r"gpt|megatron", "5", (24, 4096, 32, 32, 0, 16384, 51200, 2048), _GPT),
    (r"gpt|megatron", "3.6", (30, 3072, 32, 32, 0, 12288, 51200, 2048), _GPT),
    (r"gpt|megatron", "2.7", (32, 2560, 32, 32, 0, 10240, 51200, 2048), _GPT),
    (r"gpt|megatron", "1.7", (24, 2304, 24, 24, 0, 9216, 51200, 2048), _GPT),
    (r"gpt|megatron", "1.3", (24, 2048, 16, 16, 0, 8192, 51200, 2048), _GPT),
    (r"gpt|megatron", "0.76", (24, 1536, 16, 16, 0, 6144, 51200, 2048), _GPT),
    (r"gpt|megatron", "0.35", (24, 1024, 16, 16, 0, 4096, 51200, 2048), _GPT),
    (r"gpt|megatron", "0.125", (12, 768, 12, 12, 0, 3072, 51200, 2048), _GPT),
]
#: Words of a name that say the kind of MLP, where the model itself is not listed.
GATED = re.compile(
    r"llama|mi[sx]tral|qwen|gemma|deepseek|yi-|internlm|baichuan|olmo|glm|phi-?[34]|grok|dbrx|palm"
    r"|smollm"
)
PLAIN = re.compile(
    r"gpt|opt|bloom|mpt|megatron|nlg|falcon|pythia|neox|nemotron|starcoder|bert|gopher|chinchilla"
    r"|phi-?[12]"
)


#: Matches a size in a name: the 70b of llama-3-70b, but not the 22b of 8x22b, nor the 3b of
#: 30b-a3b, which are its active parameters.
_SIZE = re.compile(r"(?<![\dx.])(?<!-a)(\d+(?:\.\d+)?)(t|b|m)(?![a-z])")
_BILLIONS = {"t": 1e3, "b": 1.0, "m": 1e-3}
_NEAR = 0.03  # Sizes in names are rounded: 175B is 174.6B.


def size_in(name: str) -> float | None:
    """Returns the billions of parameters that a model's name states, or None."""
    match = _SIZE.search(canonical(name[:120]))
    return float(match[1]) * _BILLIONS[match[2]] if match else None


def canonical(name: str) -> str:
    """Returns a name in lower case, with "-" for spaces, colons and underscores, and without the
    publisher before a slash."""
    return re.sub(r"[\s_/:]+", "-", name.strip().lower().rsplit("/", 1)[-1])


@lru_cache(maxsize=1)
def _compiled() -> list[tuple[re.Pattern[str], list[str], Shape]]:
    names = Shape.__struct_fields__
    compiled = []
    for family, sizes, numbers, differences in _LISTED:
        fields: dict[str, Any] = dict(zip(names, numbers, strict=False)) | dict(differences)
        compiled.append((re.compile(family), sizes.split(), Shape(**fields)))
    return compiled


@lru_cache(maxsize=4096)
def known_shape(name: str) -> Shape | None:
    """Returns the published shape of a model's name; None for a name that is not listed."""
    if not name:
        return None
    size = size_in(name)
    family = _SIZE.sub("", canonical(name[:120]))
    for pattern, sizes, shape in _compiled():
        if size is None:
            is_listed = "?" in sizes
        else:
            is_listed = any(
                abs(float(listed_size) / size - 1) < _NEAR
                for listed_size in sizes
                if listed_size != "?"
            )
        if is_listed and pattern.search(family):
            return shape
    return None
