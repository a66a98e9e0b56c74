"""The test cluster itself: that it is a real Slurm, and that it leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.beds.slurm.cluster import Cluster, reap_stale
from tests.beds.slurm.cluster_conf import Shape

from .conftest import bring_up

pytestmark = [pytest.mark.slurm, pytest.mark.process]
SMALL = Shape(nodes=2, gpus=2, leaves=1)


def lines(text: str) -> list[str]:
    return sorted(text.split())


def test_tasks_see_their_node_switch_and_gpus(cluster):
    report = "echo $SLURMD_NODENAME/$SLURM_TOPOLOGY_ADDR/$CUDA_VISIBLE_DEVICES"
    shape = ["--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--exclusive", "--switches=1"]
    seen = lines(cluster.run("srun", *shape, "bash", "-c", report, timeout=60))
    leaf = seen[0].split(".")[1]
    first = 4 * int(leaf.removeprefix("leaf"))
    assert seen == [f"n{i}/spine.{leaf}.n{i}/0,1,2,3,4,5,6,7" for i in range(first, first + 4)]


def test_two_clusters_at_once_and_nothing_left_behind():
    with bring_up(SMALL) as one, bring_up(SMALL) as two:
        for cluster in (one, two):
            cluster.run("sbatch", "-N2", "--output=/dev/null", "--wrap", "srun sleep 300")
            cluster.wait(lambda c=cluster: c.job_state("1") == "RUNNING", 20, "running job")
        assert one.pids["slurmctld"] != two.pids["slurmctld"]
        time.sleep(0.5)  # the steps' processes are up
        assert len(one.processes()) > 5
    assert one.processes() == two.processes() == []
    assert not one.home.exists() and not two.home.exists()


def test_a_cluster_whose_owner_was_killed_is_reaped():
    bring_up(SMALL)
    code = "import os\nfrom tests.beds.slurm.cluster import Cluster, Shape\n"
    code += "c = Cluster(Shape(nodes=1, gpus=1, leaves=1))\n"
    code += "c.start()\nprint(c.home, flush=True)\nos.kill(os.getpid(), 9)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    home = Path(done.stdout.strip())
    orphan = Cluster(home=home)
    assert done.returncode == -9 and orphan.processes()
    reap_stale()
    assert orphan.processes() == [] and not home.exists()
