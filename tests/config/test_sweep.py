"""`--multirun`: which command lines a sweep stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.sweep import MOST, members, split
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


def test_every_combination_in_the_order_of_nested_loops():
    found = members(["cluster=h100x64", "parallel=tp2,tp4", "train.steps=10", "optim.lr=1e-3,2e-3"])
    assert [member.varied for member in found] == [
        ["parallel=tp2", "optim.lr=1e-3"], ["parallel=tp2", "optim.lr=2e-3"],
        ["parallel=tp4", "optim.lr=1e-3"], ["parallel=tp4", "optim.lr=2e-3"],
    ]  # fmt: skip
    assert all(member.words[0] == "cluster=h100x64" and member.words[2] == "train.steps=10" for member in found)


@pytest.mark.parametrize(
    ("text", "values"),
    [("a", ["a"]), ("", [""]), ("a, b", ["a", "b"]), ("[1,2],[3]", ["[1,2]", "[3]"]), ("'a,b'", ["'a,b'"]),
     ('{a: "x,]",b: [1,2]},null', ['{a: "x,]",b: [1,2]}', "null"]), ("f(1,2),3", ["f(1,2)", "3"])],
)  # fmt: skip
def test_commas_in_brackets_and_quotes_part_nothing(text, values):
    assert split(text) == values


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters=",()[]{}'\" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"))))
def test_what_is_joined_is_parted(values):
    assert split(",".join(values)) == (values or [""])


@pytest.mark.parametrize(
    ("words", "text"),
    [(["train.steps=1"], "nothing varies"), (["a=1,,2"], "lacks a value"), (["a=1,2,1"], "holds 1 twice"),
     ([f"a={','.join(map(str, range(MOST + 1)))}"], f"{MOST + 1} runs")],
)  # fmt: skip
def test_refusals(words, text):
    with pytest.raises(OrchError, match=text) as refused:
        members(words)
    assert refused.value.exit == Exit.USAGE
