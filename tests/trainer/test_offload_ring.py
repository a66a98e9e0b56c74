"""Records that pass through a bounded buffer: a taken record is as it was given back, in any ring;
failures arrive."""

from __future__ import annotations

import errno
import os
import random
import time

import pytest
import torch

from orchestrator.plan.offload import BLOCK
from trainer.errors import DiskError
from trainer.host.file import PART, Requests, StateFile
from trainer.host.memory import HostMemory
from trainer.host.ring import Record, Ring


def ring_of(folder, records: int, slots: int) -> Ring:
    file = StateFile(folder, records * BLOCK, Requests())
    host = HostMemory(torch.device("cpu"))
    file_records = [Record(at * BLOCK, BLOCK) for at in range(records)]
    return Ring(file, file_records, [host.blocks(BLOCK) for _ in range(slots)])


def slow(monkeypatch) -> None:
    """Writes and reads take unequally long, so that they overtake each other where they may."""
    write = os.pwritev
    read = os.preadv
    chance = random.Random(1)

    def late(call):
        def wait(*args):
            time.sleep(chance.random() * 2e-3)
            return call(*args)

        return wait

    monkeypatch.setattr(os, "pwritev", late(write))
    monkeypatch.setattr(os, "preadv", late(read))


@pytest.mark.parametrize(
    ("records", "slots"), [(1, 4), (3, 4), (4, 4), (5, 4), (6, 4), (9, 4), (5, 1)]
)
def test_each_round_finds_what_the_round_before_left(tmp_path, monkeypatch, records, slots):
    ring = ring_of(tmp_path, records, slots)
    slow(monkeypatch)
    for round_ in range(4):
        if round_ % 2:
            ring.read_ahead()
        for record in range(records):
            slot = ring.take()
            assert slot[0] == round_ and (round_ == 0 or slot[1] == record)
            slot[1].fill_(record)
            ring.give_back(lambda slot=slot: slot[0].add_(1) and None)
        if round_ == 2:
            ring.settle()
    ring.settle()
    assert ring.file.mapped().view(records, BLOCK)[:, 0].tolist() == [4] * records


def go_on(ring: Ring) -> None:
    for _ in range(len(ring.records)):
        ring.take()
        ring.give_back(lambda: None)


@pytest.mark.parametrize("arrives", [go_on, Ring.settle])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_request_that_fails_behind_arrives_in_the_next_round_or_in_settle(
    tmp_path, monkeypatch, call, arrives
):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ring = ring_of(tmp_path, 3, 2)
    ring.take()
    monkeypatch.setattr(os, call, fail)
    ring.give_back(lambda: None)
    with pytest.raises(DiskError, match="Input/output error"):
        arrives(ring)


def test_what_was_changed_in_the_file_after_settling_is_what_comes_next(tmp_path):
    ring = ring_of(tmp_path, 3, 2)
    ring.read_ahead()
    ring.settle()
    mapped = ring.file.mapped()
    mapped.fill_(7)
    del mapped
    assert ring.take().unique().tolist() == [7]


@pytest.mark.parametrize("size", [1, PART - 1, PART, 3 * PART + 5])
def test_pages_are_read_and_written_as_their_tensor_is(tmp_path, size):
    """Reads and writes take several requests, begin at any element, and make no copy between the
    two."""
    host = HostMemory(torch.device("cpu"), weights=tmp_path)
    pages = host.device_zeros(size + 9, torch.uint8)
    start = 7
    data = (torch.arange(size) % 251).to(torch.uint8)
    host.write(data, pages[start : start + size])
    assert torch.equal(pages[start : start + size], data) and not pages[:start].any()
    pages[start] = 99
    loaded = torch.zeros_like(data)
    host.read(pages[start : start + size], loaded)
    assert loaded[0] == 99 and torch.equal(loaded[1:], data[1:])


def test_the_space_of_pages_is_free_again_with_their_tensor(tmp_path):
    host = HostMemory(torch.device("cpu"), weights=tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    pages = host.device_zeros(BLOCK, torch.float32)
    view = pages[5:]
    del pages
    assert len(os.listdir("/proc/self/fd")) > before
    del view
    assert len(os.listdir("/proc/self/fd")) == before
