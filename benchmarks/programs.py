"""One DDP program under `orch run` and torchrun, 2 nodes of 2 ranks: a worker killed, a node lost.

`python -m benchmarks.programs --trials N` makes each trial with a new job and writes it as a line
of `RESULTS`: seconds until the program steps again in a new attempt, of whatever size, and the load
average. torchrun is tried as it is and with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: else its
workers find in their store the addresses that those of the attempt before have left there (torch
2.15). `--page` prints the table of docs/programs.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.patience import PATIENCE_S

PROGRAM = Path(__file__).parents[1] / "tests" / "beds" / "programs" / "ddp.py"
RESULTS = Path(__file__).parent / "results" / "programs.jsonl"
STEPS = 400
STEP_S = 0.25
#: How long a trial waits for the steps after its fault; a job that has not stepped before it is no
#: trial.
TRIAL_LIMIT_S = 120.0


class Step(NamedTuple):
    at: float  # Unix seconds
    step: int
    ranks: int
    loss: float


class Launcher:
    """One program in a folder of its own, with so many ranks on each of two nodes; subclasses start
    it."""

    def __init__(self, home: Path, ranks_per_node: int = 2):
        self.home = home
        self.ranks_per_node = ranks_per_node
        home.mkdir(parents=True)
        self.argv = [str(PROGRAM), str(STEPS), str(home), str(STEP_S)]
        self.environment = {**os.environ, "ORCH_HOME": str(home / "orch"), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        raise NotImplementedError

    def node(self) -> int:
        """The pid of the agent of a node without rank 0."""
        raise NotImplementedError

    def end(self) -> int:
        """Ends the job from outside; its exit code."""
        raise NotImplementedError

    def wait(self) -> int:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def steps(self) -> list[Step]:
        try:
            rows = [line.split() for line in (self.home / "steps.txt").read_text().splitlines()]
        except OSError:
            return []
        return [
            Step(float(row[0]), int(row[1]), int(row[2]), float(row[3]))
            for row in rows
            if len(row) == 4
        ]

    def stepped(self, since: float, ranks: int | None = None, limit_s: float = PATIENCE_S) -> float:
        """Waits for the second step after `since`; seconds to it. One could still be under way."""

        def reached() -> list[Step]:
            later = [one for one in self.steps() if one.at > since and ranks in (None, one.ranks)]
            return later if len(later) > 1 else []

        return until(reached, limit_s)[1].at - since

    def kill_worker(self, limit_s: float = PATIENCE_S) -> float:
        """Seconds to the second step of an attempt with a new rank 0: until then the peers may step
        on."""
        first = self.home / "pid-0"
        last = self.home / f"pid-{2 * self.ranks_per_node - 1}"
        before = first.read_text()
        began = time.time()
        os.kill(int(last.read_text()), signal.SIGKILL)

        def stepped() -> list[Step]:
            if first.read_text() in ("", before):
                return []
            attempt = first.stat().st_mtime
            later = [one for one in self.steps() if one.at > attempt]
            return later if len(later) > 1 else []

        return until(stepped, limit_s)[1].at - began

    def kill_node(self, limit_s: float = PATIENCE_S) -> float:
        agent = psutil.Process(self.node())
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()
        return self.stepped(time.time(), self.ranks_per_node, limit_s)


def until(condition: Callable, limit_s: float = PATIENCE_S):
    end = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing within {limit_s:g} s")
        time.sleep(0.02)
    return found


class Orch(Launcher):
    def start(self) -> None:
        words = ["run", "cluster=local_nodes", "--nnodes", "1:2"]
        words += ["--nproc-per-node", str(self.ranks_per_node)]
        words += ["--max-restarts", "20", "--detach", "--json"]
        self.run_id = json.loads(self._orch(*words, *self.argv).stdout)["run_id"]

    def _orch(self, *words: str) -> subprocess.CompletedProcess:
        argv = [sys.executable, "-m", "orchestrator", *words]
        return subprocess.run(
            argv, env=self.environment, cwd=PROGRAM.parents[3], capture_output=True, text=True
        )

    def _state(self) -> dict:
        return json.loads((self.home / "orch" / "runs" / self.run_id / "state.json").read_text())

    def node(self) -> int:
        nodes = self._state()["nodes"].values()
        return next(node["pid"] for node in nodes if node["ranks"] and 0 not in node["ranks"])

    def end(self) -> int:
        self._orch("cancel", self.run_id)
        return self.wait()

    def wait(self) -> int:
        return until(
            lambda: (state := self._state()).get("ended_at") and [state["exit_code"] or 0]
        )[0]

    def resume(self) -> None:
        until(lambda: self._orch("resume", self.run_id).returncode == 0)

    def close(self) -> None:
        if not self._state().get("ended_at"):
            self._orch("cancel", "--force", self.run_id)


class Torchrun(Launcher):
    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = ["--nnodes=1:2", f"--nproc-per-node={self.ranks_per_node}", "--max-restarts=20"]
        words += ["--rdzv-backend=c10d", "--rdzv-id=x"]
        words += [f"--rdzv-endpoint=127.0.0.1:{port}"]
        self.agents = []
        for node in range(2):
            argv = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *words,
                f"--local-addr=127.0.0.{node + 1}",
            ]
            with (self.home / f"agent-{node}.log").open("ab") as log:
                started = subprocess.Popen(
                    [*argv, *self.argv], env=self.environment, stdout=log, stderr=log
                )
            self.agents.append(started)
            time.sleep(2.0)  # the first hosts the store

    def node(self) -> int:
        held = {int((self.home / f"pid-{rank}").read_text()) for rank in range(self.ranks_per_node)}
        return next(
            agent.pid
            for agent in self.agents
            if not held
            & {child.pid for child in psutil.Process(agent.pid).children(recursive=True)}
        )

    def end(self) -> int:
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
        return self.wait()

    def wait(self) -> int:
        return max(
            (
                agent.wait(PATIENCE_S)
                for agent in self.agents
                if agent.returncode != -signal.SIGKILL
            ),
            key=abs,
        )

    def resume(self) -> None:
        self.start()

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                for process in [
                    *psutil.Process(agent.pid).children(recursive=True),
                    psutil.Process(agent.pid),
                ]:
                    process.kill()
                agent.wait()


class TorchrunWithNewStore(Torchrun):
    """Each attempt has a store of its own."""

    def __init__(self, home: Path, ranks_per_node: int = 2):
        super().__init__(home, ranks_per_node)
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


LAUNCHERS: dict[str, type[Launcher]] = {
    "orch run": Orch,
    "torchrun": Torchrun,
    "torchrun, new store": TorchrunWithNewStore,
}
FAULTS = ("kill_worker", "kill_node")


def trial(name: str, launcher: Launcher, fault: str) -> dict:
    """One fault in a new job. `again_s` is None where it did not step again within
    `TRIAL_LIMIT_S`."""
    found: dict = {"launcher": name, "fault": fault, "load": round(os.getloadavg()[0], 1)}
    try:
        began = time.time()
        launcher.start()
        found["first_steps_s"] = round(
            launcher.stepped(began, ranks=2 * launcher.ranks_per_node), 2
        )
        found["again_s"] = None
        found["again_s"] = round(getattr(launcher, fault)(TRIAL_LIMIT_S), 2)
        found["ranks"] = launcher.steps()[-1].ranks
    except TimeoutError as error:
        found["problem"] = str(error)
    finally:
        launcher.close()
    return found


def page(trials: list[dict]) -> str:
    """A row for each kind of trial: how many stepped again, and after how many seconds (median,
    most)."""
    rows = ["| fault | under | stepped again | after, median / most |", "|---|---|--:|--:|"]
    for fault, name in itertools.product(FAULTS, LAUNCHERS):
        kind = [
            one
            for one in trials
            if (one["launcher"], one["fault"]) == (name, fault) and "again_s" in one
        ]
        if not kind:
            continue
        again = [one["again_s"] for one in kind if one["again_s"] is not None]
        times = f"{statistics.median(again):.1f} / {max(again):.1f} s" if again else "-"
        rows.append(f"| {fault} | {name} | {len(again)} of {len(kind)} | {times} |")
    loads = [one["load"] for one in trials]
    return "\n".join(
        [
            *rows,
            "",
            f"Load average {min(loads)} to {max(loads)}, median {statistics.median(loads):.1f}.",
        ]
    )


def measure(launcher: Launcher) -> dict:
    """Seconds to steps, exit codes, and the loss of every step."""
    found: dict = {}
    try:
        began = time.time()
        launcher.start()
        found["first_steps_s"] = launcher.stepped(began, ranks=2 * launcher.ranks_per_node)
        found["worker_killed_s"] = launcher.kill_worker()
        found["node_lost_s"] = launcher.kill_node()
        found["ended_code"] = launcher.end()
        began = time.time()
        launcher.resume()
        found["resumed_s"] = launcher.stepped(began)
        (launcher.home / "hurry").touch()
        found["done_code"] = launcher.wait()
        found["losses"] = {one.step: one.loss for one in launcher.steps()}
    except TimeoutError as error:
        found["problem"] = str(error)
    finally:
        launcher.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=0, help="of each kind")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    for _ in range(asked.trials):
        for fault, name in itertools.product(asked.faults, LAUNCHERS):
            with tempfile.TemporaryDirectory() as home:
                found = trial(name, LAUNCHERS[name](Path(home, "job")), fault)
            print(json.dumps(found), flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(found) + "\n")
    if asked.page:
        print(page([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
