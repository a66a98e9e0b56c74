"""`orch init`: what it writes is the repository's, plans with it are made, and nothing is
overwritten unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import orchestrator
from orchestrator.cli.main import main
from orchestrator.plan.exits import Exit
from tests.beds.base import ROOT


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_profiles_to_start_from_render_a_job_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    assert main(["init", "slurm"]) == Exit.DONE
    assert "then: orch submit --config-dir slurm backend=PROFILE" in capsys.readouterr().out
    assert files(tmp_path / "slurm") == {
        f"backend/{k}": v for k, v in files(ROOT / "slurm" / "backend").items()
    }
    line = (
        "render --config-dir slurm backend=preemptible cluster=h100x64 cluster.nodes=2"
        " parallel=tp8_zero1"
    )
    assert (
        main([*line.split(), "model=llama3_8b", "--in-place", "backend.options.topology=none"])
        == Exit.DONE
    )
    assert "#SBATCH --partition=preempt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "chart"), [("kubernetes", "orch"), ("controller", "orch-controller")]
)
def test_a_chart_is_whole_and_has_the_version_of_orch(name, chart, tmp_path, capsys):
    """The version is the tag of the image that the chart takes by default."""
    assert main(["init", name, str(tmp_path / "my" / "chart"), "--json"]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    described = yaml.safe_load((tmp_path / "my" / "chart" / "Chart.yaml").read_text())
    assert described["appVersion"] == orchestrator.__version__
    ours = {
        name: content
        for name, content in files(ROOT / "charts" / chart).items()
        if not name.endswith(".pyc")
    }
    assert files(tmp_path / "my" / "chart") == ours and report["files"] == sorted(ours)


def test_a_program_without_orch_gets_the_file_that_it_imports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "report"]) == Exit.DONE
    assert "import it in your program, then: orch run train.py" in capsys.readouterr().out
    argv = [sys.executable, "-S", "-c", "import orch_report; print(orch_report.__file__)"]
    environ = {"PATH": os.environ["PATH"]}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "orch_report.py")


def test_nothing_is_overwritten_unless_forced(tmp_path, capsys):
    assert main(["init", "slurm", str(tmp_path)]) == Exit.DONE
    edited_file = tmp_path / "backend" / "apptainer.yaml"
    deleted_file = tmp_path / "backend" / "preemptible.yaml"
    edited_file.write_text("mine")
    deleted_file.unlink()
    assert main(["init", "slurm", str(tmp_path)]) == Exit.USAGE
    stderr = capsys.readouterr().err
    assert (
        str(edited_file) in stderr
        and "4 more would be overwritten; --force overwrites" in stderr
        and stderr.count("\n") == 1
    )
    assert edited_file.read_text() == "mine" and not deleted_file.exists()
    assert main(["init", "slurm", str(tmp_path), "--force"]) == Exit.DONE
    assert (
        edited_file.read_bytes() == (ROOT / "slurm/backend/apptainer.yaml").read_bytes()
        and deleted_file.exists()
    )


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["init", "slurm", str(tmp_path / "file" / "x")]) == Exit.CONFIG
    assert "cannot be written" in capsys.readouterr().err
