"""numpy, imported so that its BLAS wastes no processor time."""

from __future__ import annotations

import os
from importlib import import_module

_SPIN = "OPENBLAS_THREAD_TIMEOUT"  # read when OpenBLAS is loaded: its idle threads spin for 2^n ticks


def import_numpy() -> None:
    """To be called before the planner's modules are imported that stand on numpy.

    OpenBLAS starts a thread for each core, and each would spin for 2^26 ticks, some 25 ms of a processor, before it
    sleeps. Plans multiply no large matrices. The processes that this one starts do not inherit the variable.
    """
    if _SPIN not in os.environ:
        os.environ[_SPIN] = "4"  # the least that it takes
        import_module("numpy")
        del os.environ[_SPIN]
