"""The main line and its neighbours: exact groups, GPUs and levels, and the whole plan byte for byte.

To accept a change of the plan: `python -m tests.planner.test_build` writes the golden file anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, from_json, load_plan, to_json

from . import configs, shapes
from .configs import build_plan

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_h100x64_tp8_pp4_zero1.json"


def build_main_line() -> Plan:
    return build_plan(configs.config(configs.cluster(), shapes.llama3_70b(), {"tp": 8, "pp": 4, "zero": 1}))


@pytest.fixture(scope="module")
def main_line() -> Plan:
    return build_main_line()


def test_main_line_is_the_golden_plan(main_line):
    assert to_json(main_line, indent=1).decode() + "\n" == GOLDEN.read_text()
    assert load_plan(GOLDEN) == main_line == from_json(to_json(main_line))


def test_tensor_parallel_groups_are_whole_nodes(main_line):
    assert main_line.groups["tp"] == [list(range(8 * node, 8 * node + 8)) for node in range(8)]
    for group in main_line.groups["tp"]:
        assert len({main_line.ranks[rank].node for rank in group}) == 1
        assert [main_line.ranks[rank].gpu for rank in group] == list(range(8))
    assert main_line.placement["tp"].worst_level == "nvlink"


def test_every_pipeline_is_under_one_leaf(main_line):
    assert main_line.parallel.dp == 2
    leaf = main_line.cluster.levels[0]
    under = {main_line.cluster.node_names[node]: index for index, block in enumerate(leaf.switches) for node in block}
    assert len(main_line.groups["pp"]) == 16
    for group in main_line.groups["pp"]:
        assert len({under[main_line.ranks[rank].node] for rank in group}) == 1
    assert main_line.placement["pp"].worst_level == "leaf"
    assert main_line.placement["dp"].worst_level == "spine"
    assert main_line.groups["dp"] == [[rank, rank + 32] for rank in range(32)]


def test_memory_adds_up_and_zero_one_shards_only_the_optimizer():
    cluster, model = configs.cluster(), shapes.llama3_70b()
    plans = {z: build_plan(configs.config(cluster, model, {"tp": 8, "pp": 4, "zero": z})) for z in (0, 1)}
    for plan in plans.values():
        m = plan.memory
        assert m.total == m.params + m.grads + m.optimizer + m.activations + m.buffers
    assert plans[0].memory.optimizer == 2 * plans[1].memory.optimizer
    assert plans[0].memory.params == plans[1].memory.params


def test_a_broken_rule_is_one_line_with_legal_degrees():
    with pytest.raises(OrchError, match=r"rule 'heads': tp=6 .* 64 attention heads; nearest legal: \S+") as caught:
        build_plan(configs.config(configs.cluster(nodes=6), shapes.llama3_70b(), {"tp": 6, "pp": 8}))
    assert caught.value.exit == Exit.CONFIG
    assert "\n" not in str(caught.value)


if __name__ == "__main__":
    GOLDEN.write_bytes(to_json(build_main_line(), indent=1) + b"\n")
