"""The Python that starts a user's program, from the command line to the worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import api
from orchestrator.run.folder import RunFolder
from tests.beds.bundles import wait_end

from .test_verbs import home, orch, program

__all__ = ["home"]  # the fixture

ELSEWHERE = {
    "kubernetes": ("backend=kubernetes", "backend.options.image=x:1", "--in-place"),
    "container": (
        "backend=slurm",
        "backend.options.topology=none",
        "backend.options.container.runtime=pyxis",
        "backend.options.container.image=x",
    ),
}


def unfolded(lines: str) -> str:
    return " ".join(lines.split())


@pytest.fixture
def venv(tmp_path, monkeypatch) -> Path:
    """A virtual environment without orch, activated by its variables."""
    folder = tmp_path / "theirs"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("VIRTUAL_ENV", str(folder))
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    return folder


@pytest.mark.process
def test_the_activated_environment_runs_the_program(home, capsys, venv):
    """`orch run` and `python` mean its Python, also for what the program starts; orch's agents keep
    their own. Status names it."""
    script = program("""
        import subprocess, sys
        child = "import sys; print(sys.prefix, flush=True)"
        print(sys.prefix, flush=True)
        subprocess.run(["python3", "-c", child], check=True)
        """)
    for words in (("run", script), ("submit", "--follow", "nproc=1", "--", "python", script)):
        code, out, err = orch(capsys, *words)
        assert code == 0, err
        assert out.count(f"[rank 0] {venv}\n") == 2
        assert f"orch: the program's python is {venv}/bin/python (VIRTUAL_ENV)" in unfolded(err)
    code, out, _ = orch(capsys, "status")
    assert f"python      {venv}/bin/python\n" in out
    with pytest.warns(UserWarning, match=r"/bin/python \(VIRTUAL_ENV\)"):
        run = api.submit("nproc=1", command=["python3", script])
    assert run.wait().state == "done"
    assert f"{venv}\n{venv}\n" in run.folder.rank_log(0).read_text()


@pytest.mark.process
def test_python_exec_comes_first_under_any_name(home, capsys, venv, monkeypatch):
    """A script of the user's that is not called python, beside a `python` that is another one."""
    chosen = venv / "bin" / "wrapped"
    chosen.write_text(f'#!/bin/sh\nWRAPPED=yes exec {sys.executable} "$@"\n')
    chosen.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(chosen))
    script = program("import os; print(os.environ.get('WRAPPED'))")
    code, out, err = orch(capsys, "submit", "nproc=1", "--json", "--", "python", script)
    assert code == 0, err
    assert f"orch: the program's python is {chosen} (PYTHON_EXEC)" in unfolded(err)
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done"
    assert folder.rank_log(0).read_text().split("\n")[-2] == "yes"


def test_an_interpreter_that_is_not_there_is_one_line(home, capsys, monkeypatch):
    monkeypatch.setenv("PYTHON_EXEC", "/missing/python")
    program("")
    for words in (("run", "my_train.py"), ("submit", "nproc=1", "--", "python", "my_train.py")):
        code, _, err = orch(capsys, *words)
        assert (code, err) == (
            65,
            "orch: error: PYTHON_EXEC=/missing/python is not an executable file\n",
        )


@pytest.mark.parametrize("backend", ELSEWHERE)
@pytest.mark.parametrize("variable", ["", "/missing/python"])
def test_an_image_has_its_own_python(home, capsys, venv, monkeypatch, backend, variable):
    """`orch run` sends `python3`, never a path of this machine."""
    monkeypatch.setenv("PYTHON_EXEC", variable) if variable else None
    program("")
    flags = ("--dry-run", "--json", "cluster=h100x8", "parallel=dp8", "--nproc-per-node", "gpu")
    code, out, err = orch(capsys, "run", *flags, *ELSEWHERE[backend], "my_train.py")
    assert code == 0, err
    request = json.loads(out)
    assert request["worker"]["argv"] == ["python3", "-u", "my_train.py"]
    assert "python" not in request["summary"]
    assert ("the program's python is that of the image" in unfolded(err)) == bool(variable)
    assert str(venv) not in err


def test_slurm_gets_the_chosen_python_since_its_nodes_share_folders(home, capsys, venv):
    program("")
    flags = ("--dry-run", "--json", "backend=slurm", "backend.options.topology=none")
    code, out, err = orch(capsys, "run", "cluster=h100x8", "parallel=dp1", *flags, "my_train.py")
    assert code == 0, err
    request = json.loads(out)
    assert request["environment"]["path_first"] == [f"{venv}/bin"]
    assert request["agents"][0]["argv"][0] == sys.executable
    assert request["summary"]["python"] == f"{venv}/bin/python"
