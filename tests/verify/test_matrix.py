"""The matrix holds what it promises: every technique, every pair, every triple, every variation."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.plan.hierarchy import is_hierarchical
from orchestrator.plan.parity import Cell
from orchestrator.verify import matrix, techniques
from orchestrator.verify.cells import cells_of_entries
from orchestrator.verify.cover import cover


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 3), st.integers(2, 4))
def test_every_legal_combination_is_covered(levels, strength, most_used):
    def legal(row):
        return sum(map(bool, row)) <= most_used and row[:2] != (1, 1)

    rows = cover(levels, strength, legal)
    assert all(map(legal, rows))
    used = [{(axis, choice) for axis, choice in enumerate(row) if choice} for row in rows]
    choices = [
        (axis, choice) for axis, count in enumerate(levels) for choice in range(1, count + 1)
    ]
    for combination in combinations(choices, strength):
        if len({axis for axis, _ in combination}) < strength:
            continue
        alone = tuple(dict(combination).get(axis, 0) for axis in range(len(levels)))
        assert legal(alone) == any(set(combination) <= row for row in used)


def test_a_covering_array_is_much_smaller_than_the_product():
    assert (
        len(cover([4, 4, 4, 4, 4], 2, lambda row: True)) <= 24 < 4**2 * 10 / 6
    )  # 16 is the least possible


def techniques_of(section: str) -> list[set[str]]:
    return [
        {technique.name for technique in entry.techniques}
        for entry in matrix.full()
        if entry.section == section
    ]


ALL = [
    (axis, technique) for axis, techniques in techniques.AXES.items() for technique in techniques
]


def test_every_technique_is_there_alone():
    assert {technique.name for _, technique in ALL} == set().union(*techniques_of("alone"))


def test_every_pair_of_two_axes_is_there():
    pairs = techniques_of("pair")
    for (axis, member), (other_axis, partner) in combinations(ALL, 2):
        if axis != other_axis and member.pairs == partner.pairs == "all":
            assert {member.name, partner.name} in pairs


def test_a_budget_makes_layers_differ():
    entries = [entry for entry in matrix.full() if entry.recompute == "budget"]
    modes = [cell.plan.job.train.recompute_layers for cell in cells_of_entries(entries, None)]
    assert sum(len(set(layers)) > 1 for layers in modes) > len(modes) / 2, modes


def test_every_triple_of_deep_techniques_that_fits_is_there():
    products = techniques_of("product")
    deep = [(axis, technique) for axis, technique in ALL if technique.deep]
    for three in combinations(deep, 3):
        if len({axis for axis, _ in three}) == 3:
            techniques = tuple(technique for _, technique in three)
            refused = any(
                (earlier.name, later.name) in matrix.REFUSED
                for earlier, later in combinations(techniques, 2)
            )
            assert (
                any({technique.name for technique in techniques} <= product for product in products)
                != refused
            )


def test_products_of_four_dimensions_on_eight_processes_are_there():
    products = [entry for entry in matrix.full() if entry.section != "alone"]
    five_fold = [entry for entry in products if entry.processes == 8 and len(entry.techniques) == 5]
    assert (
        len(five_fold) >= 10 and max(entry.processes for entry in products) == matrix.MOST_PROCESSES
    )


def test_all_five_axes_at_once_are_there_on_sixteen_and_on_thirty_two_processes():
    every = ("tp", "cp", "pp", "ep", "dp")
    large = [entry for entry in matrix.full() if entry.processes > matrix.MOST_PROCESSES]
    assert len(large) >= 8 and {entry.processes for entry in large} == {16, 32}
    for entry in large:
        folded = entry.degrees.get("fold_cp", False)
        used = {axis for axis in every if entry.degrees[axis] > 1} | ({"ep"} if folded else set())
        assert used >= {"tp", "cp", "pp", "ep"} and (not folded or "dp" in used), entry.name
        assert entry.processes == 16 or used == {*every}, entry.name


@pytest.mark.parametrize("position", range(6))
def test_every_technique_of_a_pair_meets_every_variation(position):
    met: dict[str, set] = {}
    for entry in matrix.full():
        for technique in entry.techniques:
            met.setdefault(technique.name, set()).add(entry.variation[position])
    choices = {variation[position] for variation in matrix.VARIATIONS}
    assert all(met[technique.name] == choices for _, technique in ALL if technique.pairs == "all")


def test_cells_whose_tokens_go_by_domain_have_domains():
    entries = [entry for entry in matrix.full() if "expert_all_to_all" in entry.degrees]
    assert len(entries) >= 7
    for cell in cells_of_entries(entries, None):
        assert is_hierarchical(cell.plan) and len({rank.node for rank in cell.plan.ranks}) > 1


def test_names_are_unique_and_the_planner_takes_every_cell():
    entries = matrix.full()
    assert len({entry.name for entry in entries}) == len(entries)
    for entry, cell in zip(entries, cells_of_entries(entries, None), strict=True):
        if not isinstance(
            cell, Cell
        ):  # the one rule of the trainer that the planner keeps for it, and those of two axes
            rules = ["rule 'sharding'"]
            if "masked" in entry.name:
                rules += ["experts do not have biases", "has model.mtp"]
            assert any(rule in cell.refused for rule in rules)
            continue
        assert cell.plan.parallel.world_size == entry.processes
        assert cell.plan.parallel.micro_batches == entry.accumulation
        assert cell.plan.model.vocab % 2 == 1


def test_quick_holds_every_deep_technique_and_is_small():
    entries = matrix.quick()
    assert len({entry.name for entry in entries}) == len(entries) <= 30
    assert {t.name for entry in entries for t in entry.techniques} == {
        t.name for _, t in ALL if t.deep
    }
    assert sum(len(entry.techniques) > 2 for entry in entries) >= 3
