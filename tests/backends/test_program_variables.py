"""Tests which variables of the shell a program gets: all on this machine, elsewhere those of a
list; which not, is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from orchestrator.agent import __main__ as agent
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.pod.task import run_agent
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.job.task import environment
from orchestrator.plan.worker import PINS, pin_file
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import compose_environment, from_bytes
from orchestrator.run.state import read_state
from orchestrator.run.variables import all_names, dropped_names, matching
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
def test_on_this_machine_a_program_has_every_variable_and_no_value_is_written_down(
    home, capsys, monkeypatch
):
    monkeypatch.setenv("MY_DATA", "/data/of-mine")
    monkeypatch.setenv("HF_TOKEN", "hf_never-in-a-file")
    monkeypatch.setenv("RANK", "99")
    program(
        "import os; print(os.environ['MY_DATA'], len(os.environ['HF_TOKEN']), os.environ['RANK'])"
    )
    code, out, err = orch(capsys, "submit", "nproc=1", "--json", "--", "python", "my_train.py")
    assert code == 0, err
    assert "not passed on" not in err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done"
    assert folder.rank_log(0).read_text().split("\n")[-2] == "/data/of-mine 18 0"
    run_files = [path for path in Path(home).rglob("*") if path.is_file()]
    assert len(run_files) > 5 and not [
        path for path in run_files if b"hf_never-in-a-file" in path.read_bytes()
    ]


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
        "import os, sys; print(os.environ['LR'], os.environ['MY_TOKEN']); sys.exit(not"
        " os.path.exists('go'))"
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
    assert orch(capsys, "resume", folder.run_id, "--follow", *ALLOW)[0] == 0
    assert folder.rank_log(0).read_text().splitlines()[-1] == " hush" and not list(
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
    "OMP_NUM_THREADS": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
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


def test_elsewhere_those_that_are_not_passed_on_are_said(home, capsys, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MY_DATA"):
        monkeypatch.setenv(name, "x")
    program("")
    flags = ("--dry-run", *SLURM)
    _, out, _ = orch(capsys, "submit", *flags, "--", "python", "my_train.py")
    _, _, omitted = " ".join(out.split()).partition("variables not passed on: ")  # folded at words
    assert "--env NAME" in omitted and "backend.pass_env" in omitted
    script = ("--dry-run", "--json", *SLURM, "backend.pass_env=[WANDB_*,MY_DATA]")
    _, out, _ = orch(capsys, "submit", *script, "--", "python", "my_train.py")
    names = json.loads(out)["environment"]["names"]
    assert {"WANDB_MODE", "MY_DATA"} <= set(names) and "WANDB_API_KEY" not in names


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


def test_patterns_mean_no_secret_and_names_do():
    assert matching(SHELL, ["*"]) == ["DATA", "WANDB_MODE"]
    assert matching(SHELL, ["WANDB_*", "HF_TOKEN"]) == ["HF_TOKEN", "WANDB_MODE"]
    assert matching(SHELL, []) == []


def test_what_belongs_to_a_shell_or_another_launch_is_nobodys():
    assert all_names(SHELL) == ["DATA", "HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE"]
    assert dropped_names([*SHELL, "SSH_TTY", "XDG_RUNTIME_DIR"], ["DATA"]) == [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "WANDB_MODE",
    ]
