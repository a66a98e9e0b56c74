"""Finds the micro-batch and the global batch of a row; if the row does not state them, the memory
of the GPUs decides."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from orchestrator.cost.model.layers import expert_params
from orchestrator.plan.document import Model

from .cells import Row, RowError

#: Tokens per step, if a row does not state its batches: about those of steps of pre-training.
STEP_TOKENS = 1 << 21
_USED = 0.7  # Share of a GPU's memory that an assumed micro-batch may fill.
#: The most tokens of an assumed micro-batch. Larger ones are hardly faster, except with experts,
#: whose dispatch has a latency.
_MOST_TOKENS = 16384
_MOST_MOE_TOKENS = 32768
_STEPS = re.compile(
    r"\b(\d{1,5}) micro-?batch|(?:grad(?:ient)?[ -]*acc[a-z]*|accumulation)(?: steps)?["
    r" =:]*(\d{1,5})\b"
)


class Batch(NamedTuple):
    micro_batch_size: int  # Samples per micro-batch.
    global_batch: int  # Samples per step.
    micro_batches: int  # Micro-batches per replica.


def batch_of(
    row: Row,
    model: Model,
    pp: int,
    replicas: int,
    most_tokens: float,
    accumulates: bool,
) -> Batch:
    """Returns the batch of a row.

    `most_tokens`, from `tokens_that_fit`, limits the micro-batch of a row that states none and has
    no pipeline. `accumulates` says that the software's recipes sum the gradients of several
    micro-batches; benchmarks of other software state the batch per GPU and step.
    """
    stated_size = row.whole("micro_batch")
    batch = _stated_batch(row, model.max_seq_len)
    steps = _stated_accumulation(row)
    size = stated_size
    if size is None:
        # A micro-batch of a pipeline has a single sample.
        token_limit = most_tokens if pp == 1 else 0.0
        size = _assumed_size(batch, steps, replicas, model.max_seq_len, token_limit)
        row.say(f"micro_batch={size}")
    if batch is None:
        tokens = replicas * size * model.max_seq_len
        if not steps and (pp > 1 or accumulates or stated_size is None):
            steps = _assumed_accumulation(pp, tokens)
        batch = replicas * size * (steps or 1)
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
    return Batch(size, batch, micro_batches)


def _stated_batch(row: Row, seq_len: int) -> int | None:
    """Returns the samples per step that a row states; a number that is too large for samples counts
    tokens."""
    batch = row.whole("global_batch")
    if batch and row.text("seq_len") and batch >= 1 << 17 and batch >= 8 * seq_len:
        row.say(f"global_batch={batch // seq_len}: {batch:,} read as tokens")
        batch //= seq_len
    return batch


def _stated_accumulation(row: Row) -> int:
    """Returns the micro-batches per step and replica that the notes state; 0 if they state none."""
    match = _STEPS.search(row.text("notes").lower())
    return int(match[1] or match[2]) if match else 0


def _assumed_size(
    batch: int | None,
    steps: int,
    replicas: int,
    seq_len: int,
    token_limit: float,
) -> int:
    """Returns the samples per micro-batch that follow from the batch and the steps of accumulation;
    without these, the most within `token_limit` that divide the batch."""
    if steps:
        if batch and batch % (steps * replicas) == 0:
            return batch // (steps * replicas)
        return 1
    size = 1
    while 2 * size * seq_len <= token_limit and (not batch or batch % (2 * size * replicas) == 0):
        size *= 2
    return size


def _assumed_accumulation(pp: int, tokens: int) -> int:
    """Returns the micro-batches of `tokens` tokens that make a usual step, in a pipeline a multiple
    of its stages."""
    if pp > 1:
        return pp * min(32, max(4, round(STEP_TOKENS / (tokens * pp))))
    return max(1, round(STEP_TOKENS / tokens))


def tokens_that_fit(
    model: Model,
    tp: int,
    cp: int,
    ep: int,
    replicas: int,
    zero: int,
    memory_bytes: int,
    full: bool,
) -> float:
    """Estimates how many tokens of a sequence-parallel micro-batch fit in memory next to the
    states, on one pipeline stage.

    States take 18 bytes per parameter, sharded by ZeRO stage. Activations per layer and token
    follow Korthikanti et al. (arXiv 2205.05198) with fused attention; a logit takes 9 bytes. `full`
    says that layers are recomputed.
    """
    if model.moe and zero == 3:
        return 0.0  # ZeRO-3 gathers whole layers of experts, which leaves little.
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
    if full:
        bytes_per_layer = 2 * model.hidden
    else:
        mlp = (6 if model.mlp == "gated" else 4) * width
        bytes_per_layer = 8 * model.hidden + attention + mlp
    bytes_per_token = (model.layers * bytes_per_layer + 9 * model.vocab) / tp
    token_limit = (_MOST_MOE_TOKENS if model.moe else _MOST_TOKENS) * cp
    return max(0.0, min(token_limit, (memory_bytes * _USED - state_bytes) / bytes_per_token * cp))
