"""Host lists and times, against Slurm's own rules."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.slurm.options import format_time, parse_time, read_options
from orchestrator.backends.slurm.record import exclude
from orchestrator.backends.slurm.script.flags import job_flags
from orchestrator.cluster.export import slurm_block, slurm_conf, slurm_yaml
from orchestrator.cluster.hostlist import compress, expand, natural_key, slurm_list
from orchestrator.cluster.model import Tier, Topology
from orchestrator.errors import OrchError
from orchestrator.run.create import create_run_folder
from tests.beds.bundles import make_bundle
from tests.beds.plans import make_plan

from .test_render import script

names = st.from_regex(r"[a-z]([a-z0-9.-]{0,6}[a-z0-9])?", fullmatch=True)


@pytest.mark.parametrize(
    ("host_list", "want"),
    [
        ("n[0-3,7]", ["n0", "n1", "n2", "n3", "n7"]),
        ("gpu-[001-003]", ["gpu-001", "gpu-002", "gpu-003"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("r[1-2]n[08-10]x", [f"r{r}n{n}x" for r in (1, 2) for n in ("08", "09", "10")]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[10,2]", ["n10", "n2"]),
        ("", []),
        ("(null)", []),
        ("None assigned", []),
    ],
)
def test_expand(host_list, want):
    assert expand(host_list) == want


@pytest.mark.parametrize(
    "host_list",
    ["n[0-", "n]0[", "n[[1]]", "n[3-1]", "n[a]", "n[1-2", ",", "a,,b", "n[]", "n[0-99999999]", "n[0-9][0-9999][0-9999]",
     "$(id)", "a b", "-rf", "n[1];x", "n\n", "n\x00"],
)  # fmt: skip
def test_expand_refuses(host_list):
    if host_list == "n\n":  # surrounding white space is how commands end their lines
        assert expand(host_list) == ["n"]
        return
    with pytest.raises(OrchError, match="host list"):
        expand(host_list)


@given(st.sets(names, max_size=30))
def test_compress_and_expand_are_inverse(node_names):
    assert set(expand(compress(node_names))) == node_names


@given(
    st.sets(
        st.tuples(
            st.sampled_from(["n", "gpu-", "r1n"]), st.integers(0, 1200), st.sampled_from([0, 3, 4])
        )
    )
)
def test_numbered_names_survive(name_parts):
    node_names = {f"{prefix}{number:0{width}d}" for prefix, number, width in name_parts}
    again = expand(compress(node_names))
    assert sorted(again) == sorted(node_names)


@given(st.integers(0, 3000), st.integers(1, 3000))
def test_a_run_folds_to_one_bracket(first, count):
    assert compress(f"n{i}" for i in range(first, first + count)).count("n") == 1


@pytest.mark.parametrize(
    ("node_names", "want"),
    [
        (["n10", "n9", "n8"], "n[8-10]"),
        (["n009", "n010", "n100"], "n[009-010,100]"),
        (["x", "x5"], "x,x5"),
        (["b1", "a2", "a1"], "a[1-2],b1"),
        (["n9", "n09"], "n9,n09"),
    ],
)
def test_compress(node_names, want):
    assert compress(node_names) == want


def test_natural_order():
    assert sorted(["n10", "n9", "n1", "m2"], key=natural_key) == ["m2", "n1", "n9", "n10"]


@given(st.sets(names, max_size=30))
def test_what_slurm_is_given_has_nothing_behind_a_bracket(node_names):
    written = slurm_list(node_names)
    assert set(expand(written)) == node_names and not re.search(r"\][^,\[]", written)


@pytest.mark.parametrize(
    ("node_names", "want"),
    [
        (["n03d", "n04d", "n05d"], "n03d,n04d,n05d"),
        (
            ["n1", "n2", "n1.cluster.local", "n2.cluster.local"],
            "n[1-2],n1.cluster.local,n2.cluster.local",
        ),
        (["gpu-1-ib", "gpu-2-ib"], "gpu-1-ib,gpu-2-ib"),
        (["r1n1", "r1n2", "x"], "r1n[1-2],x"),
        ([], ""),
    ],
)
def test_slurm_list(node_names, want):
    assert slurm_list(node_names) == want


SUFFIXES = ("", "d", ".cluster.local", "-ib", "a0b")


def topology_of(suffix: str) -> Topology:
    """Two leaves and a spine, whose own names end as the nodes' do."""
    leaves = {
        f"leaf{k}{suffix}": tuple(f"n{4 * k + i:02d}{suffix}" for i in range(4)) for k in range(2)
    }
    spine = {f"spine0{suffix}": tuple(node for leaf in leaves.values() for node in leaf)}
    return Topology(
        kind="tree", tiers=(Tier(name="leaf", switches=leaves), Tier(name="spine", switches=spine))
    )


@pytest.mark.slurm
@pytest.mark.process
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_list_for_slurm_is_what_scontrol_reads(full_cluster, tmp_path, suffix):
    """topology.conf and .yaml, block or tree; --nodelist, --exclude; the lists of the script and of
    a requeue."""
    topology = topology_of(suffix)
    nodes = {node for group in topology.tiers[0].switches.values() for node in group}
    texts = [slurm_conf(topology), slurm_block(topology)]
    rows = yaml.safe_load(slurm_yaml(topology))[0]["tree"]["switches"]
    lists = [hosts for conf in texts for hosts in re.findall(r"(?:Nodes|Switches)=(\S+)", conf)]
    lists += [row.get("nodes") or row["children"] for row in rows]
    options = {"exclude": [compress(nodes)], "nodelist": [compress(nodes)]}
    flags = job_flags(make_plan(tp=8, nodes=1), read_options(options), "r", "/r", [])
    lists += [str(flags["exclude"]), str(flags["nodelist"])]
    lists += re.findall(r"^excluded_nodes='?([^'\n]*)", script(options), re.M)
    with create_run_folder(make_bundle(make_plan(), tmp_path / "runs"), "slurm") as folder:
        (folder.path / "slurm").mkdir(mode=0o700)
        exclude(folder, nodes)
        lists.append((folder.path / "slurm" / "exclude").read_text().strip())
    read = [full_cluster.run("scontrol", "show", "hostnames", hosts).split() for hosts in lists]
    assert [set(names) for names in read] == [set(expand(hosts)) for hosts in lists]
    assert set(read[-1]) == nodes == set(read[-3]) and len(lists) >= 12


@pytest.mark.slurm
@pytest.mark.process
@pytest.mark.parametrize(
    "host_list", ["n[0-3,7]", "gpu-[001-003]", "a,b[1-2],c", "r[1-2]n[08-10]", "n[098-101]"]
)
def test_agrees_with_scontrol(full_cluster, host_list):
    assert full_cluster.run("scontrol", "show", "hostnames", host_list).split() == expand(host_list)
    folded = slurm_list(expand(host_list))
    assert sorted(full_cluster.run("scontrol", "show", "hostnames", folded).split()) == sorted(
        expand(host_list)
    )


@pytest.mark.parametrize(
    ("time_limit", "seconds"),
    [("5", 300), ("5:30", 330), ("1:02:03", 3723), ("2-3", 183600), ("1-00:00:00", 86400), ("1-2:03", 93780),
     ("UNLIMITED", None), ("infinite", None), ("0", 0)],
)  # fmt: skip
def test_duration(time_limit, seconds):
    assert parse_time(time_limit) == seconds


@pytest.mark.parametrize("time_limit", ["", "x", "1:2:3:4", "-5", "1h", "1-", "5\n6", "１"])
def test_duration_refuses(time_limit):
    with pytest.raises(OrchError, match="is not a Slurm time"):
        parse_time(time_limit)


@given(st.integers(0, 10**8))
def test_duration_roundtrip(seconds):
    assert parse_time(format_time(seconds)) == seconds
