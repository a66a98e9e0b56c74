"""What people ask of an elastic run is obeyed, whoever dies between the asking and the obeying."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from orchestrator.backends.base import read_record
from orchestrator.backends.local import backend
from orchestrator.backends.local.backend import LocalBackend, LocalRecord
from orchestrator.errors import OrchError
from orchestrator.plan import load_plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import ask, newest
from orchestrator.run.request import read_request
from orchestrator.run.state import read_state
from tests.beds.bundles import wait_end, wait_for
from tests.patience import PATIENCE_S

from .test_elastic import agent, kill, running, start

pytestmark = pytest.mark.process

THREE = ("node0", "node1", "node2")


def supervisor(folder: RunFolder) -> int:
    return read_record(folder, LocalRecord).supervisor[0]


def resize(folder: RunFolder, nodes: int) -> str:
    """ "" or why not."""
    try:
        LocalBackend().resize(folder, read_request(folder), nodes, os.environ)
    except OrchError as error:
        return error.message
    return ""


def ended(folder: RunFolder):
    """The state once no process of the run is left."""
    wait_for(lambda: not folder.is_alive(), what="the end of every process")
    return LocalBackend().state(folder)


@pytest.mark.parametrize("force", [False, True])
def test_a_cancel_of_which_nobody_alive_has_heard(runs, force):
    """The command died before it could send a signal, and the coordinator with it."""
    folder = start(runs, 3, 2)
    kill(folder, running(folder, *THREE).writer)
    ask(folder, "end", force=force)
    state = ended(folder)
    assert (state.state, state.exit_code) == ("cancelled", 75)
    assert newest(folder).number == 1


def test_a_notice_that_died_with_the_coordinator_is_given_to_the_next(runs):
    folder = start(runs, 3, 2)
    writer = running(folder, *THREE).writer
    kill(folder, writer, signal.SIGSTOP)
    os.kill(supervisor(folder), signal.SIGTERM)
    notified_nodes = [node for node in THREE if node != writer]
    wait_for(
        lambda: all('"notice"' in folder.events(node).read_text() for node in notified_nodes),
        what="all to be told",
    )
    kill(folder, writer)
    state = wait_end(folder)
    assert (state.state, state.exit_code) == ("stopped", 75)


def test_a_run_without_supervisor_and_coordinator_ends_and_is_resized(runs):
    folder = start(runs, 3, 2)
    first = running(folder, *THREE)
    os.kill(supervisor(folder), signal.SIGKILL)
    kill(folder, first.writer)
    assert ended(folder).state == "stopped"
    assert resize(folder, 2) == ""
    running(folder, "node0", "node1", after=first.epoch)
    LocalBackend().cancel(folder, force=True)
    assert ended(folder).state == "cancelled"


def test_of_two_resizes_at_once_the_later_one_counts(runs, monkeypatch):
    """Both are asked before the first is looked after."""
    request_barrier = threading.Barrier(2)

    def ask_together(*args, **fields):
        intent = ask(*args, **fields)
        request_barrier.wait(PATIENCE_S)
        return intent

    monkeypatch.setattr(backend, "ask", ask_together)
    folder = start(runs, 3, 2, 1)
    first = running(folder, *THREE)
    answers: dict[int, str] = {}
    both = [
        threading.Thread(target=lambda n=nodes: answers.update({n: resize(folder, n)}))
        for nodes in (1, 2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    monkeypatch.undo()
    last = newest(folder)
    assert last.number == 2 and answers[last.nodes] == ""
    (refused_size,) = {1, 2} - {last.nodes}
    assert (
        answers[refused_size]
        == f"run test-run has received a newer request: resize to {last.nodes} nodes"
    )
    running(folder, *THREE[: last.nodes], after=first.epoch)
    assert load_plan(folder.plan).parallel.dp == last.nodes == len(read_request(folder).agents)
    assert len(read_record(folder, LocalRecord).agents) == last.nodes
    LocalBackend().cancel(folder, force=False)
    assert wait_end(folder).state == "cancelled"


@pytest.mark.parametrize("after_s", [0.0, 0.4, 1.2])
def test_a_cancel_during_a_resize_ends_the_run(runs, after_s):
    folder = start(runs, 3, 2)
    running(folder, *THREE)
    resize_thread = threading.Thread(target=resize, args=(folder, 2))
    resize_thread.start()
    wait_for(lambda: newest(folder), what="the request")
    time.sleep(after_s)
    LocalBackend().cancel(folder, force=False)
    resize_thread.join()
    state = ended(folder)
    assert (state.state, state.exit_code) == ("cancelled", 75), state.reason
    assert newest(folder).number == 2


def test_a_resize_whose_command_died_is_obeyed_and_says_so_meanwhile(runs):
    folder = start(runs, 3, 2)
    first = running(folder, *THREE)
    ask(folder, "run", nodes=2)
    seen = set()

    def looked():
        state = LocalBackend().state(folder)
        seen.add(state.state)
        return state.epoch > first.epoch and state.state == "running"

    wait_for(looked, what="two nodes")
    assert not seen & {"stopped", "cancelled", "failed", "done"}
    running(folder, "node0", "node1", after=first.epoch)
    assert read_state(folder).intent == 1
    LocalBackend().cancel(folder, force=False)
    assert wait_end(folder).state == "cancelled"


def test_a_resize_that_lost_its_supervisor_is_taken_up_by_resume(runs):
    folder = start(runs, 3, 2)
    first = running(folder, *THREE)
    os.kill(supervisor(folder), signal.SIGSTOP)
    ask(folder, "run", nodes=2)
    os.kill(supervisor(folder), signal.SIGKILL)
    state = ended(folder)
    assert state.state == "stopped" and state.intent == 0
    LocalBackend().resume(folder, read_request(folder), os.environ)
    running(folder, "node0", "node1", after=first.epoch)
    LocalBackend().cancel(folder, force=False)
    assert wait_end(folder).state == "cancelled"


def test_asking_twice_is_asking_once(runs):
    folder = start(runs, 3, 2)
    running(folder, *THREE)
    for _ in range(3):
        LocalBackend().cancel(folder, force=False)
    assert wait_end(folder).state == "cancelled"
    assert newest(folder).number == 1 and agent(folder, "node0")
