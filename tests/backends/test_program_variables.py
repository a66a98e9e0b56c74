"""Tests which variables of the shell a program gets: all on this machine, elsewhere those of a
list; which not, is said."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import api
from orchestrator.agent import __main__ as agent
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.pod.task import run_agent
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.job.task import environment
from orchestrator.errors import OrchError
from orchestrator.plan.worker import PINS, pin_file
from orchestrator.run.environment import Environment, compose_environment, values_elsewhere
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import from_bytes
from orchestrator.run.state import read_state
from orchestrator.run.variables import (
    Dropped,
    all_names,
    is_name,
    machine_names,
    select_variables,
)
from tests.beds import program_variables
from tests.beds.bundles import wait_end, wait_for

from .test_verbs import home, orch, program

__all__ = ["home"]  # the fixture

SLURM = ("backend=slurm", "backend.options.topology=none", "cluster=h100x64", "parallel=tp8")
PROGRAM = ("--", "python", "my_train.py")
SHELL = [
    "WANDB_MODE",
    "WANDB_API_KEY",
    "DATA",
    "HF_TOKEN",
    "BASH_FUNC_module%%",
    "PWD",
    "RANK",
    "ORCH_HOME",
    "A\nB",
]

ALLOW = [argument for name in PINS for argument in ("--allow", name)]


def written_pins(folder: RunFolder) -> list[Path]:
    """What a trainer remembers of the run, which a resume that is allowed to go on without
    forgets."""
    pins = [pin_file(folder.path, name) for name in PINS.values()]
    pins[0].parent.mkdir()
    for pin in pins:
        pin.write_text("{}")
    return list(folder.path.glob("pins/*"))


@pytest.mark.process
@pytest.mark.slow
def test_on_this_machine_a_program_has_what_torchrun_gives_it_and_no_value_is_written_down(
    home, capsys, monkeypatch, tmp_path
):
    """Every variable of the shell, one by one; the model named beside the program changes
    nothing."""
    for name, value in program_variables.SHELL.items():
        monkeypatch.setenv(name, value)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "99")
    words = ("model=tiny", "cluster=local", "cluster.nodes=1", "cluster.gpus_per_node=2")
    argv = ("submit", *words, "parallel=tp2", "--json", "--in-place", "--")
    code, out, err = orch(capsys, *argv, *program_variables.PROGRAM)
    assert code == 0, err
    assert "not passed on" not in err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done"
    ranks = [program_variables.printed(folder.rank_log(rank).read_text()) for rank in (0, 1)]
    wrong = program_variables.differences(ranks, os.environ, tmp_path / "torchrun", nodes=1)
    assert not wrong, "\n".join(wrong)
    assert {rank["PYTHONUNBUFFERED"] for rank in ranks} == {"yes"}
    assert folder.request.exists() and not program_variables.holders(home)


@pytest.mark.process
@pytest.mark.parametrize(
    "env_options", [["--env", "LR", "--env", "MY_TOKEN"], ["backend.pass_env=[LR,MY_*,MY_TOKEN]"]]
)
def test_a_resume_without_a_variable_that_was_asked_for_is_refused_and_changes_nothing(
    home, capsys, monkeypatch, env_options
):
    for name, value in (("LR", "1e-4"), ("MY_TOKEN", "hush"), ("MY_OTHER", "x")):
        monkeypatch.setenv(name, value)
    program(
        "import os, sys; print(os.environ['LR'], os.environ['MY_TOKEN'],"
        " os.environ.get('SET_LATER')); sys.exit(not os.path.exists('go'))"
    )
    code, out, err = orch(
        capsys, "submit", "nproc=1", *env_options, "backend.max_restarts=0", "--json", *PROGRAM
    )
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    before = wait_end(folder)
    assert before.state == "failed"
    pins = written_pins(folder)
    for lost in (["LR"], ["MY_TOKEN"], ["LR", "MY_TOKEN"]):
        with monkeypatch.context() as shell:
            for name in lost:
                shell.delenv(name)
            code, _, err = orch(capsys, "resume", folder.run_id, *ALLOW)
        assert code == 65 and f"--env {' --env '.join(lost)}, not set in this shell" in err
        assert len(err.splitlines()) == 1 and "hush" not in err
        assert read_state(folder) == before and list(folder.path.glob("pins/*")) == pins
    monkeypatch.delenv("MY_OTHER")  # nobody asked for it by name
    Path("go").touch()
    monkeypatch.setenv("LR", "")
    monkeypatch.setenv("SET_LATER", "yes")  # a resume takes the shell as it is, too
    assert orch(capsys, "resume", folder.run_id, "--follow", *ALLOW)[0] == 0
    assert folder.rank_log(0).read_text().splitlines()[-1] == " hush yes" and not list(
        folder.path.glob("pins/*")
    )


def test_every_backend_asks_for_them_before_it_ends_anything(home, capsys, monkeypatch):
    """Nothing of a run on a cluster may be deleted or cancelled, and no new size be asked for."""
    monkeypatch.setenv("LR", "1e-4")
    program("")
    of_slurm = ("parallel=tp8", "nodes=1..2", "cluster=h100x64", "backend.options.topology=none")
    of_kubernetes = ("parallel=tp8", "nodes=1..2", "cluster=h100x64", "backend.options.image=x:1")
    for backend, overrides in (("slurm", of_slurm), ("kubernetes", of_kubernetes)):
        argv = (
            "--in-place",
            "--run-id",
            backend,
            "--env",
            "LR",
            f"backend={backend}",
            "model=tiny",
        )
        code, _, err = orch(capsys, "render", *argv, *overrides, "--", "python", "my_train.py")
        assert code == 0, err
        written_pins(RunFolder(home / "runs" / backend))
    monkeypatch.delenv("LR")
    for backend in (SlurmBackend, KubernetesBackend):
        monkeypatch.setattr(backend, "is_alive", lambda *_: False)
        monkeypatch.setattr(backend, "state", lambda _, folder: read_state(folder))
    for verb in (
        ["resume", "slurm", *ALLOW],
        ["resume", "kubernetes", *ALLOW],
        ["resize", "kubernetes", "1"],
    ):
        before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
        code, _, err = orch(capsys, *verb)
        assert code == 65 and "--env LR, not set in this shell" in err, verb
        assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


@pytest.mark.process
def test_a_resize_asks_for_them_where_no_supervisor_has_them(home, capsys, monkeypatch):
    monkeypatch.setenv("LR", "1e-4")
    program(
        "import os, time; print(os.environ['LR'], os.environ['WORLD_SIZE'], flush=True);"
        " time.sleep(3600)"
    )
    cluster = ["cluster=local_nodes", "cluster.gpus_per_node=1"]
    argv = [*cluster, "nodes=1..2", "--env", "LR", "--json"]
    code, out, err = orch(capsys, "submit", *argv, *PROGRAM)
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    log = folder.rank_log(0)
    wait_for(lambda: log.exists() and "1e-4 2" in log.read_text(), what="its two ranks")
    monkeypatch.delenv("LR")
    assert orch(capsys, "resize", folder.run_id, "1")[0] == 0, "its supervisor lives and has them"
    wait_for(lambda: "1e-4 1" in log.read_text(), what="its one rank")
    assert orch(capsys, "cancel", folder.run_id)[0] == 0
    before = wait_end(folder)
    code, _, err = orch(capsys, "resize", folder.run_id, "2")
    assert code == 65 and "--env LR, not set in this shell" in err
    assert read_state(folder) == before


DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
}


def local(request, shell, monkeypatch):
    return compose_environment(request.environment, shell)


def slurm(request, shell, monkeypatch):
    exported = {name: shell[name] for name in request.environment.names if name in shell}
    return exported | environment(request, exported)


def kubernetes(request, shell, monkeypatch):
    """What the agent of a pod finds, which has the variables that were passed on from the run's
    Secret."""
    pod_environment = {}
    passed = {name: shell[name] for name in request.environment.names if name in shell}
    secret_contents = SimpleNamespace(request=in_pods(request), environment=passed, key=b"")
    with monkeypatch.context() as pod:
        for name in DEFAULTS:
            pod.delenv(name, raising=False)
        pod.setattr(os, "chdir", lambda _: None)
        pod.setattr(os, "environ", dict(os.environ))
        pod.setattr(agent, "main", lambda *_, **__: pod_environment.update(os.environ) or 0)
        end = SimpleNamespace(close=lambda: None, led=False)
        run_agent(
            SimpleNamespace(path="/"),
            SimpleNamespace(address="::"),
            secret_contents,
            "node-0",
            status_lines=end,
            coordinator="here",
        )
    return pod_environment


def in_pods(request):
    pods = msgspec.structs.replace(
        request.environment, names=[], path_first=[], python_path_first=[]
    )
    return msgspec.structs.replace(request, environment=pods)


@pytest.mark.parametrize("backend", [local, slurm, kubernetes])
@pytest.mark.parametrize(
    "user_env",
    [
        {},
        {"OMP_NUM_THREADS": "8"},
        {"OMP_NUM_THREADS": ""},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        {"PYTHONUNBUFFERED": ""},
    ],
)
def test_a_program_gets_torchrun_s_defaults_and_what_the_user_set_stays(
    home, capsys, monkeypatch, backend, user_env
):
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in user_env.items():
        monkeypatch.setenv(name, value)
    program("")
    code, out, err = orch(capsys, "submit", "--dry-run", "--json", *SLURM, *PROGRAM)
    assert code == 0, err
    environ = backend(from_bytes(out.encode()), {"HOME": "/h", **user_env}, monkeypatch)
    assert {name: environ.get(name) for name in DEFAULTS} == DEFAULTS | user_env


SLURM_DROPS = (
    "orch: variables not passed on: WANDB_API_KEY (look like secrets); MY_DATA (not in"
    " backend.passed). --env NAME passes one, backend.pass_env=[PATTERN] several"
)
KUBERNETES_DROPS = SLURM_DROPS.replace(
    "MY_DATA (not in",
    "CUDA_VISIBLE_DEVICES, HF_HOME, MY_DATA, PYTHONPATH (paths or GPUs of this machine); LR (not in",
)


def lines_about_variables(err):
    """The message about variables, unfolded; its lines are of 80 columns at most."""
    message = err[err.index("orch: variables") :].split("several")[0] + "several"
    assert all(len(line) <= 80 for line in message.splitlines())
    return " ".join(message.split())


@pytest.mark.parametrize(
    ("backend", "expected"), [("slurm", SLURM_DROPS), ("kubernetes", KUBERNETES_DROPS)]
)
def test_what_is_dropped_is_said_by_reason_before_the_start_wherever_a_run_comes_from(
    home, capsys, monkeypatch, backend, expected
):
    """By a dry run, a rendered script and the Python API; and what is said to pass passes."""
    shell = {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "x",
        "MY_DATA": "/data",
        "HF_HOME": "/home/me/hf",
        "PYTHONPATH": "src",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "ORCH_HOME": str(home),
    }
    if backend == "kubernetes":
        shell["LR"] = "1e-4"
    program("")
    monkeypatch.setattr(os, "environ", shell)
    words = ("--in-place", "cluster=h100x64", "parallel=tp8", f"backend={backend}")
    words += {"slurm": SLURM[1:2], "kubernetes": ("backend.options.image=x:1",)}[backend]
    code, out, err = orch(capsys, "submit", "--dry-run", "--json", *words, *PROGRAM)
    assert code == 0, err
    assert lines_about_variables(err) == expected
    request = from_bytes(out.encode())
    passed = {*request.environment.names} & {*shell}
    of_slurm = {"CUDA_VISIBLE_DEVICES", "HF_HOME", "PYTHONPATH", "HOME", "PATH"}
    assert passed == {"WANDB_MODE"} | (of_slurm if backend == "slurm" else set())
    code, _, err = orch(capsys, "render", *words, *PROGRAM)
    assert code == 0 and lines_about_variables(err) == expected, err
    _, out, _ = orch(capsys, "submit", "--dry-run", *words, *PROGRAM)
    assert expected.removeprefix("orch: ") in " ".join(out.split())
    in_full = ("--env", "WANDB_API_KEY", "backend.pass_env=[MY_*,HF_HOME]")
    _, out, err = orch(capsys, "submit", "--dry-run", "--json", *words, *in_full, *PROGRAM)
    environment = from_bytes(out.encode()).environment
    named = {"WANDB_API_KEY", "HF_HOME"}
    assert environment.required == sorted(named) and named <= {*environment.names}
    assert ("MY_DATA" in environment.names) == (backend == "slurm")
    if backend == "slurm":  # no Slurm here: the Python API asks it before it has messages
        return
    with pytest.warns(UserWarning, match="WANDB_API_KEY"), pytest.raises(OrchError):
        api.submit(*words[1:], command=PROGRAM[1:], in_place=True)


def test_a_profile_shows_the_list_and_may_replace_it(home, capsys):
    program("")
    words = ("--dry-run", "--json", *SLURM, "backend.passed=[PATH]")
    code, out, err = orch(capsys, "submit", *words, *PROGRAM)
    assert code == 0, err
    assert json.loads(out)["environment"]["names"] == ["PATH"]
    code, out, _ = orch(capsys, "config", *SLURM)
    assert code == 0 and "passed:" in out and "NCCL_*" in out


def test_a_run_of_an_older_orch_is_resumed_in_pods_without_this_machine_s_paths():
    """Its request names the search paths, which older versions dropped while they sent it."""
    older = Environment(
        names=["HF_HOME", "LANG", "LR", "PATH"],
        values={},
        path_first=[],
        python_path_first=[],
        required=["HF_HOME"],
    )
    shell = {"PATH": "/bin", "LANG": "C", "HF_HOME": "/hf", "OTHER": "x"}
    assert values_elsewhere(older, shell) == {"HF_HOME": "/hf", "LANG": "C"}


def test_a_pattern_that_is_none_is_refused(home, capsys):
    program("")
    code, _, err = orch(
        capsys,
        "submit",
        "--dry-run",
        *SLURM,
        "backend.pass_env=['A B']",
        "--",
        "python",
        "my_train.py",
    )
    assert code == 64 and "backend.pass_env" in err and "* for any" in err


NAMES = st.sampled_from(
    ["LR", "NCCL_DEBUG", "HF_HOME", "HF_TOKEN", "MY_KEY", "PATH", "RANK", "ORCH_HOME", "_", "A\nB"]
)
PATTERNS = st.sampled_from(["*", "NCCL_*", "HF_*", "PATH", "MY_KEY", "X*"])
VALUES = st.sampled_from(["", "1", "/data", "a:/b", "~/x", "https://host/x", "file:///x", "s3://b"])


@given(
    environ=st.dictionaries(NAMES, VALUES),
    in_full=st.sets(NAMES),
    patterns=st.sets(PATTERNS),
    shares_folders=st.booleans(),
)
def test_the_rule(environ, in_full, patterns, shares_folders):
    """Names in full always pass; a pattern passes no secret, nothing of this machine and nothing of
    another launch; each variable is passed or dropped, for one reason."""
    local = set() if shares_folders else machine_names(environ)
    selection = select_variables(environ, in_full=in_full, patterns=patterns, of_this_machine=local)
    passed = {*selection.passed}
    assert sorted(passed) == selection.passed and passed <= {*environ}
    assert in_full & {*environ} <= passed
    by_pattern = passed - in_full
    assert all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in by_pattern)
    assert not by_pattern & {"HF_TOKEN", "MY_KEY", "RANK", "ORCH_HOME", "_", "A\nB"}
    paths = {
        name for name, value in environ.items() if value in ("/data", "a:/b", "~/x", "file:///x")
    }
    assert shares_folders or not by_pattern & (paths | {"PATH"})
    reasons = msgspec.to_builtins(selection.dropped).values()
    dropped = [name for names in reasons for name in names]
    assert len(dropped) == len({*dropped}) and not {*dropped} & passed
    names = {*filter(is_name, all_names(environ))}
    assert {*dropped} | passed == names - ({"PATH"} - passed) | in_full & {*environ}


def test_what_belongs_to_a_shell_or_another_launch_is_nobodys():
    functions = ["A\nB", "BASH_FUNC_module%%"]
    assert all_names(SHELL) == [*functions, "DATA", "HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE"]
    selection = select_variables(
        [*SHELL, "SSH_TTY", "XDG_RUNTIME_DIR", "DISPLAY_STEPS"], in_full=["DATA"], patterns=["W*"]
    )
    assert selection.passed == ["DATA", "WANDB_MODE"]
    assert selection.dropped == Dropped(
        secrets=["HF_TOKEN", "WANDB_API_KEY"], unlisted=["DISPLAY_STEPS"]
    )
