"""`orch init`: what it writes is the repository's, plans with it are made, and nothing is
overwritten unasked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_chart_is_whole(tmp_path, capsys):
    assert main(["init", "kubernetes", str(tmp_path / "my" / "chart"), "--json"]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    ours = {
        name: content
        for name, content in files(ROOT / "charts" / "orch").items()
        if not name.endswith(".pyc")
    }
    assert files(tmp_path / "my" / "chart") == ours and report["files"] == sorted(ours)


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


@pytest.mark.process
def test_an_installed_package_finds_them_under_its_prefix(tmp_path):
    """Laid out as pip does: packages in lib/pythonX.Y/site-packages, data in share."""
    site = tmp_path / "prefix" / "lib" / "python3" / "site-packages"
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("orchestrator", "conf"):
        shutil.copytree(ROOT / name, site / name, ignore=skip)
    shutil.copy(ROOT / "orch_start.py", site)
    shutil.copytree(ROOT / "slurm", tmp_path / "prefix" / "share" / "orch" / "slurm", ignore=skip)
    argv = [sys.executable, "-P", str(site / "orch_start.py"), "orchestrator.cli.main", "init"]
    done = subprocess.run([*argv, "slurm", "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "backend/apptainer.yaml" in json.loads(done.stdout)["files"], (
        done
    )
    done = subprocess.run([*argv, "kubernetes"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == Exit.CONFIG and "this installation has no charts/orch" in done.stderr
