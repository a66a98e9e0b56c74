"""The base install has neither torch nor kubernetes nor submitit: planning works, the rest names the extra."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from orchestrator.errors import EXTRAS

#: `orch` where the packages of the extras are not installed.
WITHOUT = f"""
import sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in {set(EXTRAS)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing)
import importlib.util as util
real = util.find_spec
util.find_spec = lambda name, *more: None if name in {set(EXTRAS)!r} else real(name, *more)
from orchestrator.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def orch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    where = {"cluster": {"server": "http://127.0.0.1:9"}, "user": {}, "context": {"cluster": "a", "user": "a"}}
    named = {f"{kind}s": [{"name": "a", kind: value}] for kind, value in where.items()}
    known = {"apiVersion": "v1", "kind": "Config", "current-context": "a", **named}
    (tmp_path / "kubeconfig").write_text(json.dumps(known))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return lambda words: subprocess.run([sys.executable, "-c", WITHOUT, *words.split()], capture_output=True, text=True)


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        "plan +cluster=h100x64 parallel=tp8_pp4_zero1",
        "submit +cluster=h100x64 parallel=tp8_pp4_zero1 --dry-run",
        "submit nproc=2 --dry-run -- python -c pass",
        "render cluster=h100x64 cluster.nodes=2 model=llama3_8b parallel=tp8_zero1 backend=slurm --in-place --json",
        "config --choices",
        "list",
        "version",
    ],
)
def test_what_needs_no_extra_works_without_any(orch, words):
    done = orch(words)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("submit +cluster=local", "the bundled trainer needs torch: pip install 'orch-train[trainer]'"),
        ("verify parallel=tp2", "the bundled trainer needs torch: pip install 'orch-train[trainer]'"),
        ("plan --plot p.png", "--plot needs matplotlib: pip install 'orch-train[plot]'"),
        (
            "submit cluster=local backend=kubernetes backend.options.image=x:1 --in-place",
            "pip install 'orch-train[kubernetes]'",
        ),
        (
            "render cluster=local backend=kubernetes backend.options.image=x:1 --in-place"
            " backend.options.pod={spec:{priority:1}}",
            "backend.options.pod needs kubernetes: pip install 'orch-train[kubernetes]'",
        ),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(orch, words, says, tmp_path):
    done = orch(words)
    assert done.returncode == 65 and says in done.stderr and done.stderr.count("\n") == 1, done
    assert not list((tmp_path / "home" / "runs").glob("*")), "half submitted"
