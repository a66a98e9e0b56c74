"""Memory in pages of 2 MiB instead of 4 KiB.

Large blocks cost less: the system maps them in 512 times fewer steps. Forks cost less: a process in
huge pages copies hundreds of page table entries instead of 200,000. `import torch` leaves 300 MB of
private memory, a long test run 1 GB. With small pages a fork and exit cost 60 ms of kernel time per
GB, with huge ones a quarter; the full verify matrix forks thousands of ranks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

_HUGE = 1 << 21
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1; older kernels return EINVAL
_LEAST_BYTES = 192 << 20  # on small pages, for which a move pays


def collapse() -> int:
    """Moves the memory of this process into huge pages if enough of it is on small ones, and
    returns the bytes moved. Does nothing on a system without support."""
    if _small() < _LEAST_BYTES:
        return 0
    return sum(size for start, size in _anonymous() if _madvise()(start, size, _MADV_COLLAPSE) == 0)


def prefer_huge_pages(block: Tensor) -> Tensor:
    """Asks the system for huge pages under a tensor that is about to be written, if it is in host
    memory and has at least one; returns the tensor. Does nothing on a system without support."""
    is_real = type(block) is Tensor  # a fake tensor, of a subclass, has no memory
    if block.device.type != "cpu" or not is_real:
        return block
    start = -(-block.data_ptr() // _HUGE) * _HUGE
    end = (block.data_ptr() + block.nbytes) // _HUGE * _HUGE
    if start < end:
        _madvise()(start, end - start, _MADV_HUGEPAGE)
    return block


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    """Returns the C library's `madvise`."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def _small() -> int:
    """Returns the bytes of anonymous memory on small pages."""
    try:
        lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    except OSError:
        return 0
    sizes = {fields[0]: int(fields[1]) << 10 for fields in lines if fields[-1] == "kB"}
    return sizes.get("Anonymous:", 0) - sizes.get("AnonHugePages:", 0)


def _anonymous() -> Iterator[tuple[int, int]]:
    """Yields (first byte, size) of the ranges of private anonymous memory that can be huge
    pages."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        if rights == "rw-p" and path in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            start = -(-start // _HUGE) * _HUGE
            end = end // _HUGE * _HUGE
            if start < end:
                yield start, end - start
