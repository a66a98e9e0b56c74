"""Requests of people: numbered, one at a time, the newest counts."""

from __future__ import annotations

import errno
import threading

import pytest

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import ask, due, newest, wants_end
from orchestrator.run.state import RunState, prepare_resume, read_state, true_state, write_state


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "r1")
    folder.create()
    first = {
        "schema": "orch.state/1",
        "run_id": "r1",
        "created_at": 1.0,
        "updated_at": 1.0,
        "writer": "backend",
    }
    write_state(folder, RunState(**first, state="running", backend="local", plan_hash="h"))
    return folder


def test_nobody_has_asked_for_anything(folder):
    assert newest(folder) is None and due(folder, 0) is None and wants_end(folder) is None


def test_asking_twice_is_asking_once_and_force_is_more(folder):
    first = ask(folder, "end")
    assert ask(folder, "end") == first and first.number == 1
    forced = ask(folder, "end", force=True)
    assert forced.number == 2 and ask(folder, "end") == forced == wants_end(folder)


def test_a_later_request_supersedes_an_earlier_one(folder):
    ask(folder, "run", nodes=3)
    ask(folder, "end")
    last = ask(folder, "run", nodes=2)
    assert (
        last.number == 3 and due(folder, 0) == due(folder, 2) == last and wants_end(folder) is None
    )
    assert due(folder, 3) is None  # an attempt of that size began with it
    assert ask(folder, "run", nodes=2, began_with=3).number == 4  # again, and it is obeyed again


def test_a_resume_ends_no_attempt(folder):
    ask(folder, "run")
    assert due(folder, 0) is None and newest(folder).number == 1


def test_everybody_who_asks_at_once_gets_a_number_of_their_own(folder):
    nodes = range(2, 34)
    intents = []
    all_at_once = [
        threading.Thread(target=lambda n=n: intents.append(ask(folder, "run", nodes=n)))
        for n in nodes
    ]
    for thread in all_at_once:
        thread.start()
    for thread in all_at_once:
        thread.join()
    assert sorted(intent.number for intent in intents) == list(range(1, len(nodes) + 1))
    assert sorted(intent.nodes for intent in intents) == list(nodes)
    assert not [path for path in folder.intents.iterdir() if path.name.startswith(".")]


def test_a_damaged_request_is_passed_over(folder):
    first = ask(folder, "end")
    (folder.intents / "000002.json").write_bytes(b"{")
    assert newest(folder) == first
    assert ask(folder, "run", nodes=2).number == 3


def test_a_resumed_run_has_obeyed_what_was_asked_before(folder):
    ask(folder, "end")
    prepare_resume(folder)
    state = read_state(folder)
    assert (state.state, state.intent) == ("pending", 2) and due(folder, state.intent) is None


@pytest.mark.parametrize(
    ("want", "nodes", "shown"),
    [("end", None, "stopping"), ("run", 2, "restarting"), ("run", None, "stopped")],
)
def test_an_end_that_another_attempt_follows_is_not_shown_as_one(folder, want, nodes, shown):
    from orchestrator.run.state import finish

    write_state(folder, finish(read_state(folder), "stopped", 75, "resize to 2 nodes"))
    ask(folder, want, nodes=nodes)
    state = true_state(folder, alive=True)
    assert state.state == shown and (state.exit_code is None) == (shown != "stopped")
    assert true_state(folder, alive=False).state == "stopped"


def test_a_disk_that_takes_no_request_is_said(folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("orchestrator.run.intent.write_private", full)
    with pytest.raises(
        OrchError, match=r"the request cannot be written to .*intents: No space left"
    ) as refused:
        ask(folder, "end")
    assert refused.value.exit == Exit.CAPACITY


def test_a_folder_that_cannot_be_listed_asks_for_nothing_and_is_said_to_who_asks(
    folder, monkeypatch
):
    ask(folder, "end")

    def failing(path: object) -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("orchestrator.run.intent.os.listdir", failing)
    assert newest(folder) is None and due(folder, 0) is None
    with pytest.raises(OrchError, match=r"the request cannot be written to .*: Input/output error"):
        ask(folder, "run", nodes=2)


def test_an_old_listing_of_a_shared_folder_costs_no_number_twice(folder, monkeypatch):
    ask(folder, "end")
    monkeypatch.setattr("orchestrator.run.intent.os.listdir", lambda path: [])
    assert ask(folder, "run", nodes=2).number == 2
