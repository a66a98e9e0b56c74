"""Shell completion: what it offers, that it is light, and that bash takes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from orchestrator.cli.verbs import VERBS
from orchestrator.cli.verbs.completion import complete


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("orch pl", ["plan"]),
        ("orch plan cluster=h100x6", ["cluster=h100x64"]),
        ("orch plan +cluster=h100x6", ["+cluster=h100x64"]),
        ("orch plan cluster=h100x64 model=llama3_7", ["model=llama3_70b"]),
        ("orch plan cluster/node=dgx_h", ["cluster/node=dgx_h100"]),
        ("orch plan train.glob", ["train.global_batch_samples=", "train.global_batch_tokens="]),
        ("orch plan cluster.gp", ["cluster.gpus_per_node=", "cluster.gpu."]),
        ("orch plan train.precision=b", ["train.precision=bf16"]),
        ("orch plan train.compile=", ["train.compile=true", "train.compile=false"]),
        ("orch plan --plo", ["--plot"]),
        ("orch config --choices mod", ["model"]),
        ("orch completion z", ["zsh"]),
        ("orch plan --out pla", []),
        ("orch submit cluster=local -- pyth", []),
        ("orch nosuchverb clu", []),
    ],
)
def test_offers(line, offers):
    assert complete(line) == offers


def test_offers_all_verbs_and_all_groups():
    assert complete("orch ") == list(VERBS)
    offered = complete("orch plan ")
    assert {"cluster=", "model=", "parallel=", "train.", "run."} <= set(offered)


def test_offers_the_users_files_and_runs(tmp_path, monkeypatch):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "zzz_mine.yaml").write_text("")
    assert complete(f"orch plan --config-dir {tmp_path} train=zzz") == ["train=zzz_mine"]
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    assert complete("orch status ") == []
    (tmp_path / "runs" / "tiny-1").mkdir(parents=True)
    assert complete("orch status t") == ["tiny-1"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_a_script(capsys, tmp_path: Path, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "orch completion --line" in script
    if shutil.which(shell):  # bash is everywhere; the others are checked where they are
        path = tmp_path / "script"
        path.write_text(script)
        done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_bash_completes_a_file_name_past_the_equals_sign(tmp_path: Path):
    (tmp_path / "orch").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m orchestrator.cli.main "$@"\n'
    )
    (tmp_path / "orch").chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        eval "$(orch completion bash)"
        COMP_LINE="orch plan cluster=h100x6"; COMP_POINT=${{#COMP_LINE}}
        _orch; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "h100x64\n", done.stderr
