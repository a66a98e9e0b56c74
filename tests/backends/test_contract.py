"""What every backend does, held against the one of this machine and against one of another
package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from orchestrator.backends.base import BUILT_IN, Backend, backend_names, get_backend
from orchestrator.cli.main import main
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import RunState
from tests.beds.bundles import make_bundle, wait_for
from tests.beds.contract import cancel_and_resume, refusals
from tests.beds.plans import make_plan
from tests.beds.slurm.runs import Orch

HOLD = {"ORCH_TEST_STEPS": "9", "ORCH_TEST_SAVE": "1", "ORCH_TEST_HOLD": "1"}
PLAN = make_plan(dp=2, nodes=2)


def entry_point(folder: Path, value: str) -> None:
    """The metadata of an installed package that has this backend."""
    info = folder / "spawn_backend-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spawn-backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[orch.backends]\nspawn = {value}\n")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    entry_point(site, "tests.beds.third_party_backend:SpawnBackend")
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture(params=["local", "spawn"])
def backend(request, installed) -> Backend:
    return get_backend(request.param)


def bundle(backend: Backend, runs: Path, env: dict[str, str] | None = None, **fields):
    about = {"name": backend.name, **fields}
    return make_bundle(PLAN, runs, backend=about, env=env, agent_flags=backend.agent_flags)


def start(backend: Backend, runs: Path, **env: str) -> RunFolder:
    sent = bundle(backend, runs, HOLD | env)
    assert backend.submit(sent, os.environ) == f"{backend.name}://test-run" == sent.request.handle
    return RunFolder(Path(sent.request.run_dir))


def ended(backend: Backend, folder: RunFolder) -> RunState:
    wait_for(lambda: not backend.is_alive(folder), what="the run's end")
    return backend.state(folder)


def running(backend: Backend, folder: RunFolder) -> None:
    wait_for(lambda: backend.state(folder).state == "running", what="a running run")


class Here(Orch):
    """Command lines on this machine, each a process that finds the other package."""

    def __call__(self, *arguments, code=0, env=None, timeout=300):
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "ORCH_HOME": str(self.home)}
        argv = [sys.executable, "-m", "orchestrator.cli.main", *arguments]
        again = self._worker_variables if arguments[0] == "resume" else {}
        env = {**os.environ, **paths, **again, **(env or {})}
        done = subprocess.run(
            argv, capture_output=True, text=True, env=env, cwd=self.home, timeout=timeout
        )
        assert code is None or done.returncode == code, (
            f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done


@pytest.mark.process
def test_a_run_is_refused_cancelled_resumed_and_done(backend, tmp_path):
    """The same contract is tested on Slurm and on Kubernetes, in their tiers."""
    overrides = [f"backend.name={backend.name}", "cluster=local_nodes", "parallel=dp2"]
    overrides.append("cluster.gpus_per_node=1")
    orch = Here(SimpleNamespace(env={}), tmp_path)
    refusals(orch, overrides)
    run = orch.submit(*overrides, worker={"STEPS": 9, "SAVE": 1, "HOLD": 1})
    cancel_and_resume(orch, run, run.release)
    assert (run.folder / "report.json").exists()


@pytest.mark.process
def test_by_force_nothing_is_waited_for(backend, runs):
    folder = start(backend, runs, ORCH_TEST_DEAF="1")
    running(backend, folder)
    backend.cancel(folder, force=True)
    state = ended(backend, folder)
    assert (state.state, state.exit_code) == ("cancelled", Exit.RESTART)


@pytest.mark.process
def test_a_failure_of_the_program_is_the_runs(backend, runs):
    folder = start(backend, runs, ORCH_TEST_DIE="1:2:3", ORCH_TEST_HOLD="")
    state = ended(backend, folder)
    assert (state.state, state.exit_code, state.cause.rank) == ("failed", Exit.USER, 1)


def test_what_it_cannot_run_is_refused_before_there_is_a_folder(backend, runs):
    for change, exit, reason in (
        ({"device": "cuda", "nodes": 9}, Exit.CAPACITY, "GPU"),
        (
            {"backend_options": {"nicee": 1}},
            Exit.CONFIG,
            r"backend\.options\.nicee is not an option",
        ),
    ):
        job = bundle(backend, runs)
        job = msgspec.structs.replace(job, request=msgspec.structs.replace(job.request, **change))
        for refuse in (
            lambda sent=job: backend.check(sent.request),
            lambda sent=job: backend.submit(sent, os.environ),
        ):
            with pytest.raises(OrchError, match=reason) as refused:
                refuse()
            assert refused.value.exit == exit
    assert not runs.exists()


@pytest.mark.parametrize("raw", [b"", b"{", b'{"supervisor": "me"}', b"[" * 100_000])
def test_a_damaged_record_is_refused_in_one_line(backend, runs, raw):
    with create_run_folder(bundle(backend, runs), backend.name) as folder:
        folder.backend.write_bytes(raw)
    assert backend.state(folder).run_id == folder.run_id
    with pytest.raises(OrchError, match=r"backend\.json is unreadable: .+") as refused:
        backend.cancel(folder, force=False)
    assert refused.value.exit == Exit.CONFIG and "\n" not in refused.value.message


def test_an_option_of_the_wrong_kind_is_named(backend, runs):
    name = {"local": "spare_nodes", "spawn": "nice"}[backend.name]
    request = bundle(backend, runs, options={name: "many"}).request
    with pytest.raises(OrchError, match=rf"backend\.options\.{name}: ") as refused:
        backend.check(request)
    assert refused.value.exit == Exit.CONFIG


def test_other_packages_are_known_by_name_and_refused_when_they_are_no_backend(
    installed, tmp_path, capsys
):
    assert backend_names() == [*BUILT_IN, "spawn"]
    with pytest.raises(
        OrchError, match=r"unknown backend 'spwan'; did you mean 'spawn'\? choices: local, .*spawn"
    ):
        get_backend("spwan")
    overrides = [
        "+cluster=local",
        "parallel=dp2_zero1",
        "cluster.nodes=1",
        "cluster.gpus_per_node=2",
        "backend.name=spawn",
    ]
    assert main(["submit", "--dry-run", *overrides]) == 0 and "spawn://" in capsys.readouterr().out
    for value in (
        "tests.beds.plans:make_plan",
        "tests.nowhere:X",
        "orchestrator.backends.base:Backend",
    ):
        (tmp_path / "site" / "spawn_backend-1.dist-info" / "entry_points.txt").write_text(
            f"[orch.backends]\nspawn = {value}\n"
        )
        with pytest.raises(OrchError, match="backend spawn: entry point") as refused:
            get_backend("spawn")
        assert refused.value.exit == Exit.CONFIG
