"""`orch submit backend=slurm` on the real test cluster: from the command line to workers on the
nodes."""

from __future__ import annotations

import json
import subprocess

import pytest

from orchestrator.cluster.hostlist import expand
from orchestrator.plan import from_json
from orchestrator.plan.exits import Exit
from orchestrator.plan.ranks import check_ranks
from tests.beds.slurm.runs import CONF, Orch

pytestmark = [pytest.mark.slurm, pytest.mark.process]


def levels(**nodes: int) -> str:
    """A network of which each level's switch joins that many nodes."""
    rest = "gbit_per_s: 8, latency_us: 100, source: test"
    return f"cluster.levels=[{', '.join(f'{{name: {n}, nodes_per_switch: {k}, {rest}}}' for n, k in nodes.items())}]"


WIDE = levels(leaf=16)
HALF = levels(leaf=2, spine=4)  # HALF: two nodes of each leaf


def granted(orch: Orch, job: str) -> set[str]:
    return set(expand(orch.cluster.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%N").strip()))


def two_nodes(*overrides: str) -> list[str]:
    return ["cluster=testbed", "cluster.nodes=2", levels(leaf=2), "parallel=tp2_zero1", *overrides]


def test_submit_returns_at_once_and_the_run_is_done(orch):
    run = orch.submit(*two_nodes(), worker={"STEPS": 3})
    assert orch("status", run.id).stdout
    followed = orch("logs", "--follow", run.id).stdout  # to the end
    assert all(f"rank {rank} of 4 starts after step 0" in followed for rank in range(4))
    state = run.wait("done")
    assert state.exit_code == 0 and state.backend == "slurm" and state.epoch == 0
    assert set(state.nodes) == granted(orch, run.job) == set(run.assignment["nodes"])
    assert json.loads((run.folder / "report.json").read_text())
    assert (run.folder.stat().st_mode & 0o777, (run.folder / "slurm").stat().st_mode & 0o777) == (
        0o700,
        0o700,
    )
    loose = [p for p in run.folder.rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
    assert not loose, "files of the run are private"
    assert "orch-" + run.id in orch.cluster.run("squeue", "-h", "-t", "all", "-o", "%j")
    assert (
        run.id in orch("list").stdout
        and "slurm://" in orch("list").stdout + orch("status", run.id).stdout
    )


def test_the_rank_map_is_slurms_own_answer(orch):
    """Each worker prints Slurm's variables of its task; the plan in the run folder must agree for
    every rank."""
    variables = "$RANK $ORCH_NODE $SLURMD_NODENAME $SLURM_NODEID $SLURM_TOPOLOGY_ADDR"
    script = f'echo "{variables}" > "$ORCH_RUN_DIR/seen-$RANK"'
    run = orch.submit(
        "cluster=testbed", "parallel=tp2_pp2_zero1", program=("/bin/sh", "-c", script)
    )
    run.wait("done")
    plan = from_json((run.folder / "plan.json").read_bytes())
    assert check_ranks(plan) is None and set(plan.cluster.node_names) == granted(orch, run.job)
    for rank in plan.ranks:
        number, node, slurmd, index, address = (
            (run.folder / f"seen-{rank.rank}").read_text().split()
        )
        assert int(number) == rank.rank
        assert node == slurmd == rank.node == plan.cluster.node_names[int(index)]
        assert (
            run.assignment["addresses"][node] == address == f"spine.leaf{int(node[1]) // 4}.{node}"
        )
    node = [rank.node for rank in plan.ranks]
    assert all(len({node[r] for r in group}) == 1 for group in plan.groups["tp"])
    assert [level.switches for level in plan.cluster.levels] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [list(range(8))],
    ]


def test_nodes_taken_by_others_and_the_difference_from_the_plan(orch):
    """Two nodes of the first leaf and one of the second are out: four nodes planned on one leaf lie
    2 + 2 or 1 + 3."""
    for name in ("n1", "n6"):
        orch.cluster.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")
    overrides = (
        "cluster=testbed",
        "cluster.nodes=4",
        "parallel=tp2_pp4",
        "backend.options.exclude=[n0]",
    )
    run = orch.submit(
        *overrides, levels(leaf=4), "backend.options.topology=none", program=("/bin/true",)
    )
    run.wait("done")
    assert not granted(orch, run.job) & {"n0", "n1", "n6"}
    assert "pp crosses spine instead of leaf" in run.assignment["summary"]
    assert "pp crosses spine instead of leaf" in run.logs()


def test_rendered_script_gives_the_same_run(orch, tmp_path):
    submitted = orch.submit(*two_nodes(), worker={"STEPS": 2})
    rendered = orch.submit(*two_nodes(), verb="render", worker={"STEPS": 2})
    assert (submitted.folder / "slurm" / "job.sbatch").read_text().replace(
        submitted.id, "ID"
    ) == rendered.script.replace(rendered.id, "ID")
    assert rendered.state().state == "pending", "nobody has submitted it yet"
    (tmp_path / "job.sbatch").write_text(rendered.script)
    environ = {**orch.cluster.env, "ORCH_TEST_STEPS": "2"}
    subprocess.run(
        ["sbatch", str(tmp_path / "job.sbatch")],
        env=environ,
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    assert submitted.wait("done").exit_code == rendered.wait("done").exit_code == 0
    sent = [
        json.loads((run.folder / "plan.submitted.json").read_text())["hash"]
        for run in (submitted, rendered)
    ]
    assert sent[0] == sent[1], "the plan as it was sent; Slurm may give each run other nodes"
    assert [rank["coord"] for rank in submitted.plan["ranks"]] == [
        rank["coord"] for rank in rendered.plan["ranks"]
    ]


def test_exit_codes_come_through(orch):
    failed = orch.submit(*two_nodes("backend.max_restarts=0"), worker={"DIE": "3:1:5"})
    refused = orch.submit(*two_nodes(), worker={"DIE": "0:1:65"})
    unhealthy = orch.submit(
        *two_nodes("backend.options.max_node_faults=0"), worker={"DIE": "2:1:74"}
    )
    state = failed.wait("failed")
    assert state.exit_code == Exit.USER and state.cause.rank == 3 and state.cause.code == 5
    assert refused.wait("failed").exit_code == Exit.CONFIG and "code 65" in refused.logs()
    assert (
        unhealthy.wait("failed").exit_code == Exit.NODE
        and "gave up after 0 node faults" in unhealthy.logs()
    )
    assert refused.restarts == failed.restarts == unhealthy.restarts == 0


@pytest.mark.parametrize(
    ("overrides", "code", "complaint"),
    [
        (["backend.options.partition=mian"], Exit.CONFIG, "did you mean 'main'"),
        (["backend.options.partitoin=x"], Exit.CONFIG, "did you mean 'partition'"),
        (["backend.options.comment='a\nb'"], None, "unprintable character"),
        (["backend.options.gpu_type=a100"], Exit.CAPACITY, "sinfo"),
        (["backend.options.time=2-00:00:00"], Exit.CONFIG, "partition main allows"),
        (["backend.options.exclude=[n99]"], Exit.CONFIG, "exclude"),
        (["cluster.nodes=16", WIDE], Exit.CAPACITY, "partition main has 8"),
        (
            ["backend.options.partition=short", "backend.options.time=0:02:00"],
            Exit.CONFIG,
            "partition short allows",
        ),
    ],
)
def test_refusals_are_one_line(orch, overrides, code, complaint):
    done = orch("submit", "--config-dir", str(CONF), *two_nodes(), *overrides, code=None)
    assert done.returncode and (code is None or done.returncode == code), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and complaint in done.stderr
    assert not orch.cluster.run("squeue", "-h").strip(), "nothing is left in the queue"


@pytest.mark.slow
def test_main_line_at_full_size_until_the_workers_check_their_place(full_cluster, tmp_path):
    """64 workers on 8 x 8: every one finds itself on the node and GPU that the plan says, on the
    right leaf."""
    full_cluster.reset()
    orch = Orch(full_cluster, tmp_path)
    check = """
[ "$ORCH_NODE" = "$SLURMD_NODENAME" ] && [ "$WORLD_SIZE" = 64 ] && [ "$LOCAL_WORLD_SIZE" = 8 ] || exit 3
[ "$((RANK % 8))" = "$LOCAL_RANK" ] || exit 4
echo "$RANK $SLURMD_NODENAME $SLURM_TOPOLOGY_ADDR" > "$ORCH_RUN_DIR/seen-$RANK"
"""
    line = [
        "+cluster=h100x64",
        "parallel=tp8_pp4_zero1",
        "model=tiny",
        "backend=slurm",
        "train.seq_len=128",
    ]
    run = orch.submit(*line, program=("/bin/sh", "-c", check))
    assert run.wait("done").exit_code == 0
    plan = from_json((run.folder / "plan.json").read_bytes())
    assert (plan.parallel.tp, plan.parallel.pp, plan.parallel.dp, plan.parallel.zero) == (
        8,
        4,
        2,
        1,
    )
    node = [rank.node for rank in plan.ranks]
    seen = [(run.folder / f"seen-{rank}").read_text().split() for rank in range(64)]
    assert [name for _, name, _ in seen] == node
    assert all(len({node[r] for r in group}) == 1 for group in plan.groups["tp"])
    leaf = [address.split(".")[1] for _, _, address in seen]
    assert all(len({leaf[r] for r in group}) == 1 for group in plan.groups["pp"])
    assert "--switches=2@" in (run.folder / "slurm" / "job.sbatch").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "half",
    [
        ["cluster.nodes=4", HALF, "backend.options.exclude=[n2,n3,n6,n7]"],
        pytest.param([], marks=pytest.mark.full),
    ],
)
def test_trains_for_real_across_the_leaves(orch, half):
    """Gloo workers on text, tensor-parallel inside nodes, pipelines and data-parallel across: the
    loss falls.

    Eight on half of each leaf, 16 on the whole cluster.
    """
    overrides = [
        "cluster=testbed",
        "parallel=tp2_pp2_zero1",
        "train.steps=6",
        "train.log_every_steps=1",
        *half,
    ]
    run = orch.submit(*overrides, program=None)
    assert run.wait("done").exit_code == 0
    losses = run.losses()
    assert sorted(losses) == list(range(1, 7)) and losses[6] < losses[1] - 1.0
    assert set(run.assignment["nodes"]) == granted(orch, run.job)
    node = [rank["node"] for rank in run.plan["ranks"]]
    leaf = [int(name[1]) // 4 for name in node]
    groups = run.plan["groups"]
    assert all(len({node[r] for r in group}) == 1 for group in groups["tp"])
    assert any(len({node[r] for r in group}) > 1 for group in groups["pp"])
    assert any(len({leaf[r] for r in group}) > 1 for group in groups["pp"] + groups["dp"]), (
        "across the leaves"
    )
