"""Bytes a step of every axis against counts done by hand from the papers."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from orchestrator.cost.context import CostContext
from orchestrator.cost.memory.rank_memory import rank_state_bytes
from orchestrator.cost.model.layers import parameter_count
from orchestrator.cost.model.stages import rank_parameters, stage_range
from orchestrator.cost.path_cache import mirrored
from orchestrator.cost.software import SOFTWARE
from orchestrator.cost.time.traffic import Traffic, step_traffic, sums_table
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import AXES
from orchestrator.planner.placement.best_order import solve
from tests.beds.plans import make_plan, tiny_model

from . import shapes
from .configs import SOURCE, cluster, planned


def every_rank(plan, model=None, **train) -> list[list[Traffic]]:
    return step_traffic(
        Workload(
            model or plan.model,
            plan.parallel,
            structs.replace(plan.job.train, **train),
            SOFTWARE["orch"],
        )
    )


def traffic(plan, model=None, rank=0, **train) -> list[Traffic]:
    """The traffic of one pipeline rank."""
    return every_rank(plan, model, **train)[rank]


def sent(traffic_items: list[Traffic], axis: str) -> float:
    return sum(item.sent_bytes for item in traffic_items if item.axis == axis)


@pytest.mark.parametrize(("zero", "psi"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_moves_two_or_three_times_the_parameters(zero, psi):
    """ZeRO (arXiv 1910.02054, section 7): 2 Psi for stages 0 to 2, 3 Psi for stage 3, times (n-1)/n
    on a ring.

    Tables and last norm stay gathered from forward to backward.
    """
    plan = make_plan(dp=4, zero=zero, micro_batches=1)
    parameters = parameter_count(plan.model)
    model = plan.model
    once = (2 * model.vocab + 1) * model.hidden if zero == 3 else 0
    assert sent(traffic(plan), "dp") == pytest.approx((psi * parameters - once) * 4 * 3 / 4)


def test_narrow_weights_are_gathered_narrow_and_gradients_reduced_wide():
    plan = make_plan(dp=2, zero=1)
    sent_bytes = {item.operation: item.sent_bytes for item in traffic(plan, precision="bf16")}
    parameters = parameter_count(plan.model)
    assert sent_bytes["reduce_scatter"] == pytest.approx(parameters * 4 / 2)
    assert sent_bytes["all_gather"] == pytest.approx(parameters * 2 / 2)


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_sends_four_all_reduces_a_layer_and_micro_batch(sp):
    """Megatron-LM (arXiv 1909.08053, section 3): two forward, two backward; the token table and the
    head have one each. Sequence parallelism sends the same, and gathers inputs of column-parallel
    matrices again (arXiv 2205.05198, 4.2.2), unless they were recomputed just before. Recomputation
    stops before a layer's last sum, of which backward has no need. For the loss two fp32 numbers a
    token and rank.
    """
    plan = make_plan(tp=4, sp=sp, micro_batches=3, micro_batch_size=2, seq_len=16)
    layers = plan.model.layers
    hidden = 2 * 16 * plan.model.hidden * 4
    loss = 2 * 16 * 2 * 4 * 4 * 3 / 4
    all_reduce_bytes = hidden * 2 * 3 / 4  # of an all-reduce
    gathers = (2 * layers + 1) / 2 if sp else 0
    partial = sum_of_partial_gradients(plan)
    assert sent(traffic(plan), "tp") == pytest.approx(
        3 * ((4 * layers + 2 + gathers) * all_reduce_bytes + loss) + partial
    )
    gathers = 1 / 2 if sp else 0
    again = traffic(plan, recompute="full")
    assert sent(again, "tp") == pytest.approx(
        3 * (((5.5 if sp else 5) * layers + 2 + gathers) * all_reduce_bytes + loss) + partial
    )


def sum_of_partial_gradients(plan) -> float:
    """Bytes a step: of four ranks two hold the same of two heads of keys and values; with SP all
    hold the norms."""
    m = plan.model
    heads = m.layers * 2 * m.head_dim * m.hidden * 4
    norms = (2 * m.layers + 1) * m.hidden * 4 if plan.parallel.sp else 0
    return heads * 2 * 1 / 2 + norms * 2 * 3 / 4


def test_the_tiny_model_sends_what_its_ranks_were_seen_to_send():
    """docs/placement.md: 54 all-gathers a step and rank, 4 layers and 2 micro-batches, beside those
    of the loss."""
    plan = make_plan(tp=2, sp=True, dp=2, micro_batches=2, model=tiny_model(layers=4))
    sends = traffic(plan)
    hidden = max(item.size for item in sends if item.axis == "tp")
    assert (
        sum(item.count for item in sends if item.operation == "all_gather" and item.size == hidden)
        == 54
    )


@pytest.mark.parametrize(("pp", "vpp", "directions"), [(2, 1, 1), (4, 1, 2), (2, 2, 3), (4, 2, 4)])
def test_pipeline_sends_hidden_states_on_and_gradients_back_but_not_beyond_the_ends(
    pp, vpp, directions
):
    """The rank that sends most: with two stages each sends one way, a stage in the middle both."""
    plan = make_plan(
        model=tiny_model(layers=8),
        pp=pp,
        vpp=vpp,
        micro_batches=8,
        seq_len=16,
        schedule="interleaved",
    )
    busiest_bytes = max(sent(rank, "pp") for rank in every_rank(plan))
    assert busiest_bytes == directions * 8 * 16 * plan.model.hidden * 4


RING = 3 + 3 + 4  # keys and values, and again in backward; their gradients go all the way
GATHER = 3 + 3 + 3
EXCHANGE = 2 * (4 + 2 * 4 + 4) / 4 * 3 / 4


@pytest.mark.parametrize(
    ("method", "sends"),
    [("zigzag", RING), ("ring", RING), ("allgather", GATHER), ("ulysses", EXCHANGE)],
)
def test_ways_of_context_parallelism_pass_on_gather_or_exchange(method, sends):
    """The unit is keys and values of a rank: two gathers and the gradients' way back; or heads for
    sequence, there and back."""
    plan = make_plan(
        cp=4,
        micro_batches=1,
        seq_len=16,
        dp=1,
        cp_method=method,
        model=tiny_model(heads=4, kv_heads=2),
    )
    m = plan.model
    key_values = 2 * m.kv_heads * m.head_dim * (16 / 4) * 4
    assert sent(traffic(plan), "cp") == pytest.approx(m.layers * sends * key_values)


def test_experts_exchange_and_shard_over_their_own_group():
    model = shapes.mixtral_8x7b()
    plan = make_plan(model=tiny_model(layers=32), ep=4, dp=2, zero=1, micro_batches=1, seq_len=16)
    sends = traffic(plan, model)
    routed = 16 * model.hidden * 4 * model.moe.top_k
    weights = 16 * 4 * model.moe.top_k  # one a copy, there, and its gradient back
    assert sent(sends, "ep") == pytest.approx(model.layers * (4 * routed + 2 * weights) * 3 / 4)
    groups = {item.varying: item.members for item in sends if item.axis == "dp"}
    assert groups == {("cp", "ep", "dp"): 8, ("cp", "dp"): 2}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("name", ["llama3_8b", "gpt2", "mixtral_8x7b"])
def test_ranks_of_a_pipeline_hold_the_whole_model(name, schedule):
    model = getattr(shapes, name)()
    vpp = 1 if schedule == "1f1b" else 2
    plan = make_plan(model=tiny_model(layers=model.layers), pp=2, vpp=vpp, schedule=schedule)
    held = list(map(sum, rank_parameters(model, plan.parallel)))
    apart = schedule == "1f1b"  # V-shaped pipelines have both ends on one rank
    copy = (
        model.vocab * model.hidden if model.tied_embeddings and apart else 0
    )  # the last stage's own copy of the table
    assert sum(held) == parameter_count(model) + copy
    covered = [layer for stage in range(2 * vpp) for layer in stage_range(plan.parallel, stage)]
    assert covered == list(range(model.layers))


def test_tensor_parallel_ranks_share_the_model_but_for_what_is_replicated():
    model = shapes.llama3_8b()
    plan = make_plan(model=tiny_model(layers=32, heads=32, kv_heads=8, ffn_hidden=64), tp=4)
    rank_size = sum(rank_parameters(model, plan.parallel)[0])
    norms = (2 * model.layers + 1) * model.hidden
    assert 4 * rank_size == parameter_count(model) + 3 * norms


def test_hybrid_sharding_shards_among_neighbours_and_sums_shards_across_groups():
    """7.5 B parameters over 64 ranks in groups of 8: 3 Psi inside a group, an eighth of the
    gradients across."""
    plan = planned(shapes.llama3_8b(), {"zero": 3}, global_batch_samples=64)
    par = structs.replace(plan.parallel, zero_group=8)
    unsplit, hybrid = (
        [
            item
            for item in step_traffic(
                Workload(plan.model, parallel, plan.job.train, SOFTWARE["orch"])
            )[0]
            if item.axis == "dp"
        ]
        for parallel in (plan.parallel, par)
    )
    assert {(item.replica_part, item.members) for item in unsplit} == {("", 64)}
    assert {(item.replica_part, item.members) for item in hybrid} == {("shard", 8), ("replica", 8)}
    gradients = 4 * sum(rank_parameters(plan.model, par)[0])
    across = [item for item in hybrid if item.replica_part == "replica"]
    assert sum(item.sent_bytes for item in across) == pytest.approx(2 * gradients / 8 * 7 / 8)
    inside = sum(item.sent_bytes for item in hybrid if item.replica_part == "shard")
    assert inside == pytest.approx(sum(item.sent_bytes for item in unsplit) * (7 / 8) / (63 / 64))


def test_hybrid_sharding_inside_nodes_is_faster_where_the_network_is_slow():
    nic = {"per_node": 1, "rails": 1, "gbit_per_s": 100, "latency_us": 9.6, "source": SOURCE}
    plan = planned(shapes.llama3_8b(), {"zero": 3}, cluster(nic=nic), global_batch_samples=64)
    context = CostContext(plan.cluster, plan.model, plan.job.train)
    unsplit, hybrid = (
        solve(context, structs.replace(plan.parallel, zero_group=group), AXES).best.cost.gradients
        for group in (0, 8)
    )
    assert hybrid < unsplit


def test_both_ranks_of_a_stage_share_shards_and_gradients_in_a_bidirectional_pipeline():
    """Each holds both of a pair of stages: a rank sends (n-1)/n of them with n = 2 dp, and has 1/n
    of the moments."""
    single, bidirectional = (
        make_plan(pp=2, dp=2, zero=1, micro_batches=4, schedule=name)
        for name in ("1f1b", "dualpipe")
    )
    pair_sends, stage_sends = (
        [item for item in traffic(plan) if item.axis == "dp"] for plan in (bidirectional, single)
    )
    assert {item.members for item in pair_sends} == {4} and {
        item.members for item in stage_sends
    } == {2}
    assert {item.varying for item in pair_sends} == {("cp", "ep", "dp", "pp")}
    (parameters,) = {
        dense for dense, _ in rank_parameters(bidirectional.model, bidirectional.parallel)
    }
    assert sent(traffic(bidirectional), "dp") == pytest.approx(2 * parameters * 4 * 3 / 4)
    shares = [
        rank_state_bytes(1, 0, plan.parallel, plan.job.train).optimizer
        for plan in (single, bidirectional)
    ]
    assert shares[0] == 2 * shares[1]


def test_a_stage_is_paired_with_the_one_at_the_other_end():
    assert mirrored(np.arange(8).reshape(1, 8), 4).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("schedule", "vpp", "apart"),
    [
        ("1f1b", 1, True),
        ("interleaved", 2, True),
        ("zbv", 2, False),
        ("dualpipev", 2, False),
        ("dualpipe", 1, False),
    ],
)
def test_tied_tables_are_summed_only_where_two_ranks_hold_them(schedule, vpp, apart):
    """The step's seconds charge it where it is sent, too."""
    plan = make_plan(
        pp=2, vpp=vpp, micro_batches=4, schedule=schedule, model=tiny_model(tied_embeddings=True)
    )
    assert sums_table(plan.model, plan.parallel) is apart
    sent_by_all = [item for rank in every_rank(plan) for item in rank]
    reduced = [item for item in sent_by_all if (item.axis, item.operation) == ("pp", "all_reduce")]
    assert bool(reduced) is apart
    untied = structs.replace(plan.model, tied_embeddings=False)
    assert not sums_table(untied, plan.parallel)
