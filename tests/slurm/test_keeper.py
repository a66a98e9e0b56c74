"""Who keeps an agent on a node of a Slurm job: a small process, here with a program of the test's for an agent."""

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
from orchestrator.plan import Exit
from tests.agent.test_coordinator import PLAN, make_folder
from tests.beds.bundles import make_bundle, wait_for

pytestmark = pytest.mark.process

#: Appends a line to the first file for each life, and ends as the words after it say, life by life.
AGENT = """
import os, sys, time
with open(sys.argv[1], "a") as lives:
    print(os.getpid(), file=lives)
word = sys.argv[2:][len(open(sys.argv[1]).readlines()) - 1]
if word == "stay":
    for line in iter(sys.stdin.readline, ""):
        open(sys.argv[1].replace("lives", "heard"), "w").write(line)
    open(sys.argv[1].replace("lives", "heard"), "w").write("the end")  # its keeper is gone
    sys.exit(5)
if word.startswith("-"):
    os.kill(os.getpid(), -int(word))
    time.sleep(60)
sys.exit(int(word))
"""
KEEPER = """
import sys
from pathlib import Path
from orchestrator.backends.slurm.job import agent_supervisor as keeper
keeper._AGAIN_S = 0.01
over = Path(sys.argv[1]).with_name("over")
sys.exit(keeper.keep([sys.executable, "-c", *sys.argv[2:3], sys.argv[1], *sys.argv[3:]], over.exists, 2))
"""


def keeping(lives: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", KEEPER, str(lives), AGENT, *words], stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("-9", "77", "77", "-11", "0"), 0),  # killed, fenced twice, killed, done
        (("-9", "-9", "-9", "0"), 128 + 9),  # twice and no more
        (("76", "0"), Exit.CAPACITY),  # it left by itself
    ],
)
def test_an_agent_that_was_killed_or_fenced_comes_back_and_one_that_left_does_not(tmp_path, words, code):
    lives = tmp_path / "lives"
    assert keeping(lives, *words).wait(300) == code
    ends = words.index(str(int(code))) + 1 if code < 128 else 3
    assert len(lives.read_text().splitlines()) == ends


def test_none_comes_back_when_the_run_is_over(tmp_path):
    (tmp_path / "over").touch()
    assert keeping(tmp_path / "lives", "-9", "0").wait(300) == 128 + 9
    assert len((tmp_path / "lives").read_text().splitlines()) == 1


@pytest.mark.parametrize("how", ["told", "killed"])
def test_a_notice_to_the_keeper_reaches_the_agent_and_none_outlives_its_keeper(tmp_path, how):
    lives, heard = tmp_path / "lives", tmp_path / "heard"
    keeper = keeping(lives, "stay", "0")
    agent = int(wait_for(lambda: lives.exists() and lives.read_text(), 120, "the agent"))
    if how == "told":  # where Slurm has told the agent as well, it takes both for one
        keeper.send_signal(signal.SIGUSR1)
        wait_for(lambda: heard.exists() and heard.read_text() == "SIGUSR1\n", 120, "the notice")
        os.kill(agent, signal.SIGKILL)
        assert keeper.wait(300) == 128 + 9 and len(lives.read_text().splitlines()) == 1, "the next life is not wanted"
    else:
        keeper.kill()
        keeper.wait(300)
        wait_for(lambda: heard.exists() and heard.read_text() == "the end", 120, "the end of the agent")


def test_an_agent_that_hears_a_notice_from_its_keeper_and_from_slurm_takes_both_for_one(tmp_path):
    """Else it would kill the workers that are just saving. The next signal is somebody's impatience."""
    said = []

    class Channel:
        def send(self, epoch: int, notice: TerminationSignal) -> None:
            said.append(notice.force)

    async def main() -> None:
        folder = make_folder(tmp_path)
        request = make_bundle(PLAN, tmp_path / "elsewhere").request
        facts, recorder = NodeFacts("host", "127.0.0.1", 1, 2, 0), Recorder(folder, "node0", PLAN)
        connector = FixedCoordinator(folder, "node0", b"k" * 32, 1.0)
        agent = Agent(folder, PLAN, request, "node0", facts, recorder, None, connector)
        agent._channel = Channel()
        agent.terminate("got SIGTERM", insists=False)
        agent.terminate("got SIGTERM", insists=False)
        agent.terminate("got SIGTERM")
        agent.terminate("got SIGTERM")
        recorder.close()

    asyncio.run(main())
    assert said == [False, False, True]
