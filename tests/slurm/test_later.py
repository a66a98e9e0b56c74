"""A later Slurm (24.11, from a later Debian in its own root): block topology and --segment, for
real."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator

import pytest

from orchestrator.backends.slurm.commands import parse_estimate
from orchestrator.backends.slurm.job.node_assignment import read_probe
from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.backends.slurm.queue import parse_squeue, squeue_argv
from orchestrator.backends.slurm.script.fixed import PROBE
from orchestrator.backends.slurm.script.flags import as_argv, network_flags
from orchestrator.backends.slurm.script.render import JobScript, render
from orchestrator.cluster.importers.slurm import from_addresses, parse_topology
from orchestrator.cluster.importers.slurm_nodes import parse_nodes
from orchestrator.cluster.nodes import with_nodes
from orchestrator.planner.elastic.replan import replan
from tests.beds.plans import make_plan
from tests.beds.slurm.cluster import Cluster
from tests.beds.slurm.cluster_conf import Shape
from tests.beds.slurm.packages import LATER, install_later

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def blocks() -> Iterator[Cluster]:
    """8 nodes in two blocks of four."""
    if reason := install_later():
        pytest.skip(f"no later Slurm: {reason} (recorded output is tested instead)")
    with Cluster(Shape(topology="block"), root=LATER) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def empty(blocks: Cluster) -> None:
    blocks.reset()


def drain(cluster: Cluster, *names: str) -> None:
    cluster.run("scontrol", "update", f"NodeName={','.join(names)}", "State=DRAIN", "Reason=test")


def test_blocks_are_read(blocks):
    topology = parse_topology(blocks.run("scontrol", "show", "topology"))
    assert (topology.kind, topology.block_size) == ("block", 4)
    assert topology.tiers[0].switches == {
        "leaf0": ("n0", "n1", "n2", "n3"),
        "leaf1": ("n4", "n5", "n6", "n7"),
    }


def test_text_and_json_say_the_same(blocks):
    drain(blocks, "n2")
    text_nodes = parse_nodes(blocks.run("scontrol", "-o", "-d", "show", "nodes"))
    json = parse_nodes(blocks.run("scontrol", "show", "nodes", "--json"))
    assert [(n.name, n.states, n.gpus, n.free) for n in text_nodes] == [
        (n.name, n.states, n.gpus, n.free) for n in json
    ]
    assert [n.name for n in text_nodes if not n.free] == ["n2"]


@pytest.mark.parametrize(
    ("degrees", "nodes", "out", "segment"),
    [
        (
            {"tp": 8, "pp": 4},
            4,
            ("n0",),
            4,
        ),  # a pipeline of four nodes: only the whole second block will do
        (
            {"tp": 8, "pp": 2, "dp": 2},
            4,
            ("n0", "n5"),
            2,
        ),  # two pipelines of two: 2 + 2, never 3 + 1
        ({"tp": 8, "pp": 2, "dp": 3}, 6, ("n0", "n1"), 2),  # 2 + 4
    ],
)
def test_segments_from_the_plan_keep_its_parts_whole(blocks, degrees, nodes, out, segment):
    drain(blocks, *out)
    plan = make_plan(**degrees, nodes=nodes)
    topology = parse_topology(blocks.run("scontrol", "show", "topology"))
    # planned on nodes that lie in blocks of four, as the cluster's do
    plan = replan(
        plan, with_nodes(plan.cluster, [f"n{i}" for i in range(8) if f"n{i}" not in out], topology)
    )
    flags = network_flags(plan, SlurmOptions(topology="block", segment=None))
    assert flags == {"segment": segment}
    printed = blocks.run(
        "srun",
        f"-N{nodes}",
        "--exclusive",
        "--gpus-per-node=8",
        *as_argv(flags),
        "bash",
        "-c",
        PROBE,
    )
    addresses = read_probe(printed)
    per_block = Counter(address.split(".")[0] for address in addresses.values())
    assert all(count % segment == 0 for count in per_block.values()), per_block
    real = replan(plan, with_nodes(plan.cluster, addresses, from_addresses(addresses)))
    node = {rank.rank: rank.node for rank in real.ranks}
    for group in real.groups["pp"]:
        assert len({addresses[node[rank]].split(".")[0] for rank in group}) == 1, (
            "a pipeline stays in one block"
        )


def test_arrays_and_estimates_are_told_as_before(blocks):
    held = ("--hold", "--array=0-1", "--output=/dev/null", "--wrap", "true")
    array = blocks.run("sbatch", "--parsable", *held).strip()
    queued_jobs = parse_squeue(blocks.run(*squeue_argv()))
    assert {job.id for job in queued_jobs.values() if job.id.startswith(array)} == {
        f"{array}_0",
        f"{array}_1",
    }
    assert queued_jobs[f"{array}_1"].state == "PENDING"
    printed = blocks.run(
        "bash", "-c", "printf '#!/bin/sh\\n#SBATCH -N8\\n' | sbatch --test-only 2>&1"
    )
    assert parse_estimate(printed)


def test_a_segment_that_does_not_fit_waits(blocks):
    drain(blocks, "n0", "n4")
    sbatch_options = ("-N4", "--segment=4", "--exclusive", "--output=/dev/null", "--wrap", "true")
    job_id = blocks.run("sbatch", "--parsable", *sbatch_options)
    blocks.run("sleep", "2")
    assert blocks.job_state(job_id.strip()) == "PENDING"


#: In place of the run's Python: notes what it is asked to do. Asked to save, its agent ends with
#: the code that a file beside it holds.
STUB = """#!/bin/bash
echo "$5" >> "$0.asked"
case $5 in
  agent) trap 'exit "$(cat "$0.saved")"' TERM; until [ -e "$0.go" ]; do sleep 0.2; done ;;
  outcome) exit "${@: -1}" ;;
esac
"""


class Preempted:
    """A job of one node whose agent ends with `code` when a job of higher priority wants its
    node."""

    def __init__(self, cluster: Cluster, code: int):
        self.cluster = cluster
        self.run = cluster.home / "runs" / secrets.token_hex(4)
        inside = cluster.inside / self.run.relative_to(cluster.home)
        (self.run / "logs").mkdir(parents=True)
        (self.run / "request.json").touch()
        (self.run / "python").write_text(STUB)
        (self.run / "python").chmod(0o755)
        (self.run / "python.saved").write_text(f"{code}\n")
        job = JobScript(
            run_id=self.run.name, run_dir=str(inside), plan=make_plan(tp=8, nodes=1), options=SlurmOptions(),
            export=("PATH",), python=str(inside / "python"),
        )  # fmt: skip
        (self.run / "job.sbatch").write_text(render(job))
        self.id = cluster.run("sbatch", "--parsable", str(inside / "job.sbatch")).strip()

    def after(self, *kinds: str) -> list[str]:
        """Jobs that wait for it."""
        sbatch_options = ("--parsable", "-N1", "--output=/dev/null", "--wrap", "true")
        return [
            self.cluster.run("sbatch", f"--dependency={kind}:{self.id}", *sbatch_options).strip()
            for kind in kinds
        ]

    def preempt(self) -> None:
        self.cluster.wait(lambda: "agent" in self.asked, 60, "the agent", "slurmctld")
        self.cluster.run(
            "sbatch",
            "-p",
            "urgent",
            "-N8",
            "--exclusive",
            "--output=/dev/null",
            "--wrap",
            "sleep 2",
        )

    def end(self) -> list[str]:
        """Waits for its end, without the delay after a requeue; the states that it was seen in
        since."""
        seen: list[str] = []

        def ended() -> bool:
            self.cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now", check=False)
            seen.append(self.cluster.job_state(self.id))
            return seen[-1] in ("COMPLETED", "FAILED", "PREEMPTED")

        self.cluster.wait(
            (self.run / "slurm" / "over").exists, 60, "the end of the run", "slurmctld"
        )
        self.cluster.wait(ended, 120, "the end of the job", "slurmctld")
        return list(dict.fromkeys(seen))

    @property
    def asked(self) -> list[str]:
        path = self.run / "python.asked"
        return path.read_text().split() if path.exists() else []

    @property
    def restarts(self) -> int:
        return int(
            self.cluster.run("scontrol", "show", "job", self.id).split("Restarts=")[1].split()[0]
        )


def never_starts(cluster: Cluster, job: str) -> bool:
    """Whether Slurm has decided that what it waits for cannot come any more; else it has run."""
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
    look = ("squeue", "-h", "-j", job, "-t", "all", "-o", "%T %r")
    decided = lambda: {"COMPLETED", "DependencyNeverSatisfied"} & set(cluster.run(*look).split())  # noqa: E731
    cluster.wait(decided, 60, "the decision on a dependency", "slurmctld")
    return "DependencyNeverSatisfied" in cluster.run(*look)


@pytest.mark.parametrize(("code", "starts"), [(0, ("afterany",)), (1, ("afterany", "afternotok"))])
def test_a_run_that_ends_in_its_grace_time_does_not_come_back(blocks, code, starts):
    """Slurm 24.05 and later requeue a job that they have asked to leave, however it has ended."""
    job = Preempted(blocks, code)
    waiting = job.after(*starts)
    job.preempt()
    assert job.end()[-1] == "PREEMPTED", "24.11 has mended it: see docs/slurm.md"
    assert job.restarts == 0 and job.asked == ["place", "agent", "outcome"], "one attempt worked"
    assert not any(never_starts(blocks, dependent) for dependent in waiting)


@pytest.mark.parametrize("kind", ["afterok", "afternotok"])
def test_it_comes_back_for_a_job_that_asks_how_it_has_ended(blocks, kind):
    """Slurm does not take a PREEMPTED job for one that ended well. So it ends as what it is, in an
    attempt without a step."""
    job = Preempted(blocks, 0)
    (dependent,) = job.after(kind)
    job.preempt()
    assert job.end()[-1] == "COMPLETED"
    assert job.restarts == 1 and job.asked == ["place", "agent", "outcome"], "one attempt worked"
    assert (
        "attempt 1: exit code 0, the run had already ended"
        in (job.run / "logs" / f"slurm-{job.id}.log").read_text()
    )
    assert never_starts(blocks, dependent) == (kind == "afternotok")


def test_a_run_that_was_requeued_after_its_grace_time_comes_back_once(blocks):
    """Slurm keeps in mind that a job was preempted, although the script has requeued it since."""
    job = Preempted(blocks, 75)
    job.preempt()
    blocks.wait(lambda: blocks.job_state(job.id) == "PENDING", 60, "the requeue", "slurmctld")
    (job.run / "python.go").touch()

    def agent_again() -> bool:
        blocks.run("scontrol", "update", f"JobId={job.id}", "StartTime=now", check=False)
        return job.asked.count("agent") == 2

    blocks.wait(agent_again, 120, "the next attempt", "slurmctld")
    job.end()
    assert job.restarts == 1 and job.asked == 2 * ["place", "agent", "outcome"]
