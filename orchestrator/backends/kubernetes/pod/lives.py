"""How process 1 of a pod meets the others again, in place, when the run has stopped for the loss of
another pod.

The Job would make this pod anew, but a Job's controller waits longer each time: 10 s after a pod
has failed, then twice as long, up to ten minutes, and it forgets nothing while pods run, whether
its rules ignore the failure or not (Kubernetes 1.35, pkg/controller/job/backoff_utils.go). So only
the pod that was lost is made anew; the others become a new image of the same process, with nothing
left of the attempt before.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from msgspec import Struct

_SHORT_S = 60.0  # an attempt that lasts no longer has come to nothing
# of them, one after the other; then the pod is given back, and the Job makes another one
_MOST_SHORT = 5
_COUNT = "ORCH_SHORT_ATTEMPTS"


class PeersLost(Exception):
    """The agent has ended, for a new attempt, and nobody has asked this pod to leave."""

    def __init__(self, text: str, lasted_s: float):
        super().__init__(text)
        self.text = text
        self.lasted_s = lasted_s


class Beginning(Struct, frozen=True):
    """How this process was started."""

    environ: dict[str, str]
    folder: str

    @classmethod
    def of_this_process(cls) -> Beginning:
        return cls(dict(os.environ), os.getcwd())

    def short_attempts(self, lost: PeersLost) -> int:
        """How many attempts in a row came to nothing in this pod, with the one that `lost` has
        ended."""
        before = self.environ.get(_COUNT, "0")
        return (int(before) if before.isdigit() else 0) + 1 if lost.lasted_s < _SHORT_S else 0

    def may_go_on(self, lost: PeersLost) -> bool:
        return self.short_attempts(lost) < _MOST_SHORT

    def again(self, lost: PeersLost) -> NoReturn:
        """Signals that are blocked stay so, and those that have come meanwhile wait."""
        os.chdir(self.folder)
        environ = self.environ | {_COUNT: str(self.short_attempts(lost))}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
