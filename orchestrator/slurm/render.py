"""The job script, as a pure function of the run: byte for byte the same for the same run.

One sbatch job; inside it three steps: learn which nodes Slurm gave, put the ranks on them, run one agent a node. The
script itself only passes notices on and decides whether to come back. `docs/slurm.md` tells the life of a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit

from .flags import as_argv, job_flags, step_flags
from .options import SlurmOptions
from .quoting import assignment, check_text, command, directive, file_pattern

#: What a task prints of itself: position in the allocation, name, place in the network. One line, no Python, no files.
PROBE = 'printf "%s %s %s\\n" "$SLURM_NODEID" "$SLURMD_NODENAME" "${SLURM_TOPOLOGY_ADDR:-$SLURMD_NODENAME}"'


class JobScript(Struct, frozen=True, kw_only=True):
    """Everything that the text depends on."""

    run_id: str
    run_dir: str
    plan: Plan
    options: SlurmOptions
    python: str  # on the nodes, outside any container
    export: tuple[str, ...]  # names of the variables that may enter the job
    bind: tuple[str, ...] = ()  # folders that a container must see: run folder, data, token cache, checkpoints


def render(job: JobScript) -> str:
    """The whole script. Raises OrchError (65, 78) for whatever cannot be written exactly."""
    for where, text in (("run folder", job.run_dir), ("python", job.python), *(("mount", path) for path in job.bind)):
        check_text(text, where)
    flags = job_flags(job.plan, job.options, job.run_id, job.run_dir, job.export)
    directives = [line for name, value in flags.items() if (line := directive(name, value))]
    return "\n".join([*_head(job), *directives, "", *_body(job)]) + "\n"


def _head(job: JobScript) -> list[str]:
    return [
        f"#!{job.options.shell}",
        f"# orch run {job.run_id}, plan {job.plan.hash}",
        "# Written by orch from the plan and the site's profile: change those, not this.",
    ]


def _body(job: JobScript) -> list[str]:
    options, logs = job.options, str(Path(job.run_dir, "logs"))
    steps = as_argv(step_flags(job.plan, options))
    one = as_argv({**step_flags(job.plan, options), "nodes": 1, "ntasks-per-node": 1})
    task = [*_python(job), "-P", "-m", "orchestrator.slurm.task"]
    probe = ["srun", *steps, options.shell, "-c", PROBE]
    place = ["srun", *one, *_container_flags(job), *task, "place", "--run-dir", job.run_dir]
    agents = ["srun", *steps, "--output=" + file_pattern(logs) + "/slurm-%j-agents.log", "--open-mode=append"]
    agents += [*_container_flags(job), *task, "agent", "--run-dir", job.run_dir]
    return [
        "umask 077",
        assignment("run", job.run_dir),
        assignment("most", str(options.max_requeues if options.requeue else 0)),
        *_SAY,
        *(f"unset {name}" for name in options.unset),
        *(command(["module", "load", name]) for name in options.modules),
        *(check_text(line, "backend.options.setup") for line in options.setup),
        "",
        *_NOTICE,
        "",
        "# Where am I? Every task names its node and its place in the network; then the ranks are put on these nodes.",
        'life=$run/slurm/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}',
        'mkdir -p "$run/slurm" || finish 70',
        command(probe) + ' > "$life.nodes" || finish 74',
        command(place) + " --nodes \"$life.nodes\"",
        "code=$?; [ $code = 0 ] || finish $code",
        "[ -z \"$noticed\" ] || finish 75",
        "",
        "# One agent a node. The shell waits in a way that lets a notice through.",
        command(agents) + " &",
        "agents=$!",
        "while :; do",
        '  wait "$agents"; code=$?',
        '  kill -0 "$agents" 2>/dev/null || break',
        "done",
        "finish $code",
    ]  # fmt: skip


def _python(job: JobScript) -> list[str]:
    options = job.options.container
    if options.runtime == "apptainer":
        binds = [f"--bind={mount}" for mount in (*job.bind, *options.mounts)]
        return ["apptainer", "exec", "--nv", f"--pwd={job.run_dir}", *binds, options.image, options.python]
    return [options.python if options.runtime == "pyxis" else job.python]


def _container_flags(job: JobScript) -> Sequence[str]:
    options = job.options.container
    if options.runtime != "pyxis":
        return ()
    mounts = [*(f"{path}:{path}" for path in job.bind), *options.mounts]
    return (
        f"--container-image={options.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={job.run_dir}",
        "--no-container-mount-home",
    )


#: Codes with which a job comes back: it has saved, or a node of it is lost or sick, which Slurm can replace.
_AGAIN = "|".join(str(int(code)) for code in (Exit.NODE, Exit.RESTART, Exit.CAPACITY))

_SAY = [
    "say() { printf '%s orch: job %s life %s: %s\\n' \"$(date -u +%FT%TZ)\" "
    "\"$SLURM_JOB_ID\" \"${SLURM_RESTART_COUNT:-0}\" \"$*\" >&2; }",
]  # fmt: skip

#: A notice reaches the steps as SIGTERM, as in a preemption: workers save at the next step boundary and leave with 75.
#: Coming back is decided once, here. A job that is being cancelled is no longer RUNNING, and `scontrol requeue` would
#: bring it back to life: so the state is asked first. Both questions outlive a restart of the controller.
_NOTICE = f"""\
noticed=
agents=
notice() {{
  say "notice ($1): workers are asked to save"
  [ -z "$noticed" ] && [ -n "$agents" ] && [ "$1" = USR1 ] && scancel --signal=TERM "$SLURM_JOB_ID"
  noticed=$1
}}
trap 'notice USR1' USR1
trap 'notice TERM' TERM

retry() {{ for pause in 1 5 10 20 30 60 60 60; do "$@" && return; sleep $pause; done; return 1; }}

finish() {{
  trap '' USR1 TERM
  case $1 in {_AGAIN}) ;; *) say "ends with code $1"; exit "$1";; esac
  if [ -e "$run/cancel.json" ]; then say "code $1, cancelled"; retry scancel "$SLURM_JOB_ID"; exit "$1"; fi
  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge "$most" ]; then say "code $1, requeued $most times: no more"; exit "$1"; fi
  state=$(retry squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  if [ "$state" != RUNNING ]; then say "code $1, ended by Slurm ($state)"; exit "$1"; fi
  say "code $1, comes back"
  retry scontrol requeue "$SLURM_JOB_ID" || exit "$1"
  trap - TERM
  sleep 300
}}""".splitlines()  # the last line waits to be ended by the requeue
