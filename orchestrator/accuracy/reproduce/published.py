"""Published figures: each number is here once, with its source. No prediction uses any of them."""

from __future__ import annotations

ZERO = "ZeRO (arXiv 1910.02054)"
PLAYBOOK = "The Ultra-Scale Playbook (Hugging Face, 2025)"

#: ZeRO table 1: GB of model states per GPU. Model -> ranks N_d -> (P_os, P_os+g, P_os+g+p).
ZERO_STATES: dict[str, dict[int, tuple[float, ...]]] = {
    "7.5B": {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    "128B": {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    "1T": {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
#: ZeRO table 2, theoretical: the largest model, in billions of parameters, by degree of model
#: parallelism with 64 replicas of 32 GB GPUs. MP -> (baseline, P_os, P_os+g, P_os+g+p).
ZERO_LARGEST: dict[int, tuple[float, ...]] = {
    1: (2, 7.6, 14.4, 128),
    2: (4, 15.2, 28.8, 256),
    4: (8, 30.4, 57.6, 512),
    8: (16, 60.8, 115.2, 1000),
    16: (32, 121.6, 230.4, 2000),
}
#: ZeRO table 2, measured: MP -> (baseline, P_os), in billions of parameters.
ZERO_LARGEST_MEASURED: dict[int, tuple[float, ...]] = {1: (1.3, 6.2), 16: (20, 100)}
ZERO_100B_TFLOPS = 38.0  # TFLOP/s per GPU (section 10.2).
ZERO_100B_PFLOPS = 15.0  # PFLOP/s of 400 GPUs together.
#: TFLOP/s per GPU of a 40B model with model parallelism across two DGX-2 (section 1).
ZERO_ACROSS_TFLOPS = 5.0
#: The speed-up from 64 to 400 GPUs is more than this (section 10.3 and figure 3).
ZERO_SUPER_LINEAR = 400 / 64
ZERO_TRAFFIC = {0: 2.0, 1: 2.0, 2: 2.0, 3: 3.0}  # Multiples of Psi per step (section 7).

BERT_SOURCE = (
    "DeepSpeed, fastest BERT training (Microsoft, 2020); batches and steps: NVIDIA's recipe of LAMB"
    " (arXiv 1904.00962)"
)
BERT_MINUTES = 44.0  # Minutes of pre-training on 1,024 V100.
BERT_SAMPLES_PER_S = {128: 272.0, 512: 52.0}  # Sequence length -> samples/s per V100.
#: Sequence length -> (samples per step, steps).
BERT_PHASES = {128: (65536, 7038), 512: (32768, 1563)}

#: Playbook, "Memory usage in Transformers": GB of parameters, gradients and Adam's state in mixed
#: precision. Billions of parameters -> (without fp32 gradients, with fp32 gradients).
PLAYBOOK_STATES = {
    1: (16, 20),
    7: (112, 140),
    70: (1120, 1400),
    405: (6480, 8100),
}
#: Playbook: throughput of a 3B model at 4,096 tokens by degree of tensor parallelism.
#: TP -> (sequences in the largest micro-batch that fits, tokens/s per GPU).
PLAYBOOK_TP = {
    2: (3, 14167.2),
    4: (9, 13460.2),
    8: (18, 10888.5),
    16: (40, 6159.3),
    32: (90, 3609.7),
}
#: Share of the throughput that is lost from one node of pipeline stages to two, with m = 32.
PLAYBOOK_PP_LOSS = 0.14

#: Bus bandwidth of an all-reduce in GB/s: nodes of 8 H100 with 8 x 400 Gb/s -> (256 MiB, 1 GiB).
ALL_REDUCE = {
    1: (422, 466),
    4: (314, 352),
    8: (309, 348),
    16: (297, 350),
    32: (275, 344),
    64: (265, 340),
    128: (253, 331),
    256: (236, 313),
    512: (223, 297),
    1024: (219, 306),
}
ALL_REDUCE_SOURCE = (
    "one node: NVIDIA dgxc-benchmarking nccl/README.md; more: NVIDIA GTC24 session 62129, a"
    " chart, +-2"
)
PLAYBOOK_ALL_REDUCE = {1: 436, 4: 160, 8: 90, 64: 39}

#: Training FLOPs: model -> (FLOPs, training tokens, source).
TRAINING = {
    "gpt3_175b": (3.14e23, 300e9, "arXiv 2005.14165 table D.1"),
    "llama3_405b": (3.8e25, 15.6e12, "arXiv 2407.21783 section 3.2"),
}
DEEPSEEK_HOURS = 2.664e6  # Hours of H800.
DEEPSEEK_TOKENS = 14.8e12
DEEPSEEK_SOURCE = "arXiv 2412.19437 table 1"
