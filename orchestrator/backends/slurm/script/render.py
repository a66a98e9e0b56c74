"""The job script, as a pure function of the run: byte for byte the same for the same run.

One sbatch job; inside it three steps: learn which nodes Slurm gave, put the ranks on them, run one agent a node. The
script itself only passes notices on and decides whether to come back. `docs/slurm.md` tells the life of a job.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit

from .flags import Flags, as_argv, job_flags, step_flags, used_node_count
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
    python_path: tuple[str, ...] = ()  # the run's own copy of the code, when it holds orch
    bind: tuple[str, ...] = ()  # folders that a container must see: run folder, data, token cache, checkpoints
    sizes: tuple[int, ...] = ()  # node counts of an elastic run, largest first


def render(job: JobScript) -> str:
    """The whole script. Raises OrchError (65, 78) for whatever cannot be written exactly."""
    for path in (job.run_dir, job.python, *job.bind, *job.python_path):
        check_text(path, "path")
    lines = [line for name, value in directives(job).items() if (line := directive(name, value))]
    return "\n".join([*_head(job), *lines, "", *_body(job)]) + "\n"


def directives(job: JobScript) -> Flags:
    """What the script asks sbatch for."""
    return job_flags(job.plan, job.options, job.run_id, job.run_dir, job.export, elastic=bool(job.sizes))


def _head(job: JobScript) -> list[str]:
    lines = [
        f"#!{job.options.shell}",
        f"# orch run {job.run_id}, plan {job.plan.hash}",
        "# Written by orch from the plan and the site's profile: change those, not this.",
    ]
    if job.sizes:
        others = ", ".join(map(str, job.sizes))
        lines.append(f"# {used_node_count(job.plan)} nodes. It may start on {others}: sbatch --nodes=N this-file")
    return lines


def _body(job: JobScript) -> list[str]:
    options, elastic = job.options, bool(job.sizes)
    steps = as_argv(step_flags(job.plan, options, elastic))
    task = [*_python(job), "-P", "-m", "orchestrator.slurm.task"]
    on_this_node = _single_step(job)
    # of an elastic run one agent may leave long before the others
    together = as_argv({**step_flags(job.plan, options, elastic), **({"wait": 0} if elastic else {})})
    agents = ["srun", *together, f"--output={file_pattern(str(Path(job.run_dir, 'logs')))}/slurm-%j-agents.log"]
    agents += ["--open-mode=append", *_container_flags(job), *task, "agent", "--run-dir", job.run_dir]
    one_life = [
        'life="$run/slurm/$job.$times"',
        _on_all(["srun", *steps, options.shell, "-c", PROBE], elastic) + ' > "$life.nodes" || finish 74',
        f'{command([*on_this_node, *task, "place", "--run-dir", job.run_dir])} --nodes "$life.nodes"',
        "code=$?; [ $code = 0 ] || finish $code",
        '[ ! -e "$run/slurm/over" ] || leave 0 ", the run had ended before"',
        '[ -z "$noticed" ] || finish 75',
        "",
        "# One agent a node. The shell waits in a way that lets a notice through.",
        f"{_on_all(agents, elastic)} &",
        "agents=$!",
        *(_LAST_ONES if elastic else ()),
        "while :; do",
        '  wait "$agents"; code=$?',
        '  kill -0 "$agents" 2>/dev/null || break',
        "done",
        *(['kill "$watch" 2>/dev/null'] if elastic else ()),
        f'{command([*on_this_node, *task, "outcome", "--run-dir", job.run_dir])} --code "$code"',
        "finish $?",
    ]
    return [
        "umask 077",
        *_search_paths(job),
        assignment("run", job.run_dir),
        "full=$SLURM_JOB_NUM_NODES" if elastic or options.no_kill else "full=",
        assignment("most", str(options.max_requeues if options.requeue else 0)),
        assignment("most_faults", str(options.max_node_faults if options.requeue else 0)),
        *(f"unset {name}" for name in options.unset),
        *(command(["module", "load", name]) for name in options.modules),
        *(check_text(line, "backend.options.setup") for line in options.setup),
        "",
        *_LIFE,
        *(_STAND_IN if elastic else ()),
        "",
        'mkdir -p "$run/slurm" || exit 70',
        *(['cp -- "$0" "$run/slurm/script"'] if elastic else ()),
        "# Where am I? Every task names its node and its place in the network; then the ranks are put on these nodes.",
        *one_life,
    ]


def _on_all(argv: Sequence[str], elastic: bool) -> str:
    """A step on every node of the job, however many an elastic one was given."""
    where = 'srun --nodes="$full" --ntasks="$full"' if elastic else "srun"
    return f"{where} {command(argv[1:])}"


def _search_paths(job: JobScript) -> list[str]:
    """The run's own code and interpreter come first, for the steps as for the workers."""
    lines = []
    if job.python_path:
        joined = command([":".join(job.python_path)])
        lines.append(f"export PYTHONPATH={joined}${{PYTHONPATH:+:$PYTHONPATH}}")
    if job.options.container.runtime == "none":
        lines.append(f'export PATH={command([str(Path(job.python).parent)])}:"$PATH"')
    return lines


def beside_agents(job: JobScript) -> tuple[list[str], list[str]]:
    """How a further Python is started where the agents run: srun's flags, and its first words."""
    return list(_container_flags(job)), [*_python(job), "-P"]


def _single_step(job: JobScript) -> list[str]:
    """How one Python is started on the node of this script: directly, but inside a Pyxis container only by srun."""
    if job.options.container.runtime != "pyxis":
        return []
    one = {**step_flags(job.plan, job.options, bool(job.sizes)), "nodes": 1, "ntasks-per-node": 1, "relative": 0}
    return ["srun", *as_argv(one), *_container_flags(job)]


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


#: A notice reaches the steps as SIGTERM, as in a preemption: workers save at the next step boundary and leave with 75.
#: Coming back is decided once, here. A job that is being cancelled is no longer RUNNING, and `scontrol requeue` would
#: bring it back to life: so the state is asked first. Both questions outlive a restart of the controller. A lost or
#: sick node (74, 76) brings the job back too, since Slurm can replace it, but only a few times. A requeue and what the
#: next life must avoid are said in one breath, since the requeue ends the script; and how many nodes it needs, since a
#: job that kept the rest of its nodes would ask for no more than those. A script that does not come back leaves `over`
#: behind, for whoever asks while Slurm does not answer; where Slurm ends this life, what comes next is Slurm's to say.
_LIFE = f"""\
times=${{SLURM_RESTART_COUNT:-0}}
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
say() {{ printf '%s orch: job %s life %s: %s\\n' "$(date -u +%FT%TZ)" "$job" "$times" "$*" >&2; }}

noticed=
agents=
notice() {{
  say "notice ($1): workers are asked to save"
  [ -z "$noticed" ] && [ -n "$agents" ] && [ "$1" = USR1 ] && scancel --signal=TERM "$job"
  noticed=$1
}}
trap 'notice USR1' USR1
trap 'notice TERM' TERM

retry() {{ for pause in 1 5 10 20 30 60 60 60; do "$@" && return; sleep $pause; done; return 1; }}
leave() {{ say "code $1$2"; : > "$run/slurm/over"; exit "$1"; }}
obey() {{ say "code $1, ended by Slurm$2"; exit "$1"; }}
requeue() {{
  {{
    echo "requeue $job"
    [ -z "$without" ] || echo "update JobId=$job ExcNodeList=$without"
    [ -z "$full" ] || echo "update JobId=$job NumNodes=$full"
  }} | scontrol --quiet >/dev/null
}}

finish() {{
  trap '' USR1 TERM
  case $1 in
    {int(Exit.RESTART)}) ;;
    {int(Exit.NODE)}|{int(Exit.CAPACITY)})
      echo "$job $times $1" >> "$run/slurm/faults"
      [ "$(wc -l < "$run/slurm/faults")" -le "$most_faults" ] || leave $1 ", after $most_faults of its kind: no more"
      ;;
    {128 + signal.SIGTERM}) obey $1 "" ;;
    *) leave $1 "" ;;
  esac
  if [ -e "$run/cancel.json" ]; then retry scancel "$job"; leave $1 ", cancelled"; fi
  [ "$times" -lt "$most" ] || leave $1 ", come back $times times: no more"
  state=$(retry squeue --noheader --jobs="$job" --format=%T)
  [ "$state" = RUNNING ] || obey $1 " ($state)"
  without=$(cat "$run/slurm/exclude" 2>/dev/null)
  say "code $1, comes back${{without:+ without $without}}"
  retry requeue || leave $1 ", and the requeue failed"
  trap - TERM
  sleep 300
}}""".splitlines()  # the last line waits to be ended by the requeue


#: `stand_in` comes in by this door when this script's node is lost.
_STAND_IN = """\
export ORCH_SCRIPT_NODE="${ORCH_SCRIPT_NODE:-$SLURMD_NODENAME}"
[ "${1-}" != finish ] || finish "$2"
""".splitlines()


#: A node is lost, the others are still ours (--no-kill): the agents go on among themselves, and `srun` stays for them.
#: But Slurm 22.05 may never see a step end that was on a lost node: so it gets half a minute after the run's last word.
_LAST_ONES = """\
{
  until [ -e "$run/slurm/ended" ]; do sleep 2; done
  sleep 30; kill "$agents"; sleep 15; kill -KILL "$agents"
} 2>/dev/null &
watch=$!""".splitlines()
