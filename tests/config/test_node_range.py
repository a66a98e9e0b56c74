"""Numbers of nodes: `4`, `2..4` and `2:4` mean the same on every way into a configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.compose import load
from orchestrator.config.node_range import MAX_SIZES, node_range
from orchestrator.errors import OrchError

COUNTS = st.integers(1, 9_999_999)


@given(COUNTS, st.integers(0, MAX_SIZES - 1))
def test_both_spellings_are_one_range(first, more):
    last = min(first + more, 9_999_999)
    assert node_range(f"{first}:{last}") == node_range(f"{first}..{last}") == (first, last)
    assert node_range(f"{first}") == (first, first)


@given(COUNTS, COUNTS, st.sampled_from(["nodes=", "--nnodes "]))
def test_both_spellings_are_refused_in_the_same_words(first, last, key):
    messages = set()
    for typed in (f"{first}:{last}", f"{first}..{last}"):
        try:
            node_range(typed, key)
        except OrchError as error:
            messages.add(error.message)
    is_legal = first <= last < first + MAX_SIZES
    assert len(messages) == (0 if is_legal else 1)
    assert all(message.startswith(f"{key}{first}..{last} ") for message in messages)


@given(st.text("0123456789.:- a\n", max_size=9))
def test_other_text_is_refused_in_one_line(typed):
    try:
        first, last = node_range(typed)
    except OrchError as error:
        assert error.exit == 64
    else:
        assert typed in (f"{first}:{last}", f"{first}..{last}", f"{first}")


@pytest.mark.parametrize("prefix", ["", "+"])
def test_words_of_the_command_line(prefix):
    for typed in ("2..4", "2:4"):
        assert load(["cluster=h100x64", f"{prefix}nodes={typed}"], ranges=True).nodes == "2..4"
    fixed = load(["cluster=h100x64", f"{prefix}nodes=2"])
    assert (fixed.nodes, fixed.cluster.nodes) == (None, 2)
    assert fixed == load(["cluster=h100x64", "cluster.nodes=2"])


def test_a_file_takes_both_spellings(tmp_path):
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (tmp_path / "conf" / ".orch").touch()
    for typed in ("2..4", "'2:4'"):
        (folder / "mine.yaml").write_text(f"# @package _global_\nnodes: {typed}\n")
        config = load(["experiment=mine"], tmp_path / "conf", ranges=True)
        assert config.nodes == "2..4"
