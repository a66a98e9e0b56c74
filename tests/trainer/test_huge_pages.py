"""Memory in huge pages is the same memory, and what else a process has mapped is left alone."""

import mmap
from pathlib import Path

import pytest
import torch

from trainer import huge_pages


def test_only_whole_huge_pages_of_private_memory_without_a_file(monkeypatch):
    maps = (
        # three whole ones, without the ragged ends
        "7f0000100000-7f0000900000 rw-p 00000000 00:00 0 \n"
        "7f0001000000-7f0001100000 rw-p 00000000 00:00 0 \n"  # smaller than one
        "7f0002000000-7f0002400000 r--p 00000000 00:00 0 \n"
        "7f0003000000-7f0003400000 rw-p 00000000 08:01 77 /a file (deleted)\n"
        "555500000000-555500400000 rw-p 00000000 00:00 0 [heap]\n"
        "7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0 [stack]\n"
    )
    monkeypatch.setattr(huge_pages.Path, "read_text", lambda self: maps)
    assert list(huge_pages._anonymous()) == [(0x7F0000200000, 3 << 21), (0x555500000000, 2 << 21)]


def test_contents_survive(monkeypatch):
    block = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(block), 4096):
        block[at : at + 8] = at.to_bytes(8, "little")
    monkeypatch.setattr(huge_pages, "_LEAST_BYTES", 0)
    huge_pages.collapse()
    assert all(block[at : at + 8] == at.to_bytes(8, "little") for at in range(0, len(block), 4096))
    monkeypatch.setattr(huge_pages, "_LEAST_BYTES", 1 << 62)
    assert huge_pages.collapse() == 0


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages"
)
def test_a_large_block_asks_for_them():
    block = huge_pages.prefer_huge_pages(torch.empty(8 << 20, dtype=torch.uint8))
    middle = block.data_ptr() + (4 << 20)
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *values = line.split()
        if "-" in field:
            begin, end = (int(address, 16) for address in field.split("-"))
        elif field == "VmFlags:" and begin <= middle < end:
            break
    assert "hg" in values
