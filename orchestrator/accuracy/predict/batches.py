"""Finds the micro-batch and the global batch of a row; if the row does not state them, the memory
of the GPUs decides."""

from __future__ import annotations

import math
import re

from orchestrator.cost.model.layers import expert_params
from orchestrator.plan.document import Model

from .cells import Row, RowError

STEP_TOKENS = 1 << 21  # Tokens per step, if a row does not state its batches.
_USED = 0.7  # Share of a GPU's memory that an assumed micro-batch may fill.
#: The most tokens of an assumed micro-batch. Larger ones are hardly faster, except with experts,
#: whose dispatch has a latency.
_MOST_TOKENS = 16384
_MOST_MOE_TOKENS = 32768
_STEPS = re.compile(
    r"\b(\d{1,5}) micro-?batch|(?:grad(?:ient)?[ -]*acc[a-z]*|accumulation)(?: steps)?["
    r" =:]*(\d{1,5})\b"
)


def batch_of(
    row: Row, model: Model, pp: int, replicas: int, most_tokens: float, accumulates: bool
) -> tuple[int, int, int]:
    """Returns (samples per micro-batch, samples per global batch, micro-batches per replica).

    `most_tokens`, from `tokens_that_fit`, limits the micro-batch of a row that states none and has
    no pipeline. `accumulates` says that the software's recipes sum the gradients of several
    micro-batches; benchmarks of other software state the batch per GPU and step.
    """
    size = row.whole("micro_batch")
    batch = row.whole("global_batch")
    match = _STEPS.search(row.text("notes").lower())
    accumulation_steps = int(match[1] or match[2]) if match else 0
    seq_len = model.max_seq_len
    if batch and row.text("seq_len") and batch >= 1 << 17 and batch >= 8 * seq_len:
        row.say(f"global_batch={batch // seq_len}: {batch:,} read as tokens")
        batch //= seq_len
    is_stated = size is not None
    if size is None:
        size = 1
        if accumulation_steps and batch and batch % (accumulation_steps * replicas) == 0:
            size = batch // (accumulation_steps * replicas)
        elif pp == 1 and not accumulation_steps:
            while 2 * size * seq_len <= most_tokens and (
                not batch or batch % (2 * size * replicas) == 0
            ):
                size *= 2
        row.say(f"micro_batch={size}")
    if batch is None:
        if not accumulation_steps and pp > 1:
            accumulation_steps = pp * min(
                32, max(4, round(STEP_TOKENS / (replicas * size * seq_len * pp)))
            )
        elif not accumulation_steps and (accumulates or not is_stated):
            # Steps of pre-training have about this number of tokens.
            accumulation_steps = max(1, round(STEP_TOKENS / (replicas * size * seq_len)))
        batch = replicas * size * (accumulation_steps or 1)
        row.say(f"global_batch={batch}")
    if size * replicas > batch and size > 1:
        size = max(1, batch // replicas)
        row.say(f"micro_batch={size}: the global batch has no more for a replica")
    micro_batches = max(1, math.ceil(batch / (size * replicas)))
    if micro_batches > 1 << 20:
        raise RowError(
            f"global_batch={batch} is {micro_batches:,} micro-batches per replica, more than is"
            " plausible"
        )
    return size, batch, micro_batches


def tokens_that_fit(
    model: Model, tp: int, cp: int, ep: int, replicas: int, zero: int, memory_bytes: int, full: bool
) -> float:
    """Estimates how many tokens of a sequence-parallel micro-batch fit in memory next to the
    states, on one pipeline stage.

    States take 18 bytes per parameter, sharded by ZeRO stage. Activations per layer and token
    follow Korthikanti et al. (arXiv 2205.05198) with fused attention; a logit takes 9 bytes. `full`
    says that layers are recomputed.
    """
    experts = expert_params(model)
    sharded_bytes = {0: 0, 1: 12, 2: 16, 3: 18}[zero]
    state_bytes = 0.0
    for parameters, ranks in (
        (model.parameters - experts, replicas * cp),
        (experts / ep, replicas * cp / ep),
    ):
        state_bytes += parameters / tp * (18 - sharded_bytes + sharded_bytes / max(1.0, ranks))
    if zero == 3:
        state_bytes += 3 * model.parameters / model.layers / tp * 4
    width = model.ffn_hidden
    if model.moe:
        width = model.moe.top_k * model.moe.ffn_hidden + model.moe.shared_ffn_hidden
    attention = (4 * model.heads + 4 * model.kv_heads) * model.head_dim
    bytes_per_layer = (
        2 * model.hidden
        if full
        else 8 * model.hidden + attention + (6 if model.mlp == "gated" else 4) * width
    )
    bytes_per_token = (model.layers * bytes_per_layer + 9 * model.vocab) / tp
    token_limit = (_MOST_MOE_TOKENS if model.moe else _MOST_TOKENS) * cp
    if model.moe and zero == 3:
        return 0.0  # ZeRO-3 gathers whole layers of experts, which leaves little.
    return max(0.0, min(token_limit, (memory_bytes * _USED - state_bytes) / bytes_per_token * cp))
