"""Leases of epochs: one holder each, whoever races; an older holder finds out."""

from __future__ import annotations

import multiprocessing

import msgspec
import pytest

from orchestrator.run.epoch_lease import EpochLease, LeaseFile, LeaseLost
from orchestrator.run.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_the_newest_claim_holds(folder):
    old = EpochLease(folder, "node0")
    new = EpochLease(folder, "node1")
    assert new.newest == -1
    old.take(0)
    old.check()
    with pytest.raises(LeaseLost):
        new.take(0)
    new.take(1)
    with pytest.raises(LeaseLost, match="epoch 1 is leased to another node, this is 0"):
        old.check()
    with pytest.raises(LeaseLost):
        old.take(1)
    claim = msgspec.json.decode((folder.path / "claims" / "1").read_bytes(), type=LeaseFile)
    assert (claim.epoch, claim.node) == (1, "node1")
    assert sorted(path.name for path in (folder.path / "claims").iterdir()) == ["0", "1"]


def test_a_claim_below_the_newest_is_worthless(folder):
    EpochLease(folder, "node0").take(5)
    late = EpochLease(folder, "node1")
    with pytest.raises(LeaseLost):
        late.take(4)
    with pytest.raises(LeaseLost):
        late.check()


def _race(path, node, start):
    """LeaseFile a hundred epochs in a row against the others; leave the list of those that were
    won."""
    claims = EpochLease(RunFolder(path), node)
    won = []
    start.wait(300)
    for epoch in range(100):
        try:
            claims.take(epoch)
        except LeaseLost:
            if claims.held != epoch:  # else it was won, and somebody has claimed the next one since
                continue
        won.append(epoch)
    (path / f"won-{node}").write_bytes(msgspec.json.encode(won))


@pytest.mark.process
def test_of_many_who_race_one_wins_each_epoch(folder):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    racers = [
        context.Process(target=_race, args=(folder.path, f"node{i}", start)) for i in range(4)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(300)
        assert racer.exitcode == 0
    won = [
        epoch
        for path in folder.path.glob("won-*")
        for epoch in msgspec.json.decode(path.read_bytes())
    ]
    assert sorted(won) == list(range(100))
