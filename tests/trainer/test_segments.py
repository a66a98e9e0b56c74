"""Experts computed one after another, and rows permuted, against autograd's own gradients of the
plain expressions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainer.model.mlp import ACTIVATIONS
from trainer.model.permutation import CopyPositions, copied, inverse, permuted, summed
from trainer.model.segments import segmented

COUNTS = [3, 0, 5, 1]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def plain(x, weights, gate, up, down, activation):
    outputs = []
    start = 0
    for expert, count in enumerate(COUNTS):
        rows = x[start : start + count]
        weight = weights[start : start + count, None]
        raised = F.linear(rows, up[expert])
        act = ACTIVATIONS[activation]
        inner = act(raised) if gate is None else act(F.linear(rows, gate[expert])) * raised
        outputs.append(F.linear(inner * weight, down[expert]))
        start += count
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("hidden", "ffn"), [(4, 7), (7, 4)], ids=["results are narrow", "results are wide"]
)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_experts_one_after_another(hidden, ffn, activation, gated, frozen):
    torch.manual_seed(1)
    experts = len(COUNTS)
    n = sum(COUNTS)
    arguments = [random(n, hidden), random(n), random(experts, ffn, hidden) if gated else None]
    arguments += [random(experts, ffn, hidden), random(experts, hidden, ffn)]
    arguments[1].data[0] = 0.0  # a choice may weigh nothing, and its weight has a gradient still
    trained = [
        argument
        for index, argument in enumerate(arguments)
        if argument is not None and not (frozen and index == 3)
    ]
    if frozen:
        arguments[3].requires_grad_(False)
    grad = torch.randn(n, hidden, dtype=torch.float64)
    out = segmented(*arguments[:2], COUNTS, *arguments[2:], activation)
    expected = plain(*arguments, activation)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for gradient, right in zip(
        torch.autograd.grad(out, trained, grad),
        torch.autograd.grad(expected, trained, grad),
        strict=True,
    ):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("hidden", "ffn"), [(4, 7), (7, 4)])
def test_experts_in_narrow_precision_keep_wide_weights(hidden, ffn):
    torch.manual_seed(1)
    wide = [
        random(9, hidden),
        random(9),
        random(4, ffn, hidden),
        random(4, ffn, hidden),
        random(4, hidden, ffn),
    ]
    narrow = [
        tensor.detach().to(torch.float32 if index == 1 else torch.bfloat16)
        for index, tensor in enumerate(wide)
    ]
    narrow = [tensor.requires_grad_() for tensor in narrow]
    out = segmented(*narrow[:2], COUNTS, *narrow[2:], "silu")
    expected = plain(*wide, "silu")
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    for leaf, right in zip(narrow, torch.autograd.grad(expected.sum(), wide), strict=True):
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad.double(), right, rtol=0.05, atol=0.15)


@pytest.mark.parametrize(("n", "k"), [(5, 3), (5, 1), (0, 2)])
def test_copies_and_their_sums(n, k):
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(n * k, generator=generator)
    source = order // k
    positions = inverse(order)
    assert torch.equal(order[positions], torch.arange(n * k))
    x = random(n, 4)
    copies = random(n * k, 4)
    weights = random(n * k)
    pairs = [
        (copied(x, source, CopyPositions(positions.view(n, k))), x[source], x),
        (
            summed(copies, source, CopyPositions(positions.view(n, k))),
            copies[positions].view(n, k, 4).sum(1),
            copies,
        ),
        (permuted(copies, order, positions), copies[order], copies),
        (permuted(weights, order, positions), weights[order], weights),
    ]
    for output, expected, leaf in pairs:
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-14)
        grad = torch.randn(output.shape, dtype=torch.float64, generator=generator)
        (gradient,), (right,) = (
            torch.autograd.grad(output, leaf, grad),
            torch.autograd.grad(expected, leaf, grad),
        )
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-14)
