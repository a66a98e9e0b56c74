"""What a plan says of offloading: its price, its offer, what it refuses; the paper's order of
techniques."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from benchmarks.largest_model import largest, table
from orchestrator.cluster.resolve import resolve
from orchestrator.config.compose import load
from orchestrator.config.schema import HostSpec
from orchestrator.cost.time.offload import ASSUMED, DISK_BYTES, UPDATE_BYTES, offload_seconds
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.trained import refusal
from orchestrator.planner.explain import explain
from tests.planner.configs import build_plan

HOST = HostSpec(
    memory_gib=2000,
    memory_gb_per_s=400,
    link_gb_per_s=50,
    disk_gib=8000,
    disk_gb_per_s=8,
    source="test",
)
LARGE = ["cluster=h100x8", "model=llama3_70b", "parallel=tp8", "train.recompute=full"]


def config_of(*overrides: str, host: HostSpec | None = HOST):
    config = load([*LARGE, *overrides])
    return structs.replace(config, cluster=structs.replace(config.cluster, host=host))


@pytest.mark.parametrize(
    "word", ["train.offload_activations=host", "train.contiguous_activations=true"]
)
def test_a_search_finds_layouts_whose_layers_store_nothing(word):
    """With recompute=full a layer's only tensor is its input, which is elsewhere."""
    words = ["cluster=h100x8", "model=llama3_8b", "parallel=auto", "train.recompute=full"]
    plan = build_plan(load([*words, word]))
    assert plan.memory.total <= plan.memory.capacity


def test_a_plan_without_offload_does_not_name_it():
    assert b"offload" not in msgspec.json.encode(build_plan(config_of(host=None)))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_price_is_what_link_memory_and_disk_take(tier):
    """A naive sum over the parameters of a rank, eight of which share the node."""
    plan = build_plan(config_of(f"train.offload={tier}"))
    parameters = plan.memory.params / 2
    update = parameters * 8 * 28 / 400e9
    disk = parameters * 8 * 24 / 8e9
    down = parameters * 4 / 50e9
    up = parameters * 2 / 50e9
    expected = max(update, up, down, disk) if tier == "disk" else max(update, up) + down
    assert plan.time.terms["optimizer"] == pytest.approx(expected, rel=0.05)
    assert (UPDATE_BYTES, DISK_BYTES) == (28, 24)


def test_shards_on_the_host_are_on_no_device_and_travel_for_each_gather():
    """Two gathers and the first departure of each gradient, its return and a departure for each
    later micro-batch, less the work that hides them."""
    words = ["parallel=dp8_zero3", "train.offload=host", "parallel.micro_batch_size=1"]
    beside = build_plan(config_of(*words))
    away = build_plan(config_of(*words, "train.offload_weights=true"))
    assert away.memory.params == away.memory.grads == 0
    assert beside.memory.params > 0
    assert away.memory.host == beside.memory.host + beside.memory.params
    slower = [
        build_plan(
            config_of(
                *words,
                "train.offload_weights=true",
                host=structs.replace(HOST, link_gb_per_s=link_gb_per_s),
            )
        )
        for link_gb_per_s in (0.5, 0.25)
    ]
    shard = beside.memory.params / 2
    passes = away.parallel.micro_batches
    travel = shard * (2 * passes * 2 + (2 * passes - 1) * 4)
    prices = [plan.time.terms["optimizer"] for plan in slower]
    assert prices[1] - prices[0] == pytest.approx(travel / 0.5e9, rel=0.01)
    assert away.time.terms["optimizer"] < prices[0]


def test_layouts_with_shards_on_the_host_are_explained_and_searched():
    """The smallest layout of such a job is not that of one GPU, which has nothing to gather."""
    words = ["train.offload=host", "train.offload_weights=true"]
    config = config_of("parallel=dp8_zero3", *words)
    plan = build_plan(config)
    explain(config, resolve(config.cluster), plan, limit=3)
    searched = build_plan(config_of("parallel=auto", *words))
    assert searched.parallel.zero == 3
    assert searched.memory.params == 0
    with pytest.raises(OrchError, match="only ZeRO-3 over several ranks"):
        build_plan(config_of("parallel=auto", "parallel.zero=1", *words))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["parallel.schedule=zb_h1"], "legal schedules: afab, 1f1b, interleaved"),
        (["parallel.zero_group=1"], "no zero_group of 1"),
    ],
)
def test_shards_leave_the_device_only_where_they_are_gathered_by_layer(keys, problem):
    words = ["model=llama3_8b", "parallel=dp8_zero3", "train.offload=host"]
    words.append("train.offload_weights=true")
    assert problem in (refusal(build_plan(config_of(*words, *keys))) or "")


def test_nothing_is_added_to_other_plans():
    plan = build_plan(config_of())
    assert offload_seconds(1e9, 1, plan.job.train, plan.cluster, 1e-11) == 0.0


def test_a_plan_that_does_not_fit_is_offered_the_host_and_the_disk_with_their_price():
    config = config_of()
    plan = build_plan(config)
    assert plan.memory.total > plan.memory.capacity
    explanation = explain(config, resolve(config.cluster), plan, limit=9)
    offers = {
        change.overrides[0]: change
        for change in explanation.changes
        if "offload" in change.overrides[0]
    }
    assert list(offers) == [
        "train.offload=host",
        "train.offload=disk",
    ]  # inputs of layers alone are too little
    for override, change in offers.items():
        offloaded = build_plan(config_of(override))
        assert (change.step_s, change.memory) == (offloaded.time.step_s, offloaded.memory)
        assert change.memory.total <= change.memory.capacity and change.saves_s < 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_price_of_inputs_is_what_is_longer_than_the_work_beside_it(tier):
    """The price is worked out by hand: eight ranks share the disk, a GPU has its link; one input a
    layer and micro-batch."""
    slow = structs.replace(HOST, link_gb_per_s=0.5, disk_gb_per_s=2.0)
    overrides = [
        "train.precision=bf16",
        "parallel=dp8_zero3",
        "model=llama3_8b",
        "train.recompute=full",
    ]
    plain, away = (
        build_plan(config_of(*overrides, *offload, host=slow))
        for offload in ((), (f"train.offload_activations={tier}",))
    )
    par = away.parallel
    micro = away.parallel.micro_batch_size * away.job.train.seq_len * away.model.hidden * 2
    once = away.model.layers * micro / (0.5e9 if tier == "host" else 2e9 / 8)
    later = away.time.terms["activations"]
    assert 0 < later < 2 * par.micro_batches * once
    assert away.time.step_s - plain.time.step_s == pytest.approx(later, rel=1e-6)
    work = (
        plain.time.step_s - plain.time.terms.get("optimizer", 0) - plain.time.exposed_comm_s["dp"]
    )
    assert later == pytest.approx(2 * par.micro_batches * once - work, rel=0.1)
    fast = build_plan(config_of(*overrides, "train.offload_activations=host"))
    assert "activations" not in fast.time.terms and fast.memory.total < plain.memory.total
    tier_bytes = (
        (fast.memory.host, 0)
        if tier == "host"
        else (away.memory.disk, away.memory.disk - away.memory.host)
    )
    assert tier_bytes[0] == away.model.layers * micro and tier_bytes[1] >= 0


def test_inputs_on_the_host_are_offered_where_they_make_it_fit():
    long = [
        "train.seq_len=98304",
        "model.max_seq_len=98304",
        "train.global_batch_samples=8",
        "train.recompute=full",
    ]
    config = load(["cluster=h100x8", "model=llama3_8b", "parallel=dp8_zero3", *long])
    plan = build_plan(config)
    explanation = explain(config, resolve(config.cluster), plan, limit=99)
    offers = {change.overrides[0]: change for change in explanation.changes}
    assert plan.memory.total > plan.memory.capacity
    assert offers["train.offload_activations=host"].memory.total <= plan.memory.capacity


def test_shared_inputs_have_a_price_of_their_own_and_are_offered_where_they_make_it_fit():
    """Each of a layer's inputs is gathered once more: its price is all that the step is longer."""
    words = [
        "cluster=h100x8",
        "model=llama3_8b",
        "parallel=tp8",
        "parallel.sp=false",
        "train.seq_len=196608",
        "model.max_seq_len=196608",
        "train.global_batch_samples=8",
        "train.recompute=full",
    ]
    config = load(words)
    whole = build_plan(config)
    shared = build_plan(load([*words, "train.partition_activations=true"]))
    gathers_s = shared.time.terms["inputs"]
    assert "inputs" not in whole.time.terms and gathers_s > 0
    assert shared.time.step_s - whole.time.step_s == pytest.approx(gathers_s, rel=1e-6)
    assert sum(shared.time.terms.values()) == pytest.approx(shared.time.step_s)
    assert shared.time.compute_s == pytest.approx(whole.time.compute_s)
    assert whole.memory.total > whole.memory.capacity > shared.memory.total
    explanation = explain(config, resolve(config.cluster), whole, limit=99)
    offers = {change.overrides[0]: change for change in explanation.changes}
    assert offers["train.partition_activations=true"].memory == shared.memory


def test_a_plan_says_where_nothing_is_put_away():
    plan = build_plan(config_of("train.offload_activations=host", "train.recompute=none"))
    assert any("offload_activations changes nothing" in line for line in plan.warnings)


@pytest.mark.parametrize(
    ("tier", "change", "line"),
    [
        ("host", {"memory_gib": 100}, r"cluster\.host\.memory_gib=100\.0: .*train\.offload=disk"),
        ("disk", {"disk_gib": 500}, r"cluster\.host\.disk_gib=500\.0: .*larger disk"),
    ],
)
def test_hosts_without_room_are_refused_at_plan_time(tier, change, line):
    with pytest.raises(OrchError, match=line) as error:
        build_plan(config_of(f"train.offload={tier}", host=structs.replace(HOST, **change)))
    assert error.value.exit == Exit.CONFIG and "\n" not in error.value.message


def test_assumed_hosts_and_slow_disks_are_said():
    offload_warnings = [
        line
        for line in build_plan(config_of("train.offload=disk", host=None)).warnings
        if "offload" in line
    ]
    assert (
        len(offload_warnings) == 1
        and f"{ASSUMED.disk_bytes_per_s / 1e9:g} GB/s of disk are assumed" in offload_warnings[0]
    )
    assert not [
        line for line in build_plan(config_of("train.offload=host")).warnings if "offload" in line
    ]
    slow = build_plan(
        config_of("train.offload=disk", host=structs.replace(HOST, disk_gb_per_s=0.1))
    )
    assert any("of the step: a larger global batch" in line for line in slow.warnings)


def test_the_table_of_the_largest_models_is_the_published_one():
    assert table() in (Path(__file__).parents[2] / "docs" / "offload.md").read_text()


def test_sharding_and_offloading_only_ever_raise_the_largest_model():
    """The papers' order holds: one GPU of 80 GB trains 5 billion parameters of 16 bytes, four times
    as many offloaded."""
    assert largest(1, "none") == 80e9 / 16 and largest(1, "zero1, host") == 4 * largest(1, "none")
    for gpus in (8, 64, 512):
        stages = [
            largest(gpus, name)
            for name in ("none", "zero1", "zero2", "zero3", "zero3, host", "zero3, disk")
        ]
        assert stages == sorted(stages)
