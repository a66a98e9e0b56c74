"""Split backward: the input's gradient now, the weight's when asked, both equal to autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.model.linear import Embedding, Linear
from trainer.pipeline.split import DeferredWeightGrads, install


def layers(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(Linear(5, 7, bias), nn.LayerNorm(7), nn.Tanh(), Linear(7, 3, bias)).double()
    for param in net.parameters():
        nn.init.normal_(param)
    return net


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in net.named_parameters()}


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_equals_autograd(shape, bias, deferred):
    x = torch.randn(shape, dtype=torch.float64)
    plain = layers(bias)
    split = layers(bias)
    notified = []
    plain_input = x.clone().requires_grad_()
    split_input = x.clone().requires_grad_()
    plain(plain_input).square().sum().backward()

    queue = DeferredWeightGrads(notified.append)
    install([split], queue)
    if deferred:
        queue.open()
    split(split_input).square().sum().backward()
    torch.testing.assert_close(split_input.grad, plain_input.grad)
    assert (split[0].weight.grad is None) == deferred
    if deferred:
        notes = queue.close()
        assert len(notes) == 2
        queue.compute(notes)
        assert not notes  # each activation is dropped as soon as it is used
    assert [id(param) for param in notified] == [
        id(split[3].weight),
        id(split[0].weight),
    ]  # in order of backward
    torch.testing.assert_close(gradients(split), gradients(plain), rtol=1e-12, atol=1e-12)


def test_weight_gradients_accumulate_over_micro_batches():
    plain = layers()
    split = layers()
    queue = DeferredWeightGrads()
    install([split], queue)
    owed = []
    for seed in range(3):
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        plain(x).sum().backward()
        queue.open()
        split(x).sum().backward()
        owed.append(queue.close())
    for notes in reversed(owed):  # in any order
        queue.compute(notes)
    torch.testing.assert_close(gradients(split), gradients(plain), rtol=1e-12, atol=1e-12)


def test_hooks_on_a_split_weight_stay_silent():
    """torch runs a post-accumulate-grad hook even when the gradient is None: the queue alone must
    report a weight."""
    net = layers()
    notified = []
    hooked = []
    queue = DeferredWeightGrads(notified.append)
    install([net], queue)
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda p: hooked.append(p))
    queue.open()
    net(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    assert (
        all(param.grad is not None for param in hooked) and len(hooked) == 4
    )  # two biases, the norm's two
    queue.compute(queue.close())
    assert (
        not {id(param) for param in notified} & {id(param) for param in hooked}
        and len(notified) == 2
    )


def test_a_shared_matrix_is_left_alone():
    embed = Embedding(11, 4)
    head = Linear(4, 11)
    head.weight = embed.weight
    before = head.run
    install([nn.ModuleList([embed, head])], DeferredWeightGrads())
    assert head.run is before


def test_a_frozen_weight_gets_no_gradient():
    net = layers()
    notified = []
    net[0].weight.requires_grad_(False)
    queue = DeferredWeightGrads(notified.append)
    install([net], queue)
    net(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    assert net[0].weight.grad is None and [id(param) for param in notified] == [id(net[3].weight)]


def test_a_weight_gradient_sums_leading_dimensions_and_adds_in_place():
    linear = Linear(5, 7, bias=False)
    x = torch.randn(2, 3, 5)
    grad = torch.randn(2, 3, 7)
    queue = DeferredWeightGrads()
    weight_grad = torch.einsum("abi,abo->oi", x, grad)
    queue.compute([(linear, (x,), grad)])
    torch.testing.assert_close(linear.weight.grad, weight_grad)
    first = linear.weight.grad
    queue.compute([(linear, (x,), grad)])
    assert linear.weight.grad is first  # it may be a bucket's view
    torch.testing.assert_close(first, 2 * weight_grad)
