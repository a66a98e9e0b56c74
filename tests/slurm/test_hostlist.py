"""Host lists and times, against Slurm's own rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.slurm.options import format_time, parse_time
from orchestrator.cluster.hostlist import compress, expand, natural_key
from orchestrator.errors import OrchError

names = st.from_regex(r"[a-z]([a-z0-9.-]{0,6}[a-z0-9])?", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("n[0-3,7]", ["n0", "n1", "n2", "n3", "n7"]),
        ("gpu-[001-003]", ["gpu-001", "gpu-002", "gpu-003"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("r[1-2]n[08-10]x", [f"r{r}n{n}x" for r in (1, 2) for n in ("08", "09", "10")]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[10,2]", ["n10", "n2"]),
        ("", []),
        ("(null)", []),
        ("None assigned", []),
    ],
)
def test_expand(text, want):
    assert expand(text) == want


@pytest.mark.parametrize(
    "text",
    ["n[0-", "n]0[", "n[[1]]", "n[3-1]", "n[a]", "n[1-2", ",", "a,,b", "n[]", "n[0-99999999]", "n[0-9][0-9999][0-9999]",
     "$(id)", "a b", "-rf", "n[1];x", "n\n", "n\x00"],
)  # fmt: skip
def test_expand_refuses(text):
    if text == "n\n":  # surrounding white space is how commands end their lines
        assert expand(text) == ["n"]
        return
    with pytest.raises(OrchError, match="host list"):
        expand(text)


@given(st.sets(names, max_size=30))
def test_compress_and_expand_are_inverse(found):
    assert set(expand(compress(found))) == found


@given(st.sets(st.tuples(st.sampled_from(["n", "gpu-", "r1n"]), st.integers(0, 1200), st.sampled_from([0, 3, 4]))))
def test_numbered_names_survive(parts):
    found = {f"{prefix}{number:0{width}d}" for prefix, number, width in parts}
    again = expand(compress(found))
    assert sorted(again) == sorted(found)


@given(st.integers(0, 3000), st.integers(1, 3000))
def test_a_run_folds_to_one_bracket(first, count):
    assert compress(f"n{i}" for i in range(first, first + count)).count("n") == 1


@pytest.mark.parametrize(
    ("found", "want"),
    [
        (["n10", "n9", "n8"], "n[8-10]"),
        (["n009", "n010", "n100"], "n[009-010,100]"),
        (["x", "x5"], "x,x5"),
        (["b1", "a2", "a1"], "a[1-2],b1"),
        (["n9", "n09"], "n9,n09"),
    ],
)
def test_compress(found, want):
    assert compress(found) == want


def test_natural_order():
    assert sorted(["n10", "n9", "n1", "m2"], key=natural_key) == ["m2", "n1", "n9", "n10"]


@pytest.mark.slurm
@pytest.mark.process
@pytest.mark.parametrize("text", ["n[0-3,7]", "gpu-[001-003]", "a,b[1-2],c", "r[1-2]n[08-10]", "n[098-101]"])
def test_agrees_with_scontrol(full_cluster, text):
    assert full_cluster.run("scontrol", "show", "hostnames", text).split() == expand(text)
    folded = compress(expand(text))
    assert sorted(full_cluster.run("scontrol", "show", "hostnames", folded).split()) == sorted(expand(text))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:02:03", 3723), ("2-3", 183600), ("1-00:00:00", 86400), ("1-2:03", 93780),
     ("UNLIMITED", None), ("infinite", None), ("0", 0)],
)  # fmt: skip
def test_duration(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "-5", "1h", "1-", "5\n6", "１"])
def test_duration_refuses(text):
    with pytest.raises(OrchError, match="is not a Slurm time"):
        parse_time(text)


@given(st.integers(0, 10**8))
def test_duration_roundtrip(seconds):
    assert parse_time(format_time(seconds)) == seconds
