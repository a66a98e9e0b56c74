"""A submission that was killed between its first object and its Job: what it left is found, named
and deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from orchestrator.backends.base import write_record
from orchestrator.backends.kubernetes.api.api_errors import unreachable
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.names import SUBMISSION
from orchestrator.backends.kubernetes.record import KubernetesRecord
from orchestrator.backends.kubernetes.submission import apply_all
from orchestrator.plan import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import newest
from tests.beds.bundles import refusal

from .test_watching import state, write_state

KINDS = ("Secret", "ConfigMap", "Service")


class Api:
    """Stands for an API server: objects by kind and name."""

    def __init__(self, submissions: dict[str, str], answers: bool = True):
        self.objects = {(kind, "r"): note for kind, note in submissions.items()}
        self.answers = answers

    def get(self, kind, name):
        note = self.objects.get((kind, name))
        return (
            None
            if note is None
            else {"metadata": {"name": name, "annotations": {SUBMISSION: note}}}
        )

    def list(self, kind, *_, **__):
        if not self.answers:
            raise unreachable("https://10.0.0.1:6443", OSError("refused"))
        return []

    def delete(self, kind, name, *_):
        return self.objects.pop((kind, name), None) is not None

    def log(self, *_, **__):
        return iter(())


def backend_with(api: Api, path: Path, monkeypatch, submission: str = "s", age_s: float = 600.0):
    folder = RunFolder(path / "r")
    backend = KubernetesBackend()
    folder.create()
    write_state(folder, state("pending", -1))
    write_record(folder, KubernetesRecord(None, "n", "Job", "r", submission, time.time() - age_s))
    monkeypatch.setattr(backend, "_cluster", lambda context, namespace: api)
    return folder, backend


def test_status_ends_it_and_deletes_what_it_left(tmp_path, monkeypatch):
    api = Api(dict.fromkeys(KINDS, "s"))
    folder, backend = backend_with(api, tmp_path, monkeypatch)
    run_state = backend.state(folder)
    assert (run_state.state, api.objects) == ("stopped", {})
    assert (
        "broke off before the Job was sent; deleted what it left: Service r, ConfigMap r, Secret r"
        in run_state.reason
    )


def test_cancel_deletes_what_it_left_at_once(tmp_path, monkeypatch):
    api = Api(dict.fromkeys(KINDS, "s"))
    folder, backend = backend_with(api, tmp_path, monkeypatch, age_s=1.0)
    backend.cancel(folder, force=False)
    assert (backend.state(folder).state, api.objects) == ("cancelled", {})
    with refusal("is not running", Exit.USAGE):
        backend.cancel(folder, force=False)


@pytest.mark.parametrize(
    ("submission", "age_s", "theirs"),
    [("s", 5.0, "s"), ("", 600.0, "s"), ("s", 600.0, "other")],
    ids=["being sent", "rendered for GitOps", "somebody else's"],
)
def test_what_is_not_a_remain_stays(tmp_path, monkeypatch, submission, age_s, theirs):
    api = Api(dict.fromkeys(KINDS, theirs))
    folder, backend = backend_with(api, tmp_path, monkeypatch, submission, age_s)
    backend.state(folder)
    assert len(api.objects) == len(KINDS)


def test_a_submitter_that_only_stands_still_keeps_what_it_has_sent(tmp_path, monkeypatch):
    """It holds the run's lock, and goes on to the Job some day; who cancels the run leaves that to
    it."""
    api = Api(dict.fromkeys(KINDS, "s"))
    folder, backend = backend_with(api, tmp_path, monkeypatch)
    lock = folder.take_lock()
    assert backend.state(folder).state == "pending"
    backend.cancel(folder, force=True)
    assert len(api.objects) == len(KINDS)
    assert newest(folder).want == "end"
    os.close(lock)
    assert (backend.state(folder).state, api.objects) == ("cancelled", {})


def test_a_server_that_is_cut_off_is_waited_for_once():
    """It is not waited for once more for each object that would be deleted; a refusal does clear up
    behind itself."""
    bodies = [
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": "r"}} for kind in (*KINDS, "Job")
    ]
    for silent, expected_kinds in ((True, ["Job"]), (False, ["Job", *reversed(KINDS)])):
        api = Api({})
        seen = []

        def get(kind, name, silent=silent, seen=seen):
            seen.append(kind)
            if silent:
                raise unreachable("https://10.0.0.1:6443", OSError("refused"))

        def apply(body, manager):
            if body["kind"] == "Job":
                raise unreachable("https://10.0.0.1:6443", OSError("refused"))
            return {}

        api.get = get
        api.apply = apply
        with refusal("no answer", Exit.CAPACITY):
            apply_all(api, bodies, "r", "s")
        assert seen == expected_kinds


def test_without_an_answer_nothing_is_known(tmp_path, monkeypatch):
    folder, backend = backend_with(Api({}, answers=False), tmp_path, monkeypatch)
    assert backend.state(folder).reason.startswith(
        "last known state: pending; unknown now: no answer"
    )
