"""The wheel: what it holds, and that orch runs from it alone, beside another `trainer`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from orchestrator import start
from tests.beds.base import ROOT
from tests.cli.test_init import files
from tests.house.test_house import tracked
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process

#: Folder of the repository -> its place in the wheel.
PLACES = {
    "orchestrator/": "orchestrator/",
    "trainer/": "orchestrator/_bundled/trainer/",
    "conf/": "orchestrator/_bundled/conf/",
    "slurm/backend/": "orchestrator/_bundled/slurm/backend/",
    "charts/orch/": "orchestrator/_bundled/charts/orch/",
    "charts/orch-controller/": "orchestrator/_bundled/charts/orch-controller/",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A site-packages with the wheel, built from a copy of the tracked files as a release would be.
    A pure wheel is installed by unpacking it."""
    import shutil

    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked():
        if (ROOT / path).is_file():
            target = folder / "src" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, target)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    subprocess.run(
        [sys.executable, "-c", build],
        cwd=folder / "src",
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    shutil.rmtree(folder / "src")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def orch(site, tmp_path, monkeypatch):
    """Runs orch from the wheel, in an empty folder. The packages that it depends on come after it;
    their folder's .pth files, which name this checkout, are not read from PYTHONPATH."""
    monkeypatch.chdir(tmp_path)
    paths = [str(site), sysconfig.get_paths()["purelib"]]
    environment = {
        **os.environ,
        "ORCH_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    # Without the interpreter's link into the virtual environment its .pth files are not read either.
    python = os.path.realpath(sys.executable)
    argv = [python, "-P", str(site / "orch_start.py"), "orchestrator.cli.main"]

    def call(line: str) -> str:
        done = subprocess.run(
            [*argv, *line.split()],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, (line, done)
        return done.stdout

    return call


def sources(folder: str) -> dict[str, bytes]:
    return {
        name: content for name, content in files(ROOT / folder).items() if not name.endswith(".pyc")
    }


def test_site_packages_gets_no_general_names(site):
    """Every tracked file of these folders is in the wheel, and nothing else but two modules."""
    top_level = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert top_level == {"orchestrator", "orch_report.py", "orch_start.py"}
    tracked_files = {
        place + path.removeprefix(folder)
        for path in tracked()
        for folder, place in PLACES.items()
        if path.startswith(folder) and (ROOT / path).is_file()
    }
    installed = {f"orchestrator/{name}" for name in files(site / "orchestrator")}
    assert installed == tracked_files, sorted(installed ^ tracked_files)


def test_orch_runs_from_the_wheel_beside_a_trainer_of_others(orch, site, tmp_path):
    """A distribution called `trainer` is in site-packages, too; the agents, the workers and the
    tools that start the bundled trainer run orch's own."""
    (site / "trainer").mkdir()
    (site / "trainer" / "__init__.py").write_text("raise SystemExit('theirs')\n")
    assert f"{site}\n" in orch("paths")
    orch("plan cluster=h100x64 parallel=tp8_pp4_zero1")
    output = orch("submit parallel=tp2 cluster.nodes=1 cluster.gpus_per_node=2 train.steps=2 -f")
    assert "done: all workers are done" in output
    (run,) = (tmp_path / "home" / "runs").iterdir()
    orch(f"export {run.name} --out weights.safetensors")
    orch("init slurm slurm")
    assert files(tmp_path / "slurm" / "backend") == sources("slurm/backend")
    orch("init kubernetes chart")
    assert files(tmp_path / "chart") == sources("charts/orch")
    orch("init controller chart2")
    assert files(tmp_path / "chart2") == sources("charts/orch-controller")


def test_the_code_of_a_wheel_is_that_of_its_checkout(site):
    """Slurm compares the two: the submitter's orch, and the one of the image."""
    code = "from orchestrator.start import code_version; print(code_version())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=site,
    )
    assert done.stdout.strip() == start.code_version(), done
