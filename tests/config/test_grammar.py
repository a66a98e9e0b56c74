"""Parallelism specs: any order, round trip, and refusals that name the rule and a legal word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config import grammar
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

degrees = st.fixed_dictionaries(
    {},
    optional={
        **{
            name: st.integers(1, grammar.MAX_DEGREE)
            for name in ("tp", "pp", "dp", "cp", "ep", "vpp")
        },
        "zero": st.integers(0, 3),
        "sp": st.booleans(),
    },
).filter(bool)


@given(degrees, st.randoms())
def test_any_order_reads_the_same_and_goes_round(layout, random):
    spec = grammar.canonical(layout)
    spec_parts = spec.split("_")
    random.shuffle(spec_parts)
    assert grammar.parse("_".join(spec_parts)) == grammar.parse(spec) == layout
    assert grammar.canonical(grammar.parse(spec)) == spec and grammar.looks_like_spec(spec)


@pytest.mark.parametrize(
    ("spec", "axis", "folds"),
    [
        ("tp8_ep8_etp1", 1, None),
        ("tp8_ep16_etp1", 2, None),
        ("tp8_ep4_etp2", 1, None),
        ("tp2_cp2_ep2_etp1", 1, None),
        ("tp2_cp2_ep4_etp1", 1, True),
        ("tp2_cp4_ep16_etp1_zero1", 2, True),
        ("tp2_cp2_ep2_etp2", 1, True),
    ],
)
def test_with_etp_ep_counts_the_ranks_of_the_expert_mesh(spec, axis, folds):
    """tp is taken first, then cp, then an axis of its own."""
    layout = grammar.parse(spec)
    assert (layout["ep"], layout.get("fold_cp")) == (axis, folds)
    assert grammar.canonical(layout) == spec


@given(st.text(alphabet="tpdcezrovs0123456789_-=. ", max_size=24))
def test_a_word_is_read_or_refused_with_a_legal_suggestion(spec):
    try:
        grammar.parse(spec)
    except OrchError as error:
        assert error.exit == Exit.USAGE
        assert grammar.RULE in error.message
        if "did you mean" in error.message:
            suggested = error.message.split("did you mean '")[1].split("'")[0]
            assert grammar.parse(suggested)


def test_what_sp_may_be():
    assert grammar.parse("tp8_sp0")["sp"] is False
    assert grammar.parse("tp8_sp1")["sp"] is True
    assert grammar.parse("sp8_tp8")["sp"] is True
    assert "sp" not in grammar.parse("tp8")


@pytest.mark.parametrize(
    ("spec", "rule", "near"),
    [
        ("tp8-pp4", "not a name with a number", "tp8_pp4"),
        ("TP8_PP4", "not a name with a number", "tp8_pp4"),
        ("tp8__pp4", "a part is empty", "tp8_pp4"),
        ("tp08", "not a name with a number", "tp8"),
        ("tp8_tp4", "tp is given twice", "tp8"),
        ("zero4", "zero is 0, 1, 2 or 3", "zero3"),
        ("tp0", "must be from 1 to", "tp1"),
        ("tp8_sp3", "sp0, sp1 or sp8", "tp8_sp1"),
        ("tp8_zer1", "no degree 'zer'", "tp8_zero1"),
        ("tp9999999", "must be from 1 to", "tp1048576"),
        ("tp4_etp3_ep2", "etp=3 does not divide tp=4", "tp4_ep2_etp2"),
        ("tp4_etp1_ep3", "ep is tp / etp = 4", "tp4_ep4_etp1"),
        ("tp4_cp2_etp1_ep12", "a multiple of tp * cp / etp = 8", "tp4_cp2_ep8_etp1"),
        ("tp8_zer1_etp1", "no degree 'zer'", "tp8_ep8_etp1_zero1"),
        ("tp=8_pp=4", "not a name with a number", "tp8_pp4"),
    ],
)
def test_refusals_name_the_rule_and_the_nearest_word(spec, rule, near):
    with pytest.raises(OrchError) as refused:
        grammar.parse(spec)
    assert rule in refused.value.message
    assert f"did you mean {near!r}" in refused.value.message


@pytest.mark.parametrize(
    "name", ["default", "fsdp", "llama3_70b", "llama3_405b_long", "ddp", "", "8tp"]
)
def test_names_of_files_are_not_words(name):
    assert not grammar.looks_like_spec(name)
