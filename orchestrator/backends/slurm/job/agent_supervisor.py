"""Runs the agent of an elastic run as a child process and restarts it if it crashes while its node
survives.

Slurm sees one task that keeps running, so no new step is needed and the job does not end. Depending
on the site, Slurm signals this process alone (proctrack/cgroup) or the agent too
(proctrack/linuxproc, pgid). Signals are therefore forwarded over the agent's standard input, where
one that arrives both ways counts once: a second would mean "at once".
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from orchestrator.plan import Exit

_RESTART_DELAY_S = 1.0
#: By default it is ignored, so that children of workers live until the workers have saved
#: (orchestrator/agent).
FORWARDED_SIGNAL = signal.SIGURG
_TERMINATION_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    FORWARDED_SIGNAL,
)


def supervise(argv: Sequence[str], run_ended: Callable[[], bool], max_restarts: int) -> int:
    """Run the agent `argv` to its last exit; returns its exit code, 128 + the signal's number if it
    was killed.

    A killed agent is restarted at most `max_restarts` times. One that was fenced (its node was
    frozen or cut off, and has recovered) is always restarted, and joins as a newcomer. None is
    restarted when the run has ended or after a termination signal. The agent's standard input is
    its lifeline: it exits when this process does.
    """
    received: list[bytes] = []
    lifeline: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(signal.Signals(number).name.encode())
        for descriptor in lifeline:
            with contextlib.suppress(OSError):
                os.write(descriptor, received[-1] + b"\n")

    for number in _TERMINATION_SIGNALS:  # handlers, because the agent would inherit SIG_IGN
        signal.signal(number, forward)
    killed = 0
    while True:
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as agent:
            assert agent.stdin
            lifeline[:] = [agent.stdin.fileno()]
            if received:  # before the agent had started
                forward(signal.SIGTERM, None)
            code = agent.wait()
            lifeline.clear()
        killed += code < 0
        restart = killed <= max_restarts if code < 0 else code == Exit.FENCED
        if received or not restart or run_ended():
            return code if code >= 0 else 128 - code
        print(f"orch: the agent ended with {code}, it is started again", flush=True)
        time.sleep(_RESTART_DELAY_S)
