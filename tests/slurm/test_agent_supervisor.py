"""The agent supervisor restarts an agent on its node. Its agent is here a program of the test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.agent.node.agent import Agent, NodeFacts
from orchestrator.agent.node.connection import FixedCoordinator
from orchestrator.agent.node.recorder import Recorder
from orchestrator.agent.protocol.messages import TerminationSignal
from orchestrator.backends.slurm.job.agent_supervisor import FORWARDED_SIGNAL
from orchestrator.plan import Exit
from tests.beds.bundles import make_bundle, wait_for
from tests.beds.coordinated import PLAN, make_folder

pytestmark = pytest.mark.process

#: Appends a line to the first file at each start, and ends as the words after it say, one a start.
AGENT = """
import os, sys, time
with open(sys.argv[1], "a") as starts:
    print(os.getpid(), file=starts)
word = sys.argv[2:][len(open(sys.argv[1]).readlines()) - 1]
if word == "stay":
    for line in iter(sys.stdin.readline, ""):
        open(sys.argv[1].replace("starts", "received"), "w").write(line)
    open(sys.argv[1].replace("starts", "received"), "w").write("the end")  # its supervisor is gone
    sys.exit(5)
if word.startswith("-"):
    os.kill(os.getpid(), -int(word))
    time.sleep(60)
sys.exit(int(word))
"""
SUPERVISOR = """
import sys
from pathlib import Path
from orchestrator.backends.slurm.job import agent_supervisor
agent_supervisor._RESTART_DELAY_S = 0.01
ended = Path(sys.argv[1]).with_name("ended")
agent = [sys.executable, "-c", *sys.argv[2:3], sys.argv[1], *sys.argv[3:]]
sys.exit(agent_supervisor.supervise(agent, ended.exists, 2))
"""


def start_supervisor(starts: Path, *agent_argv: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(starts), AGENT, *agent_argv],
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("agent_argv", "code"),
    [
        (("-9", "77", "77", "-11", "0"), 0),  # killed, fenced twice, killed, done
        (("-9", "-9", "-9", "0"), 128 + 9),  # twice and no more
        (("76", "0"), Exit.CAPACITY),  # it left by itself
    ],
)
def test_an_agent_that_was_killed_or_fenced_is_restarted_and_one_that_exited_is_not(
    tmp_path, agent_argv, code
):
    starts = tmp_path / "starts"
    assert start_supervisor(starts, *agent_argv).wait(300) == code
    ends = agent_argv.index(str(int(code))) + 1 if code < 128 else 3
    assert len(starts.read_text().splitlines()) == ends


def test_none_is_restarted_when_the_run_has_ended(tmp_path):
    (tmp_path / "ended").touch()
    assert start_supervisor(tmp_path / "starts", "-9", "0").wait(300) == 128 + 9
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


@pytest.mark.parametrize("stop_method", ["signal", "notice", "kill"])
def test_the_agent_receives_the_supervisors_signal_and_does_not_outlive_it(tmp_path, stop_method):
    starts = tmp_path / "starts"
    received = tmp_path / "received"
    supervisor = start_supervisor(starts, "stay", "0")
    agent = int(wait_for(lambda: starts.exists() and starts.read_text(), 120, "the agent"))
    if stop_method != "kill":
        sent = signal.SIGUSR1 if stop_method == "signal" else FORWARDED_SIGNAL
        supervisor.send_signal(sent)
        wait_for(
            lambda: received.exists() and received.read_text() == f"{sent.name}\n",
            120,
            "the signal",
        )
        os.kill(agent, signal.SIGKILL)
        assert supervisor.wait(300) == 128 + 9 and len(starts.read_text().splitlines()) == 1, (
            "no restart is wanted"
        )
    else:
        supervisor.kill()
        supervisor.wait(300)
        wait_for(
            lambda: received.exists() and received.read_text() == "the end",
            120,
            "the end of the agent",
        )


def test_a_signal_from_slurm_and_from_the_supervisor_counts_once(tmp_path):
    """Else it would kill the workers that are just saving. The next signal is somebody's
    impatience."""
    sent = []

    class Channel:
        def send(self, epoch: int, notice: TerminationSignal) -> None:
            sent.append(notice.force)

    async def main() -> None:
        folder = make_folder(tmp_path)
        request = make_bundle(PLAN, tmp_path / "elsewhere").request
        facts = NodeFacts("host", "127.0.0.1", 1, 2, 0)
        recorder = Recorder(folder, "node0", PLAN)
        connector = FixedCoordinator(folder, "node0", b"k" * 32, 1.0)
        agent = Agent(folder, PLAN, request, "node0", facts, recorder, None, connector)
        agent._channel = Channel()
        agent.terminate("got SIGTERM", can_force=False)
        agent.terminate("got SIGTERM", can_force=False)
        agent.terminate("got SIGTERM")
        agent.terminate("got SIGTERM")
        recorder.close()

    asyncio.run(main())
    assert sent == [False, False, True]
