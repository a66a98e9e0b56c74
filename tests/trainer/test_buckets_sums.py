"""What arrives in the shards is the right sum, whatever the groups, the order of gradients and the
bucket size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from tests.beds.plans import make_plan
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.errors import LayoutError
from trainer.optim.clip import ROW, clip_coefficient, squared_norm
from trainer.parallel.data.buckets import GradBuckets
from trainer.parallel.data.zero2 import ShardedGradBuckets
from trainer.parallel.params import whole
from trainer.verify.ranks import run_ranks

F64 = torch.float64


def bucketed(
    mesh: Mesh, zero: int, **sizes: tuple[int, ...]
) -> tuple[GradBuckets, dict[str, Parameter]]:
    params = {name: Parameter(torch.randn(shape, dtype=F64)) for name, shape in sizes.items()}
    triples = [(name, param, whole(name, tuple(param.shape))) for name, param in params.items()]
    return GradBuckets(triples, mesh, zero, F64, 512, CommCounter()), params


def alone(zero: int = 0, **sizes: tuple[int, ...]) -> tuple[GradBuckets, dict[str, Parameter]]:
    return bucketed(Mesh.alone(make_plan()), zero, **sizes)


@pytest.mark.parametrize("zero", [0, 1])
def test_parameters_keep_their_values_and_become_views_of_the_buckets(zero):
    before = {"a": (30, 5), "b": (7,), "c": (2, 3)}
    torch.manual_seed(0)
    expected = {name: torch.randn(shape, dtype=F64) for name, shape in before.items()}
    torch.manual_seed(0)
    buckets, params = alone(zero, **before)
    for name, param in params.items():
        assert torch.equal(param.detach(), expected[name])
    for bucket in buckets.buckets:
        bucket.params.fill_(3.0)
    assert all(bool((param == 3.0).all()) for param in params.values())


def test_accumulates_in_the_reduce_dtype_and_clears_grad():
    param = Parameter(torch.zeros(4, dtype=torch.bfloat16))
    mesh = Mesh.alone(make_plan())
    buckets = GradBuckets(
        [("a", param, whole("a", (4,)))], mesh, 1, torch.float32, 64, CommCounter()
    )
    buckets.expect(300)
    for _ in range(300):  # in bf16 the sum of ones would stop at 256
        param.sum().backward()
        assert param.grad is None
    buckets.finish()
    grad = buckets.full_grads()["a"]
    assert grad.tolist() == [300.0] * 4 and grad.dtype == torch.float32


def test_a_parameter_without_gradient_counts_as_zero_and_not_as_last_steps():
    buckets, params = alone(a=(3,), b=(3,))
    for used in (("a", "b"), ("a",), ("b",)):
        buckets.expect(1)
        sum(params[name].sum() for name in used).backward()
        buckets.finish()
        for name, grad in buckets.full_grads().items():
            assert grad.tolist() == [float(name in used)] * 3


def launches(
    buckets: GradBuckets, params: dict[str, Parameter], names: list[str], passes: int = 1
) -> list[int]:
    """How many reductions have started after each of these parameters got a gradient of ones."""
    buckets.expect(passes)
    seen = []
    for name in names:
        params[name].grad = torch.ones_like(params[name])
        buckets.accumulate_grad(params[name])
        seen.append(buckets.started)
    return seen


def step(
    buckets: GradBuckets, params: dict[str, Parameter], names: list[str], passes: int = 1
) -> None:
    """One step in which the parameters get gradients of ones in this order."""
    launches(buckets, params, names, passes)
    buckets.finish()


def test_one_gradient_too_many_is_an_error_not_a_silent_sum():
    buckets, params = alone(a=(3,))
    step(buckets, params, ["a"])
    buckets.expect(1)
    params["a"].sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"a got gradient 2 of this step after its bucket's reduction had started",
    ):
        params["a"].sum().backward()


def test_a_gradient_that_comes_twice_in_place_of_anothers_is_found_too():
    buckets, params = alone(a=(3,), b=(3,))
    step(buckets, params, ["b", "a"])
    with pytest.raises(RuntimeError, match="a got gradient 1 of this step after"):
        step(buckets, params, ["b", "b", "a"])


def test_a_parameter_used_at_both_ends_gets_two_gradients_a_pass():
    """The tied embedding where one rank holds the first and the last stage (vpp > 1, V-shaped
    schedules)."""
    buckets, params = alone(embed=(64,), head=(64,))
    for _ in range(3):
        step(buckets, params, ["head", "embed", "embed", "head", "embed", "embed"], passes=2)
        assert buckets.full_grads()["embed"].tolist() == [4.0] * 64
    assert launches(buckets, params, ["head", "embed", "embed"]) == [1, 1, 2], (
        "another number of micro-batches"
    )


def test_a_parameter_that_only_some_passes_use_waits_for_the_end():
    buckets, params = alone(a=(64,), b=(64,))
    for names in (["b", "a", "b"], ["b", "a", "b", "a"], ["b", "b"]):
        step(buckets, params, names, passes=2)
        assert buckets.full_grads()["a"].tolist() == [float(names.count("a"))] * 64


def test_a_parameter_never_used_does_not_hold_up_its_bucket():
    buckets, params = alone(a=(64,), unused=(3,), b=(64,))
    step(buckets, params, ["b", "a"])
    assert launches(buckets, params, ["b", "a"])[-1] == len(buckets.buckets)


def test_expect_before_finish_is_an_error():
    buckets, params = alone(a=(3,))
    step(buckets, params, ["a"])
    buckets.expect(1)
    params["a"].sum().backward()
    with pytest.raises(RuntimeError, match="finish"):
        buckets.expect(1)
    with pytest.raises(ValueError, match="at least one"):
        buckets.expect(0)


def test_higher_zero_and_double_parameters_are_refused():
    with pytest.raises(LayoutError, match="ZeRO-2"):
        alone(2, a=(3,))
    param = Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="twice"):
        pair = [("a", param, whole("a", (3,)))] * 2
        GradBuckets(pair, Mesh.alone(make_plan()), 0, F64, 64, CommCounter())


def test_buckets_complete_from_the_last_layer_on():
    buckets, params = alone(first=(64,), second=(64,), third=(64,))  # 512 bytes: one bucket each
    assert [bucket.infos[0].name for bucket in buckets.buckets] == ["third", "second", "first"]
    step(buckets, params, ["third", "second", "first"])
    assert launches(buckets, params, ["third", "second", "first"]) == [1, 2, 3]


def test_buckets_completed_out_of_order_wait_for_their_turn():
    """Ranks may see gradients in different orders; their collectives may not start in different
    orders."""
    buckets, params = alone(first=(64,), second=(64,))
    step(buckets, params, ["second", "first"])
    assert launches(buckets, params, ["first", "second"]) == [0, 2]


@pytest.mark.process
@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_that_get_gradients_in_different_orders_get_the_same_sums(zero):
    def work(rank):
        buckets, params = bucketed(
            Mesh.from_plan(make_plan(dp=2), rank), zero, a=(64,), b=(64,), c=(64,)
        )
        for _ in range(2):
            buckets.expect(1)
            for name in "abc" if rank else "cba":
                params[name].grad = torch.full(
                    (64,), 1.0 + rank + 10 * "abc".index(name), dtype=F64
                )
                buckets.accumulate_grad(params[name])
            buckets.finish()
        return {name: grad.unique() for name, grad in buckets.full_grads().items()}

    assert (
        run_ranks(work, 2)
        == [{"a": torch.tensor(3.0), "b": torch.tensor(23.0), "c": torch.tensor(43.0)}] * 2
    )


# ------------------------------------------------------------------------------------------- norms


@pytest.mark.process
def test_what_a_long_step_shows_of_a_bucket_does_not_hold_for_a_shorter_one():
    """ZeRO-2 with replicas: three passes send the bucket once each, a single one twice. The sum
    over the replicas must not leave before the second."""
    plan = make_plan(dp=2, zero=2, zero_group=1)

    def work(rank: int) -> list[float]:
        mesh = Mesh.from_plan(plan, rank)
        params = {name: Parameter(torch.zeros(4, dtype=F64)) for name in "ab"}
        triples = [(name, param, whole(name, (4,))) for name, param in params.items()]
        buckets = ShardedGradBuckets(triples, mesh, 2, F64, 512, CommCounter())
        for passes, names in ((3, "ababab"), (3, "ababab"), (1, "abab")):
            buckets.expect(passes)
            for name in names:
                params[name].grad = torch.ones_like(params[name])
                buckets.accumulate_grad(params[name])
            buckets.finish()
        return buckets.full_grads()["a"].tolist()

    assert run_ranks(work, 2) == [[4.0] * 4] * 2, "two gradients of ones from each of two ranks"


def test_norm_of_many_elements_is_not_lost_in_fp32():
    """One fp32 sum over 40 million squares was 0.3 % wrong on a CPU; ours must be good to 1e-6 at
    any length."""
    flat = torch.full((20_000_003,), 0.1)
    exact = 20_000_003 * float(flat[0]) ** 2
    assert float(squared_norm([flat])) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("length", [0, 1, ROW - 1, ROW, ROW + 1, 3 * ROW])
def test_norm_covers_rows_and_the_rest(length):
    flat = torch.arange(length, dtype=F64)
    assert float(squared_norm([flat])) == pytest.approx(float(flat.square().sum()), rel=1e-14)


def test_clip_coefficient():
    norm = torch.tensor(4.0, dtype=F64)
    assert float(clip_coefficient(norm, 1.0)) == pytest.approx(1 / (4 + 1e-6), rel=1e-15)
    assert float(clip_coefficient(norm, 8.0)) == 1.0 == float(clip_coefficient(norm, 0.0))
