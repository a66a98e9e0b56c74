"""Every spelling becomes the same model, and broken input one line that names the place."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.cluster.diff import diff
from orchestrator.cluster.document import parse_document, to_document
from orchestrator.cluster.export import export, slurm_block, slurm_conf, slurm_yaml
from orchestrator.cluster.importers.infiniband import parse_ibnetdiscover
from orchestrator.cluster.importers.kubernetes import parse_nodes, profile_of, profiles
from orchestrator.cluster.importers.slurm import parse_topology
from orchestrator.cluster.model import MIG, SHARED, Machine, Tier, Topology
from orchestrator.cluster.read import FORMATS, merge, parse, recognise
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from . import samples


def sizes(topology: Topology) -> list[list[int]]:
    return [sorted(len(nodes) for nodes in tier.switches.values()) for tier in topology.tiers]


# ----------------------------------------------------------------------------------------
#     InfiniBand


def test_rails_make_one_leaf_group():
    topology = parse_ibnetdiscover(samples.ibnetdiscover(1, [3, 2], rails=4))
    assert sizes(topology) == [[2, 3], [5]]
    assert [tier.name for tier in topology.tiers] == ["leaf", "spine"]
    assert topology.tiers[0].switches["leaf-0-0-0"] == ("node0", "node1", "node2")
    assert topology.tiers[0].gbit_per_s == 400
    assert (
        topology.tiers[0].oversubscription == 5 / 4
    )  # 5 nodes x 4 rails below, 2 groups x 4 rails x 2 spines upwards
    assert topology.machines["node4"] == Machine(nics=4)


def test_three_levels_and_a_cut_rail():
    dump = samples.ibnetdiscover(2, [2, 2])
    assert sizes(parse_ibnetdiscover(dump)) == [[2, 2, 2, 2], [4, 4], [8]]
    lost = "H-0000000000030001"
    records = [record for record in dump.split("\n\n") if f'Ca\t1 "{lost}"' not in record]
    cut = "\n".join(line for line in "\n\n".join(records).splitlines() if lost not in line)
    topology = parse_ibnetdiscover(cut)
    assert sizes(topology) == [[2, 2, 2, 2], [4, 4], [8]], "one rail of one node may be missing"
    assert topology.machines["node3"].nics == 1


# ----------------------------------------------------------------------------------------
#     Kubernetes


@pytest.mark.parametrize("name", [n for n, p in profiles().items() if p.levels])
def test_every_family_of_labels(name):
    """Each shipped profile is recognised by itself and gives its tiers, fine to coarse."""
    profile = profiles()[name]
    keys = [keys[0] for keys in profile.levels.values()]
    labels = {}
    for i in range(8):
        path = [f"v{i >> (len(keys) - depth)}" for depth in range(len(keys))]
        labels[f"n{i}"] = {**dict(zip(keys, path, strict=True)), "kubernetes.io/hostname": f"n{i}"}
        labels[f"n{i}"] |= {"topology.kubernetes.io/zone": "z"} if name != "generic" else {}
    topology = parse_nodes(samples.kubernetes(labels))
    levels = [tier for depth, tier in enumerate(profile.levels) if 2 ** (len(keys) - depth) > 1]
    assert [tier.name for tier in topology.tiers] == levels[::-1]
    assert topology.machines["n3"] == Machine(gpus=8, nics=8)


def test_ragged_drained_and_unlabelled_nodes():
    labels = {f"n{i}": {"example.org/rack": f"r{i // 3}"} for i in range(7)} | {"n9": {}}
    nodes_json = samples.kubernetes(
        labels,
        n1={"spec": {"unschedulable": True}},
        n2={"spec": {"taints": [{"key": "broken", "effect": "NoSchedule"}]}},
        n3={"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}},
        n4={"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}},
    )
    topology = parse_nodes(nodes_json, profile_of("rack=example.org/rack"))
    assert sizes(topology) == [[1, 3, 3]]
    assert topology.free == ["n0", "n3", "n5", "n6", "n9"]
    assert (topology.machines["n1"].reason, topology.machines["n2"].reason) == (
        "cordoned",
        "taint broken",
    )


@pytest.mark.parametrize("name", [n for n, p in profiles().items() if p.levels and n != "generic"])
def test_every_family_of_labels_beside_cpu_nodes_and_ragged(name):
    """System pools have zones and no GPUs; of the GPU nodes three do not say under which leaf they
    are."""
    keys = [keys[0] for keys in profiles()[name].levels.values()]
    labels = {f"cpu{i}": {"topology.kubernetes.io/zone": f"z{i}"} for i in range(9)}
    for i in range(12):
        path = [f"v{i >> (len(keys) - depth)}" for depth in range(len(keys))]
        labels[f"n{i}"] = {**dict(zip(keys, path, strict=True)), "topology.kubernetes.io/zone": "z"}
    for i in (3, 7, 11):
        del labels[f"n{i}"][keys[-1]]
    system = {f"cpu{i}": {"status": {"allocatable": {"cpu": "8"}}} for i in range(9)}
    topology = parse_nodes(samples.kubernetes(labels, **system))
    assert topology.tiers[0].name == list(profiles()[name].levels)[-1]
    leaves = topology.tiers[0].switches
    assert [nodes for nodes in leaves.values() if {"n3", "n7", "n11"} & set(nodes)] == [
        ("n3",),
        ("n7",),
        ("n11",),
    ]
    assert ("n0", "n1") in leaves.values() and not any(
        "cpu" in str(nodes) for nodes in leaves.values()
    )
    assert {topology.machines[f"cpu{i}"].reason for i in range(9)} == {"no GPUs"}
    assert topology.free == topology.order(f"n{i}" for i in range(12))


def test_a_missing_level_is_that_of_the_neighbours():
    labels = {f"n{i}": {"z": f"zone{i // 4}", "r": f"rack{i // 2}"} for i in range(8)}
    del labels["n1"]["z"], labels["n6"]["r"], labels["n6"]["z"]
    labels["n6"]["nvidia.com/gpu.clique"] = labels["n7"]["nvidia.com/gpu.clique"] = "nvl"
    topology = parse_nodes(samples.kubernetes(labels), profile_of("zone=z,rack=r"))
    assert sizes(topology) == [[2, 2, 2, 2], [4, 4]]


def test_other_makers_gpus_count():
    taints = [{"key": "amd.com/gpu", "effect": "NoSchedule"}]
    amd = {"status": {"allocatable": {"amd.com/gpu": "8"}}, "spec": {"taints": taints}}
    topology = parse_nodes(
        samples.kubernetes({"n0": {}, "n1": {}}, n0=amd, n1={"status": {"allocatable": {}}})
    )
    assert (topology.machines["n0"].gpus, topology.free) == (8, ["n0"])


A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "8"}


@pytest.mark.parametrize(
    ("labels", "amounts", "cards", "reason"),
    [
        ({"nvidia.com/gpu.replicas": "1"}, {}, 8, ""),
        ({"nvidia.com/gpu.sharing-strategy": "none", "nvidia.com/gpu.replicas": "0"}, {}, 8, ""),
        ({"nvidia.com/mig.strategy": "single", "nvidia.com/mig.capable": "true"}, {}, 8, ""),
        ({"nvidia.com/gpu.count": "7"}, {"nvidia.com/gpu": "7"}, 7, ""),
        (
            {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED"},
            {"nvidia.com/gpu": "32"},
            8,
            SHARED,
        ),
        (
            {"nvidia.com/gpu.replicas": "12", "nvidia.com/gpu.count": "1"},
            {"nvidia.com/gpu": "12"},
            1,
            SHARED,
        ),
        ({"nvidia.com/gpu.sharing-strategy": "mps"}, {}, 8, SHARED),
        ({"nvidia.com/gpu.count": "2"}, {}, 2, SHARED),  # the count alone
        (
            {"nvidia.com/gpu.replicas": "4"},
            {"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "32"},
            0,
            SHARED,
        ),
        ({}, {"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "16"}, 0, SHARED),
        (
            {"cloud.google.com/gke-max-shared-clients-per-gpu": "2"},
            {"nvidia.com/gpu": "16"},
            8,
            SHARED,
        ),
        ({"cloud.google.com/gke-gpu-partition-size": "3g.40gb"}, {}, 8, MIG),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb-SHARED"}, {}, 8, MIG),
        ({"nvidia.com/gpu.product": "cards-of-ours", "nvidia.com/gpu.slices.gi": "1"}, {}, 8, MIG),
    ],
)
def test_what_a_plugin_advertises_is_not_what_the_cards_are(labels, amounts, cards, reason):
    status = {"status": {"allocatable": {"nvidia.com/gpu": "8"} | amounts}}
    topology = parse_nodes(samples.kubernetes({"a": A100 | labels, "b": A100}, a=status))
    assert (topology.machines["a"].gpus, topology.machines["a"].reason) == (cards, reason)
    assert topology.free == (["b"] if reason else ["a", "b"])


def test_nvlink_racks_and_slinky():
    labels = {f"n{i}": {"nvidia.com/gpu.clique": f"uuid.{i // 4}"} for i in range(8)}
    topology = parse_nodes(samples.kubernetes(labels))
    assert (topology.kind, sorted(map(len, topology.domains.values()))) == ("flat", [4, 4])
    note = "topology.slinky.slurm.net/spec"
    notes = {
        f"n{i}": {"name": f"n{i}", "annotations": {note: f"tree:top:leaf{i // 2}"}}
        for i in range(4)
    }
    extra = {name: {"metadata": metadata} for name, metadata in notes.items()}
    topology = parse_nodes(samples.kubernetes({name: {} for name in notes}, **extra))
    assert sizes(topology) == [[2, 2], [4]]


def test_one_rack_name_in_two_zones_is_two_racks():
    labels = {f"n{i}": {"z": f"zone{i // 4}", "r": f"rack{i // 2 % 2}"} for i in range(8)}
    topology = parse_nodes(samples.kubernetes(labels), profile_of("zone=z,rack=r"))
    assert sizes(topology) == [[2, 2, 2, 2], [4, 4]]


# ---------------------------------------------------------------------------------------- broken,
#     hostile

TWICE = samples.kubernetes({"a": {}}).replace(
    '"items": [', '"items": [{"metadata": {"name": "a"}}, '
)


@pytest.mark.parametrize(
    ("read", "document", "complaint"),
    [
        (parse_ibnetdiscover, '[1]\t"H-1"[1]', "line 1"),
        (parse_ibnetdiscover, 'Switch\t2 "S-1"\t# "a"\n[1]\tnonsense', "line 2"),
        (
            parse_ibnetdiscover,
            'Switch\t2 "S-1"\t# "a"\n\nSwitch\t2 "S-1"\t# "a"',
            "line 3: duplicate device S-1",
        ),
        (parse_ibnetdiscover, 'Switch\t2 "S-1"\t# "a"\n[1]\t"S-2"[1]', "link to S-2"),
        (parse_nodes, '{"kind": "List", "items": 3}', "items"),
        (parse_nodes, '{"items": []}', "none"),
        (parse_nodes, "{", "Kubernetes nodes"),
        (parse_nodes, TWICE, "items[1]"),
        (partial(parse_nodes, profile="coreweve"), samples.kubernetes({"a": {}}), "coreweave"),
        (
            parse_topology,
            "SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2",
            "line 2: SwitchName=a is already on line 1",
        ),
        (parse_topology, "# x\nSwitchName=a Nodes=n[1-", "line 2"),
        (
            parse_topology,
            "SwitchName=l Nodes=n1\nSwitchName=a Switches=b\nSwitchName=b Switches=a",
            "own ancestor",
        ),
        (
            parse_topology,
            "BlockName=a Nodes=n1\nBlockName=b Nodes=n1\nBlockSizes=1",
            "node n1 is in two blocks, a and b",
        ),
        (parse_topology, "SwitchName=a Nodes=n1\n\nBlockName=b Nodes=n2", "line 3"),
        (parse_topology, "BlockName=b Nodes=n2\nBlockSizes=0,1", "BlockSizes"),
        (
            parse_topology,
            "- topology: t\n  tree:\n    switches: [{switch: a, nodes: [1]}]",
            "'nodes'",
        ),
        (parse_topology, "- topology: t\n  tree:\n    switches: [{nodes: n1}]", "switches[0]"),
    ],
)
def test_refusals_name_the_place(read, document, complaint):
    with pytest.raises(OrchError) as refused:
        read(document)
    assert complaint in refused.value.message and "\n" not in refused.value.message


BOMB = "".join(f"- &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))
ENDLESS = {
    "bomb": "- &a0 [1, 2]\n" + BOMB,
    "recursive": "- &a {topology: *a}\n",
    "brackets": "- topology: " + "[" * 5000,
    "braces": "- topology: " + "{a: " * 3000,
    "closed": "- topology: " + "[" * 900 + "]" * 900,
    "json": '{"schema": ' + "[" * 100_000,
    "unread json": '{"metadata": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_texts_without_an_end_are_refused_in_one_line(name):
    endless_text = ENDLESS[name]
    refusals = 0
    for format in FORMATS:
        for document in (endless_text, f"schema: orch.topology/1\nclusters:\n{endless_text}"):
            try:
                parse(document, format)
            except OrchError as error:
                refusals += 1
                assert (
                    "\n" not in error.message
                    and len(error.message) < 400
                    and error.exit == Exit.CONFIG
                )
    assert refusals >= len(FORMATS), "a form that the text is none of may find nothing in it"


def test_a_chain_of_switches_is_refused_quickly():
    """Walking every switch to its top would take 10^10 steps."""
    lines = [
        "SwitchName=s0 Nodes=n0",
        *(f"SwitchName=s{i} Switches=s{i - 1}" for i in range(1, 100_000)),
    ]
    with pytest.raises(OrchError, match="more than 64"):
        parse_topology("\n".join(lines))


@given(st.text(alphabet="SwitchNameBlock=[]0123456789-,\n :{}\"'#\\", max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(document):
    for format in ("slurm", "slurm-nodes", "kubernetes", "ibnetdiscover", "orch"):
        try:
            parse(document, format)
        except OrchError as error:
            assert "\n" not in error.message


# ---------------------------------------------------------------------------------------- there and
#     back


@st.composite
def topologies(draw):
    leaves = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    owner = [leaf for leaf, size in enumerate(leaves) for _ in range(size)]
    group = draw(st.integers(1, 3))
    tiers = [("leaf", 1), ("spine", group), ("core", 10**6)]
    drawn_tiers = []
    for name, width in tiers:
        switches: dict[str, list[str]] = {}
        for node, leaf in enumerate(owner):
            switches.setdefault(f"{name}{leaf // width}", []).append(f"n{node}")
        drawn_tiers.append(Tier(name, {k: tuple(v) for k, v in switches.items()}))
    out = draw(st.sets(st.integers(0, len(owner) - 1)))
    machines = [
        Machine(gpus=8, free=i not in out, reason="bad" if i in out else "")
        for i in range(len(owner))
    ]
    named = {f"n{i}": machine for i, machine in enumerate(machines)}
    return Topology("tree", tuple(drawn_tiers), name="c", machines=named)


def members(topology: Topology) -> list[set[frozenset[str]]]:
    return [{frozenset(nodes) for nodes in tier.switches.values()} for tier in topology.tiers]


@given(topologies())
@settings(max_examples=60, deadline=None)
def test_exports_read_back(topology):
    for exported in (slurm_conf(topology), slurm_yaml(topology)):
        assert recognise(exported) == "slurm"
        assert members(parse(exported)) == members(topology)
    assert parse_document(to_document([topology])) == topology
    assert diff(topology, parse_document(to_document([topology]))) == []
    blocks = parse_topology(slurm_block(topology))
    assert diff(blocks, parse_topology(slurm_block(blocks))) == []
    assert {frozenset(n) for n in blocks.tiers[0].switches.values()} == members(topology)[0]
    drawn = [e for e in xml.fromstring(export(topology, "svg")).iter() if e.tag.endswith("rect")]
    assert len(drawn) == len(topology.nodes) + sum(len(tier.switches) for tier in topology.tiers)


def test_diff_in_words():
    old = parse_topology(
        "SwitchName=a Nodes=n[0-3]\nSwitchName=b Nodes=n[4-7]\nSwitchName=s Switches=a,b"
    )
    new = parse_topology(
        "SwitchName=a2 Nodes=n[0-2,4]\nSwitchName=b Nodes=n[5-8]\nSwitchName=s Switches=a2,b"
    )
    assert diff(old, new) == ["nodes gone: n3", "nodes new: n8", "leaf: moved from b to a2: n4"]
    a = merge([old, Topology("flat", (), machines={"n0": Machine(gpus=8)})])
    b = merge(
        [old, Topology("flat", (), machines={"n0": Machine(gpus=7, free=False, reason="ECC")})]
    )
    assert diff(a, b) == ["gpus: 8 before, 7 now: n0", "out of service (ECC): n0"]


def test_several_clusters_in_one_file():
    first = parse_topology("SwitchName=a Nodes=n[0-3]")
    second = parse_topology("SwitchName=b Nodes=m[0-1]")
    both = to_document([structs.replace(first, name="one"), structs.replace(second, name="two")])
    assert parse_document(both, "two").nodes == ["m0", "m1"]
    with pytest.raises(OrchError, match="one, two"):
        parse_document(both)
    with pytest.raises(OrchError, match="two"):
        parse_document(both, "tow")


@pytest.mark.parametrize("sizes", ["4", "3", "4,8", "4,16", "4,8,16", "2,16", ""])
def test_block_sizes_read_back_as_they_were(sizes):
    """Ragged blocks with one size, several, and sizes that leave one out; a text without sizes
    reads back, too."""
    nodes = ("n[1-4]", "n[5-8]", "n[9-13]", "n[14-18]", "n[19-22]")
    lines = [f"BlockName=b{index} Nodes={names}" for index, names in enumerate(nodes)]
    topology = parse("\n".join([*lines, f"BlockSizes={sizes}" if sizes else ""]))
    for format in ("block", "yaml", "orch"):
        again = parse(export(topology, format))
        assert (again.kind, again.tiers, again.block_size) == (
            topology.kind,
            topology.tiers,
            topology.block_size,
        )
        assert diff(topology, again) == []
    if sizes:
        assert slurm_block(topology).splitlines()[-1] == f"BlockSizes={sizes}"


def test_other_block_sizes_are_a_difference_and_blocks_stay_blocks_beside_domains():
    block_conf = "BlockName=a Nodes=n[1-4]\nBlockName=b Nodes=n[5-8]\nBlockSizes="
    topology = parse(block_conf + "4")
    assert diff(topology, parse(block_conf + "2")) == ["block sizes: 4 before, 2 now"]
    domains = {"d0": ("n1", "n2"), "d1": ("n3", "n4")}
    assert slurm_block(structs.replace(topology, domains=domains)) == slurm_block(topology)


def test_blocks_of_our_own_file_without_sizes_get_some():
    tiers = (
        Tier("rack", {"a": ("n1", "n2"), "b": ("n3",)}),
        Tier("row", {"r": ("n1", "n2", "n3")}),
    )
    assert slurm_block(Topology("block", tiers)).splitlines()[-1] == "BlockSizes=1,2"


# ---------------------------------------------------------------------- adapters that nobody named
#     after their host


def fabric(*adapters: tuple[str, str, str], cable: bool = False) -> str:
    """ibnetdiscover's text of adapters, each (description, GUID of its system or "", the leaves its
    ports are on)."""
    ports: dict[str, list[str]] = {"a": [], "b": []}
    blocks = []
    for number, (description, system, leaves) in enumerate(adapters):
        lines = [f"sysimgguid=0x{system}"] if system else []
        lines.append(f'Ca\t2 "H-{number:016x}"\t\t# "{description}"')
        for port, leaf in enumerate(leaves, 1):
            lines.append(
                f'[{port}](1)\t"S-{leaf}"[{number + 1}]\t\t# lid 1 lmc 0 "{leaf}" lid 2 4xSDR'
            )
            ports[leaf].append(
                f'[{number + 1}]\t"H-{number:016x}"[{port}](1)\t\t# "{description}" lid 1 4xSDR'
            )
        blocks.append("\n".join(lines))
    if cable:
        ports["a"].append('[30]\t"S-b"[30]\t\t# "leaf-b" lid 1 4xSDR')
        ports["b"].append('[30]\t"S-a"[30]\t\t# "leaf-a" lid 1 4xSDR')
    switches = [
        f'Switch\t32 "S-{leaf}"\t\t# "leaf-{leaf}"\n' + "\n".join(port_lines)
        for leaf, port_lines in ports.items()
        if port_lines
    ]
    return "\n\n".join([*switches, *blocks]) + "\n"


def fabric_nodes(*adapters: tuple[str, str, str]) -> list[str]:
    return parse_ibnetdiscover(fabric(*adapters)).nodes


MODEL = "MT23108 InfiniHost Mellanox Technologies"


@pytest.mark.parametrize(
    "name", [MODEL, "localhost mlx4_0", "", "node1", "MT4129 ConnectX7   Mellanox Technologies"]
)
def test_adapters_of_one_description_are_nodes_by_their_systems(name):
    adapters = ((name, "a1", "a"), (name, "a2", "a"), (name, "", "b"), (name, "a4", "ab"))
    topology = parse_ibnetdiscover(fabric(*adapters, cable=True))
    guids = [f"{number:016x}" for number in (0xA1, 0xA2, 2, 0xA4)]
    assert sorted(topology.nodes) == sorted(guids), "the third, without a system, by its own"
    assert sorted(map(len, topology.tiers[0].switches.values())) == [1, 3], (
        "two switches, the last node under one of them"
    )
    assert [len(tier.switches) for tier in topology.tiers] == [2, 1]


def test_named_hosts_stay_beside_nameless_ones():
    adapters = (
        ("node1 mthca0", "a1", "a"),
        ("node2 mthca0", "a2", "a"),
        (MODEL, "a3", "b"),
        (MODEL, "a4", "ab"),
    )
    assert sorted(fabric_nodes(*adapters)) == [f"{0xA3:016x}", f"{0xA4:016x}", "node1", "node2"]


def test_a_host_with_several_adapters_stays_one_node():
    assert fabric_nodes(("node7 mlx5_0", "a1", "a"), ("node7 mlx5_1", "a2", "b")) == ["node7"]
    assert fabric_nodes(("nvidia-7 HCA-1", "a1", "a"), ("nvidia-7 HCA-2", "a2", "b")) == [
        "nvidia-7"
    ]
    assert fabric_nodes(("node7 HCA-1", "a1", "a"), ("node7 HCA-2", "a2", "b")) == ["node7"]
    assert fabric_nodes(("node7", "a1", "a"), ("node7", "a1", "a")) == ["node7"], (
        "two ports of one system"
    )
    assert fabric_nodes((MODEL, "a1", "a"), (MODEL, "a1", "b")) == [f"{0xA1:016x}"]


def test_hosts_of_one_name_with_several_adapters_each_are_refused():
    fabric_text = fabric(
        *(
            (f"localhost mlx5_{device}", f"a{host}{device}", "a")
            for host in range(3)
            for device in range(2)
        )
    )
    with pytest.raises(
        OrchError,
        match=r"3 adapters are described as 'localhost mlx5_0'.*set the hosts' node descr",
    ):
        parse_ibnetdiscover(fabric_text)


def test_a_node_with_links_to_two_groups_does_not_join_them():
    adapters = [(f"n{number} mlx5_0", f"a{number}", "ab"[number // 4]) for number in range(8)]
    topology = parse_ibnetdiscover(
        fabric(*adapters, ("store mlx5_0", "b0", "a"), ("store mlx5_1", "b1", "b"))
    )
    assert sorted(map(len, topology.tiers[0].switches.values())) == [4, 5]
