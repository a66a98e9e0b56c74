"""Reading what Slurm's commands say: nodes, topology, job states, queues. Pure; the live twins are
in test_live.py."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.slurm import queue
from orchestrator.backends.slurm.states import JOB_STATES, explain_reason, job_state
from orchestrator.cluster.importers.slurm import from_addresses, parse_topology
from orchestrator.cluster.importers.slurm_nodes import parse_nodes, parse_state, select
from orchestrator.cluster.model import FLAT
from orchestrator.errors import OrchError
from tests.beds.slurm import large_output as big

REAL_NODE = """\
NodeName=n0 Arch=x86_64 CoresPerSocket=8
   CPUAlloc=16 CPUEfctv=16 CPUTot=16 CPULoad=0.35
   AvailableFeatures=testbed
   ActiveFeatures=testbed,ib
   Gres=gpu:h100:8
   GresDrain=N/A
   GresUsed=gpu:h100:2(IDX:0-1)
   NodeAddr=127.0.0.1 NodeHostName=vm Port=24473 Version=22.05.8
   OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0
   RealMemory=16000 AllocMem=0 FreeMem=21990 Sockets=2 Boards=1
   State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=main,urgent,short
   CfgTRES=cpu=16,mem=16000M,billing=16
   AllocTRES=

NodeName=n1 Arch=x86_64 State=DOWN*+DRAIN+NOT_RESPONDING Gres=(null) CPUTot=4 RealMemory=10 Partitions=main
   Reason=bad State=IDLE NodeName=n9 [root@2026-11-20T10:00:00]
"""


def test_indented_nodes():
    first, second = parse_nodes(REAL_NODE)
    assert (first.name, first.gpus, first.gpus_used, first.gpu_type) == ("n0", 8, 2, "h100")
    assert (first.cpus, first.state) == (16, "MIXED")
    assert first.features == {"testbed", "ib"} and first.partitions == {"main", "urgent", "short"}
    assert second.states == {"DOWN", "DRAIN", "NOT_RESPONDING"} and second.gpus == 0
    assert second.reason.startswith("bad State=IDLE NodeName=n9"), (
        "what an administrator writes is never a field"
    )
    assert not first.free and not second.free and first.usable and not second.usable


def test_text_and_json_agree():
    plain = parse_nodes(big.scontrol_nodes(90))
    json = parse_nodes(big.scontrol_nodes_json(90))
    facts = attrgetter("name", "states", "gpus", "gpus_used", "gpu_type", "cpus")
    assert list(map(facts, plain)) == list(map(facts, json))
    free = [big.node_name(i) for i in range(90) if big.state_of(i) in ("IDLE", "IDLE+POWERED_DOWN")]
    assert [n.name for n in plain if n.free] == free


def test_recorded_output_of_slurm_24_11():
    """Real answers of 24.11.5 with topology/block; test_later.py asks a living one, where it can be
    installed."""
    folder = Path(__file__).parent / "recorded" / "24.11.5"
    plain, json = (parse_nodes((folder / name).read_text()) for name in ("nodes.txt", "nodes.json"))
    assert plain == json and len(plain) == 8 and all(node.free and node.gpus == 8 for node in plain)
    topology = parse_topology((folder / "topology.txt").read_text())
    assert (topology.kind, topology.block_size) == ("block", 4)
    assert topology.tiers[0].switches["leaf1"] == ("n4", "n5", "n6", "n7")


@pytest.mark.parametrize(
    ("state_text", "want", "free"),
    [
        ("IDLE", {"IDLE"}, True),
        ("idle*", {"IDLE", "NOT_RESPONDING"}, False),
        ("idle~", {"IDLE", "POWERED_DOWN"}, True),
        ("IDLE+PLANNED", {"IDLE", "PLANNED"}, True),
        ("MIXED-", {"MIXED", "PLANNED"}, False),
        ("drained", {"DRAIN"}, False),
        ("IDLE+DRAIN", {"IDLE", "DRAIN"}, False),
        ("IDLE+MAINTENANCE+RESERVED", {"IDLE", "MAINTENANCE", "RESERVED"}, False),
        ("IDLE$", {"IDLE", "MAINTENANCE"}, False),
        ("ALLOCATED+COMPLETING", {"ALLOCATED", "COMPLETING"}, False),
        ("IDLE+SOMETHING_NEW", {"IDLE", "SOMETHING_NEW"}, False),
        ("DOWN+REBOOT_ISSUED^", {"DOWN", "REBOOT_ISSUED"}, False),
    ],
)
def test_node_states(state_text, want, free):
    assert parse_state(state_text) == want
    (node,) = parse_nodes(f"NodeName=x State={state_text} Gres=gpu:8 CPUTot=1")
    assert node.free is free


@pytest.mark.parametrize(
    ("gres", "whole_gpus", "total"),
    [
        ("gpu:8", [(8, "")], 8),
        ("gpu:h100:8(S:0-1)", [(8, "h100")], 8),
        ("gpu:3090:8(S:0-1)", [(8, "3090")], 8),
        ("gpu:3090:3(IDX:0-2)", [(3, "3090")], 3),
        ("gpu:4090d:8,gpu:4090d:2", [(10, "4090d")], 10),
        ("gpu:a100:4(S:0),gpu:2080ti:8(S:1)", [(4, "a100"), (8, "2080ti")], 12),
        ("gpu:1080Ti:2(S:0),shard:1080Ti:8(0/4,0/4)", [(2, "1080Ti")], 2),
        ("gpu:a100_3g.20gb:2,gpu:a100:6", [(6, "a100")], 8),
        ("gpu:1g.5gb:7(S:0)", [], 7),
        ("gpu:3g.20gb:8(S:0-1),gpu:2g.10gb:8(S:0-1),gpu:1g.10gb.me:16", [], 32),
        ("gpu:nvidia_h100_80gb_hbm3_1g.10gb:56(S:0-1)", [], 56),
        ("nic:4,gpu:mi300x:4", [(4, "mi300x")], 4),
        ("gpu:5090:no_consume:8", [(8, "5090")], 8),
        ("gpu:tesla", [(1, "tesla")], 1),
        ("gpu:nvidia_h100_80gb_hbm3:4", [(4, "nvidia_h100_80gb_hbm3")], 4),
        ("(null)", [], 0),
        ("shard:8", [], 0),
    ],
)
def test_gres_as_text_and_json(gres, whole_gpus, total):
    (plain,) = parse_nodes(f"NodeName=x State=IDLE Gres={gres} GresUsed={gres} CPUTot=1")
    raw = {"name": "x", "state": ["IDLE"], "gres": gres, "gres_used": gres, "cpus": 1}
    (json,) = parse_nodes(msgspec.json.encode({"nodes": [raw]}).decode())
    assert plain == json and plain.gpus_used == total
    groups = [
        (plain.gpus, plain.gpu_type),
        *((group.gpus, group.gpu) for group in plain.other_gpus),
    ]
    assert groups == (whole_gpus or [(0, "")]) and plain.sliced is (
        total > sum(count for count, _ in whole_gpus)
    )


@pytest.mark.parametrize(
    "total", ["gres/gpu=3,gres/gpu:3090=3", "gres/gpu:3090=1,gres/gpu:a100=2", "gres/gpu=3"]
)
def test_allocated_gpus_without_detail(total):
    (node,) = parse_nodes(f"NodeName=x State=MIXED Gres=gpu:8 AllocTRES=cpu=4,mem=1G,{total}")
    assert node.gpus_used == 3


@pytest.mark.parametrize(
    "node_listing",
    ["", "Nodes: none", "{}", '{"nodes": 3}', '{"nodes": []}', "NodeName=x CPUTot=1"],
)
def test_not_nodes(node_listing):
    with pytest.raises(OrchError):
        parse_nodes(node_listing)


def test_select_by_partition_and_features():
    nodes = parse_nodes(big.scontrol_nodes(4))
    assert len(select(nodes, "batch", "h100&ib")) == 4
    assert select(nodes, "batch", "h100&gold") == select(nodes, "debug") == []
    assert len(select(nodes, None, "[rack1|rack2]")) == 4  # left to Slurm


# ------------------------------------------------------------------------------------------
#     topology

TREE_CONF = """\
# two leaves of different size
SwitchName=leaf0 Nodes=n[0-3]  # comment
switchname=leaf1 nodes=n[4-5,9]
SwitchName=spine \\
    Switches=leaf[0-1]
"""
TREE_LIVE = """\
SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n0,n1,n2,n3
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[4-5,9]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-5,9] Switches=leaf0,leaf1
"""
TREE_YAML = """\
- topology: ib
  cluster_default: true
  tree:
    switches:
      - {switch: spine, children: "leaf[0-1]"}
      - {switch: leaf0, nodes: "n[0-3]"}
      - {switch: leaf1, nodes: "n[4-5,9]"}
- topology: none
  flat: true
"""


@pytest.mark.parametrize("topology_text", [TREE_CONF, TREE_LIVE, TREE_YAML])
def test_one_tree_three_spellings(topology_text):
    topology = parse_topology(topology_text)
    assert topology.kind == "tree"
    assert [t.name for t in topology.tiers] == ["leaf", "spine"]
    assert topology.tiers[0].switches == {
        "leaf0": ("n0", "n1", "n2", "n3"),
        "leaf1": ("n4", "n5", "n9"),
    }
    below = {node for group in topology.tiers[1].switches.values() for node in group}
    assert below == {f"n{i}" for i in (0, 1, 2, 3, 4, 5, 9)}


def test_uneven_depth_is_levelled():
    topology_text = (
        "SwitchName=a Nodes=n[0-1]\nSwitchName=b Nodes=n[2-3]\nSwitchName=m"
        " Switches=a\nSwitchName=top Switches=m,b"
    )
    tiers = parse_topology(topology_text).tiers
    assert len(tiers) == 3
    for tier in tiers:
        assert sorted(n for group in tier.switches.values() for n in group) == [
            "n0",
            "n1",
            "n2",
            "n3",
        ]
    assert tiers[1].switches == {"m": ("n0", "n1"), "b": ("n2", "n3")}


BLOCKS = (
    "BlockName=b0 Nodes=n[0-3]\nBlockName=b1 Nodes=n[4-7]\nBlockName=b2"
    " Nodes=n[8-11]\nBlockSizes=4,8\n"
)
BLOCKS_YAML = """\
- topology: nvl
  block:
    block_sizes: [4, 8]
    blocks: [{block: b0, nodes: "n[0-3]"}, {block: b1, nodes: "n[4-7]"}, {block: b2, nodes: "n[8-11]"}]
"""


@pytest.mark.parametrize("topology_text", [BLOCKS, BLOCKS_YAML])
def test_blocks(topology_text):
    topology = parse_topology(topology_text)
    assert (topology.kind, topology.block_size) == ("block", 4)
    assert topology.tiers[0].switches["b2"] == ("n8", "n9", "n10", "n11")
    assert {k: len(v) for k, v in topology.tiers[1].switches.items()} == {"b0": 8, "b2": 4}


@pytest.mark.parametrize(
    "topology_text", ["", "slurm_load_topo: no topology", "- topology: x\n  flat: true\n"]
)
def test_flat(topology_text):
    assert parse_topology(topology_text) == FLAT


@pytest.mark.parametrize(
    "topology_text",
    ["SwitchName=a Switches=b", "SwitchName=a Switches=b\nSwitchName=b Switches=a", "SwitchName=a Nodes=n[0-",
     "SwitchName=a Nodes=n1\nBlockName=b Nodes=n2", "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1",
     "BlockName=a Nodes=n1\nBlockSizes=4,12", "topology: x", "- topology: x\n  tree: 3\n"],
)  # fmt: skip
def test_broken_topology_is_one_clear_line(topology_text):
    with pytest.raises(OrchError) as refused:
        parse_topology(topology_text)
    assert "\n" not in refused.value.message


def test_addresses_of_the_tasks():
    """The addresses are as eight tasks of the test cluster print them."""
    topology = from_addresses({f"n{i}": f"spine.leaf{i // 4}.n{i}" for i in range(8)})
    assert [len(t.switches) for t in topology.tiers] == [2, 1]
    assert topology.tiers[0].switches["spine.leaf1"] == ("n4", "n5", "n6", "n7")
    assert from_addresses({"a": "a", "b": "b"}) == FLAT
    assert from_addresses({"n.dots.org": "core.leaf0.n.dots.org"}).tiers[0].switches == {
        "core.leaf0": ("n.dots.org",)
    }


def test_order_keeps_neighbours_together():
    tree = parse_topology(
        "SwitchName=l0 Nodes=n[0,2,10]\nSwitchName=l1 Nodes=n[1,3]\nSwitchName=s Switches=l0,l1"
    )
    assert tree.order(["n10", "n3", "n2", "n1", "n0", "x"]) == ["n0", "n2", "n10", "n1", "n3", "x"]


# ------------------------------------------------------------------------------------------ jobs


def test_every_state_has_a_meaning_and_ends_are_ends():
    ends = {state_name for state_name, state_meaning in JOB_STATES.items() if state_meaning.ended}
    assert ends == {
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "PREEMPTED",
        "NODE_FAIL",
        "BOOT_FAIL",
        "LAUNCH_FAILED",
        "OUT_OF_MEMORY",
        "DEADLINE",
        "REVOKED",
        "RECONFIG_FAIL",
    }
    assert all(meaning.phrase for meaning in JOB_STATES.values())


@pytest.mark.parametrize(
    ("state_name", "phase"),
    [("RUNNING", "running"), ("PD", "pending"), ("CANCELLED by 1000", "cancelled"), ("PREEMPTED", "stopped"),
     ("NODE_FAIL", "stopped"), ("TIMEOUT", "stopped"), ("REQUEUE_HOLD", "pending"), ("CG", "stopping"),
     ("COMPLETED", "done"), ("OUT_OF_ME+", "failed"), ("CONFIGURING", "starting")],
)  # fmt: skip
def test_state_words(state_name, phase):
    assert job_state(state_name).phase == phase


@given(st.text(max_size=20))
def test_an_unknown_state_is_never_an_end(state_suffix):
    meaning = job_state("ZZ" + state_suffix)
    assert not meaning.ended or "+" in state_suffix


def test_reasons_are_explained():
    assert explain_reason("(Resources)") == "Resources: waiting for nodes to become free"
    assert explain_reason("None") == explain_reason("(null)") == ""
    assert explain_reason("SomethingNew") == "SomethingNew"


def test_squeue_and_sacct_rows():
    us = "\x1f"
    row = [
        "12",
        "PENDING",
        "Resources",
        "2026-11-21T12:00:00",
        "N/A",
        "8",
        "",
        "main",
        "orch-a|b",
        "(null)",
    ]
    live = queue.parse_squeue(us.join(row) + "\nnoise\n")
    assert (
        live["12"].reason == "Resources"
        and live["12"].start == "2026-11-21T12:00:00"
        and live["12"].end == ""
    )
    assert live["12"].name == "orch-a|b"
    rows = [["12", "FAILED", "75:0", "Unknown", "Unknown", "8", "n[0-3]", "main", "x"],
            ["13", "CANCELLED by 0", "0:15", "Unknown", "Unknown", "1", "None assigned", "main", "y"]]  # fmt: skip
    old = queue.parse_sacct("\n".join(us.join(r) for r in rows))
    assert (old["12"].exit_code, old["13"].exit_code, old["13"].node_names) == (75, -15, ())
    both = queue.merge(live, old)
    assert (
        both["12"].state == "PENDING"
        and both["12"].exit_code is None
        and both["13"].source == "sacct"
    )


def test_one_call_for_all():
    assert queue.sacct_argv(["30", "4"])[-1] == "--jobs=4,30"
    assert not any(argument.startswith("--jobs") for argument in queue.squeue_argv())
