"""What keeps the experts of a layer equally busy: terms of the loss, and a bias of the choice that
has no part in it.

Terms are sums over sequences or tokens, so they do not depend on how the batch is cut: a layer adds
them for its own tokens, divided by the step's global count.
"""

from __future__ import annotations

from torch import Tensor

from .router import Routing


def sequence_balance(routing: Routing, counts: Tensor) -> Tensor:
    """Sum over sequences of sum over experts of f * P (Switch, arXiv 2101.03961, equation 4, with
    several choices; DeepSeek-V3, arXiv 2412.19437, equations 17 to 20), 1 where all experts are
    chosen equally often.

    f: share of the sequence's choices that went to an expert, times experts; P: mean score.
    `counts` int64 [b, experts]: choices of whole sequences, `routing` has this rank's tokens of
    them, sequence after sequence.
    """
    counts = counts.to(
        routing.scores.dtype
    )  # a quotient of integers would be fp32, also beside float64
    choices = counts.sum(-1, keepdim=True)
    tokens = choices / routing.experts.shape[-1]
    share = counts * (counts.shape[-1] / choices)
    return (share / tokens * routing.scores.unflatten(0, (len(counts), -1)).sum(1)).sum()


def batch_balance(routing: Routing, load: Tensor) -> Tensor:
    """Sum over tokens of sum over experts of f * score, as `sequence_balance` but with f of the
    whole global batch (Qiu et al., arXiv 2501.11873), by which Qwen3 is trained: experts may then
    specialise in some sequences.

    f is known when a step ends, its gradient is wanted before. Others take what the micro-batches
    so far have chosen, which depends on the layout; here it is `load` [experts], the f of the step
    before.
    """
    return (routing.scores @ load.to(routing.scores.dtype)).sum()


def load_of(choices: Tensor) -> Tensor:
    """fp32 [..., experts]: how often each was chosen over the mean. `chosen` int64, by all tokens
    of a step."""
    return choices.float() * choices.shape[-1] / choices.sum(-1, keepdim=True).float()


def bias_change(choices: Tensor, speed: float) -> Tensor:
    """By what a step changes the biases of the choice, fp32 [..., experts]: by `speed`, up for an
    expert that was chosen less often in the step than the mean, down for one that was chosen more
    often (arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). `chosen`
    int64 [..., experts]: by all tokens of the step."""
    deficit = choices.sum(-1, keepdim=True) - choices * choices.shape[-1]  # in whole numbers: exact
    return deficit.sign().float() * speed


def z_sum(routing: Routing) -> Tensor:
    """Sum over tokens of the squared log-sum-exp of router logits, which keeps these small (ST-MoE,
    arXiv 2202.08906, section 3.3)."""
    return routing.logits.logsumexp(-1).square().sum()
