"""What is written as YAML is read back as it was, by a reader of YAML 1.1; and looks as people write it."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.launch.yaml_text import to_yaml

TRICKY = [
    *("", " a", "a ", "a: b", "a:", "a #b", "- a", "1e5", "1:30", "0x1", "~", "No", "null", "2026-11-22", "[a]", "&a"),
    *("*a", "!a", "%a", "@a", "'", '"', "\\", "a\nb", "\u2028", "é", "\x7f", "\U0001f600", "=", "<<", "y", "{}", "?"),
    *("---", "...", ".5", "+1", "-", "a, b", "(x)", "/p/q-1.yaml", "gpu/ib", "a:b", "a ::b", "\ufeff", "\x85", "a -b"),
]
texts = st.one_of(st.sampled_from(TRICKY), st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts)
values = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3))
)


@given(values)
def test_what_is_written_is_read_back(value):
    found = yaml.safe_load(to_yaml(value))
    assert found == value and repr(found) == repr(_sorted(value))


def _sorted(value):
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def test_it_looks_as_people_write_it():
    value = {
        "b": [1, {"x": 1e-5, "a": []}, [True, "on"]],
        "a": {"path": "/x/y 1", "none": None, "word": "8: x"},
        "c": {},
    }
    assert to_yaml(value) == (
        'a:\n  none: null\n  path: /x/y 1\n  word: "8: x"\nb:\n- 1\n- a: []\n  x: 1.0e-05\n- - true\n  - "on"\nc: {}\n'
    )
