"""An agent in a process of its own, which is started again where it died and its node did not.

Slurm sees one task, which lives on: so it need not be asked for another step, and has no reason to end the job. What
Slurm signals to a step reaches this process alone (proctrack/cgroup) or the agent too (proctrack/linuxproc, pgid). So
it is passed on by the agent's standard input, where it is heard as the same wish and not as a second, impatient one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from orchestrator.plan import Exit

_AGAIN_S = 1.0
_NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def keep(argv: Sequence[str], is_over: Callable[[], bool], most: int) -> int:
    """The exit code of the last agent; 128 and the signal's number where it was killed.

    It comes back, as a newcomer, at most `most` times after it was killed, and always when it was fenced (frozen or cut
    off, and well again); not when the run is over or somebody wants its end. Its standard input is a lifeline: it ends
    with this process.
    """
    told: list[bytes] = []
    lifeline: list[int] = []

    def tell(number: int, _: object) -> None:
        told.append(signal.Signals(number).name.encode())
        for descriptor in lifeline:
            with contextlib.suppress(OSError):
                os.write(descriptor, told[-1] + b"\n")

    for number in _NOTICES:  # handlers, not SIG_IGN: that the agent would inherit
        signal.signal(number, tell)
    killed = 0
    while True:
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as agent:
            lifeline[:] = [agent.stdin.fileno()]
            if told:  # before there was anybody to tell
                tell(signal.SIGTERM, None)
            code = agent.wait()
            lifeline.clear()
        killed += code < 0
        again = killed <= most if code < 0 else code == Exit.FENCED
        if told or not again or is_over():
            return code if code >= 0 else 128 - code
        print(f"orch: the agent ended with {code}, it is started again", flush=True)
        time.sleep(_AGAIN_S)
