"""`orch report` of a run with experts: numbers by layer, and load by expert over steps as text and
as a picture."""

from __future__ import annotations

import json

import pytest
from msgspec import json as encoding

from orchestrator.cli.main import main
from orchestrator.observe.expert_loads import loads_of
from orchestrator.observe.pages.expert_page import render
from orchestrator.plan import Exit, to_json
from orchestrator.plan.document import Moe
from orchestrator.plan.expert_load import ExpertLoad
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import SCHEMA, RunState, write_state
from orchestrator.style import Style
from tests.beds.plans import make_plan, tiny_model
from tests.observe.test_measured import StepLine

PLAN = make_plan(ep=2, model=tiny_model(moe=Moe(experts=4, top_k=1, ffn_hidden=8)))
EVEN = ExpertLoad([4, 4, 4, 4], 1.0)
ONE = ExpertLoad([0, 16, 0, 0], 0.25, 0.5, (-1.0, 2.0))


def lines() -> list[StepLine]:
    """Layer 1 collapses at step 3, which is run twice: at first it was even."""
    steps = [(0, 1, EVEN), (0, 2, EVEN), (0, 3, EVEN), (1, 3, ONE)]
    values = {
        "tokens": 16,
        "samples": 0,
        "step_s": 1.0,
        "expert_bytes": {"nvlink": 64},
        "expert_s": {"nvlink": 0.5},
    }
    return [
        StepLine(rank=0, epoch=e, step=n, experts={"0": EVEN, "1": x}, **values)
        for e, n, x in steps
    ]


def test_the_page_shows_the_layer_that_is_least_even():
    page = render(PLAN, loads_of(lines()), Style(unicode=False))
    rows = {row.split()[0]: row.split() for row in page.splitlines() if row and row[0].isdigit()}
    assert rows["0"][1:6] == ["1.00", "to", "1.00", "1.00", "1.00"] and rows["0"][-1] == "-"
    assert rows["1"][1:4] == ["1.00", "to", "0.00"] and rows["1"][-3:] == ["-1", "to", "+2"]
    drawn = page.split("layer 1")[1].splitlines()[1:]
    assert [row.split("|")[1] for row in drawn] == ["====", "====", " @  "]
    assert page.isascii() and max(map(len, page.splitlines())) <= 80
    assert render(PLAN, {}, Style()) == ""


def test_neighbours_share_a_character_where_the_line_is_short():
    load = ExpertLoad([1] * 128 + [3] * 128, 1.0)
    many = make_plan(model=tiny_model(moe=Moe(experts=256, top_k=2, ffn_hidden=8)))
    page = render(
        many, {0: [(step, load) for step in range(1, 40)]}, Style(unicode=False, width=80)
    )
    drawn = [row for row in page.splitlines() if "|" in row]
    assert len(drawn) == 10 and drawn[0].startswith("step 1 ") and drawn[-1].startswith("step 39 ")
    assert max(map(len, drawn)) <= 80


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.create()
    folder.plan.write_bytes(to_json(PLAN))
    folder.request.write_text("{}")
    values = {
        "run_id": "r",
        "state": "done",
        "exit_code": 0,
        "backend": "local",
        "created_at": 0.0,
        "updated_at": 0.0,
    }
    write_state(folder, RunState(schema=SCHEMA, plan_hash=PLAN.hash, writer="w", epoch=1, **values))
    return folder


def test_the_verb_reads_what_agents_wrote(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["report", "--experts", str(tmp_path / "e.png")]) == Exit.USAGE
    assert "no step was sampled yet" in capsys.readouterr().err
    run.metrics(PLAN.cluster.node_names[0]).write_bytes(
        b"".join(encoding.encode(line) + b"\n" for line in lines())
    )
    assert main(["report", "--experts", str(tmp_path / "e.png")]) == 0
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert (
        "tokens by expert over steps, layer 1" in out
        and "to experts of other ranks: nvlink 64 B in 500 ms" in out
    )
    assert main(["report", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["experts"]["1"]["balance"] == {"first": 1.0, "last": 0.0}
    assert report["experts"]["1"]["bias"] == [-1.0, 2.0] and report["expert_bytes_per_step"] == {
        "nvlink": 64
    }
    assert main(["report", "--experts", "e.gif"]) == Exit.USAGE
    assert "--experts e.gif: the file must end in" in capsys.readouterr().err
