"""How process 1 of a pod starts the next attempt in place when the run has stopped for the loss of
another pod.

The Job would replace this pod, but a Job's controller waits longer each time: 10 s after a pod has
failed, then twice as long, up to ten minutes, and it forgets nothing while pods run, whether its
rules ignore the failure or not (Kubernetes 1.35, pkg/controller/job/backoff_utils.go). So only the
lost pod is replaced; in each of the others process 1 replaces itself (execve), with nothing left of
the attempt before.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from msgspec import Struct

_SHORT_S = 60.0  # an attempt that lasts no longer has failed
# consecutive short attempts, after which the pod exits and the Job replaces it
_MOST_SHORT = 5
_COUNT = "ORCH_SHORT_ATTEMPTS"


class PeersLost(Exception):
    """The agent has ended for a new attempt, and this pod got no termination signal."""

    def __init__(self, reason: str, lasted_s: float):
        super().__init__(reason)
        self.reason = reason
        self.lasted_s = lasted_s


class ProcessStart(Struct, frozen=True):
    """How this process was started."""

    environ: dict[str, str]
    folder: str

    @classmethod
    def of_this_process(cls) -> ProcessStart:
        return cls(dict(os.environ), os.getcwd())

    def short_attempts(self, lost: PeersLost) -> int:
        """Counts the consecutive short attempts of this pod, the one that `lost` ended included."""
        if lost.lasted_s >= _SHORT_S:
            return 0
        count = self.environ.get(_COUNT, "0")
        return int(count) + 1 if count.isdigit() else 1

    def may_restart(self, lost: PeersLost) -> bool:
        return self.short_attempts(lost) < _MOST_SHORT

    def restart(self, lost: PeersLost) -> NoReturn:
        """Replaces this process by a new one (execve). Blocked signals stay blocked, and pending
        ones stay pending."""
        os.chdir(self.folder)
        environ = self.environ | {_COUNT: str(self.short_attempts(lost))}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
