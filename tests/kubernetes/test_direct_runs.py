"""What is asked of a run without a controller: on a full disk, twice at once, by a command that
dies."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from msgspec import structs

from orchestrator.backends.base import write_record
from orchestrator.backends.kubernetes.api.api_errors import unreachable
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.direct_runs import DirectRuns
from orchestrator.backends.kubernetes.observer import LastReport, save_last_report
from orchestrator.backends.kubernetes.record import KubernetesRecord
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.planner.elastic.replan import replan
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import ask, newest
from orchestrator.run.request import read_request
from orchestrator.run.state import read_state
from tests.beds.bundles import make_bundle, refusal
from tests.beds.plans import make_plan
from tests.patience import wait_for

from .test_watching import job, pod, state, write_state


class Api:
    """Stands for an API server: one Job with two pods."""

    namespace = "n"

    def __init__(self, answers: bool = True):
        self.answers = answers
        self.there = True
        self.ended = []

    def get(self, kind, name):
        return job() if kind == "Job" and self.there else None

    def list(self, kind, *_, **__):
        if not self.answers:
            raise unreachable("https://10.0.0.1:6443", OSError("refused"))
        pods = [
            pod(index, labels={"orch.dev/run": "r"}, creationTimestamp="2027-01-15T08:00:00Z")
            for index in (0, 1)
        ]
        return {"Job": [job()], "Pod": pods}.get(kind, []) if self.there else []

    def delete(self, kind, name, *_, **__):
        self.ended.append(name)
        self.there = self.there and kind != "Job"

    def log(self, *_, **__):
        return iter(())


def run_of(
    api: Api, path: Path, monkeypatch, sent: bool = True
) -> tuple[RunFolder, KubernetesBackend]:
    folder = RunFolder(path / "r")
    backend = KubernetesBackend()
    folder.create()
    write_state(folder, state("running", 1))
    write_record(folder, KubernetesRecord(None, "n", "Job", "r", "s", 0.0, sent=sent))
    monkeypatch.setattr(backend, "_cluster", lambda context, namespace: api)
    return folder, backend


# ------------------------------------------------------------------------------------------ a full
#     disk


@pytest.fixture(
    params=[errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO], ids=errno.errorcode.get
)
def full_disk(request, monkeypatch):
    """A function: once it was called, no file of this process takes its content."""

    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    return lambda: monkeypatch.setattr(os, "replace", refuse)


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_keeps_nobody_from_ending_a_run(
    tmp_path, monkeypatch, capsys, full_disk, force
):
    api = Api()
    folder, backend = run_of(api, tmp_path, monkeypatch)
    full_disk()
    assert backend.state(folder).state == "running"
    backend.cancel(folder, force)
    assert api.ended == (["r", "r-0-x", "r-1-x"] if force else ["r"])
    assert "the run is ended all the same" in capsys.readouterr().err
    assert not backend.is_alive(folder)
    assert backend.state(folder).state == "cancelled"


def test_a_full_disk_and_no_answer_is_no_end(tmp_path, monkeypatch, full_disk):
    folder, backend = run_of(Api(answers=False), tmp_path, monkeypatch)
    full_disk()
    with refusal("no answer", Exit.CAPACITY):
        backend.cancel(folder, force=True)


# ------------------------------------------------------------------------------------------ resize
#     and resume


class Sent(DirectRuns):
    """Keeps what would be sent; `meanwhile` is called before that."""

    def __init__(self, api: Api):
        self.api = api
        self.sent = []
        self.meanwhile = lambda: None
        super().__init__(
            lambda context, namespace: api, lambda: KubernetesBackend()._observer, lambda: None
        )

    def is_alive(self, folder, record):
        return self.api.there

    def _send(self, folder, request, plan, environ, generation, drafts):
        self.meanwhile()
        self.sent.append((len(request.agents), plan, generation))
        write_record(
            folder,
            KubernetesRecord(None, "n", "Job", "r", "s", 0.0, generation=generation, sent=True),
        )
        self.api.there = True


@pytest.fixture
def elastic(tmp_path) -> tuple[RunFolder, Sent, dict[int, Plan]]:
    """A run of four nodes that may have two or one."""
    plans = {}
    for nodes in (4, 2, 1):
        plan = make_plan(dp=nodes, nodes=nodes, micro_batches=4 // nodes)
        plans[nodes] = replan(plan, plan.cluster)
    backend = {"name": "kubernetes", "options": {"image": "x"}}
    with create_run_folder(
        make_bundle(plans[4], tmp_path, run_id="r", backend=backend, sizes=plans), "kubernetes"
    ) as f:
        write_record(f, KubernetesRecord(None, "n", "Job", "r", "s", 0.0, sent=True))
    return f, Sent(Api()), plans


def in_force(folder: RunFolder) -> tuple[int, str, str, str]:
    request = read_request(folder)
    plan = load_plan(folder.plan)
    return len(request.agents), request.plan_hash, plan.hash, read_state(folder).plan_hash


def one(plan: Plan, nodes: int) -> tuple[int, str, str, str]:
    return nodes, plan.hash, plan.hash, plan.hash


@pytest.mark.parametrize("nodes", [2, 1])
def test_a_size_whose_command_died_is_taken_up_by_the_next_one(elastic, nodes):
    folder, runs, plans = elastic
    ask(folder, "run", nodes=nodes)
    runs.api.there = False
    record = KubernetesRecord(None, "n", "Job", "r", "s", 0.0, sent=True)
    runs.resume(folder, read_request(folder), record, {})
    assert runs.sent == [(nodes, plans[nodes], 1)]
    assert in_force(folder) == one(plans[nodes], nodes)
    runs.api.there = False
    runs.resume(folder, read_request(folder), record, {})  # and once
    assert runs.sent[1:] == [(nodes, plans[nodes], 2)]


def test_of_two_resizes_at_once_the_later_one_counts_whole(elastic):
    folder, runs, plans = elastic
    first = threading.Thread(target=runs.resize, args=(folder, read_request(folder), None, 2, {}))
    second = threading.Thread(target=runs.resize, args=(folder, read_request(folder), None, 1, {}))

    def ask_again() -> None:
        runs.meanwhile = lambda: None
        second.start()
        wait_for(lambda: newest(folder).nodes == 1, 60, "the second request")

    runs.meanwhile = ask_again
    first.start()
    first.join(60)
    second.join(60)
    assert [sent[0] for sent in runs.sent] == [2, 1]
    assert in_force(folder) == one(plans[1], 1)


def test_a_resize_that_was_cancelled_meanwhile_starts_nothing(elastic):
    folder, runs, plans = elastic
    delete = runs.api.delete

    def cancelled(*arguments: object, **keywords: object) -> None:
        delete(*arguments, **keywords)
        if newest(folder).want != "end":
            ask(folder, "end")

    runs.api.delete = cancelled
    with refusal("has received a newer request: cancelled by the user", Exit.USAGE):
        runs.resize(folder, read_request(folder), None, 2, {})
    assert not runs.sent
    assert in_force(folder) == one(plans[4], 4)


def test_a_run_that_a_command_is_starting_is_not_started_twice_and_can_be_ended(elastic):
    folder, runs, _ = elastic
    runs.api.there = False
    record = KubernetesRecord(None, "n", "Job", "r", "s", 0.0)

    def meanwhile() -> None:
        with refusal("another command is starting run r", Exit.CAPACITY):
            runs.resume(folder, read_request(folder), record, {})
        runs.cancel(folder, record, force=False)

    runs.meanwhile = meanwhile
    runs.resume(folder, read_request(folder), record, {})
    assert len(runs.sent) == 1
    assert newest(folder).want == "end"


def test_what_pods_say_does_not_forget_what_was_asked(tmp_path, monkeypatch):
    """They know nothing of requests, which lie on the submitter's machine."""
    folder, _ = run_of(Api(), tmp_path, monkeypatch)
    write_state(folder, structs.replace(state("running", 1), intent=3))
    save_last_report(folder, LastReport(state("running", 5)))
    assert (read_state(folder).epoch, read_state(folder).intent) == (5, 3)
