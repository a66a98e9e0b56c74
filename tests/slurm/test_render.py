"""The job script: golden text, flags from plans, and that nothing hostile gets into a directive."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator import __version__
from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.options import (
    SlurmOptions,
    check_environment,
    check_rendering,
    from_environment,
    read_options,
)
from orchestrator.backends.slurm.script.flags import job_flags, network_flags, step_flags
from orchestrator.backends.slurm.script.quoting import check_text, command, directive
from orchestrator.backends.slurm.script.render import JobScript, common_flags, render, render_array
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import block_size, leaf_switches, whole_unit
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan
from tests.planner.configs import build_plan

GOLDEN = Path(__file__).parent / "golden"
MAIN_LINE = structs.replace(make_plan(tp=8, pp=4, dp=2, nodes=8), hash="f" * 64)

CASES: dict[str, dict] = {
    "plain": {},
    "everything": {
        "partition": "gpu", "account": "llm", "qos": "high", "reservation": "week1", "constraint": "h100&ib",
        "exclude": ["n[3-5]", "bad1"], "time": "1-00:00:00", "gpu_request": "gres", "gpu_type": "h100",
        "cpus_per_node": 96, "memory": "1800G", "topology": "tree", "switches_wait": "00:10:00", "notice_s": 600,
        "requeue": False, "no_kill": False, "dependency": "afterok:12", "begin": "now+1hour", "comment": "it's # here",
        "wckey": "w1", "mail_user": "a@b.org", "mail_type": "END,FAIL", "modules": ["cuda/12.4", "gcc/13"],
        "setup": ["export NCCL_IB_HCA=mlx5", "ulimit -l unlimited"], "unset": ["LD_PRELOAD"],
        "sbatch": {"gres-flags": "enforce-binding", "licenses": "x:1"}, "srun": {"mpi": "none"},
    },
    "block_pyxis": {
        "topology": "block", "spread_segments": True,
        "container": {"runtime": "pyxis", "image": "registry.example/llm:1", "mounts": ["/data:/data:ro"]},
    },
    "apptainer": {"container": {"runtime": "apptainer", "image": "/images/llm 1.sif", "python": "/opt/bin/python"}},
    "elastic": {"sizes": (8, 4), "max_node_faults": 5},
}  # fmt: skip


def job(options: dict, **changes: object) -> JobScript:
    options = dict(options)
    fields: dict = {
        "run_id": "tiny-1", "run_dir": "/home/o'neil/5% runs/tiny-1", "plan": MAIN_LINE,
        "export": ("PATH", "HOME"), "bind": ("/home/o'neil/5% runs/tiny-1",), "sizes": options.pop("sizes", ()),
        "python": "/opt/py/bin/python", "python_path": ("/home/o'neil/5% runs/tiny-1/code",),
    }  # fmt: skip
    fields = {"options": read_options(options)} | fields | changes
    return JobScript(**fields)


def script(options: dict, **changes: object) -> str:
    return render(job(options, **changes))


def array(**changes: object) -> str:
    """The script of an array of two runs, each in a folder of its own."""
    return render_array(
        [job({}, run_dir=f"/home/o'neil/5% runs/tiny-{i}", **changes) for i in (1, 2)], "tiny-1"
    )


@pytest.mark.parametrize("name", [*CASES, "array"])
def test_golden(name):
    """Byte for byte. Delete a golden file to have it written anew, then read the difference."""
    job_script = array() if name == "array" else script(CASES[name])
    path = GOLDEN / f"{name}.sbatch"
    golden = job_script.replace(f"ORCH_SUBMITTER={__version__}\n", "ORCH_SUBMITTER=VERSION\n")
    if not path.exists():
        path.write_text(golden)
        pytest.fail(f"{path.name} did not exist: written, look at it and run again")
    assert golden == path.read_text()
    assert bash_accepts(job_script)


def bash_accepts(job_script: str) -> bool:
    done = subprocess.run(["bash", "-n"], input=job_script, capture_output=True, text=True)
    return (done.returncode, done.stderr) == (0, "")


@settings(deadline=None, max_examples=40)
@given(st.text(min_size=1, max_size=40))
def test_a_command_comes_back_word_for_word(argument):
    if "\0" in argument or any(0xD800 <= ord(c) < 0xE000 for c in argument):
        return
    done = subprocess.run(["bash", "-c", command(["printf", "%s", argument])], capture_output=True)
    assert done.stdout == argument.encode()


CONTROL = ["\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\v"]


@given(st.text(max_size=30), st.sampled_from(CONTROL), st.text(max_size=30))
def test_no_control_character_reaches_a_directive(before, control, after):
    with refusal("", Exit.SECURITY):
        directive("comment", before + control + after)


HOSTILE = ["a\nb", "a\n#SBATCH --uid=0", "x\r\ny", "a\0b", "\x1b[2J", "a\u2028b"]


@pytest.mark.parametrize("field", ["comment", "constraint", "begin", "mail_user"])
@pytest.mark.parametrize("hostile_text", HOSTILE)
def test_hostile_option_text_is_refused(field, hostile_text):
    with refusal("", Exit.SECURITY, Exit.CONFIG):
        script({field: hostile_text})


@pytest.mark.parametrize(
    "options",
    [{"partition": "a,"}, {"partition": "a,$(id)"}, {"partition": "a b"},
     {"partition": "$(id)"}, {"account": "--uid=0"}, {"modules": ["x; rm -rf ."]},
     {"unset": ["A B"]}, {"exclude": ["n[0-"]}, {"time": "soon"}, {"memory": "lots"}, {"partitoin": "x"},
     {"nodes": "8"}, {"sbatch": {"Bad Flag": 1}}, {"container": {"runtime": "pyxis"}}, {"dependency": "afterok:1 --x"},
     {"setup": ["a\nb"]}, {"sbatch": {"comment": "x\ny"}}, {"sbatch": {"output": "x"}}, {"srun": {"export": "NONE"}},
     {"container": {"image": "x"}}, {"topology": "ring"}, {"notice_s": -1}],
)  # fmt: skip
def test_bad_options_are_one_clear_line(options):
    with refusal("", Exit.CONFIG, Exit.SECURITY):
        script(options)


@pytest.mark.parametrize("where", ["run_dir", "python"])
def test_hostile_paths_are_refused_or_exact(where):
    changes = {where: "/a\nb"}
    with pytest.raises(OrchError):
        script({}, **changes)
    job_script = script({}, python="/opt/$(id)/`x`/py thon")
    assert "'/opt/$(id)/`x`/py thon'" in job_script


def test_flags_follow_the_plan():
    flags = job_flags(MAIN_LINE, SlurmOptions(topology="tree"), "r", "/r", ["HOME"])
    assert (flags["nodes"], flags["gpus-per-node"], flags["ntasks-per-node"]) == (8, "8", 1)
    assert flags["export"] == "HOME" and flags["exclusive"] is True and flags["mem"] == "0"
    assert "gres" not in flags
    assert "gpus-per-node" not in job_flags(
        MAIN_LINE, SlurmOptions(gpu_request="gres"), "r", "/r", []
    )


def test_cpus_are_repeated_on_srun():
    options = SlurmOptions(cpus_per_node=64)
    both = job_flags(MAIN_LINE, options, "r", "/r", []), step_flags(MAIN_LINE, options)
    assert [flags["cpus-per-task"] for flags in both] == [64, 64]


def two_leaves(plan, size):
    nodes = len(plan.cluster.node_names)
    switches = [list(range(i, min(i + size, nodes))) for i in range(0, nodes, size)]
    level = structs.replace(plan.cluster.levels[0], name="leaf", switches=switches)
    top = structs.replace(level, name="spine", switches=[list(range(nodes))])
    return structs.replace(plan, cluster=structs.replace(plan.cluster, levels=[level, top]))


def test_switches_are_counted_from_the_plan():
    plan = two_leaves(MAIN_LINE, 4)
    assert leaf_switches(plan) == 2
    assert network_flags(plan, SlurmOptions(topology="tree")) == {"switches": "2@00:05:00"}
    half = two_leaves(make_plan(tp=8, pp=4, dp=1, nodes=4), 4)
    assert leaf_switches(half) == 1


@pytest.mark.parametrize(
    ("degrees", "nodes", "block", "want"),
    [
        # a pipeline is four nodes: whole in a block of four
        ({"tp": 8, "pp": 4, "dp": 2}, 8, 4, 4),
        ({"tp": 8, "pp": 4, "dp": 2}, 8, 18, 8),  # the whole job fits
        # a pipeline does not fit: only the tensor-parallel group is kept
        ({"tp": 8, "pp": 4, "dp": 2}, 8, 3, 1),
        ({"tp": 8, "ep": 4, "dp": 2}, 8, 6, 4),  # expert-parallel group of four nodes
        ({"tp": 4, "pp": 2, "dp": 8}, 8, 4, 1),
    ],
)  # fmt: skip
def test_segment_keeps_the_largest_part_whole(degrees, nodes, block, want):
    plan = make_plan(**degrees, nodes=nodes)
    assert whole_unit(plan, block) == want
    assert nodes % want == 0 and want <= max(block, 1)


def test_segment_that_does_not_divide_is_refused():
    with pytest.raises(OrchError, match="segment 3 does not divide the plan's 8 nodes"):
        network_flags(MAIN_LINE, SlurmOptions(topology="block", segment=3))


def test_block_size_is_the_nvlink_domain_or_the_leaf():
    assert block_size(two_leaves(MAIN_LINE, 4)) == 4


def test_check_text_lets_unicode_pass():
    assert check_text("naïve 日本語", "x") == "naïve 日本語"


def test_runs_that_ask_for_different_things_are_no_array():
    eight = job({})
    four = job({}, plan=make_plan(tp=8, pp=4, nodes=4))
    assert common_flags([eight, job({}, run_id="tiny-2", run_dir="/runs/tiny-2")]) is not None
    assert common_flags([eight, four]) is None
    assert common_flags([eight, job({"time": "1:00:00"})]) is None
    with pytest.raises(ValueError, match="cannot be one array"):
        render_array([eight, four], "x")


# ------------------------------------------------------------------------------------------
#     profiles


def test_the_users_variables_of_sbatch_stand_for_options_that_are_not_set():
    options = read_options({"account": "llm"})
    assert (
        from_environment(options, {"SLURM_CONF": "/x", "SBATCH_QOS": "", "SBATCH_ACCOUNT": "other"})
        == {}
    )
    variables = {
        "SBATCH_QOS": "high",
        "SBATCH_ACCOUNT": "llm",
        "SBATCH_TIMELIMIT": "1:00:00",
        "SBATCH_PARTITION": "a,b",
    }
    assert from_environment(options, variables) == {
        "qos": "high",
        "time": "1:00:00",
        "partition": "a,b",
    }
    check_environment(options, variables)


@pytest.mark.parametrize(
    "variable",
    ["SBATCH_ACCOUNT=other", "SLURM_CLUSTERS=east", "SBATCH_CLUSTERS=east", "SBATCH_QOS=a b", "SBATCH_TIMELIMIT=soon",
     "SBATCH_PARTITION=a,,b", "SBATCH_PARTITION=a,b,"],
)  # fmt: skip
def test_a_variable_that_cannot_be_meant_is_refused_by_name(variable):
    name, _, value = variable.partition("=")
    with refusal(variable, Exit.CONFIG):
        check_environment(read_options({"account": "llm"}), {name: value})


@pytest.mark.parametrize(
    "variable",
    [
        "SBATCH_EXPORT=NONE",
        "SBATCH_NO_REQUEUE=1",
        "SBATCH_GET_USER_ENV=1",
        "SBATCH_OPEN_MODE=truncate",
    ],
)
def test_only_a_rendered_script_minds_the_rest_of_them(variable):
    """sbatch prefers variables to directives, but sees none of them where orch calls it."""
    name, _, value = variable.partition("=")
    check_environment(read_options({}), {name: value})
    assert name not in Slurm({name: value}).environ
    with refusal(variable, Exit.CONFIG):
        check_rendering({name: value, "SBATCH_QOS": "high"})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"setup": ["true", "cd /nowhere", "echo late"]}, "backend.options.setup: cd /nowhere"),
        (
            {"modules": ["cuda/12.4"], "setup": ["echo late"]},
            "backend.options.modules: module load cuda/12.4",
        ),
    ],
)
def test_a_line_of_the_site_that_fails_ends_the_job(tmp_path, options, complaint):
    job_script = script(options, run_dir=str(tmp_path))
    done = subprocess.run(
        ["bash", "-c", job_script],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"},
    )
    assert done.returncode == Exit.CONFIG and complaint in done.stderr and "late" not in done.stdout
    assert (tmp_path / "slurm" / "over").read_text() == "65\n"


@pytest.mark.parametrize("folder_variable", ["MODULESHOME", "LMOD_PKG"])
def test_the_command_of_modules_is_looked_for_where_the_login_shell_has_not_made_it(
    tmp_path, folder_variable
):
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text(
        'module() { echo "$*" > "$MODULES_SEEN"; [ "$2" = cuda/12.4 ]; }\n'
    )
    environ = {
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        folder_variable: str(tmp_path),
        "MODULES_SEEN": str(tmp_path / "seen"),
    }
    for name, code in (("cuda/12.4", 3), ("cuda/99", int(Exit.CONFIG))):
        body = script({"modules": [name], "setup": ["exit 3"]}, run_dir=str(tmp_path))
        done = subprocess.run(["bash", "-c", body], capture_output=True, text=True, env=environ)
        assert done.returncode == code and (tmp_path / "seen").read_text() == f"load {name}\n"


PROFILES = Path(__file__).resolve().parents[2] / "slurm"
NAMES = {path.stem for path in (PROFILES / "backend").glob("*.yaml")} | {
    "dgx_superpod",
    "gres_modules",
    "apptainer",
}
NAMES |= {"nvl72_block", "preemptible"}  # one for each style of site
LINES = {
    "nvl72_block": [
        "cluster=gb200_nvl72x8",
        "parallel=tp4_pp8_zero1",
        "train.global_batch_samples=1152",
    ]
}
MAIN = ["cluster=h100x64", "parallel=tp8_pp4_zero1"]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_profile(name):
    """A site profile composes, its options are legal, and bash accepts the script."""
    config = load([*LINES.get(name, MAIN), f"backend={name}"], PROFILES)
    assert config.backend.name == "slurm"
    options = read_options(config.backend.options)
    job_script = script(config.backend.options, plan=build_plan(config))
    assert f"#SBATCH --partition={options.partition}\n" in job_script and bash_accepts(job_script)
    if options.topology == "block":
        assert "#SBATCH --segment=" in job_script and "--switches" not in job_script
    if options.topology == "tree":
        assert "#SBATCH --switches=2@" in job_script


@pytest.mark.parametrize(
    ("option", "flag"), [("gpu_type", "gpus-per-node"), ("partition", "partition"), ("qos", "qos")]
)
def test_a_name_may_be_a_number(option, flag):
    """The command line and YAML read `3090` as a number, which is a GPU's, a partition's or an
    account's name here."""
    config = load(["cluster=h100x64", "backend=slurm", f"backend.options.{option}=3090"])
    flags = job_flags(MAIN_LINE, read_options(config.backend.options), "r", "/r", [])
    assert flags[flag] == ("3090:8" if option == "gpu_type" else "3090")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (
            {"time": 14400},
            "backend.options.time",
        ),  # YAML's reading of 4:00:00: no name, so it is not guessed
        ({"partition": 1.5}, "backend.options.partition"),
        ({"gpu_type": True}, "backend.options.gpu_type"),
    ],
)
def test_what_is_no_text_is_refused_with_the_quotes_that_help(options, key):
    with pytest.raises(OrchError, match=f"{key}: Expected .*in quotes it is text: '{key}=\"...\"'"):
        read_options(options)
