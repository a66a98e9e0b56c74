"""Programs of users under `orch run` and torchrun, 2 nodes of 2 ranks: a worker killed, a node lost,
ended and resumed.

`python -m benchmarks.programs --programs ddp,trl --launchers orch,torchrun` runs each program under
each launcher with all faults, writes one line of `RESULTS` for each, and writes the table of
docs/programs.md with `--page`. torchrun can also be tried with
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` (`torchrun_new_store`): without it, its workers find in their
store the addresses that those of the attempt before have left there (torch 2.15).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.pages import filled
from tests.beds.programs import SIMULATED_NODES
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "programs.jsonl"
PAGE = ROOT / "docs" / "programs.md"
STEP_S = 0.25
#: How long the table waits for steps after a fault.
TRIAL_LIMIT_S = 150.0


class Program(NamedTuple):
    """A user's program, in tests/beds/programs: `script STEPS FOLDER SECONDS_A_STEP`."""

    script: str
    packages: tuple[str, ...] = ()  # that it needs besides torch
    overrides: tuple[str, ...] = ()  # words for `orch run`
    steps: int = 200
    saved_after: int = 5  # the step of its first checkpoint
    #: Relative difference of losses that another number of ranks or another order of sums makes.
    tolerance: float = 1e-3

    @property
    def path(self) -> Path:
        return ROOT / "tests" / "beds" / "programs" / self.script


PROGRAMS = {
    "ddp": Program("ddp.py", steps=400, saved_after=1),
    "nanogpt": Program("nanogpt.py"),
    "fsdp_tp": Program("fsdp_tp.py", overrides=("parallel=tp2",)),
    "accelerate": Program("accelerate_loop.py", packages=("accelerate",)),
    "lightning": Program("lightning_trainer.py", packages=("pytorch_lightning",)),
    "trl": Program("trl_sft.py", packages=("trl", "datasets")),
}


class Step(NamedTuple):
    at: float  # Unix seconds
    step: int
    ranks: int
    loss: float


class Launcher:
    """One program in a folder of its own, with so many ranks on each of two nodes; subclasses start
    it."""

    def __init__(self, program: Program, home: Path, ranks_per_node: int = 2):
        self.program = program
        self.home = home
        self.ranks_per_node = ranks_per_node
        home.mkdir(parents=True)
        self.argv = [str(program.path), str(program.steps), str(home), str(STEP_S)]
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

    def workers(self) -> dict[int, psutil.Process]:
        """Rank -> its process: the topmost one with the program's arguments and a rank."""
        workers: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.home) not in process.cmdline():
                    continue
                rank = process.environ().get("RANK", "")
                if rank.isdecimal():
                    earliest = workers.setdefault(int(rank), process)
                    if process.create_time() < earliest.create_time():
                        workers[int(rank)] = process
        return workers

    def kill_worker(self, limit_s: float = PATIENCE_S) -> float:
        """Seconds to the second step of an attempt with a new rank 0: until then the peers may step
        on."""
        workers = self.workers()
        began = time.time()
        workers[max(workers)].kill()
        until(lambda: not workers[0].is_running(), limit_s, every_s=0.1)
        until(lambda: 0 in self.workers(), limit_s, every_s=0.5)
        # Not the process's own time of creation: that comes from the time of the machine's start,
        # which may be seconds off.
        restarted_at = time.time()
        return restarted_at - began + self.stepped(restarted_at, limit_s=limit_s)

    def kill_node(self, limit_s: float = PATIENCE_S) -> float:
        kill_tree(self.node())
        return self.stepped(time.time(), self.ranks_per_node, limit_s)


def kill_tree(pid: int) -> None:
    """Kills a process and its descendants. These may have ended with it in the meantime."""
    first = psutil.Process(pid)
    for process in [first, *first.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def until(condition: Callable, limit_s: float = PATIENCE_S, every_s: float = 0.02):
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing within {limit_s:g} s")
        time.sleep(every_s)
    return value


class Orch(Launcher):
    def start(self) -> None:
        words = ["run", "--nnodes", "1:2"]
        words += ["--nproc-per-node", str(self.ranks_per_node)]
        words += ["--max-restarts", "20", "--detach", "--json"]
        words += [*SIMULATED_NODES, *self.program.overrides]
        self.run_id = json.loads(self._orch(*words, *self.argv).stdout)["run_id"]

    def _orch(self, *words: str) -> subprocess.CompletedProcess:
        argv = [sys.executable, "-m", "orchestrator", *words]
        return subprocess.run(argv, env=self.environment, cwd=ROOT, capture_output=True, text=True)

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
        first = self.workers()[0]
        return next(
            agent.pid
            for agent in self.agents
            if first not in psutil.Process(agent.pid).children(recursive=True)
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
                kill_tree(agent.pid)
                agent.wait()


class TorchrunWithNewStore(Torchrun):
    """Each attempt has a store of its own."""

    def __init__(self, program: Program, home: Path, ranks_per_node: int = 2):
        super().__init__(program, home, ranks_per_node)
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


LAUNCHERS: dict[str, type[Launcher]] = {
    "orch": Orch,
    "torchrun": Torchrun,
    "torchrun_new_store": TorchrunWithNewStore,
}


def measure(launcher: Launcher, limit_s: float = PATIENCE_S) -> dict:
    """Seconds to steps, exit codes, and the loss of every step. Where the program does not step
    again after a fault within the limit, `problem` names the fault."""
    record: dict = {}
    stage = "start"
    try:
        began = time.time()
        launcher.start()
        record["first_steps_s"] = launcher.stepped(began, ranks=2 * launcher.ranks_per_node)
        stage = "first checkpoint"
        until(lambda: any(one.step > launcher.program.saved_after for one in launcher.steps()))
        stage = "worker_killed"
        record["worker_killed_s"] = launcher.kill_worker(limit_s)
        stage = "node_lost"
        record["node_lost_s"] = launcher.kill_node(limit_s)
        stage = "end"
        record["ended_code"] = launcher.end()
        record["steps_at_end"] = max(one.step for one in launcher.steps())
        began = time.time()
        stage = "resume"
        launcher.resume()
        record["resumed_s"] = launcher.stepped(began, limit_s=limit_s)
        record["resumed_at"] = next(one.step for one in launcher.steps() if one.at > began)
        stage = "finish"
        (launcher.home / "hurry").touch()
        record["done_code"] = launcher.wait()
    except TimeoutError as error:
        record["problem"] = f"{stage}: {error}"
    finally:
        record["losses"] = {one.step: one.loss for one in launcher.steps()}
        launcher.close()
    return record


def trial(program_name: str, launcher_name: str) -> dict:
    """One line of the results: `measure` without the losses, and whether every step has one."""
    program = PROGRAMS[program_name]
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as home:
        record = measure(LAUNCHERS[launcher_name](program, Path(home, "job")), TRIAL_LIMIT_S)
    losses = record.pop("losses")
    for name, value in record.items():
        if isinstance(value, float):
            record[name] = round(value, 1)
    return {
        "program": program_name,
        "launcher": launcher_name,
        "load": load,
        **record,
        "every_step": sorted(losses) == list(range(1, program.steps + 1)),
    }


def seconds_of(record: dict, stage: str, name: str) -> str:
    """The cell of a stage: its seconds, `no` if the program did not step again, `-` if it was not
    tried."""
    if name in record:
        return f"{record[name]:.0f} s"
    return "no" if record.get("problem", "").startswith(f"{stage}:") else "-"


def page(trials: list[dict]) -> str:
    """The table of the latest trial of each program and launcher."""
    rows = [
        "| program | under | first steps | worker killed | node lost | end | resumed | all steps |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    latest = {(one["program"], one["launcher"]): one for one in trials}
    for program, launcher in itertools.product(PROGRAMS, LAUNCHERS):
        if (program, launcher) not in latest:
            continue
        one = latest[program, launcher]
        cells = [
            seconds_of(one, "start", "first_steps_s"),
            seconds_of(one, "worker_killed", "worker_killed_s"),
            seconds_of(one, "node_lost", "node_lost_s"),
            str(one.get("ended_code", "-")),
            seconds_of(one, "resume", "resumed_s"),
            "yes" if one["every_step"] else "no",
        ]
        rows.append(f"| {program} | {launcher} | {' | '.join(cells)} |")
    loads = [one["load"] for one in latest.values()]
    return "\n".join([*rows, "", f"Load average {min(loads)} to {max(loads)} on 2 cores."])


def names_of(choices: dict[str, Any]) -> Callable[[str], list[str]]:
    """Returns the parser of a comma-separated list of keys of `choices`."""

    def names(text: str) -> list[str]:
        unknown = set(text.split(",")) - choices.keys()
        if unknown:
            message = f"{', '.join(sorted(unknown))}: choose from {', '.join(choices)}"
            raise argparse.ArgumentTypeError(message)
        return text.split(",")

    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=names_of(PROGRAMS), default=[], help="comma-separated")
    parser.add_argument("--launchers", type=names_of(LAUNCHERS), default=["orch", "torchrun"])
    parser.add_argument("--page", action="store_true", help="write the table of docs/programs.md")
    arguments = parser.parse_args()
    for program_name, launcher_name in itertools.product(arguments.programs, arguments.launchers):
        record = trial(program_name, launcher_name)
        print(json.dumps(record), flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")
    if arguments.page:
        table = page([json.loads(line) for line in RESULTS.read_text().splitlines()])
        PAGE.write_text(filled(PAGE.read_text(), "trials", table))


if __name__ == "__main__":
    main()
