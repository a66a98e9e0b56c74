"""A cluster entry with its real nodes: which of them are taken, and that planning itself asks
nobody."""

from __future__ import annotations

import builtins
import os
import socket
import subprocess
import time

import pytest
from msgspec import structs

from orchestrator.backends.base import Choice
from orchestrator.backends.slurm import backend as slurm_backend
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.cli.main import main
from orchestrator.cluster.diff import diff
from orchestrator.cluster.document import parse_document, to_document
from orchestrator.cluster.model import Machine, Tier, Topology
from orchestrator.cluster.read import read
from orchestrator.cluster.resolve import Sources, resolve
from orchestrator.config.compose import load
from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Cluster
from orchestrator.planner.build import build_plan
from orchestrator.run.bad_nodes import BadNode, NodeMemory
from orchestrator.submit import cluster as edge
from tests.beds.bundles import refusal
from tests.planner import configs, shapes

from . import samples

NODES = tuple(f"n{i}" for i in range(6))
LIVE = Topology(
    "tree",
    (Tier("leaf", {"left": NODES[:3], "right": NODES[3:]}), Tier("spine", {"spine": NODES})),
    machines={node: Machine(gpus=8, gpu="h100", free=node != "n0") for node in NODES},
)


def sources(*bad: str) -> Sources:
    return Sources(live=lambda backend, partition: LIVE, bad_nodes=lambda cluster: bad)


def test_imported_nodes_without_the_gpus_are_left_out(tmp_path):
    file = tmp_path / "nodes"
    lines = [
        f"NodeName=n{i} State=IDLE Gres=gpu:{kind}:8 CPUTot=1"
        for i, kind in enumerate(["h100", "a100", "h100"])
    ]
    file.write_text(
        "\n".join([*lines, "NodeName=n9 State=IDLE+DRAIN Gres=gpu:h100:8 CPUTot=1 Reason=ECC"])
    )
    spec = configs.cluster(8, 8, topology_file=str(file))
    cluster = resolve(spec)
    assert cluster.node_names == ["n0", "n2"] and cluster.left_out == {
        "out of service": 1,
        "with 8 a100": 1,
    }
    plan = configs.build_plan(
        configs.config(spec, shapes.llama3_8b(), {"tp": 8, "zero": 1}, global_batch_samples=8)
    )
    assert (
        "a job runs on nodes of one kind, here 2 with 8 H100-SXM5-80GB; left out: 1 with 8 a100"
        in plan.warnings
    )
    file.write_text("\n".join([lines[1], "NodeName=n8 State=IDLE Gres=gpu:h100:4 CPUTot=1"]))
    with pytest.raises(
        OrchError, match=r"none is free with 8 H100.* there are: 1 with 4 h100, 1 with 8 a100"
    ):
        resolve(spec)


def test_a_name_of_ones_own_for_a_gpu_finds_its_nodes(tmp_path):
    file = tmp_path / "nodes"
    kinds = ["h100", "nvidia_h100_80gb_hbm3", "gh200", "h200"]
    file.write_text(
        "\n".join(
            f"NodeName=n{i} State=IDLE Gres=gpu:{kind}:8 CPUTot=1" for i, kind in enumerate(kinds)
        )
    )
    spec = configs.cluster(8, 8, topology_file=str(file))
    for name in ("NVIDIA H100 80GB", "H100-SXM5-80GB", "h100"):
        resolved = resolve(structs.replace(spec, gpu=structs.replace(spec.gpu, name=name)))
        assert resolved.node_names == ["n0", "n1"] and resolved.left_out == {
            "with 8 gh200": 1,
            "with 8 h200": 1,
        }


def test_shared_gpus_are_no_gpus_of_a_plan(tmp_path, capsys):
    file = tmp_path / "nodes.json"
    product = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    labels = {f"whole-{i}": product | {"nvidia.com/gpu.count": "8"} for i in range(2)}
    labels |= {"sliced": product | {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.count": "2"}}
    labels |= {"cut": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}}
    file.write_text(samples.kubernetes(labels))
    resolved = resolve(configs.cluster(4, 8, topology_file=str(file)))
    assert resolved.node_names == ["whole-0", "whole-1"]
    assert resolved.left_out == {"with MIG slices": 1, "with shared GPUs": 1}
    assert main(["topology", "show", str(file)]) == Exit.DONE
    page = capsys.readouterr().out
    assert "4 nodes, 1 with MIG slices, 1 with shared GPUs" in page and "2/8 GPUs per node" in page
    job = [
        "cluster=h100x64",
        f"cluster.topology_file={file}",
        "model=llama3_8b",
        "train.global_batch_samples=1020",
    ]
    assert main(["plan", *job, "parallel=tp8_zero1", "parallel.dp=3"]) == Exit.CONFIG
    assert (
        "2 nodes x 8 GPUs = 16 (left out: 1 with MIG slices, 1 with shared GPUs)"
        in capsys.readouterr().err
    )


MIXED = """\
NodeName=g1 State=IDLE Gres=gpu:3090:8(S:0-1) CPUTot=64
NodeName=g2 State=MIXED Gres=gpu:3090:10 GresUsed=gpu:3090:3(IDX:0-2) CPUTot=64
NodeName=g3 State=IDLE Gres=gpu:a100:4(S:0),gpu:2080ti:8(S:1) CPUTot=64
NodeName=g4 State=IDLE Gres=gpu:3g.20gb:8,gpu:1g.5gb:16 CPUTot=64
NodeName=g5 State=IDLE Gres=gpu:3090 CPUTot=64
NodeName=g6 State=IDLE Gres=(null) CPUTot=64
NodeName=g7 State=IDLE Gres=gpu:8 CPUTot=64
"""


def test_nodes_of_other_models_slices_and_impossible_counts_are_left_out(tmp_path):
    file = tmp_path / "nodes"
    file.write_text(MIXED)

    def taken(gpu: str, gpus: int, **values: object) -> Cluster:
        spec = configs.cluster(7, gpus, topology_file=str(file), **values)
        return resolve(structs.replace(spec, gpu=structs.replace(spec.gpu, name=gpu)))

    resolved = taken("RTX-3090", 8)
    assert resolved.node_names == ["g1", "g2", "g7"]
    assert resolved.left_out == {
        "with 4 a100 and 8 2080ti": 1,
        "with 3090 GPUs": 1,
        "without GPUs": 1,
        "without a whole GPU, slices only": 1,
    }
    assert taken("A100-SXM4-40GB", 4).node_names == ["g3", "g7"]
    assert taken("RTX-2080Ti", 8).node_names == ["g3", "g7"]
    assert taken("H100-SXM5-80GB", 8).node_names == ["g7"], (
        "its type is not known, and eight are possible"
    )
    # A job without GPUs may use nodes without any.
    file.write_text(MIXED.splitlines()[5] + "\n" + MIXED.splitlines()[6])
    assert taken("cpu", 1, device="cpu").node_names == ["g6", "g7"]


def test_several_models_survive_our_own_file(tmp_path):
    file = tmp_path / "nodes"
    file.write_text(MIXED)
    topology = read(file)
    assert parse_document(to_document([topology])).machines == topology.machines
    machines = topology.machines | {"g3": structs.replace(topology.machines["g3"], other_gpus=())}
    changes = diff(topology, structs.replace(topology, machines=machines))
    assert changes == ["other_gpus: 8 2080ti before, none now: g3"]


BLOCKS = """\
BlockName=a Nodes=r[1-16]
BlockName=b Nodes=r[17-29]
BlockName=c Nodes=r[30-47]
BlockSizes=13
"""


def of_file(tmp_path, *overrides: str) -> Config:
    file = tmp_path / "topology.conf"
    file.write_text(BLOCKS)
    job = (
        "cluster=gb200_nvl72x8",
        "model=llama3_70b",
        "parallel=tp8_pp2_zero1",
        "train.global_batch_samples=1024",
    )
    return load([*job, f"cluster.topology_file={file}", *overrides])


@pytest.mark.parametrize("key", ["cluster.nodes", "cluster.topology_nodes"])
@pytest.mark.parametrize(
    ("count", "by_block"),
    [(47, (16, 13, 18)), (44, (16, 10, 18)), (34, (16, 0, 18)), (16, (16, 0, 0)), (8, (0, 8, 0))],
)
def test_so_many_nodes_of_a_file_are_taken_as_the_command_line_says(key, count, by_block, tmp_path):
    cluster = resolve(of_file(tmp_path, f"{key}={count}").cluster)
    index = {name: int(name[1:]) for name in cluster.node_names}
    blocks = [range(1, 17), range(17, 30), range(30, 48)]
    assert tuple(sum(at in block for at in index.values()) for block in blocks) == by_block


def test_groups_of_the_taken_nodes_cross_no_block(tmp_path):
    config = of_file(tmp_path, "cluster.nodes=44", "train.global_batch_samples=1023")
    plan = build_plan(config, resolve(config.cluster))
    blocks = [range(1, 17), range(17, 30), range(30, 48)]
    assert len(plan.groups["tp"]) == 22
    for group in plan.groups["tp"]:
        numbers = {int(plan.ranks[rank].node[1:]) for rank in group}
        assert len(numbers) == 2 and any(numbers <= set(block) for block in blocks)


def test_the_entrys_own_number_takes_every_node_of_a_file(tmp_path):
    assert len(resolve(of_file(tmp_path).cluster).node_names) == 47


@pytest.mark.parametrize(
    ("overrides", "exit", "says"),
    [
        (["cluster.nodes=48"], Exit.CAPACITY, "48 nodes are wanted, 47 fit"),
        (["cluster.topology_nodes=0"], Exit.USAGE, "cluster.topology_nodes=0"),
        (
            ["cluster.topology_file=slurm:", "cluster.topology_nodes=4"],
            Exit.USAGE,
            "cluster.nodes says how many",
        ),
        (
            ["cluster.topology_file=null", "cluster.topology_nodes=4"],
            Exit.USAGE,
            "needs a file that",
        ),
        (
            ["cluster.topology_file=null", "cluster.topology_name=x"],
            Exit.USAGE,
            "needs a file that",
        ),
    ],
)
def test_what_a_file_cannot_give_is_refused(overrides, exit, says, tmp_path):
    with refusal(says, exit):
        resolve(of_file(tmp_path, *overrides).cluster)


def test_bad_nodes_are_left_out_of_a_running_cluster():
    spec = configs.cluster(3, 8, topology_file="slurm:batch")
    assert resolve(spec, sources()).node_names == ["n3", "n4", "n5"], "those under one switch"
    resolved = resolve(spec, sources("n4", "gone"))
    assert "n4" not in resolved.node_names and len(resolved.node_names) == 3
    assert resolved.left_out == {"found bad by earlier runs": 1, "out of service": 1}
    with pytest.raises(OrchError, match="3 nodes are wanted, 2 are free") as refused:
        resolve(spec, sources("n1", "n2", "n4"))
    assert refused.value.exit == Exit.CAPACITY


JOB = ("cluster=slurm", "cluster.nodes=4", "model=llama3_8b")


@pytest.mark.parametrize(
    ("verb", "argv"),
    [
        ("plan", ("parallel=tp8_zero1",)),
        ("tune", ("parallel.tp=8", "parallel.pp=1")),
        ("whatif", ("parallel=tp8_zero1", "--case", "train.seq_len=4096")),
        ("submit", ("parallel=tp8_zero1", "--run-id", "r")),
        ("bench", ()),
    ],
)
def test_every_verb_leaves_them_out_and_says_so_once(verb, argv, tmp_path, monkeypatch, capsys):
    reads = []
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    monkeypatch.setattr(slurm_backend, "read_cluster", lambda *which: reads.append(which) or LIVE)
    resolved = []
    monkeypatch.setattr(
        edge, "resolve", lambda *args: resolved.append(resolve(*args)) or resolved[-1]
    )
    sent = []

    def submit(backend, bundle, environ):
        sent.append(bundle.request.backend_options["bad_nodes"])
        raise OrchError("not sent", Exit.CAPACITY)

    monkeypatch.setattr(SlurmBackend, "choose", lambda backend, bundles, environ: Choice(0, []))
    monkeypatch.setattr(SlurmBackend, "submit", submit)
    now = time.time()
    NodeMemory(tmp_path).add(
        BadNode(cluster="slurm", node="n4", why="ECC", run="r", at=now, until=now + 60)
    )
    sends = verb in ("submit", "bench")
    assert main([verb, *JOB, *argv]) == (Exit.CAPACITY if sends else Exit.DONE)
    err = capsys.readouterr().err
    assert resolved and all(
        cluster.node_names and "n4" not in cluster.node_names for cluster in resolved
    )
    assert err.count("without n4, found bad by earlier runs (orch nodes)") == 1 and len(reads) == 1
    assert sent == ([["n4"]] if sends else [])


def test_a_plan_is_made_without_asking_anybody(monkeypatch):
    config = configs.config(
        configs.cluster(), shapes.llama3_8b(), {"auto": True, "tp": 8}, global_batch_samples=64
    )
    cluster = resolve(config.cluster)
    before = build_plan(config, cluster)  # what is imported is imported

    def refuse(*args, **kwargs):
        raise AssertionError(f"{args} {kwargs}")

    for module, names in (
        (builtins, ["open"]),
        (os, ["open", "stat", "scandir", "getenv"]),
        (socket, ["socket"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "environ", None)
    plan = build_plan(config, cluster)
    monkeypatch.undo()
    assert plan == before
