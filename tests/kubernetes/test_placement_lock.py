"""Submitters of one namespace: one at a time chooses, whatever their clocks say and however long
one of them stands."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from orchestrator.backends.kubernetes import placement_lock as module
from orchestrator.backends.kubernetes.placement_lock import placement_lock
from orchestrator.backends.kubernetes.submission import apply_all
from orchestrator.plan import Exit
from tests.beds.bundles import refusal
from tests.patience import PATIENCE_S, wait_for

from .test_half_submissions import KINDS
from .test_half_submissions import Api as Objects

NOW = module._now


class Api:
    """Stands for an API server: the Lease, with versions and preconditions."""

    namespace = "n"

    def __init__(self):
        self.lease: dict | None = None
        self.versions = itertools.count(1)
        self.lock = threading.Lock()

    def create(self, body):
        with self.lock:
            if self.lease is not None:
                return None
            number = str(next(self.versions))
            self.lease = {
                **body,
                "metadata": {**body["metadata"], "uid": f"u{number}", "resourceVersion": number},
            }
            return self.lease

    def get(self, kind, name):
        with self.lock:
            return self.lease

    def delete(self, kind, name, only=None):
        with self.lock:
            held = self.lease and (
                self.lease["metadata"]["uid"],
                self.lease["metadata"]["resourceVersion"],
            )
            if held is None or (only is not None and only != held):
                return False
            self.lease = None
            return True


def age(api: Api, seconds: float) -> None:
    """Another machine's clock is that much behind ours; or ahead."""
    at = datetime.now(UTC) - timedelta(seconds=seconds)
    api.lease["spec"]["acquireTime"] = at.isoformat(timespec="microseconds").replace("+00:00", "Z")


@pytest.mark.parametrize("seconds", [25.0, 3600.0, -3600.0])
def test_a_living_holder_is_not_overtaken_whatever_its_clock_says(seconds):
    api = Api()
    with placement_lock(api, "a") as check:
        age(api, seconds)
        holder = api.lease
        with (
            refusal("other submissions hold Lease", Exit.CAPACITY),
            placement_lock(api, "b", wait_s=0.5),
        ):
            pass
        assert api.lease is holder
        check()
    assert api.lease is None


def test_a_holder_that_stood_still_is_overtaken_sends_nothing_and_leaves_the_others_lease(
    monkeypatch,
):
    api = Api()
    with placement_lock(api, "a", lease_s=1) as check:
        age(api, -3600.0)  # its clock is an hour ahead: that does not keep it alive
        with placement_lock(api, "b") as check_other:
            monkeypatch.setattr(module, "_now", lambda: NOW() + 2.0)
            with refusal("suspended for .* s since its nodes were chosen", Exit.CAPACITY):
                check()
            check_other()
    assert api.lease is None


def test_of_many_waiters_on_a_dead_holder_s_lease_one_at_a_time_goes_on():
    api = Api()
    inside = []
    holder_counts = []
    done = []
    api.create({"metadata": {}, "spec": {"holderIdentity": "dead", "leaseDurationSeconds": 1}})

    def take(name: str) -> None:
        with placement_lock(api, name, wait_s=PATIENCE_S) as check:
            inside.append(name)
            holder_counts.append(len(inside))
            time.sleep(0.02)
            inside.remove(name)
            check()
        done.append(name)

    threads = [threading.Thread(target=take, args=(f"r{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(done) == 8, PATIENCE_S, "all of them")
    assert set(holder_counts) == {1}
    assert api.lease is None


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_submission_that_came_too_late_leaves_nothing(calls):
    """It is asked before each part of the objects, and once more when the Job is there."""
    api = Objects({})
    check_counter = itertools.count()
    bodies = [
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": "r"}} for kind in (*KINDS, "Job")
    ]

    def check() -> None:
        if next(check_counter) == calls:
            raise module.OrchError("suspended", Exit.CAPACITY)

    def apply(body, manager):
        api.objects[body["kind"], "r"] = "s"
        return {}

    api.apply = apply
    with refusal("suspended", Exit.CAPACITY):
        apply_all(api, bodies, "r", "s", check)
    assert not api.objects
