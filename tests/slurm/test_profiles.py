"""Every site profile composes, is understood, and renders a script that bash accepts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.backends.slurm.options import read_options
from orchestrator.backends.slurm.script.render import JobScript, render
from orchestrator.config.compose import load
from tests.planner.configs import build_plan

PROFILES = Path(__file__).resolve().parents[2] / "slurm"
NAMES = sorted(path.stem for path in (PROFILES / "backend").glob("*.yaml"))
LINES = {"nvl72_block": ["cluster=gb200_nvl72x8", "parallel=tp4_pp8_zero1", "train.global_batch_samples=1152"]}
MAIN = ["cluster=h100x64", "parallel=tp8_pp4_zero1"]


@pytest.mark.parametrize("name", NAMES)
def test_profile(name):
    config = load([*LINES.get(name, MAIN), f"backend={name}"], PROFILES)
    assert config.backend.name == "slurm"
    options = read_options(config.backend.options)
    plan = build_plan(config)
    job = JobScript(
        run_id="r", run_dir="/runs/r", plan=plan, options=options, python="/py/bin/python", export=("HOME",)
    )
    text = render(job)
    assert f"#SBATCH --partition={options.partition}\n" in text
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if options.topology == "block":
        assert "#SBATCH --segment=" in text and "--switches" not in text
    if options.topology == "tree":
        assert "#SBATCH --switches=2@" in text


def test_there_are_profiles_for_each_style_of_site():
    assert {"dgx_superpod", "gres_modules", "nvl72_block", "preemptible", "apptainer"} <= set(NAMES)
