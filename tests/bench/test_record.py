"""The way from measured rows to plans: the fit, the file, and what a plan does with it."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.bench import run as bench
from orchestrator.bench.fit import fit, predicted
from orchestrator.cluster.measured import Row, key_of, path_of
from orchestrator.config.compose import load
from orchestrator.config.schema import Config
from orchestrator.cost.of_plan import context_of
from orchestrator.errors import OrchError
from orchestrator.observe.pages.plan_page import render
from orchestrator.plan import Exit, Plan, from_json, to_json
from orchestrator.planner import build
from orchestrator.run.folder import home_folder
from orchestrator.submit.cluster import ClusterResolver
from tests.planner.configs import level_between
from trainer.bench.cases import OPERATIONS, SIZES, cases

LATENCY = 2e-4
RATE = 4e5
WORDS = ["cluster=local_shaped", "cluster.gpus_per_node=2", "parallel=tp2_dp2"]


def plan_of(config: Config) -> Plan:
    return build.build_plan(config, ClusterResolver(home_folder(os.environ))(config.cluster))


def rows(
    level: str, latency: float, rate: float, stretch: dict[str, float] | None = None, ranks: int = 2
) -> list[Row]:
    """What a link would show that is exactly as the planner thinks."""
    link_rows = []
    for operation in OPERATIONS:
        for size in SIZES:
            row = Row(level, operation, ranks, size, 0.0)
            seconds = predicted(row, latency, (stretch or {}).get(operation, 1.0) / rate)
            link_rows.append(msgspec.structs.replace(row, seconds=seconds))
    return link_rows


FACTORS = st.lists(st.floats(1.0, 3.0), min_size=5, max_size=5)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11), st.integers(2, 16), FACTORS)
def test_the_fit_finds_what_made_the_rows(latency, rate, ranks, factors):
    stretch = dict(zip(OPERATIONS, factors, strict=True))
    link_fit = fit(rows("switch", latency, rate, stretch, ranks))["switch"]
    best = min(factors)
    # with few bytes against much latency (or the other way) one of the two cannot be seen in the
    # rows
    assert link_fit.error < 1e-3
    if 0.02 < latency * rate / max(SIZES) < 1:
        assert link_fit.bytes_per_s == pytest.approx(rate / best, rel=1e-3)
        assert link_fit.latency_s == pytest.approx(latency, rel=1e-3)
        assert link_fit.stretch == pytest.approx(
            {name: f / best for name, f in stretch.items()}, rel=1e-3
        )


def test_noise_never_gives_a_negative_latency_or_cost():
    faster_when_larger = [
        Row("nvlink", "all_reduce", 2, size, 1e-3 / (i + 1)) for i, size in enumerate(SIZES)
    ]
    link_fit = fit(faster_when_larger)["nvlink"]
    assert link_fit.bytes_per_s > 0 and link_fit.latency_s > 0
    all_bytes = [Row("nvlink", "all_reduce", 2, size, (size / 1e6) ** 1.2) for size in SIZES]
    link_fit = fit(all_bytes)["nvlink"]
    assert link_fit.latency_s == 0 and link_fit.bytes_per_s > 0


def test_cases_meet_on_the_tier_that_they_measure():
    job = ["cluster=h100x64", "model=tiny", "parallel=default", "train.global_batch_samples=64"]
    plan = plan_of(load([*job, "train.global_batch_tokens=null"]))
    link_cases = cases(plan)
    tiers = ["nvlink", *(level.name for level in plan.cluster.levels)]
    assert {case.level for case in link_cases} == set(tiers) and [
        c for c in link_cases if c.level == "nvlink"
    ][-1].ranks == 8
    for case in link_cases:
        members = [rank for group in case.groups for rank in group]
        assert len(members) == len(set(members)) and min(map(len, case.groups)) > 1
        for group in case.groups:
            nodes = [plan.cluster.node_names.index(plan.ranks[rank].node) for rank in group]
            for a, b in pairwise(nodes):
                assert level_between(plan.cluster, a, b) == case.level


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("ORCH_HOME", str(folder))
    return folder


def keep(
    overrides: list[str],
    home,
    stretch: dict[str, float] | None = None,
    host: dict[str, float] | None = None,
    **links: tuple[float, float],
) -> str:
    config = load(overrides)
    compute = {
        "name": "bench_compute",
        "precision": "fp32",
        "matmul_flops": 8e9,
        "attention_flops": 2e9,
    }
    compute |= {"memory_bytes_per_s": 3e9, "launch_s": 1e-5}
    events = [compute, *([{"name": "bench_host", "rank": 0, **host}] if host else [])]
    for level, (latency, rate) in links.items():
        events += [
            {"name": "bench_link", **msgspec.to_builtins(row)}
            for row in rows(level, latency, rate, stretch)
        ]
    return bench.keep(config, bench.record_of(config, "local://bench-test", events), home)


def test_plans_use_what_was_measured_and_say_so(home):
    described = plan_of(load(WORDS))
    keep(WORDS, home, nvlink=(1e-3, 5e8), switch=(LATENCY, RATE))
    plan = plan_of(load(WORDS))
    (switch,) = plan.cluster.levels
    assert switch.bytes_per_s == pytest.approx(RATE) and switch.latency_s == pytest.approx(LATENCY)
    assert (
        "local://bench-test" in switch.source
        and "local://bench-test" in plan.cluster.measured.source
    )
    assert plan.time.exposed_comm_s["dp"] > 2 * described.time.exposed_comm_s["dp"]
    rate = context_of(plan).rate
    assert {
        (link_rate.nvlink, link_rate.nic, link_rate.latency, link_rate.launch_s)
        for link_rate in (rate.tensor, rate.ring)
    } == {(1.0, 1.0, 1.0, 0)}
    assert (1 / rate.gemm_s, 1 / rate.attention_s, 1 / rate.byte_s) == pytest.approx(
        (8e9, 2e9, 3e9)
    )
    assert "measured by orch bench" in render(plan) and "measured by" not in render(described)
    assert from_json(to_json(plan)) == plan
    assert plan_of(load([*WORDS, "cluster.measured=false"])).time == described.time


HOST_FOUND = {
    "memory_bytes": 1 << 40,
    "memory_bytes_per_s": 1e11,
    "link_bytes_per_s": 2e10,
    "disk_bytes": 1 << 42,
    "disk_bytes_per_s": 3e9,
}


def test_plans_use_the_host_that_was_measured(home):
    """The measured host takes the place of a described one; a record of before it was measured
    leaves what is described."""
    keep(WORDS, home, switch=(LATENCY, RATE))
    away = [*WORDS, "train.offload=disk"]
    assumed = plan_of(load(away))
    assert assumed.cluster.host is msgspec.UNSET and any(
        "are assumed" in line for line in assumed.warnings
    )
    keep(WORDS, home, host=HOST_FOUND, switch=(LATENCY, RATE))
    plan = plan_of(load(away))
    assert msgspec.structs.asdict(plan.cluster.host) == {
        **HOST_FOUND,
        "source": plan.cluster.measured.source,
    }
    assert not any("are assumed" in line for line in plan.warnings)
    slow = HOST_FOUND | {"disk_bytes_per_s": 1e8}
    keep(WORDS, home, host=slow, switch=(LATENCY, RATE))
    rank_parameters = plan.model.parameters / plan.parallel.tp
    assert plan_of(load(away)).time.terms["optimizer"] == pytest.approx(
        24 * 2 * rank_parameters / 1e8, rel=0.1
    )


def test_an_operation_that_gets_less_out_of_a_link_costs_more(home):
    keep(WORDS, home, switch=(1e-6, RATE))
    even = plan_of(load(WORDS)).time.exposed_comm_s["dp"]
    keep(WORDS, home, stretch={"all_reduce": 1.5}, switch=(1e-6, RATE))
    # a little more than half as much again: the same compute hides a part of both
    assert 1.5 <= plan_of(load(WORDS)).time.exposed_comm_s["dp"] / even < 1.53


def test_another_cluster_is_not_planned_with_it(home):
    keep(WORDS, home, switch=(LATENCY, RATE))
    slower_nic = [*WORDS, "cluster.nic.gbit_per_s=0.3"]
    assert key_of(load(WORDS).cluster) != key_of(load(slower_nic).cluster)
    assert plan_of(load(slower_nic)).cluster.measured is None
    assert key_of(load([*WORDS, "cluster.measured=false"]).cluster) == key_of(load(WORDS).cluster)


def test_a_damaged_file_is_named_with_the_ways_out(home):
    path = path_of(load(WORDS).cluster, home)
    path.parent.mkdir()
    path.write_text(json.dumps({"schema": "orch.bench/1"}))
    with pytest.raises(OrchError, match=r"cluster\.measured=false") as refused:
        plan_of(load(WORDS))
    assert refused.value.exit == Exit.CONFIG and str(path) in refused.value.message
    plan_of(load([*WORDS, "cluster.measured=false"]))
