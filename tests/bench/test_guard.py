"""The guard over the numbers that users feel: what it names, and that its works and canaries
run."""

from __future__ import annotations

import json
import sys
from itertools import count

import msgspec
import pytest

from benchmarks import guard
from benchmarks.guard import Comparison, Row, row_of
from benchmarks.guarded import NUMBERS, PLAIN, Turn, in_turns, of_command

CONDITIONS = {
    "commit": "0123456789",
    "date": "2026-01-01",
    "hardware": "2 CPUs of a test",
    "load_average": 0.5,
}


def row(ratio: float, spread: float = 0.02) -> Row:
    return row_of([Turn(ratio * (1 + off), 1.0) for off in (-spread, 0.0, spread)], CONDITIONS)


@pytest.fixture
def result(tmp_path, monkeypatch):
    """The file of committed values, elsewhere."""
    path = tmp_path / "guard.json"
    monkeypatch.setattr(guard, "RESULT", path)
    return path


def costing(monkeypatch, **ratios: float) -> None:
    """Numbers that cost so many canaries now, and no time."""
    for name, ratio in ratios.items():
        turns = [Turn(ratio * off, 1.0) for off in (0.98, 1.0, 1.02)]
        number = NUMBERS[name]
        stand_in = type(number)(number.what, number.canary, 3, lambda rounds, turns=turns: turns)
        monkeypatch.setitem(NUMBERS, name, stand_in)


@pytest.mark.parametrize(
    ("cost", "verdict"),
    [
        (1.25, "worse"),
        (1.1, "as before"),
        (1.0, "as before"),
        (0.9, "as before"),
        (0.75, "better"),
        (3.0, "worse"),
    ],
)
def test_a_quarter_more_is_worse_and_a_tenth_more_is_not(cost, verdict):
    assert Comparison("plan", row(2.0 * cost), row(2.0)).verdict == verdict


@pytest.mark.parametrize("cost", [1.3, 0.75])
def test_what_the_rounds_differ_by_themselves_is_not_judged(cost):
    assert Comparison("plan", row(cost, spread=0.9), row(1.0, spread=0.02)).verdict == "unsure"


def test_a_worse_number_is_one_line_with_what_was_what_is_and_the_commit(
    result, monkeypatch, capsys
):
    result.write_bytes(msgspec.json.encode({"plan": row(1.0), "help": row(4.0), "save": row(1.0)}))
    costing(monkeypatch, plan=1.26, help=2.0, save=1.05)
    assert guard.main(["--only", "plan", "help", "save"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        (
            "worse         plan: +26%: was 1 canaries (0.99 to 1.01) at 0123456789 of 2026-01-01,"
            " is 1.26 canaries (1.25 to 1.27), 1.3 s"
        ),
        (
            "better        help: -50%: was 4 canaries (3.96 to 4.04) at 0123456789 of 2026-01-01,"
            " is 2 canaries (1.98 to 2.02), 2 s"
        ),
        (
            "as before     save: +5%: was 1 canaries (0.99 to 1.01) at 0123456789 of 2026-01-01,"
            " is 1.05 canaries (1.04 to 1.06), 1.1 s"
        ),
        "guard: 1 worse, 1 better, 1 as before",
    ]


def test_a_number_that_is_missing_or_unknown_in_the_file_is_said(result, monkeypatch, capsys):
    result.write_bytes(msgspec.json.encode({"plan": row(1.0), "search_of_old": row(4.0)}))
    costing(monkeypatch, plan=1.0, help=2.0)
    assert guard.main(["--only", "plan", "help"]) == 0
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first.startswith("as before     plan:")
    assert (
        second
        == "not committed help: 2 canaries (1.98 to 2.02), 2 s; guard.json has no such number"
        " (--write adds it)"
    )
    assert (
        third.startswith("unknown       search_of_old: guard.json has it")
        and "(--write removes it)" in third
    )
    assert last == "guard: 1 as before, 1 not committed, 1 unknown"


def test_written_values_are_those_the_next_run_is_held_against(result, monkeypatch, capsys):
    result.write_bytes(msgspec.json.encode({"plan": row(1.0), "search_of_old": row(4.0)}))
    costing(monkeypatch, plan=5.0, help=2.0)
    guard.main(["--only", "help", "--write"])
    committed = guard.committed(result)
    assert sorted(committed) == ["help", "plan"] and committed["plan"] == row(1.0), (
        "what is not measured stays"
    )
    capsys.readouterr()
    guard.main(["--only", "help", "plan", "--json"])
    numbers = json.loads(capsys.readouterr().out)["numbers"]
    assert {name: verdict_row["verdict"] for name, verdict_row in numbers.items()} == {
        "help": "as before",
        "plan": "worse",
    }
    assert numbers["plan"]["change"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"plan": {"ratio": 1}}', b'{"plan": 2}', b"\xff"]
)
def test_a_damaged_file_is_one_line(content, result):
    result.write_bytes(content)
    with pytest.raises(SystemExit, match=r"guard\.json: [^\n]+$"):
        guard.main(["--only", "plan"])


def test_a_work_that_fails_is_one_line_and_the_others_are_measured(result, monkeypatch, capsys):
    costing(monkeypatch, plan=1.0, help=2.0)
    broken = type(NUMBERS["plan"])(
        "", "", 3, lambda rounds: of_command([sys.executable, "-c", "1/0"], PLAIN, 1)
    )
    monkeypatch.setitem(NUMBERS, "plan", broken)
    assert guard.main(["--only", "plan", "help"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("not measured  plan: ") and captured.err.count("\n") == 1
    assert "help: 2 canaries" in captured.out


def test_a_machine_that_is_slower_or_gets_slower_meets_canary_and_work_alike():
    def on(speed) -> Row:
        return row_of(in_turns(lambda: 3.0 * speed(), lambda: 2.0 * speed(), 9), CONDITIONS)

    seconds = count(10)
    quiet = on(lambda: 1.0)
    slow = on(lambda: 7.0)
    slowing = on(lambda: float(next(seconds)))
    assert quiet.ratio == slow.ratio == slowing.ratio == 1.5
    assert slow.seconds == 7 * quiet.seconds


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NUMBERS if not name.startswith("search_")])
def test_each_work_and_its_canary_run(name):
    (turn,) = NUMBERS[name].measure(1)
    assert turn.work > 0 and turn.canary > 0


#: The planner, made slower: it searches twice.
SLOWED = """
import sys
from orchestrator.planner.search import auto

once = auto.resolve_auto

def often(*args, **options):
    for _ in range(4):  # later ones find much in caches
        once(*args, **options)
    return once(*args, **options)

auto.resolve_auto = often
from orch_start import main

sys.exit(main())
"""


@pytest.mark.timing
def test_a_search_that_is_made_at_least_twice_as_long_is_seen():
    arguments = ["plan", "+cluster=h100x1024", "model=llama3_70b", "parallel=auto"]
    was = row_of(NUMBERS["search_1024"].measure(3), CONDITIONS)
    now = row_of(of_command([sys.executable, "-c", SLOWED, *arguments], PLAIN, 3), CONDITIONS)
    comparison = Comparison("search_1024", now, was)
    assert comparison.verdict == "worse", comparison.line
