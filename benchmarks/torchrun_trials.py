"""One fault in a stock torchrun job: three elastic agents with all defaults, the same program, the
same machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed import run

from orchestrator.backends.local.namespaces import Network, Wiring, cut, heal
from orchestrator.drill.node_faults import DUTY_S
from orchestrator.run.processes import descendants

TOGETHER = Path(__file__).with_name("together.py")
NODES = 3
_LINK = 1e9 / 8  # bytes/s
_START_S = 900.0  # a loaded machine takes its time, and that is no fault of the launcher's


class Job:
    """Agents on 127.0.0.1 to .3; the first hosts rank 0 (ranks go by address), the second was
    started first and hosts the store, which is as near to a coordinator as torchrun has. With
    `cables` each has a network namespace and an address of its own.
    """

    def __init__(self, home: Path, cables: bool = False):
        self.home = home
        home.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        names = tuple(f"node-{node}" for node in range(NODES))
        wiring = Wiring(names, _LINK, ((tuple(range(NODES)),),), (1.0,))
        self.network = Network(wiring) if cables else None
        addresses = [
            wiring.address(name) if cables else f"127.0.0.{node + 1}"
            for node, name in enumerate(names)
        ]
        words = [f"--nnodes=2:{NODES}", "--nproc-per-node=1"]
        words += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={addresses[1] if cables else '127.0.0.1'}:{port}",
        ]
        words += [f"--rdzv-id={home.name}", "--max-restarts=3"]
        environment = os.environ | {"TOGETHER_DIR": str(home), "OMP_NUM_THREADS": "1"}
        self.agents: dict[int, BaseProcess] = {}
        for node in (1, 0, 2):
            told = (
                [f"--rdzv-conf=is_host={int(node == 1)}"] if cables else []
            )  # else it knows by the name of the host
            argv = [*words, *told, f"--local-addr={addresses[node]}", str(TOGETHER)]
            enter = self.network.enter(names[node]) if self.network else None
            about = (argv, environment, home / f"agent-{node}.log", enter)
            self.agents[node] = get_context("fork").Process(target=_torchrun, args=about)
            self.agents[node].start()
            if (
                node == 1 and not cables
            ):  # which this process could not reach; the others try again by themselves
                self._wait(port)

    def _wait(self, port: int) -> None:
        try:
            _listens(port)
        except BaseException:  # told to end meanwhile
            self.close()
            raise

    def steps(self) -> list[dict]:
        try:
            return [
                json.loads(line) for line in (self.home / "steps.jsonl").read_text().splitlines()
            ]
        except (OSError, ValueError):
            return []

    def worker(self, node: int) -> int:
        """The agent's worker, whatever else it has started."""
        for pid in descendants(self.agents[node].pid):
            with contextlib.suppress(OSError):
                if str(TOGETHER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise RuntimeError(f"agent {node} has no worker")

    def rank_of(self, node: int) -> int:
        variables = Path(f"/proc/{self.worker(node)}/environ").read_bytes().split(b"\0")
        return int(next(word for word in variables if word.startswith(b"RANK="))[5:])

    def close(self) -> None:
        for agent in self.agents.values():
            for pid in [agent.pid, *descendants(agent.pid)]:
                _send(pid, signal.SIGKILL)
            agent.join()
        for path in self.home.glob("pid-*"):  # what an agent that was killed left behind
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(path.read_text().split()[0])
                if str(TOGETHER).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and _in(
                    pid, self.home
                ):
                    _send(pid, signal.SIGKILL)
        if self.network:
            self.network.close()


def _torchrun(
    argv: list[str], environment: dict[str, str], log: Path, enter: Callable[[], None] | None
) -> None:
    """An agent, in a process of its own. It is forked from one that has imported torch, which is
    not what is measured and takes a busy machine longer than all the rest."""
    os.setsid()
    with log.open("wb") as file, open(os.devnull, "rb") as nothing:
        for ours, theirs in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(ours.fileno(), theirs)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)  # not the benchmark's
    os.environ.update(environment)
    if enter:
        enter()
    run.main(argv)


def torchrun_trial(
    home: Path, fault: str, position: str, for_s: float, limit_s: float
) -> dict | None:
    """The same fields as a trial of ours; what torchrun does not tell (when it noticed) is None.
    None at all where the job did not come to step on all nodes before it was hit: that is no trial.
    """
    job = Job(home / f"torchrun-{time.time_ns()}", cables=fault == "partition")
    found = {
        "fault": fault,
        "position": position,
        "ok": False,
        "problem": "",
        "at": time.time(),
        "workers": "stand-ins",
    }
    try:
        end = time.monotonic() + _START_S
        while len(job.steps()) < 5:
            if time.monotonic() > end:
                return None
            time.sleep(0.1)
        try:
            nodes = {job.rank_of(node): node for node in range(NODES)}
        except RuntimeError:  # a busy machine: it began without one
            return None
        node = {"rank0": nodes[0], "coordinator": 1}.get(position)
        if node is None:
            node = next(node for rank, node in sorted(nodes.items()) if rank != 0 and node != 1)
        before = job.steps()[-1]
        found |= {"at": time.time(), "node": f"agent {node}"}
        lift = hit(job, fault, node, for_s)
        _watch(job, found, before, lift, found["at"] + for_s, limit_s)
    except (RuntimeError, OSError, StopIteration, KeyError) as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    finally:
        job.close()
    return found


def hit(job: Job, fault: str, node: int, for_s: float):
    """The fault; what takes it back after `for_s`, if it is of those that last."""
    agent = job.agents[node].pid
    worker = job.worker(node)
    everything = [agent, *descendants(agent)]
    if fault == "kill_worker":
        _send(worker, signal.SIGKILL)
    elif fault == "stop_worker":
        _send(worker, signal.SIGSTOP)
    elif fault == "slow_worker":
        end = time.monotonic() + for_s
        period, stopped = DUTY_S
        while time.monotonic() < end:
            _send(worker, signal.SIGSTOP)
            time.sleep(stopped)
            _send(worker, signal.SIGCONT)
            time.sleep(period - stopped)
    elif fault == "kill_agent":
        _send(agent, signal.SIGKILL)
    elif fault == "kill_node":
        for pid in everything:
            _send(pid, signal.SIGKILL)
    elif fault in ("stop_agent", "stop_node"):
        stopped = [agent] if fault == "stop_agent" else everything
        for pid in stopped:
            _send(pid, signal.SIGSTOP)
        return lambda: [_send(pid, signal.SIGCONT) for pid in stopped]
    elif fault == "notice":
        _send(agent, signal.SIGTERM)
        return lambda: [_send(pid, signal.SIGKILL) for pid in everything if pid != agent]
    elif fault == "partition":
        holds = [os.getpid()], job.network.switches, node
        cut(*holds)
        return lambda: heal(*holds)
    else:
        raise RuntimeError(f"no {fault} under torchrun")
    return None


def _watch(job: Job, found: dict, before: dict, lift, lifted: float, limit_s: float) -> None:
    """Until another life steps; or, for what costs time only, until steps go on. An orphan's steps
    are no recovery."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if lift and time.time() >= lifted:
            lift()
            lift = None
        steps = job.steps()
        anew = [step for step in steps if step["at"] > found["at"] and step["pid"] != before["pid"]]
        same = [step for step in steps if step["at"] > lifted + 3 and step["step"] > before["step"]]
        whole = (
            found["fault"] in ("slow_worker", "stop_agent", "stop_node", "partition") and not lift
        )
        if len(anew) >= 2:
            done = max(step["step"] for step in steps if step["pid"] == before["pid"])
            found["ok"], found["stepping_s"] = True, anew[0]["at"] - anew[0]["step_s"] - found["at"]
            found["lost_steps"] = max(0, done - (anew[0]["step"] - 1))
            return
        if whole and same:
            found |= {"ok": True, "lost_steps": 0}
            return
        if all(agent.exitcode is not None for agent in job.agents.values()):
            found["problem"] = "all agents have ended"
            return
        time.sleep(0.1)
    orphans = job.steps()[-1]["at"] > time.time() - 2
    found["problem"] = f"no new life within {limit_s:g} s" + (
        ", the old one steps on" if orphans else ""
    )


def _listens(port: int) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)


def _in(pid: int, home: Path) -> bool:
    return f"TOGETHER_DIR={home}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
