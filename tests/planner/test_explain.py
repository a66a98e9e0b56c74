"""What limits a plan adds up, changes are what they are said to be, what does not fit is told by
how much."""

from __future__ import annotations

import json
import re

import pytest
from msgspec import structs

from orchestrator.cli.main import main
from orchestrator.cluster.resolve import resolve
from orchestrator.observe.pages.plan_page import explanation as render
from orchestrator.planner.explain import CATEGORIES, explain, neighbours

from . import configs, shapes
from .configs import build_plan


def explained(parallel, nodes=2, **train):
    config = configs.config(
        configs.cluster(nodes, 4), shapes.llama3_8b(), parallel, global_batch_samples=32, **train
    )
    plan = build_plan(config)
    return config, plan, explain(config, resolve(config.cluster), plan)


@pytest.mark.parametrize(
    "parallel", [{"tp": 4, "zero": 1}, {"tp": 2, "pp": 2, "zero": 1}, {"pp": 4, "zero": 1}]
)
def test_terms_add_up_to_the_step(parallel):
    _, plan, explanation = explained(parallel)
    assert sum(term.seconds for term in explanation.terms) == pytest.approx(
        plan.time.step_s, rel=1e-6
    )
    assert [term.seconds for term in explanation.terms] == sorted(
        (t.seconds for t in explanation.terms), reverse=True
    )


def test_changes_are_faster_and_are_what_a_plan_of_them_says():
    config, plan, explanation = explained({"tp": 4, "zero": 1})
    assert explanation.changes and explanation.over_bytes == 0
    assert [c.step_s for c in explanation.changes] == sorted(c.step_s for c in explanation.changes)
    for change in explanation.changes:
        changed = config
        for override in change.overrides:
            group, key, setting = re.split("[.=]", override)
            value = int(setting) if setting.isdigit() else setting
            fields = {key: value}
            groups = {group: structs.replace(getattr(changed, group), **fields)}
            changed = structs.replace(changed, **groups)
        again = build_plan(changed)
        assert (
            again.time.step_s == pytest.approx(change.step_s)
            and again.memory.total == change.memory.total
        )
        assert (
            change.saves_s == pytest.approx(plan.time.step_s - change.step_s) and change.saves_s > 0
        )


def test_what_does_not_fit_is_told_by_category_with_changes_that_fit():
    _, plan, explanation = explained({"tp": 1, "zero": 0})
    assert explanation.over_bytes == plan.memory.total - plan.memory.capacity > 0
    assert {name for name, _ in explanation.categories} == set(CATEGORIES)
    assert sum(size for _, size in explanation.categories) == plan.memory.total
    assert explanation.changes and all(
        change.memory.total <= change.memory.capacity for change in explanation.changes
    )
    page = render(explanation, plan.time.step_s)
    assert "It does not fit" in page and "optimizer" in page


@pytest.mark.parametrize(("device", "compiled", "warned"), [
    ("cuda", None, True), ("cuda", False, False), ("cpu", None, False), ("cpu", True, True),
])  # fmt: skip
def test_it_is_said_that_compiled_blocks_are_planned_as_if_they_were_not(device, compiled, warned):
    cluster = configs.cluster(2, 4, device=device)
    config = configs.config(
        cluster, shapes.tiny(), {"tp": 2}, compile=compiled, global_batch_samples=32
    )
    plan = build_plan(config)
    page = render(explain(config, resolve(cluster), plan), plan.time.step_s)
    assert ("not counted: train.compile" in page) == warned
    toggled_plan = build_plan(
        structs.replace(config, train=structs.replace(config.train, compile=not warned))
    )
    assert (toggled_plan.time.step_s, toggled_plan.memory) == (plan.time.step_s, plan.memory), (
        "else it is counted"
    )


def test_neighbours_differ_in_one_thing():
    _, plan, _ = explained({"tp": 2, "pp": 2, "zero": 1})
    seen = [tuple(overrides) for overrides, _ in neighbours(plan)]
    assert len(seen) == len(set(seen)) > 10
    assert all(
        len(overrides) == 1 or overrides[0].startswith("parallel.schedule") for overrides in seen
    )


def test_whatif_counts_gpu_hours(capsys):
    arguments = [
        "cluster=h100x64",
        "parallel=tp8_pp4_zero1",
        "--tokens",
        "1e12",
        "--case",
        "train.seq_len=4096",
        "--json",
    ]
    assert main(["whatif", *arguments]) == 0
    first, second = json.loads(capsys.readouterr().out)
    hours = 1e12 / first["batch_tokens"] * first["step_s"] / 3600 * 64
    assert first["gpu_hours"] == pytest.approx(hours) and second["seq_len"] == 4096


def test_tune_prints_words_that_plan_to_the_same_step(capsys):
    assert (
        main(
            [
                "tune",
                "cluster=h100x8",
                "model=llama3_8b",
                "parallel=auto",
                "parallel.tp=2",
                "--json",
            ]
        )
        == 0
    )
    best = json.loads(capsys.readouterr().out)["front"][0]
    assert main(["plan", "cluster=h100x8", "model=llama3_8b", *best["overrides"], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (
        plan["time"]["step_s"] == best["step_s"] and plan["memory"]["total"] == best["memory_bytes"]
    )
    assert plan["parallel"]["tp"] == 2
