"""Imports numpy for the planner, so that its BLAS wastes no processor time.

OpenBLAS starts a thread per core, and each would spin for 2^26 ticks, some 25 ms of a processor,
before it sleeps. Plans multiply no large matrices. Processes that this one starts do not inherit
the variable that forbids it.
"""

from __future__ import annotations

import os

__all__ = ["np"]

#: OpenBLAS reads this variable when it is loaded: its idle threads spin for 2^n ticks.
_SPIN = "OPENBLAS_THREAD_TIMEOUT"

_ours = _SPIN not in os.environ
if _ours:
    os.environ[_SPIN] = "4"  # the smallest value that it accepts
import numpy as np  # noqa: E402

if _ours:
    del os.environ[_SPIN]
