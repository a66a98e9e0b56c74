"""The choice of cases for `make test`: no pair of settings is lost, and what is chosen does not
change by chance."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.pairs import covering, settings
from tests.trainer.parity_cases import TECHNIQUES

CASES = st.dictionaries(
    st.integers(0, 99),
    st.fixed_dictionaries(
        {},
        optional={
            "tp": st.sampled_from((1, 2)),
            "zero": st.integers(0, 3),
            "sp": st.booleans(),
            "dp": st.just(2),
        },
    ),
    max_size=20,
)


def pairs_of(cases: list[dict]) -> set:
    return {pair for case in cases for pair in combinations(sorted(settings(case)), 2)}


@given(CASES)
def test_every_setting_and_pair_of_settings_is_met_and_no_case_is_in_vain(cases):
    chosen = covering(cases)
    rest = [cases[name] for name in chosen]
    assert pairs_of(rest) == pairs_of(list(cases.values()))
    assert frozenset().union(*map(settings, rest)) == frozenset().union(
        *map(settings, cases.values())
    )
    assert len({settings(case) for case in rest}) == len(rest)


def test_the_list_of_the_key_proof_is_halved_and_every_technique_stays():
    cases = {
        (technique, name): case
        for technique, technique_cases in TECHNIQUES.items()
        for name, case in technique_cases.items()
    }
    chosen = covering(cases)
    assert len(chosen) < len(cases) / 2
    assert {technique for technique, _ in chosen} == set(TECHNIQUES)
