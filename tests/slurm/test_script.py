"""The job script as bash runs it, with Slurm's commands replaced by a few lines of shell each. No
Slurm."""

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
#: The states of jobs are the lines `id state` of a file; one that it does not have is not known any
#: more.
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
        self.home = home
        self.run = home / "run"
        self.tools = home / "bin"
        for folder in (self.run / "logs", self.run / "slurm", self.tools):
            folder.mkdir(parents=True)
        (self.run / "request.json").touch()
        (home / "jobs").touch()
        for name, tool_script in {"srun": SRUN, "squeue": SQUEUE, "python": PYTHON}.items():
            self.tool(name, tool_script)
        for name in ("scontrol", "scancel"):
            self.tool(name, f'#!/bin/bash\necho "{name} $*" >> "$HOME/said"; cat >> "$HOME/said"\n')

    def tool(self, name: str, tool_script: str) -> None:
        path = self.tools / name
        path.write_text(tool_script)
        path.chmod(0o755)

    def start(
        self, options: dict | None = None, *script_arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        options = dict(options or {})
        job_script = script(
            options, run_dir=str(self.run), python=str(self.tools / "python"), python_path=()
        )
        environ = {"PATH": f"{self.tools}:/usr/bin:/bin", "HOME": str(self.home), "NODES": "n0 n1"}
        environ |= {
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "n0",
            "SLURM_JOB_NUM_NODES": "2",
            **variables,
        }
        (self.home / "script").write_text(job_script)
        argv = ["bash", str(self.home / "script"), *script_arguments]
        return subprocess.run(
            argv,
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            stdin=subprocess.DEVNULL,
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
    """A TaskProlog, the shell's start file of a module system, the notice of a preloaded
    library."""
    (bed.home / "start").write_text(f"{banner}\n")
    done = bed.start({"setup": [f"export BASH_ENV={bed.home}/start"]})
    assert bed.answers() == {"n0": "n0", "n1": "n1"} and not lacking(bed.printed())
    assert "lacks" not in done.stderr and "place" in bed.asked()


#: A look at a file whose name holds HANGS never returns; the clock of the others runs fast.
HUNG = """
[() { case "$*" in -[re]*HANGS*) while :; do command sleep 1; done ;; esac; builtin [ "$@"; }
command() {
  case "$*" in
    -v*HANGS*) while :; do builtin command sleep 1; done ;;
    -p*) builtin command sleep 0.02 ;;
    *) builtin command "$@" ;;
  esac
}
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
    probe_arguments = [argument.format(run=bed.run) for argument in needs]
    environ = {**os.environ, "SLURM_NODEID": "0", "SLURMD_NODENAME": "n0"}
    done = subprocess.run(
        ["bash", "-c", HUNG + PROBE, "probe", *probe_arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert read_probe(done.stdout) == {"n0": "n0"} and lacking(done.stdout) == (
        {"n0": lacks} if lacks else {}
    )
    assert not done.stderr or "Killed" in done.stderr


def test_nodes_that_do_not_answer_leave_the_rest_to_be_read(bed):
    """srun fails then; the task `place` names the silent node."""
    done = bed.start(SILENT="n1")
    assert bed.answers() == {"n0": "n0"} and bed.asked()[:1] == ["place"] and done.returncode == 0


def test_an_allocation_in_which_no_step_starts_comes_back(bed):
    (bed.home / "jobs").write_text("7 COMPLETING\n")
    done = bed.start(NODES="")
    assert done.returncode == Exit.NODE and bed.asked() == []


# ------------------------------------------------------------------------------------------ whose
#     folder it is


def killed_before_it_had_taken_over(slurm: Path) -> None:
    (slurm / "owner").write_text("5\n")
    (slurm / "5.ended").symlink_to("6")


def claimed_by_an_earlier_attempt(slurm: Path) -> None:
    (slurm / "owner").write_text("5\n")
    (slurm / "5.ended").symlink_to("7")


def two_were_killed(slurm: Path) -> None:
    killed_before_it_had_taken_over(slurm)
    (slurm / "5.ended.6").symlink_to("6_1")


def claimed_as_before(slurm: Path) -> None:
    (slurm / "owner").write_text("5\n")
    (slurm / "5.ended").mkdir()


def an_empty_owner(slurm: Path) -> None:
    (slurm / "owner").touch()


def an_empty_owner_was_claimed(slurm: Path) -> None:
    an_empty_owner(slurm)
    (slurm / "nobody.ended").symlink_to("6")


def no_owner(slurm: Path) -> None:
    (slurm / "7.owner").write_text("7\n")


@pytest.mark.parametrize(
    "before",
    [killed_before_it_had_taken_over, claimed_by_an_earlier_attempt, two_were_killed, claimed_as_before, an_empty_owner,
     an_empty_owner_was_claimed, no_owner],
)  # fmt: skip
def test_a_job_that_was_killed_while_it_took_a_folder_over_keeps_nobody_waiting(bed, before):
    before(bed.run / "slurm")
    done = bed.start()
    assert (done.returncode, bed.asked()[:1]) == (0, ["place"]) and (
        bed.run / "slurm" / "owner"
    ).read_text() == "7\n"
    assert not list((bed.run / "slurm").glob("*.owner"))


@pytest.mark.parametrize("by", ["5", "5 6"])
def test_a_folder_whose_job_lives_is_left_alone(bed, by):
    """Also one that another job, which lives, has claimed and is about to take over."""
    owner, *claims = by.split()
    (bed.run / "slurm" / "owner").write_text(f"{owner}\n")
    (bed.home / "jobs").write_text(f"{by.split()[-1]} RUNNING\n")
    for claim in claims:
        (bed.run / "slurm" / f"{owner}.ended").symlink_to(claim)
        bed.tool("sleep", f'#!/bin/bash\necho {claim} > "{bed.run}/slurm/owner"\n')
    done = bed.start()
    assert (done.returncode, bed.asked()) == (Exit.FENCED, [])
    assert f"the run belongs to job {by.split()[-1]} (RUNNING): this job exits" in done.stderr
    assert (bed.run / "slurm" / "owner").read_text() == f"{by.split()[-1]}\n"


@pytest.mark.parametrize("answers_after", [3, 99])
def test_a_controller_that_does_not_answer_is_asked_again(bed, answers_after):
    bed.tool("sleep", '#!/bin/bash\necho x >> "$HOME/slept"\n')
    down = 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1'
    count = f'[ "$(wc -l < "$HOME/slept")" -ge {answers_after} ] || {{ {down}; }}'
    bed.tool(
        "squeue", SQUEUE.replace("#!/bin/bash\n", f'#!/bin/bash\ntouch "$HOME/slept"\n{count}\n')
    )
    (bed.run / "slurm" / "owner").write_text("5\n")
    done = bed.start()
    assert (done.returncode, bed.asked()[:1]) == (
        (0, ["place"]) if answers_after == 3 else (Exit.FENCED, [])
    )
    assert answers_after == 3 or "Unable to contact slurm controller" in done.stderr


@pytest.mark.parametrize(
    ("preempted", "restarts", "code", "waiting", "stays_out"),
    [
        ("None", 0, 0, "", False),  # nothing would bring it back
        ("2026-11-27T10:46:13", 0, 0, "", True),
        ("None", 2, 0, "", True),  # an earlier attempt may have been preempted
        (
            "2026-11-27T10:46:13",
            0,
            1,
            "afterok:7(unfulfilled)",
            True,
        ),  # a failure satisfies the same as a preemption
        ("2026-11-27T10:46:13", 0, 0, "afterok:7(unfulfilled)", False),
        ("2026-11-27T10:46:13", 0, 0, "afterany:3(unfulfilled),afternotok:7(unfulfilled)", False),
        ("2026-11-27T10:46:13", 0, 0, "aftercorr:7_*(unfulfilled)", False),
        (
            "2026-11-27T10:46:13",
            0,
            0,
            "(null)\nafterok:17(unfulfilled),afterok:71(unfulfilled)",
            True,
        ),
        ("2026-11-27T10:46:13", 0, 0, "afterany:7(unfulfilled)", True),  # any end will do
        ("2026-11-27T10:46:13", 0, 0, None, False),  # Slurm does not answer
    ],
)
@pytest.mark.parametrize(
    "array", [{}, {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}]
)
def test_a_preempted_job_that_is_over_is_kept_out_of_the_queue(
    bed, preempted, restarts, code, waiting, stays_out, array
):
    """Unless another job asks how it has ended: Slurm would say PREEMPTED."""
    job = "7_1" if array else "7"
    answer = f"cat <<'E'\n{waiting}\nE" if waiting is not None else "exit 1"
    bed.tool("squeue", f"#!/bin/bash\n{answer}\n")
    shown = f'echo "JobId=7 PreemptTime={preempted} SuspendTime=None"'
    bed.tool("scontrol", f'#!/bin/bash\n{shown}; echo "scontrol $*" >> "$HOME/said"\n')
    bed.tool("python", f'{PYTHON}[ "$5" != outcome ] || exit {code}\n')
    done = bed.start(SLURM_RESTART_COUNT=str(restarts), **array)
    assert done.returncode == code and "agent" in bed.asked()
    calls = (bed.home / "said").read_text() if (bed.home / "said").exists() else ""
    assert (f"scontrol update JobId={job} Requeue=0\n" in calls) == stays_out, (calls, done.stderr)


@pytest.mark.parametrize("line", [{"setup": ["false"]}, {"modules": ["cuda/12.4"]}])
def test_an_agent_that_takes_over_needs_no_line_of_the_site(bed, line):
    """The lines were run on its own node already; here a requeue is decided, from a node where they
    may fail."""
    (bed.home / "jobs").write_text("7 RUNNING\n")
    bed.tool("sleep", "#!/bin/bash\nkill -KILL $PPID\n")  # as a requeue does
    done = bed.start({**line, "sizes": (8, 4)}, "finish", str(int(Exit.RESTART)))
    assert "requeue 7" in (bed.home / "said").read_text(), done.stderr
    assert not (bed.run / "slurm" / "over").exists()


def test_an_elastic_job_asks_for_its_first_number_of_nodes_again(bed):
    """Slurm may start a later attempt on fewer nodes; the next one is to have all of them."""
    (bed.home / "jobs").write_text("7 RUNNING\n")
    bed.tool("sleep", "#!/bin/bash\nkill -KILL $PPID\n")  # as a requeue does
    bed.tool("python", f'{PYTHON}[ "$5" != outcome ] || exit {int(Exit.RESTART)}\n')
    for restarts, nodes in enumerate(("2", "1")):
        bed.start(
            {"sizes": (2, 1)},
            SLURM_RESTART_COUNT=str(restarts),
            SLURM_JOB_NUM_NODES=nodes,
        )
    requests = [line for line in (bed.home / "said").read_text().splitlines() if "Nodes" in line]
    assert requests == ["update JobId=7 NumNodes=2"] * 2
