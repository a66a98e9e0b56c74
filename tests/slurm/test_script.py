"""The job script as bash runs it, with Slurm's commands replaced by a few lines of shell each. No Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.backends.slurm.job.node_assignment import lacking, read_probe
from orchestrator.backends.slurm.script.fixed import PROBE
from orchestrator.plan.exits import Exit

from .test_render import script

#: srun runs the words behind its flags once on each of $NODES, all but the silent ones.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
place=0 worst=0
for name in $NODES; do
  [ "$name" = "$SILENT" ] && { worst=1; continue; }
  SLURM_NODEID=$place SLURMD_NODENAME=$name "$@" || worst=$?
  place=$((place + 1))
done
exit $worst
"""
#: The states of jobs are the lines `id state` of a file; one that it does not have is not known any more.
SQUEUE = """#!/bin/bash
for word; do case $word in --jobs=*) asked=${word#*=} ;; esac; done
while read -r id state; do [ "$id" != "$asked" ] || { echo "$state"; exit 0; }; done < "$HOME/jobs"
echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1
"""
#: In place of the run's Python: notes what it is asked to do.
PYTHON = """#!/bin/bash
echo "$5" >> "$HOME/asked"
"""


class Bed:
    """A run folder, and the folder of commands that its script finds."""

    def __init__(self, home: Path):
        self.home, self.run, self.tools = home, home / "run", home / "bin"
        for folder in (self.run / "logs", self.run / "slurm", self.tools):
            folder.mkdir(parents=True)
        (self.run / "request.json").touch()
        (home / "jobs").touch()
        for name, text in {"srun": SRUN, "squeue": SQUEUE, "python": PYTHON}.items():
            self.tool(name, text)
        for name in ("scontrol", "scancel"):
            self.tool(name, f'#!/bin/bash\necho "{name} $*" >> "$HOME/said"; cat >> "$HOME/said"\n')

    def tool(self, name: str, text: str) -> None:
        path = self.tools / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, options: dict | None = None, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        text = script(options or {}, run_dir=str(self.run), python=str(self.tools / "python"), python_path=())
        environ = {"PATH": f"{self.tools}:/usr/bin:/bin", "HOME": str(self.home), "NODES": "n0 n1"}
        environ |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0", "SLURM_JOB_NUM_NODES": "2", **variables}
        (self.home / "script").write_text(text)
        argv = ["bash", str(self.home / "script"), *words]
        return subprocess.run(
            argv, env=environ, capture_output=True, text=True, errors="replace", timeout=60, stdin=subprocess.DEVNULL
        )

    def asked(self) -> list[str]:
        path = self.home / "asked"
        return path.read_text().split() if path.exists() else []

    def answers(self) -> dict[str, str]:
        return read_probe(self.printed())

    def printed(self) -> str:
        """What the nodes have printed when they were asked who they are."""
        return (self.run / "slurm" / "7.0.nodes").read_text(errors="replace")


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def test_a_script_places_starts_agents_and_ends(bed):
    done = bed.start()
    assert (done.returncode, bed.asked()) == (0, ["place", "agent", "agent", "outcome"])
    assert bed.answers() == {"n0": "n0", "n1": "n1"}


@pytest.mark.parametrize(
    "banner",
    ["echo Loading cuda/12.4", "echo you have new mail", "printf 'no end of line'", "echo 5 n7 n7 image; echo",
     "printf '0 n0 n0\\r\\n\\v\\f\\r'", "echo 'orch-node: a b c'", "printf '\\x1b[1mhello\\n\\xff\\n'"],
)  # fmt: skip
def test_what_else_a_node_prints_is_no_answer(bed, banner):
    """A TaskProlog, the shell's start file of a module system, the notice of a preloaded library."""
    (bed.home / "start").write_text(f"{banner}\n")
    done = bed.start({"setup": [f"export BASH_ENV={bed.home}/start"]})
    assert bed.answers() == {"n0": "n0", "n1": "n1"} and not lacking(bed.printed())
    assert "lacks" not in done.stderr and "place" in bed.asked()


#: A look at a file whose name holds HANGS never returns; the clock of the others runs fast.
HUNG = """
[() { case "$*" in -[re]*HANGS*) while :; do command sleep 1; done ;; esac; builtin [ "$@"; }
command() { case "$*" in -v*HANGS*) while :; do builtin command sleep 1; done ;; esac; builtin command "$@"; }
sleep() { builtin command sleep 0.02; }
"""


@pytest.mark.parametrize(
    ("needs", "lacks"),
    [
        (("{run}", "sh", "{run}/request.json"), ""),
        (("HANGS", "sh", ""), "run-folder-within-20-s"),
        (("{run}", "HANGS/python", "HANGS.sif"), "program-within-20-s, image-within-20-s"),
        (("/nowhere", "no-such-program", "HANGS.sif"), "run-folder, program, image-within-20-s"),
    ],
)
def test_a_node_whose_file_system_hangs_says_so(bed, needs, lacks):
    words = [word.format(run=bed.run) for word in needs]
    environ = {**os.environ, "SLURM_NODEID": "0", "SLURMD_NODENAME": "n0"}
    done = subprocess.run(
        ["bash", "-c", HUNG + PROBE, "probe", *words], env=environ, capture_output=True, text=True, timeout=60
    )
    assert read_probe(done.stdout) == {"n0": "n0"} and lacking(done.stdout) == ({"n0": lacks} if lacks else {})
    assert not done.stderr or "Killed" in done.stderr


def test_nodes_that_do_not_answer_leave_the_rest_to_be_read(bed):
    """srun fails then; the task `place` names the silent node."""
    done = bed.start(SILENT="n1")
    assert bed.answers() == {"n0": "n0"} and bed.asked()[:1] == ["place"] and done.returncode == 0


def test_an_allocation_in_which_no_step_starts_comes_back(bed):
    (bed.home / "jobs").write_text("7 COMPLETING\n")
    done = bed.start(NODES="")
    assert done.returncode == Exit.NODE and bed.asked() == []
