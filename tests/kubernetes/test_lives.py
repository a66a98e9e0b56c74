"""Lives of pods without a cluster: process 1 of each as a real process on an address of its own,
one shared claim.

What Kubernetes does (start a pod, take it away, start it again when its code says so) the tests do
by hand; the real cluster is in test_real_nodes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from msgspec import structs

from orchestrator.backends.kubernetes.objects.payload import pack_plan
from orchestrator.backends.kubernetes.pod.status_lines import parse_status_line
from orchestrator.plan import Exit, Plan, seal
from orchestrator.run.request import to_bytes
from tests.beds.base import ROOT, wait
from tests.beds.bundles import make_bundle, reports
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process
#: The address of pod 0: no other program of this machine speaks from it, so a port that is free
#: there stays free.
FIRST = "127.0.2.1"
#: Paths and the name of pod 0 are what differs from a pod.
POD = """
import os
import sys
from pathlib import Path
from msgspec import structs
from orchestrator.backends.kubernetes import names
from orchestrator.backends.kubernetes.pod import task
folder, first, gather, control = sys.argv[1:]
own = os.environ["JOB_COMPLETION_INDEX"]
names.INPUT = folder
names.RENDEZVOUS_PORT, names.CONTROL_PORT, names.METRICS_PORT = int(gather), int(control), 0
task.TERMINATION_MESSAGE = Path(folder, f"termination-message-{own}")
read = task.read_pod
task.read_pod = lambda *given: structs.replace(read(*given), host_of_first=first)
sys.exit(task.main())
"""


def free_ports(count: int) -> list[int]:
    """Ports of pod 0 that nobody has; all are held at once, so that they differ."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((FIRST, 0))
        return [probe.getsockname()[1] for probe in probes]


class Pods:
    """The pods of one run, index by index."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        count: int,
        sizes: Mapping[int, Plan] = MappingProxyType({}),
        options: Mapping[str, object] = MappingProxyType({}),
        **wishes: object,
    ):
        """`sizes`: the plans of an elastic run; `options`: of the backend."""
        self.folder = folder
        self.count = count
        self.ranks = len(plan.ranks)
        self.ports = free_ports(2)
        self.run = folder / "claim" / "tiny"
        self.run.parent.mkdir(parents=True)
        backend = {"name": "kubernetes", "max_restarts": 0, "grace_s": 10.0}
        backend["options"] = {
            "rendezvous_timeout_s": PATIENCE_S,
            "grow_after_s": 1,
            "claim": "runs",
            **options,
        }
        env = {f"ORCH_TEST_{name}": str(value) for name, value in wishes.items()}
        backend |= {"heartbeat_timeout_s": 15.0}
        about: dict = {
            "run_id": "tiny",
            "backend": backend,
            "env": env,
            "names": (),
            "sizes": sizes,
        }
        request = make_bundle(plan, self.run.parent, **about).request
        # the image has the program; here it runs in the run folder
        request = structs.replace(
            request, worker=structs.replace(request.worker, cwd=str(self.run)), device="cpu"
        )
        (folder / "request.json").write_bytes(to_bytes(request))
        (folder / "plan.bin").write_bytes(pack_plan(plan))
        for nodes, sized in sizes.items():
            (folder / f"plan.nodes{nodes}.bin").write_bytes(pack_plan(sized))
        (folder / "config.yaml").write_text("run: tiny\n")
        (folder / "key").write_text("ab" * 32)
        (folder / "environment.json").write_text("{}")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *indices: int, together: int | None = None, returns: str = "") -> None:
        """`together`: how many nodes an elastic run has then; without it, that of these pods.
        `returns`: as the Job notes it on a pod."""
        for index in indices or range(self.count):
            address = f"127.0.2.{index + 1}"
            environ = {
                "JOB_COMPLETION_INDEX": str(index),
                "HOSTNAME": "node-7",
                "ORCH_POD": f"tiny-{index}-x",
            }
            environ |= {
                "ORCH_POD_NODE": f"n{index}",
                "ORCH_POD_ADDRESS": address,
                "ORCH_POD_RETURNS": returns,
            }
            environ |= {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
            argv = [sys.executable, "-c", POD, str(self.folder), FIRST, *map(str, self.ports)]
            environ["ORCH_TOGETHER"] = str(together or len(indices) or self.count)
            with (self.folder / f"log-{index}").open("ab") as log:
                self.processes[index] = subprocess.Popen(
                    argv, env=environ, stdout=log, stderr=log, cwd=self.folder
                )

    def codes(self, seconds: float = PATIENCE_S) -> list[int]:
        end = time.monotonic() + seconds
        return [self.processes[i].wait(max(0.1, end - time.monotonic())) for i in range(self.count)]

    def log(self, index: int) -> str:
        return (self.folder / f"log-{index}").read_text(errors="replace")

    def until(self, ready: Callable[[], object]) -> None:
        assert wait(ready, PATIENCE_S, 0.05), "\n".join(
            self.log(i)[-3000:] for i in range(self.count)
        )

    def reached(self, step: int) -> bool:
        """Every rank has reported that step: one that still starts up has no answer to SIGTERM
        yet."""
        lines = reports(self.run / "metrics")
        return len({line["rank"] for line in lines if line.get("step", 0) >= step}) == self.ranks

    @property
    def state(self) -> dict:
        return json.loads((self.run / "state.json").read_text())


@pytest.fixture
def pods(tmp_path, request):
    """A run of two pods of two workers."""
    runs: list[Pods] = []

    def make(**wishes: object) -> Pods:
        plan = make_plan(tp=2, dp=2, nodes=2)
        data = structs.replace(plan.job.data, cache_dir=str(tmp_path / "data"))
        job = structs.replace(plan.job, data=data)
        plan = seal(structs.replace(plan, job=job, hash=""))
        runs.append(Pods(tmp_path / f"run{len(runs)}", plan, 2, **wishes))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.processes.values():
            process.kill()
            process.wait()


def test_a_run_from_the_first_pod_to_the_last(pods):
    run = pods(STEPS=4)
    run.start()
    assert run.codes() == [0, 0], run.log(0)
    assert run.state["state"] == "done"
    assert "[rank 0] rank 0 of 4 starts" in run.log(0)
    status_lines = [
        status_line for line in run.log(0).splitlines() if (status_line := parse_status_line(line))
    ]
    assert any(b'"done"' in bytes(s.state) for s in status_lines)
    placement = json.loads((run.run / "kubernetes" / "placement.json").read_text())
    assert (placement["pods"], placement["nodes"]) == (["tiny-0-x", "tiny-1-x"], ["n0", "n1"])
    run.start(1)  # a pod that comes back after the end has nothing to do
    assert run.processes[1].wait(PATIENCE_S) == Exit.DONE


AGAIN = "meeting the other pods again"


def test_a_pod_that_loses_a_peer_stays_and_meets_its_successor(pods):
    """SIGKILL of one pod's process 1: no goodbye, no disruption mark on the other, which is of the
    same kind twice."""
    run = pods(HOLD=1, SAVE=1)
    run.start()
    run.until(lambda: run.reached(2))
    for times in (1, 2):
        before = run.state["epoch"]
        run.processes[1].kill()
        run.processes[1].wait()
        run.until(lambda times=times: run.log(0).count(AGAIN) == times)
        run.start(1)
        run.until(
            lambda before=before: run.state["epoch"] > before and run.state["state"] == "running"
        )
        assert run.processes[0].poll() is None
    (run.run / "go").touch()
    assert run.codes() == [0, 0], run.log(0)
    assert run.state["state"] == "done"


def test_losing_a_peer_while_it_is_waited_for_costs_nothing(pods):
    """The lost pod comes back under another name, and only then the run starts."""
    run = pods(STEPS=2)
    run.start(1)
    run.until(lambda: "connecting to pod 0" in run.log(1))
    run.processes[1].kill()
    run.processes[1].wait()
    run.start()
    assert run.codes() == [0, 0], run.log(0)


def test_a_notice_to_one_pod_saves_all_and_the_others_wait_for_its_successor(pods):
    """A drain sends SIGTERM to the pods of one node alone."""
    run = pods(HOLD=1, SAVE=1)
    run.start()
    run.until(lambda: run.reached(2))
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.processes[1].wait(PATIENCE_S) == Exit.RESTART, run.log(1)
    run.until(lambda: AGAIN in run.log(0))
    assert len(list(run.run.glob("saved-*"))) == 4
    assert run.state["state"] == "stopped"
    (run.run / "go").touch()
    run.start(1)
    assert run.codes() == [0, 0], run.log(0)


def test_a_pod_that_meets_the_others_again_still_leaves_when_it_is_told_to(pods):
    """`orch cancel` tells one pod after the other; so the second hears of it while it begins
    again."""
    run = pods(HOLD=1, SAVE=1)
    run.start()
    run.until(lambda: run.reached(2))
    run.processes[1].send_signal(signal.SIGTERM)
    run.until(lambda: AGAIN in run.log(0))
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.codes() == [Exit.RESTART, Exit.RESTART], run.log(0)


@pytest.mark.parametrize(
    ("returns", "code"), [("", Exit.RESTART), ("1", Exit.RESTART), ("2", Exit.CAPACITY)]
)
def test_pods_that_wait_in_vain_come_back_until_they_have_come_back_too_often(pods, returns, code):
    run = pods(options={"rendezvous_timeout_s": 0.5, "max_pod_returns": 2})
    run.start(1, returns=returns)
    assert run.processes[1].wait(PATIENCE_S) == code, run.log(1)
    termination = json.loads((run.folder / "termination-message-1").read_text())
    assert termination["code"] == code and "did not complete the rendezvous" in termination["text"]
    assert ("max_pod_returns=2" in termination["text"]) == (code == Exit.CAPACITY)


def test_a_program_that_fails_ends_the_run_with_its_code(pods):
    run = pods(STEPS=4, DIE="3:2:65")
    run.start()
    assert run.codes() == [Exit.CONFIG, Exit.CONFIG], run.log(0)
    terminations = [
        json.loads(path.read_text()) for path in sorted(run.folder.glob("termination-message-*"))
    ]
    assert [termination["code"] for termination in terminations] == [Exit.CONFIG, Exit.CONFIG]
