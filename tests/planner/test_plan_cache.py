"""What was planned before is read back: equal to planning anew, never stale, and no more than a
help."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from orchestrator.cluster.measured import path_of
from orchestrator.config.compose import load
from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.planner import build
from orchestrator.planner.elastic.sizes import ROOMS_OF_A_PLAN, plan_of
from orchestrator.run.folder import home_folder
from orchestrator.submit.cluster import ClusterResolver, with_token_folder
from tests.house.rooms import edges


def cached(config: Config) -> Plan:
    home = home_folder(os.environ)
    return plan_of(with_token_folder(config, home), ClusterResolver(home)(config.cluster))


WORDS = ["cluster=h100x64", "parallel=tp8_pp4", "model=llama3_70b"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def planned(monkeypatch):
    """Counts what the planner is asked for."""
    calls = []
    real = build.build_plan
    monkeypatch.setattr(
        build, "build_plan", lambda *arguments: calls.append(arguments) or real(*arguments)
    )
    return calls


def test_the_same_job_is_planned_once(home, planned, monkeypatch):
    config = load(WORDS)
    fresh = cached(config)
    assert cached(config) == fresh and len(planned) == 1
    assert list(cached(config).placement) == list(fresh.placement)  # pages follow its order
    cached(load([*WORDS, "train.seq_len=4096"]))
    monkeypatch.setenv("ORCH_HOME", str(home / "other"))
    assert cached(config).job.data.cache_dir.startswith(str(home / "other"))
    assert len(planned) == 3


def test_a_damaged_file_is_planned_again(home, planned, tmp_path):
    config = load(WORDS)
    first = cached(config)
    (path,) = (tmp_path / "cache" / "orch" / "plan").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    for content in (b"", b"{}", path.read_bytes().replace(b'"gpu":3', b'"gpu":2', 1)):
        path.write_bytes(content)
        assert cached(config) == first
    assert len(planned) == 4


def test_files_that_a_plan_was_made_of_are_looked_at(home, planned, tmp_path):
    table = tmp_path / "table.csv"
    overrides = [
        "cluster=local",
        "parallel=pp2",
        "parallel.micro_batch_size=2",
        "train.global_batch_samples=8",
    ]
    config = load([*overrides, "cluster.gpus_per_node=2", f"parallel.schedule_file={table}"])
    row_tables = []
    for rows in ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1") * 2:
        table.write_text(rows)
        row_tables.append(cached(config).parallel.schedule_rows)
    assert row_tables[:2] == row_tables[2:] and row_tables[0] != row_tables[1] and len(planned) == 2


def test_measured_figures_count(home, planned):
    config = load(WORDS)
    cached(config)
    record = path_of(config.cluster, home)
    record.parent.mkdir(parents=True)
    record.write_text("{")
    for _ in range(2):  # a refusal is not remembered
        with pytest.raises(OrchError, match="measure again"):
            cached(config)
    record.unlink()
    cached(config)
    assert len(planned) == 1


@pytest.mark.process
def test_idle_threads_of_numpys_blas_take_no_processor_time_and_later_processes_are_not_told(home):
    code = (
        "import os, sys, time\nfrom orchestrator.cli.main import main\nmain(['plan', '--json',"
        " *sys.argv[1:]])\nprint(os.environ.get('OPENBLAS_THREAD_TIMEOUT'), time.process_time() -"
        " time.thread_time())"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ["OPENBLAS_NUM_THREADS"] = "8"
    command = [sys.executable, "-c", code, *WORDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    thread_timeout, others_s = done.stdout.splitlines()[-1].split()
    assert thread_timeout == "None" and float(others_s) < 0.003, (
        done.stderr
    )  # they would spin for 10 ms and more


@pytest.mark.process
def test_neither_hydra_nor_the_planner_is_imported_for_a_job_planned_before(home, tmp_path):
    code = (
        "import sys\nfrom orchestrator.cli.main import main\ncode = main(['plan', '--json',"
        " *sys.argv[1:]])\nwatched = {'hydra', 'numpy', 'numpy.ma', 'orchestrator.planner.build',"
        " 'orchestrator.planner.search.search'}\nwatched |= {'logging', 'statistics', 'fractions',"
        " 'tempfile', 'csv', 'numpy.typing'}\nprint(code, *sorted(watched & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *WORDS]
    done = [subprocess.run(command, capture_output=True, text=True, timeout=300) for _ in range(2)]
    shutil.rmtree(tmp_path / "cache" / "orch" / "plan")
    done.append(subprocess.run(command, capture_output=True, text=True, timeout=300))
    (first, *page), (second, *again), (anew, *third) = (
        process.stdout.splitlines()[::-1] for process in done
    )
    assert page == again == third and "numpy" in first.split() and second == "0", done[1].stderr
    assert not {"numpy.ma", "orchestrator.planner.search.search"} & set(first.split()), (
        "its degrees are given"
    )
    assert anew == "0 numpy orchestrator.planner.build"


def test_cached_plans_depend_on_the_code_of_every_room_that_makes_them():
    """Without it a plan outlives a change of the cost model that predicted it."""
    rooms = {"orchestrator.planner"}
    while new_rooms := {after for before, after in edges() if before in rooms} - rooms:
        rooms |= new_rooms
    without_figures = {"orchestrator.bundled", "orchestrator.cache", "orchestrator.errors"}
    listed = {f"orchestrator.{room}" for room in ROOMS_OF_A_PLAN}
    assert rooms - without_figures == listed
