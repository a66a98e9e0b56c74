"""The base install has neither torch nor kubernetes nor submitit: planning works, the rest names
the extra."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import EXTRAS, how_to_install, not_installed

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
    where = {
        "cluster": {"server": "http://127.0.0.1:9"},
        "user": {},
        "context": {"cluster": "a", "user": "a"},
    }
    named = {f"{kind}s": [{"name": "a", kind: value}] for kind, value in where.items()}
    kubeconfig = {"apiVersion": "v1", "kind": "Config", "current-context": "a", **named}
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return lambda command_line: subprocess.run(
        [sys.executable, "-c", WITHOUT, *command_line.split()], capture_output=True, text=True
    )


@pytest.mark.process
@pytest.mark.parametrize(
    "command_line",
    [
        "plan +cluster=h100x64 parallel=tp8_pp4_zero1",
        "submit +cluster=h100x64 parallel=tp8_pp4_zero1 --dry-run",
        "submit nproc=2 --dry-run -- python -c pass",
        (
            "render cluster=h100x64 cluster.nodes=2 model=llama3_8b parallel=tp8_zero1"
            " backend=slurm --in-place --json"
        ),
        "config --choices",
        "list",
        "version",
    ],
)
def test_what_needs_no_extra_works_without_any(orch, command_line):
    done = orch(command_line)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("command_line", "says"),
    [
        (
            "submit +cluster=local",
            "the bundled trainer needs torch: pip install 'torch>=2.11' 'safetensors>=0.4'",
        ),
        (
            "verify parallel=tp2",
            "the bundled trainer needs torch: pip install 'torch>=2.11' 'safetensors>=0.4'",
        ),
        ("plan --plot p.png", "--plot needs matplotlib: pip install 'matplotlib>=3.8'"),
        (
            "submit cluster=local backend=kubernetes backend.options.image=x:1 --in-place",
            "pip install 'kubernetes>=37' 'urllib3>=2'",
        ),
        (
            (
                "render cluster=h100x64 model=llama3_8b parallel=tp8_zero1 backend=kubernetes"
                " backend.options.image=x:1 backend.options.pod={spec:{runtimeClassName:nvidia}}"
                " --in-place"
            ),
            "backend.options.pod needs kubernetes: pip install 'kubernetes>=37' 'urllib3>=2'",
        ),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(orch, command_line, says, tmp_path):
    done = orch(command_line)
    assert done.returncode == 65 and says in done.stderr and done.stderr.count("\n") == 1, done
    assert not list((tmp_path / "home" / "runs").glob("*")), "half submitted"


ROOT = Path(__file__).parents[2]
ORIGINS = {
    "editable checkout": '{"url": "file:///home/a/orch", "dir_info": {"editable": true}}',
    "checkout": '{"url": "file:///home/a/orch", "dir_info": {}}',
    "wheel": '{"url": "file:///tmp/orch_train-9-py3-none-any.whl", "archive_info": {}}',
    "index": None,
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_what_is_missing_is_installed_alike_however_orch_was(tmp_path, monkeypatch, origin):
    """The name orch itself never appears: on an index that does not have it a stranger may claim
    its name."""
    installed = tmp_path / "orch_train-9.dist-info"
    installed.mkdir()
    needs = ("numpy>=1", 'torch>=9.9; extra == "trainer"', 'safetensors>=8; extra == "trainer"')
    needs += (
        'orch-train[trainer]; extra == "all"',
        'urllib3<3,>=2; python_version > "3" and extra == "kubernetes"',
    )
    lines = [
        "Metadata-Version: 2.4",
        "Name: orch-train",
        "Version: 9",
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    (installed / "METADATA").write_text("\n".join(lines) + "\n")
    if url := ORIGINS[origin]:
        (installed / "direct_url.json").write_text(url)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        not_installed("safetensors", "it").message
        == "it needs safetensors: pip install 'torch>=9.9' 'safetensors>=8'"
    )
    assert how_to_install("urllib3", "tokenizers") == "pip install 'urllib3<3,>=2' 'tokenizers'"


def test_what_is_missing_is_told_where_orch_is_not_installed(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    assert not_installed("torch").message == "this needs torch: pip install 'torch' 'safetensors'"


def test_nobody_is_told_to_install_our_name_from_an_index():
    files = [
        path
        for room in ("orchestrator", "trainer", "docs")
        for path in (ROOT / room).rglob("*.[pm][yd]")
    ]
    offenders = [
        str(path)
        for path in (*files, ROOT / "README.md")
        if re.search(r"install '?orch-train", path.read_text())
    ]
    assert files and not offenders
