"""`--multirun`: which command lines a sweep stands for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.main import main
from orchestrator.config.sweep import MOST, members, split
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


def test_every_combination_in_the_order_of_nested_loops():
    sweep = members(["cluster=h100x64", "parallel=tp2,tp4", "train.steps=10", "optim.lr=1e-3,2e-3"])
    assert [member.varied for member in sweep] == [
        ["parallel=tp2", "optim.lr=1e-3"], ["parallel=tp2", "optim.lr=2e-3"],
        ["parallel=tp4", "optim.lr=1e-3"], ["parallel=tp4", "optim.lr=2e-3"],
    ]  # fmt: skip
    assert all(
        member.words[0] == "cluster=h100x64" and member.words[2] == "train.steps=10"
        for member in sweep
    )


@pytest.mark.parametrize(
    ("sweep_text", "values"),
    [("a", ["a"]), ("", [""]), ("a, b", ["a", "b"]), ("[1,2],[3]", ["[1,2]", "[3]"]), ("'a,b'", ["'a,b'"]),
     ('{a: "x,]",b: [1,2]},null', ['{a: "x,]",b: [1,2]}', "null"]), ("f(1,2),3", ["f(1,2)", "3"]),
     ("it's,b", ["it's", "b"]), ("a,'b,c', d", ["a", "'b,c'", "d"]), (":-),b", [":-)", "b"])],
)  # fmt: skip
def test_commas_in_brackets_and_quotes_part_nothing(sweep_text, values):
    assert split(sweep_text) == values


@given(
    st.lists(
        st.text(
            st.characters(
                codec="ascii", exclude_characters=",()[]{}'\" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
            )
        )
    )
)
def test_what_is_joined_is_parted(values):
    assert split(",".join(values)) == (values or [""])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [(["train.steps=1"], "nothing varies"), (["a=1,,2"], "lacks a value"), (["a=1,2,1"], "holds 1 twice"),
     ([f"a={','.join(map(str, range(MOST + 1)))}"], f"{MOST + 1} runs"),
     ([r"checkpoint.dir=/data/a\,b"], "a backslash does not escape a comma; .* in quotes .* checkpoint.dir='a,b'"),
     (["metrics.pattern='a,b'"], "nothing varies"),
     (["backend.env.X='a,b','a,b'"], "holds a,b twice")],
)  # fmt: skip
def test_refusals(overrides, complaint):
    with pytest.raises(OrchError, match=complaint) as refused:
        members(overrides)
    assert refused.value.exit == Exit.USAGE


DEVICES = "mlx5_0:1,mlx5_3:1"
PATTERN = r"step (?P<step>\d{1,9}), loss (?P<loss>\S+)"
JOB = ["cluster=h100x8", "model=llama32_1b", "parallel=tp2,tp4"]
PROGRAM = ["--", "python", "-c", "pass"]


def planned(capsys, *overrides: str) -> list[dict]:
    """The requests of a sweep over two layouts."""
    assert main(["submit", "--dry-run", "--multirun", "--json", *JOB, *overrides]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("mark", "'\"")
def test_a_text_in_quotes_is_one_value_without_them(capsys, mark):
    runs = planned(capsys, f"backend.env.NCCL_IB_HCA={mark}{DEVICES}{mark}")
    assert [run["environment"]["values"]["NCCL_IB_HCA"] for run in runs] == [DEVICES] * 2
    runs = planned(capsys, f"backend.env.NCCL_IB_HCA={mark}{DEVICES}{mark},mlx5_4:1")
    assert [run["environment"]["values"]["NCCL_IB_HCA"] for run in runs] == [
        DEVICES,
        "mlx5_4:1",
    ] * 2
    runs = planned(capsys, f"metrics.pattern={mark}{PATTERN}{mark}", *PROGRAM)
    assert len(runs) == 2 and all(PATTERN in json.dumps(run).replace("\\\\", "\\") for run in runs)
    sweep_members = members(["parallel=tp2,tp4", f"+checkpoint.dir={mark}/data/a,b{mark}"])
    assert [member.words[1] for member in sweep_members] == ["+checkpoint.dir=/data/a,b"] * 2


def test_brackets_hold_commas_together_as_before(capsys):
    runs = planned(capsys, f'backend.env={{NCCL_IB_HCA: "{DEVICES}"}}')
    assert [run["environment"]["values"]["NCCL_IB_HCA"] for run in runs] == [DEVICES] * 2


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [f"metrics.pattern={PATTERN}", *PROGRAM],
            "in quotes they are one value: metrics.pattern='a,b'",
        ),
        (
            ['checkpoint={dir: "/data/a,b"}'],
            "it names a file; keys are set one by one, as checkpoint.KEY=VALUE",
        ),
        (['metrics={pattern: "a, (?P<step>x)"}'], "keys are set one by one, as metrics.KEY=VALUE"),
    ],
)
def test_a_refusal_names_the_spelling_that_works(capsys, overrides, says):
    assert main(["submit", "--dry-run", "--multirun", *JOB, *overrides]) == 64
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_without_a_sweep_quotes_around_a_text_stay_refused(capsys):
    overrides = ["cluster=h100x8", "model=llama32_1b", f'backend.env.NCCL_IB_HCA="{DEVICES}"']
    assert main(["submit", "--dry-run", *overrides]) == 64
    assert "without quotes" in capsys.readouterr().err
