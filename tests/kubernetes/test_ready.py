"""What the tier does on a machine that does not have its programs: builds them, or says plainly why not."""

from __future__ import annotations

import pytest

from tests.beds.kubernetes import building, ready


@pytest.fixture
def machine(monkeypatch) -> dict:
    """One that can build, and has built nothing; a test changes what it is about."""
    has = {"uid": 0, "go": "/go", "free": 1e12, "refuses": None, "fails": None}
    has["left"] = list(building.PROGRAMS)

    def build(names: tuple[str, ...], seconds: float) -> str | None:
        has["left"].remove(*names)
        return has["fails"] if len(has["left"]) == 2 else None

    monkeypatch.setattr(building, "missing", lambda names: [name for name in names if name in has["left"]])
    monkeypatch.setattr(building, "build", build)
    monkeypatch.setattr(ready.os, "geteuid", lambda: has["uid"])
    monkeypatch.setattr(ready, "find", lambda name: has[name])
    monkeypatch.setattr(ready.shutil, "disk_usage", lambda path: ready.shutil._ntuple_diskusage(2e12, 0, has["free"]))
    monkeypatch.setattr(ready, "provide", lambda *packages: None)
    monkeypatch.setattr(ready, "refusal", lambda shape: has["refuses"])
    return has


def test_what_is_missing_is_built_with_a_line_for_each(machine, capsys):
    assert ready.why_not({}) is None
    assert not machine["left"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 * len(building.PROGRAMS)
    assert "builds kube-apiserver, 1 of 11" in said[0]


def test_nothing_is_said_where_all_is_there(machine, capsys):
    machine["left"].clear()
    assert ready.why_not({}) is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("lack", "says"),
    [
        ({"uid": 1000}, "only root"),
        ({"go": None}, "this machine has no Go"),
        ({"free": 1e9}, "takes 12 GB, of which 1 are free"),
        ({"refuses": "this root may not do what it takes (EPERM)"}, "EPERM"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_built(machine, lack, says):
    machine |= lack
    assert says in ready.why_not({})
    assert len(machine["left"]) == len(building.PROGRAMS)


def test_a_build_that_fails_is_the_reason_and_the_switch_is_too(machine):
    machine["fails"] = "go build k8s.io/x: no network"
    assert ready.why_not({}) == "go build k8s.io/x: no network"
    assert ready.why_not({ready.SWITCH: "0"}) == "ORCH_TEST_KUBERNETES=0"
