"""Driving `orch` against a bed, as a user would: the command line, and what the API server
shows."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.beds import base
from tests.beds.base import ROOT
from tests.beds.bundles import reports
from tests.beds.held.sitecustomize import VARIABLE, release

from . import image, nodes
from .bed import Bed
from .building import program

_NUMBER = itertools.count()
USER = 10001
LAST = 60  # step of the runs below
#: tp inside a pod, pp and dp across pods; two pods a node.
TINY = (
    "cluster=local",
    "cluster.nodes=4",
    "cluster.gpus_per_node=2",
    "parallel=tp2_pp2",
    f"train.steps={LAST}",
)
SHORT = ("train.seq_len=64", "train.global_batch_samples=8", "checkpoint.every_steps=20", "train.log_every_steps=1",
         "optim.schedule=constant")  # fmt: skip
#: Options of every run on real nodes: little of everything, torch from a volume.
SMALL = {
    "image": image.NAME,
    "pull_policy": "Never",
    "claim": "runs",
    "user": USER,
    "cpus": 0.8,
    "memory_gib": 3,
    "shm_gib": 0.25,
    "unreachable_s": 5,
    "rendezvous_timeout_s": 600,
    "volumes": [{"claim": "site", "path": image.SITE}],
}


NEVER_HANGS = "backend.hang_after_s=3600"  # a run that is held


def held_before(step: int) -> dict[str, object]:
    """Options by which the trainer waits before that step until it is released."""
    agent = {"name": "agent", "env": [{"name": VARIABLE, "value": str(step)}]}
    return {"pod": {"spec": {"containers": [agent]}}}


def stand_in(**wishes: object) -> list[str]:
    """The words of the program tests/beds/worker.py, which a pod's image does not have."""
    environment = [f"ORCH_TEST_{name}={value}" for name, value in wishes.items()]
    source = (ROOT / "tests" / "beds" / "worker.py").read_text()
    return ["--", "env", *environment, "python3", "-c", source]


class Orch:
    """One user's home, and a namespace of their own under the restricted profile."""

    def __init__(self, bed: Bed, home: Path, namespace: str, options: Mapping[str, object] = SMALL):
        self.bed = bed
        self.home = home
        self.namespace = namespace
        self.options = options

    @classmethod
    @contextlib.contextmanager
    def in_new_namespace(cls, bed: Bed, home: Path) -> Iterator[Orch]:
        name = f"t{next(_NUMBER)}"
        enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
        bed.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": enforce}}
        )
        runs = bed.home / "pv" / name
        runs.mkdir()
        os.chown(runs, USER, USER)
        nodes.volume(bed, "runs", runs, read_only=False, namespace=name)
        nodes.volume(bed, "site", image.site_packages(), read_only=True, namespace=name)
        try:
            yield cls(bed, home, name)
        finally:
            bed.kubectl("delete", "namespace", name, "--wait=false", check=False, timeout=300)
            argv = ("-n", name, "delete", "jobs,pods", "--all", "--grace-period=1", "--timeout=60s")
            bed.kubectl(
                *argv, check=False, timeout=300
            )  # kubectl keeps to its minute, a machine that stands still not

    @property
    def claim(self) -> Path:
        return self.bed.home / "pv" / self.namespace

    def __call__(
        self,
        *argv: str,
        code: int | None = 0,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 600,
        cwd: Path = Path("/"),
    ) -> subprocess.CompletedProcess[str]:
        """Runs `orch`. `env`: changes of the shell's variables; None: not set."""
        shell = self.bed.env | self._environ({}) | dict(env or {})
        environ = {name: value for name, value in shell.items() if value is not None}
        done = self.bed.commands.run(argv, environ, self.home, timeout, cwd=cwd)
        return base.checked(done, code)

    def alone(
        self, *arguments: str, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs `orch` in a process of its own, as a user has it: for who takes its time."""
        argv = [sys.executable, "-m", "orchestrator.cli.main", *arguments]
        return self.bed.run(*argv, env=self._environ(env), timeout=timeout, cwd=self.home)

    def _environ(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {
            "ORCH_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }

    def submit(
        self,
        *argv: str,
        options: Mapping[str, object] | None = None,
        code: int = 0,
        env: Mapping[str, str | None] | None = None,
    ) -> Run:
        done = self(*self.submission(options), *argv, code=code, env=env)
        return Run(self, json.loads(done.stdout)["run_dir"])

    def submit_held(self, *argv: str, options: Mapping[str, object] | None = None) -> Run:
        """A run of the trainer that waits before its last step until it is released: what a test
        does to it comes before its end, however slow the machine is."""
        return self.submit(*argv, NEVER_HANGS, options={**held_before(LAST), **(options or {})})

    def submission(self, options: Mapping[str, object] | None = None) -> list[str]:
        """The words of `orch submit` to this bed, with these options; several at once have files of
        their own."""
        merged = {**self.options, "namespace": self.namespace, **(options or {})}
        conf = self.home / f"conf-{next(_NUMBER)}" / "backend"
        conf.mkdir(parents=True)
        profile_text = (
            "# @package _global_\ndefaults:\n  - kubernetes\n  - _self_\nbackend:\n  grace_s: 20\n"
        )
        (conf / "bed.yaml").write_text(
            f"{profile_text}  heartbeat_timeout_s: 10\n  options: {json.dumps(merged)}\n"
        )
        return ["submit", "--json", "--in-place", "--config-dir", str(conf.parent), "backend=bed"]

    def bound(self, run_id: str, count: int, seconds: float = 600) -> list[dict]:
        """The run's pods by completion index, once the scheduler has given every one a node.
        Thousands of looks at hundreds of pods would be most of what the cluster has to do: a watch
        tells."""
        argv = [
            "-m",
            "tests.beds.kubernetes.bound",
            f"orch.dev/run={run_id}",
            str(count),
            self.namespace,
        ]
        self.bed.run(sys.executable, *argv, env={"PYTHONPATH": str(ROOT)}, timeout=seconds)
        return self.pods(run_id)

    def pods(self, run_id: str) -> list[dict]:
        pods = self.bed.get("pods", "-n", self.namespace, "-l", f"orch.dev/run={run_id}")["items"]
        return sorted(
            pods,
            key=lambda pod: int(
                pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            ),
        )


class Run(base.Run):
    orch: Orch

    @property
    def inside(self) -> Path:
        """The run's folder on the claim."""
        return self.orch.claim / self.id

    def steps(self, since_epoch: int = 0) -> dict[int, float]:
        """Step -> loss, the last time that it was made, from the agents' own records on the
        claim."""
        step_losses: dict[int, float] = {}
        for report in reports(self.inside / "metrics"):
            if report.get("loss") is not None and report["epoch"] >= since_epoch:
                step_losses[report["step"]] = report["loss"]
        return step_losses

    def step(self, at_least: int) -> None:
        self.until(f"step {at_least}", lambda: max(self.steps(), default=-1) >= at_least)

    def release(self, step: int = LAST) -> None:
        """Lets a run make the step before which it is held."""
        release(self.inside, step)

    def saved(self) -> list[int]:
        """Steps of the checkpoints on the claim."""
        return [
            int(path.name.removeprefix("step-"))
            for path in (self.inside / "checkpoints").glob("step-*")
        ]

    def logs(self) -> str:
        """The last lines of the first pods, and what the namespace's events say."""
        bed = self.orch.bed
        space = self.orch.namespace
        with contextlib.suppress(Exception):
            names = [pod["metadata"]["name"] for pod in self.orch.pods(self.id)][:8]
            texts = [
                f"--- {n}\n{bed.kubectl('logs', '-n', space, n, '--tail=15', check=False)[-3000:]}"
                for n in names
            ]
            return "\n".join(
                [*texts, bed.kubectl("get", "events", "-n", space, check=False)[-3000:]]
            )
        return "no logs"


class Helm:
    """`helm` in one namespace of a bed."""

    def __init__(self, bed: Bed, namespace: str):
        self.bed = bed
        self.namespace = namespace

    def __call__(
        self,
        *argv: str | Path,
        values: dict | None = None,
        timeout: float = 120,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        values_flags = () if values is None else ("--values", "-")
        argv = (str(program("helm")), "--namespace", self.namespace, *map(str, argv), *values_flags)
        return self.bed.run(*argv, input=json.dumps(values), timeout=timeout, check=check)


def check_rank_map(orch: Orch, run: Run) -> None:
    """Every rank sits where the API server says that its pod lies, tensor-parallel groups inside
    one pod."""
    placement = json.loads((run.inside / "kubernetes" / "placement.json").read_text())
    pods = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in orch.pods(run.id)}
    assert set(placement["pods"]) == set(pods)
    for name, node in zip(placement["pods"], placement["nodes"], strict=True):
        assert node.split(".pod-")[0] == pods[name]
    plan = run.plan
    assert {rank["node"] for rank in plan["ranks"]} == set(placement["nodes"])
    for group in plan["groups"]["tp"]:
        assert len({plan["ranks"][rank]["node"] for rank in group}) == 1
    assert len(set(pods.values())) == 2
