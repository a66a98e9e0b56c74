"""Memory by category: against arithmetic on tensors whose life is known."""

import pytest
import torch

from trainer.metrics.memory import StepMemory, StorageTracker

KIB = 1024


def kib(count: int, **options: object) -> torch.Tensor:
    return torch.zeros(count * KIB // 4, **options)


def test_views_of_one_buffer_count_once_and_whole():
    flat = kib(8)
    with StorageTracker(
        {"params": lambda: [flat[:10], flat[10:20]], "buffers": lambda: [kib(1, device="meta")]}
    ) as tracker:
        pass
    assert tracker.points()[-1].held["params"] == tracker.live == 8 * KIB, (
        "and meta tensors weigh nothing"
    )


def test_peak_and_live_follow_the_life_of_storages():
    with StorageTracker() as tracker:
        first = kib(4)
        second = first + 1
        del first
        assert (tracker.live, tracker.peak) == (4 * KIB, 8 * KIB)
        del second
    assert (tracker.live, tracker.peak) == (0, 8 * KIB)


def test_what_was_there_before_is_not_counted_even_when_a_view_of_it_comes_out():
    weight = kib(4)
    with StorageTracker() as tracker:
        weight.view(2, -1).t()
        weight.add_(1)
    assert tracker.peak == 0


def test_autograd_keeps_exactly_what_its_backward_needs():
    """x @ w saves x and w, both there before; exp saves its own output; the product is freed."""
    x = torch.ones(32, 32)
    w = torch.ones(32, 32, requires_grad=True)
    size = 32 * 32 * 4
    with StorageTracker() as tracker:
        y = (x @ w).exp()
        assert tracker.live == size
        loss = y.sum()
        del y
        assert tracker.live == size + 4
        loss.backward()
        del loss
        assert tracker.live == size, "only w.grad is left"


def test_freed_addresses_can_be_reused():
    with StorageTracker() as tracker:
        for _ in range(100):
            kib(1)
    assert (tracker.live, tracker.peak) == (0, KIB)


def test_a_step_by_category_sums_to_its_total():
    weight = torch.ones(64, 64, requires_grad=True)
    memory = StepMemory(
        torch.device("cpu"),
        {"params": lambda: [weight], "grads": lambda: [], "buffers": lambda: []},
    )
    measured: dict[str, int] = {}
    with memory.measure(measured):
        weight.exp().exp().exp().sum().backward()
    assert measured["params"] == 64 * 64 * 4
    assert measured["activations"] == 3 * 64 * 64 * 4, "each exp keeps its result"
    assert measured["buffers"] == 64 * 64 * 4 + 8, (
        "the gradient on its way back; the sum and its own"
    )
    assert measured["total"] == sum(value for name, value in measured.items() if name != "total")


def test_unknown_categories_are_refused():
    with pytest.raises(ValueError, match="activatoins"):
        StepMemory(torch.device("cpu"), {"activatoins": lambda: []})
