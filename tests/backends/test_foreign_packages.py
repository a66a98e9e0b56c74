"""Packages of other people called `trainer` or `orchestrator`, on PYTHONPATH and in the working
folder, run nothing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import start
from orchestrator.backends.kubernetes.objects.pod import _container
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.backends.local.backend import LocalBackend
from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.backends.slurm.script.render import JobScript, render
from orchestrator.drill import node_command
from orchestrator.run.folder import RunFolder
from tests.beds.bundles import make_bundle, wait_end
from tests.beds.plans import make_plan

pytestmark = pytest.mark.process


@pytest.fixture
def theirs(tmp_path, monkeypatch) -> Path:
    """The working folder, which is on PYTHONPATH as well. Whatever is imported from it leaves a
    trace."""
    folder = tmp_path / "theirs"
    for package in ("trainer", "orchestrator"):
        (folder / package).mkdir(parents=True)
        for name in ("__init__.py", "__main__.py", "preload.py"):
            trace = (
                f"open({str(tmp_path / 'hijacked')!r}, 'a').write(__name__)\nraise"
                " SystemExit('theirs')\n"
            )
            (folder / package / name).write_text(trace)
    (folder / "theirs_alone.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.chdir(folder)
    return folder


def test_the_bundled_trainer_runs_where_others_have_packages_of_its_name(theirs, tmp_path, corpus):
    plan = make_plan(
        dp=2,
        nodes=1,
        steps=2,
        seq_len=32,
        data_paths=[str(corpus)],
        cache_dir=str(tmp_path / "cache"),
    )
    bundle = make_bundle(plan, tmp_path / "runs", command=(), names=("PATH", "HOME", "PYTHONPATH"))
    LocalBackend().submit(bundle, os.environ)
    folder = RunFolder(tmp_path / "runs" / "test-run")
    state = wait_end(folder)
    assert state.state == "done", (state.reason, folder.rank_log(0).read_text())
    assert not (tmp_path / "hijacked").exists()


@pytest.mark.parametrize("module", ["trainer.export", "orchestrator.backends.local.supervisor"])
def test_our_modules_are_found_by_location_and_all_others_by_the_users_paths(
    theirs, tmp_path, module
):
    done = subprocess.run([*start.command(module), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and module in done.stdout.split("\n")[0], done
    by_name = subprocess.run(
        [sys.executable, "-m", module.split(".")[0]], capture_output=True, text=True
    )
    assert by_name.stderr == "theirs\n"  # the trap works
    (tmp_path / "hijacked").unlink()
    done = subprocess.run(
        [sys.executable, "-P", str(start.FILE), "theirs_alone"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_copy_of_our_code_is_preferred_where_there_is_one(tmp_path):
    trainer_argv = start.command("trainer")
    assert trainer_argv[:2] == [sys.executable, "-P"] and trainer_argv[2] == str(start.FILE)
    assert start.command("trainer", [str(tmp_path)]) == trainer_argv
    (tmp_path / "orch_start.py").write_text("")
    assert start.command("trainer", ["/nowhere", str(tmp_path)])[2] == str(
        tmp_path / "orch_start.py"
    )


def test_the_command_orch_and_the_first_process_of_a_job_and_a_pod_are_ours(theirs, tmp_path):
    script = Path(sys.executable).with_name("orch")
    if not script.is_file():
        pytest.skip(f"orch is not installed beside {sys.executable}")
    job = JobScript(
        run_id="r",
        run_dir="/r",
        plan=make_plan(),
        options=SlurmOptions(),
        python=sys.executable,
        export=(),
    )
    (place_command,) = re.findall(r"^(.* orchestrator.slurm.task) place", render(job), re.MULTILINE)
    *pod, task = _container(job.plan, KubernetesOptions(image="i", python=sys.executable))[
        "command"
    ]
    # process 1 of a container: it takes no --help
    assert task == "orchestrator.backends.kubernetes.pod"
    drilled = node_command.arguments(str(tmp_path), 1, "kill_worker", 0, 1.0, 0.0, 1.0)
    for argv, expected_output in (
        ([str(script), "version"], "orch "),
        ([*shlex.split(place_command), "--help"], "orchestrator.slurm.task"),
        ([*pod, "orchestrator.drill.node_command", "--help"], "orchestrator.drill.node_command"),
        ([sys.executable, "-P", *drilled], '"problem"'),
    ):
        done = subprocess.run(argv, capture_output=True, text=True)
        assert expected_output in done.stdout and "theirs" not in done.stderr, (argv, done)
    assert not (tmp_path / "hijacked").exists()
