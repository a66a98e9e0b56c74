"""Terms of the loss, and a bias of the choice outside the loss, that keep the experts of a layer
equally busy.

Terms are sums over sequences or tokens, so they do not depend on how the batch is cut: a layer adds
them for its own tokens, divided by the step's global count.
"""

from __future__ import annotations

from torch import Tensor

from .router import Routing


def sequence_balance(routing: Routing, counts: Tensor) -> Tensor:
    """Returns the sum over sequences of the sum over experts of f * P (Switch, arXiv 2101.03961,
    equation 4, with several choices; DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). A sequence
    adds 1 if all experts are chosen equally often.

    f: share of the sequence's choices that went to an expert, times experts; P: mean score.
    `counts` int64 [b, experts]: choices of whole sequences. `routing`: that of this rank's tokens
    of these sequences, in order.
    """
    # A quotient of integers would be fp32, even with float64 scores.
    counts = counts.to(routing.scores.dtype)
    choices = counts.sum(-1, keepdim=True)
    tokens = choices / routing.experts.shape[-1]
    share = counts * (counts.shape[-1] / choices)
    score_sums = routing.scores.unflatten(0, (len(counts), -1)).sum(1)
    return (share / tokens * score_sums).sum()


def batch_balance(routing: Routing, load: Tensor) -> Tensor:
    """Returns the sum over tokens of the sum over experts of f * score, with f of the whole global
    batch (Qiu et al., arXiv 2501.11873), as in Qwen3's training: experts may then specialise in
    some sequences.

    f is known only when the step ends, after its gradient is needed. Other trainers use the choices
    of the micro-batches so far, which depend on the layout; here f is `load` [experts], that of the
    previous step.
    """
    return (routing.scores @ load.to(routing.scores.dtype)).sum()


def load_of(choices: Tensor) -> Tensor:
    """Returns fp32 [..., experts]: how often each expert was chosen, divided by the mean. `choices`
    int64: the choices of all tokens of a step."""
    return choices.float() * choices.shape[-1] / choices.sum(-1, keepdim=True).float()


def bias_change(choices: Tensor, speed: float) -> Tensor:
    """Returns the change of the biases in a step, fp32 [..., experts]: `speed` up for an expert
    that
    was chosen less often in the step than the mean, down for one that was chosen more often (arXiv
    2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). `choices` int64 [...,
    experts]: the choices of all tokens of the step."""
    # Whole numbers, so the comparison is exact.
    deficit = choices.sum(-1, keepdim=True) - choices * choices.shape[-1]
    return deficit.sign().float() * speed


def z_sum(routing: Routing) -> Tensor:
    """Returns the sum over tokens of the squared log-sum-exp of router logits, which keeps the
    logits small (ST-MoE, arXiv 2202.08906, section 3.3)."""
    return routing.logits.logsumexp(-1).square().sum()
