"""A job goes from a laptop to a login node by ssh, and from there into Slurm's queue: a real sshd
before the real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.beds import base, sshd
from tests.beds.base import ROOT
from tests.beds.slurm.cluster import Cluster

PROGRAM = """
import os, pathlib, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["SLURMD_NODENAME"], flush=True)
while not pathlib.Path(os.environ["GO"]).exists():
    time.sleep(0.1)
"""


class Laptop:
    """`orch` where no Slurm is: its commands are not on PATH, its configuration is not in the
    environment."""

    def __init__(self, home: Path, node: sshd.LoginNode):
        self.home = home
        self.node = node
        self.folder = home / "project"
        self.folder.mkdir()
        (self.folder / "train.py").write_text(PROGRAM)
        tools = home / "tools"
        tools.mkdir()
        for name in ("sh", "git", "python3"):
            (tools / name).symlink_to(subprocess.check_output(["which", name], text=True).strip())
        path = f"{node.path}:{tools}"
        self.environ = {
            "PATH": path,
            "HOME": str(home),
            "ORCH_HOME": str(home / "laptop"),
            "PYTHONPATH": str(ROOT),
        }

    def __call__(
        self, *arguments: str, code: int | None = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "orchestrator", *arguments]
        environ = self.environ | dict(env or {})
        done = subprocess.run(
            argv, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=600
        )
        return base.checked(done, code)


class Run(base.Run):
    def logs(self) -> str:
        return self.orch("logs", self.id, code=None).stdout


@pytest.fixture
def laptop(cluster: Cluster, tmp_path: Path) -> Iterator[Laptop]:
    if reason := sshd.install():
        pytest.skip(f"no sshd: {reason}")
    environ = {
        "SLURM_CONF": cluster.env["SLURM_CONF"],
        "ORCH_HOME": str(tmp_path / "site"),
        "GO": str(tmp_path / "go"),
    }
    with sshd.LoginNode(tmp_path / "sshd", environ) as node:
        yield Laptop(tmp_path, node)


@pytest.mark.slurm
@pytest.mark.slow
def test_a_program_waits_in_slurm_s_queue_runs_is_cancelled_and_resumed_from_a_laptop(
    laptop, cluster, tmp_path
):
    assert laptop(
        "submit", "backend=slurm", "nproc=1", "--", "python", "train.py", code=76
    )  # no Slurm here
    options = ["cluster=slurm", "backend=slurm", "nproc=4", "backend.options.partition=main"]
    submit_argv = ["submit", *options, *laptop.node.options(), "--env", "GO"]
    shown = laptop(*submit_argv, "--dry-run", "--", "python", "train.py").stdout
    assert "#SBATCH" in shown and "Plan of a program" in shown
    sent = laptop(*submit_argv, "--json", "--", "python", "train.py")
    assert "sends 1 file," in sent.stderr
    run = Run(laptop, json.loads(sent.stdout)["run_dir"])
    run.wait("running")
    jobs = cluster.run("squeue", "-h", "-o", "%j").split()
    assert any(run.id in name for name in jobs)
    run.until("all ranks print", lambda: run.logs().count("of 4 on n") == 4)
    assert {line.split(" on ")[1] for line in run.logs().splitlines() if " on n" in line} == set(
        run.state().nodes
    )
    laptop("cancel", run.id)
    assert run.wait("cancelled")
    assert not cluster.run("squeue", "-h", "-t", "R", "-o", "%j").split()
    (tmp_path / "go").touch()
    done = laptop("resume", run.id, "--follow")
    assert done.stdout.splitlines()[-1].startswith("done"), done.stdout
    assert os.path.isdir(tmp_path / "site" / "runs" / run.id) and run.state().backend == "ssh"
