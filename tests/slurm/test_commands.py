"""Slurm's commands on the real test cluster: answers read, complaints turned into one line with an
exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.backends.slurm.commands import Slurm, error_line
from orchestrator.backends.slurm.states import job_state
from orchestrator.backends.slurm.submission import JobWatcher
from orchestrator.cluster.importers.slurm import parse_topology
from orchestrator.cluster.importers.slurm_nodes import parse_nodes
from orchestrator.plan.exits import Exit
from tests.beds.base import ROOT
from tests.beds.bundles import refusal
from tests.beds.slurm.cluster import Cluster, reap_stale
from tests.beds.slurm.cluster_conf import Shape
from tests.beds.slurm.runs import CONF, Orch, refusals

from .conftest import bring_up

live = [pytest.mark.slurm, pytest.mark.process]


@pytest.fixture
def slurm(cluster):
    return Slurm(cluster.env)


@pytest.fixture
def script(tmp_path):
    def write(*directives: str, body: str = "sleep 60") -> str:
        path = tmp_path / "job.sh"
        lines = [f"#SBATCH {d}" for d in ("--output=/dev/null", *directives)]
        path.write_text("\n".join(["#!/bin/bash", *lines, body]) + "\n")
        return str(path)

    return write


@pytest.mark.process
def test_ctrl_c_of_the_terminal_does_not_reach_a_command_in_the_middle_of_its_answer(tmp_path):
    """A job that Slurm has accepted would be nobody's: each command is in a session of its own."""
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text(
            "#!/bin/sh\ncat > /dev/null\necho $$ $(cut -d' ' -f6 /proc/$$/stat)\n"
        )
        (tmp_path / name).chmod(0o755)
    slurm = Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    for answer in (slurm.sbatch("job.sh"), slurm.run(["scontrol", "release", "1"])):
        pid, session = answer.split()
        assert pid == session


class TestLive:
    pytestmark = live

    def test_nodes_and_topology_of_the_running_cluster(self, slurm, cluster, script):
        nodes = {node.name: node for node in parse_nodes(slurm.nodes())}
        assert sorted(nodes) == cluster.shape.names
        assert all(
            n.free and n.gpus == 8 and n.gpu_type == "h100" and not n.gpus_used
            for n in nodes.values()
        )
        topology = parse_topology(slurm.topology())
        assert topology.kind == "tree"
        assert topology.tiers[0].switches == {
            "leaf0": ("n0", "n1", "n2", "n3"),
            "leaf1": ("n4", "n5", "n6", "n7"),
        }
        job = slurm.sbatch(script("--nodes=1 --gpus-per-node=2 --nodelist=n3"))
        cluster.wait(lambda: cluster.job_state(job) == "RUNNING", 20, "running job")
        (busy,) = [node for node in parse_nodes(slurm.nodes()) if not node.free]
        assert (busy.name, busy.gpus_used, busy.state) == ("n3", 2, "MIXED")

    def test_drained_and_down_nodes_are_not_free(self, slurm, cluster):
        cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test State=IDLE")
        cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=x")
        nodes = {node.name: node for node in parse_nodes(slurm.nodes())}
        assert [name for name, node in nodes.items() if not node.free] == ["n1", "n2"]
        assert nodes["n1"].reason.startswith("test State=IDLE")

    def test_a_job_through_its_states_without_accounting(self, slurm, cluster, script):
        watcher = JobWatcher(slurm, delay_s=0)
        job = slurm.sbatch(script("--nodes=2", body="exit 3"))
        cluster.wait(lambda: job_state(cluster.job_state(job)).ended, 20, "end of the job")
        ended = watcher.query([job])[job]
        assert (ended.state, ended.nodes, job_state(ended.state).phase) == ("FAILED", 2, "failed")
        held = slurm.sbatch(script("--hold"))
        jobs = watcher.query([job, held])
        assert jobs[held].state == "PENDING" and jobs[held].reason == "JobHeldUser" and job in jobs

    def test_start_estimate(self, slurm, cluster, script):
        """It refuses what sbatch itself would accept and keep pending with PartitionNodeLimit."""
        assert slurm.start_estimate(Path(script("--nodes=8")).read_text()).startswith("20")
        with refusal("", Exit.CAPACITY):
            slurm.start_estimate(Path(script("--nodes=9")).read_text())

    @pytest.mark.parametrize(
        ("directive", "exit", "says"),
        [
            ("--partition=mian", Exit.CONFIG, "did you mean 'main'"),
            ("--gpus-per-node=a100:8", Exit.CAPACITY, "sinfo"),
            ("--gpus-per-node=9", Exit.CAPACITY, "sinfo"),
            ("--gres=tpu:1", Exit.CONFIG, "gpu_request"),
            ("--constraint=gold", Exit.CONFIG, "backend.options.constraint"),
            ("--reservation=nope", Exit.CONFIG, "backend.options.reservation"),
            ("--exclude=zz9", Exit.CONFIG, "exclude"),
            ("--dependency=afterok:notajob", Exit.CONFIG, "dependency"),
        ],
    )
    def test_refusals_are_one_line_with_a_code(self, slurm, cluster, script, directive, exit, says):
        with refusal(says, exit):
            slurm.sbatch(script(directive))

    def test_a_stopped_controller_is_told(self, cluster, script):
        cluster.stop_controller()
        with refusal("scontrol ping", Exit.CAPACITY):
            Slurm(cluster.env, timeout_s=5).jobs(["1"])


@pytest.mark.slurm
@pytest.mark.process
def test_a_full_queue_is_told_at_once(tmp_path):
    """sbatch itself would try again for two minutes, and so would its estimate."""
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\n#SBATCH --hold --output=/dev/null\nsleep 1\n")
    with bring_up(Shape(nodes=1, gpus=1, leaves=1, max_jobs=2)) as cluster:
        slurm = Slurm(cluster.env)
        accepted = []
        with refusal("full", Exit.CAPACITY):
            for _ in range(4):
                accepted.append(slurm.sbatch(str(path)))
        assert cluster.run("squeue", "-h", "-o", "%i").split() == accepted
        orch = Orch(cluster, tmp_path)
        overrides = (
            "cluster=testbed",
            "cluster.nodes=1",
            "cluster.gpus_per_node=1",
            "parallel=tp1",
            "--run-id",
            "late",
        )
        done = orch(
            "submit", "--config-dir", str(CONF), *overrides, "--", "/bin/true", code=Exit.CAPACITY
        )
        [complaint] = refusals(done.stderr)
        assert "full" in complaint
        assert cluster.run("squeue", "-h", "-o", "%i").split() == accepted
        assert (
            json.loads(orch("status", "--json", "late").stdout)["state"]["exit_code"]
            == Exit.CAPACITY
        )


@pytest.mark.slurm
@pytest.mark.process
def test_the_cluster_of_the_tests_begins_on_other_ports_if_one_is_taken():
    """A port that was free when the cluster chose it."""
    cluster = bring_up(Shape(nodes=1, gpus=1, leaves=1))
    chosen_ports = cluster.ports
    with socket.create_server(("", chosen_ports.slurmd[0])), cluster:
        assert cluster.idle() == 1
        assert cluster.ports != chosen_ports


@pytest.mark.slurm
@pytest.mark.process
def test_a_cluster_whose_owner_was_killed_is_reaped():
    bring_up(Shape(nodes=2, gpus=2, leaves=1))
    code = "import os\nfrom tests.beds.slurm.cluster import Cluster, Shape\n"
    code += (
        "print(Cluster(Shape(nodes=1, gpus=1, leaves=1)).__enter__().home,"
        " flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    orphan = Cluster(home=Path(done.stdout.strip()))
    assert done.returncode == -9 and orphan.processes()
    reap_stale()
    assert orphan.processes() == [] and not orphan.home.exists()


def test_without_slurm_on_this_machine():
    with refusal("is this a login node", Exit.CAPACITY):
        Slurm({"PATH": "/nowhere"}).run(["sbatch-that-is-not-there"])


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid name",
         "invalid partition specified: x"),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)",
         "Job violates accounting/QOS policy (job submit limit)"),
        ("Slurmctld(primary) at vm is DOWN\n*****\n** RESTORE SLURMCTLD DAEMON TO SERVICE **\n*****\n",
         "Slurmctld(primary) at vm is DOWN"),
        ("", "it failed without a message"),
        ("x\x1b[31my\nz", "z"),
    ],
)  # fmt: skip
def test_first_complaint(stderr, line):
    assert error_line(stderr) == line


def test_the_users_own_formats_do_not_reach_us():
    ours = {"SLURM_CONF": "/x", "A": "b"}
    theirs = {"SQUEUE_FORMAT": "%i", "SLURM_JOB_ID": "1", "SBATCH_PARTITION": "p"}
    environ = Slurm({**theirs, **ours}).environ
    assert environ.items() >= ours.items() and not set(theirs) & set(environ)
