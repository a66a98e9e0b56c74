"""A later Slurm (24.11, from a later Debian in its own root): block topology and --segment, for real."""

from __future__ import annotations

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
    assert topology.tiers[0].switches == {"leaf0": ("n0", "n1", "n2", "n3"), "leaf1": ("n4", "n5", "n6", "n7")}


def test_text_and_json_say_the_same(blocks):
    drain(blocks, "n2")
    text = parse_nodes(blocks.run("scontrol", "-o", "-d", "show", "nodes"))
    json = parse_nodes(blocks.run("scontrol", "show", "nodes", "--json"))
    assert [(n.name, n.states, n.gpus, n.free) for n in text] == [(n.name, n.states, n.gpus, n.free) for n in json]
    assert [n.name for n in text if not n.free] == ["n2"]


@pytest.mark.parametrize(
    ("degrees", "nodes", "out", "segment"),
    [
        ({"tp": 8, "pp": 4}, 4, ("n0",), 4),  # a pipeline of four nodes: only the whole second block will do
        ({"tp": 8, "pp": 2, "dp": 2}, 4, ("n0", "n5"), 2),  # two pipelines of two: 2 + 2, never 3 + 1
        ({"tp": 8, "pp": 2, "dp": 3}, 6, ("n0", "n1"), 2),  # 2 + 4
    ],
)
def test_segments_from_the_plan_keep_its_parts_whole(blocks, degrees, nodes, out, segment):
    drain(blocks, *out)
    plan = make_plan(**degrees, nodes=nodes)
    topology = parse_topology(blocks.run("scontrol", "show", "topology"))
    # planned on nodes that lie in blocks of four, as the cluster's do
    plan = replan(plan, with_nodes(plan.cluster, [f"n{i}" for i in range(8) if f"n{i}" not in out], topology))
    flags = network_flags(plan, SlurmOptions(topology="block", segment=None))
    assert flags == {"segment": segment}
    printed = blocks.run("srun", f"-N{nodes}", "--exclusive", "--gpus-per-node=8", *as_argv(flags), "bash", "-c", PROBE)
    places = read_probe(printed)
    per_block = Counter(address.split(".")[0] for address in places.values())
    assert all(count % segment == 0 for count in per_block.values()), per_block
    real = replan(plan, with_nodes(plan.cluster, places, from_addresses(places)))
    node = {rank.rank: rank.node for rank in real.ranks}
    for group in real.groups["pp"]:
        assert len({places[node[rank]].split(".")[0] for rank in group}) == 1, "a pipeline stays in one block"


def test_arrays_and_estimates_are_told_as_before(blocks):
    held = ("--hold", "--array=0-1", "--output=/dev/null", "--wrap", "true")
    array = blocks.run("sbatch", "--parsable", *held).strip()
    found = parse_squeue(blocks.run(*squeue_argv()))
    assert {job.id for job in found.values() if job.id.startswith(array)} == {f"{array}_0", f"{array}_1"}
    assert found[f"{array}_1"].state == "PENDING"
    printed = blocks.run("bash", "-c", "printf '#!/bin/sh\\n#SBATCH -N8\\n' | sbatch --test-only 2>&1")
    assert parse_estimate(printed)


def test_a_segment_that_does_not_fit_waits(blocks):
    drain(blocks, "n0", "n4")
    words = ("-N4", "--segment=4", "--exclusive", "--output=/dev/null", "--wrap", "true")
    asked = blocks.run("sbatch", "--parsable", *words)
    blocks.run("sleep", "2")
    assert blocks.job_state(asked.strip()) == "PENDING"


#: In place of the run's Python: notes what it is asked to do. Its agent ends well when it is asked to save.
STUB = """#!/bin/bash
echo "$5" >> "$0.asked"
[ "$5" != agent ] || { trap 'exit 0' TERM URG; for i in {1..600}; do sleep 0.2; done; exit 75; }
"""


def test_a_run_that_ends_well_in_its_grace_time_takes_its_nodes_no_third_time(blocks):
    """Slurm 24.11 requeues a job that it has asked to leave although it has ended with 0. That attempt leaves at once:
    no step, no agents. The job ends as what it is, so that those after it (`afterok`) start.
    """
    run, inside = blocks.home / "tiny-1", blocks.inside / "tiny-1"
    (run / "logs").mkdir(parents=True)
    (run / "request.json").touch()
    (run / "python").write_text(STUB)
    (run / "python").chmod(0o755)
    job = JobScript(
        run_id="tiny-1", run_dir=str(inside), plan=make_plan(tp=8, nodes=1), options=SlurmOptions(), export=("PATH",),
        python=str(inside / "python"),
    )  # fmt: skip
    (run / "job.sbatch").write_text(render(job))
    id_ = blocks.run("sbatch", "--parsable", str(inside / "job.sbatch")).strip()
    asked = run / "python.asked"
    blocks.wait(lambda: asked.exists() and "agent" in asked.read_text(), 60, "the agent", "slurmctld")
    blocks.run("sbatch", "-p", "urgent", "-N8", "--exclusive", "--output=/dev/null", "--wrap", "sleep 2")
    blocks.wait((run / "slurm" / "over").exists, 60, "the end of the run", "slurmctld")
    blocks.wait(lambda: blocks.job_state(id_) in ("PENDING", "COMPLETED"), 60, "Slurm's decision", "slurmctld")
    again = blocks.job_state(id_) == "PENDING"

    def completed() -> bool:
        blocks.run("scontrol", "update", f"JobId={id_}", "StartTime=now", check=False)
        return blocks.job_state(id_) == "COMPLETED"

    blocks.wait(completed, 120, "the end of the job", "slurmctld")
    assert asked.read_text().split() == ["place", "agent", "outcome"], "one life worked"
    log = (run / "logs" / f"slurm-{id_}.log").read_text()
    assert again == ("life 1: code 0, the run had ended before" in log)
    assert again, "24.11 has mended it: Requeue=0 and this test may go"
