"""Runs the agent of an elastic run as a child process, and restarts it if it crashes while its node
survives.

Slurm sees one task that keeps running, so no new step is needed and the job does not end. Depending
on the site, Slurm signals this process alone (proctrack/cgroup) or the agent too
(proctrack/linuxproc, pgid). Signals are therefore forwarded over the agent's standard input, where
a signal that arrives both ways counts once: a second signal would mean "at once".
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
#: The signal by which the script asks agents to save and stop. Other processes ignore it by
#: default, so the children of workers live until the workers have saved (orchestrator/agent).
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
    """Runs the agent `argv` to its last exit.

    Returns its exit code, 128 + the signal's number if it was killed. A killed agent is restarted
    at most `max_restarts` times. An agent that was fenced (its node was frozen or cut off, and has
    recovered) is always restarted, and joins as a newcomer. No agent is restarted when the run has
    ended or after a termination signal. The agent's standard input is its lifeline: the agent exits
    when this process does.
    """
    received: list[bytes] = []
    lifeline: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(signal.Signals(number).name.encode())
        for descriptor in lifeline:
            with contextlib.suppress(OSError):
                os.write(descriptor, received[-1] + b"\n")

    # handlers, because the agent would inherit SIG_IGN
    for number in _TERMINATION_SIGNALS:
        signal.signal(number, forward)
    killed = 0
    while True:
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as agent:
            assert agent.stdin
            lifeline[:] = [agent.stdin.fileno()]
            if received:  # the signal came before the agent had started
                forward(signal.SIGTERM, None)
            code = agent.wait()
            lifeline.clear()
        killed += code < 0
        if code < 0:
            restart = killed <= max_restarts
            exit_code = 128 - code
        else:
            restart = code == Exit.FENCED
            exit_code = code
        if received or not restart or run_ended():
            return exit_code
        print(f"orch: the agent ended with {code}: restarting it", flush=True)
        time.sleep(_RESTART_DELAY_S)
