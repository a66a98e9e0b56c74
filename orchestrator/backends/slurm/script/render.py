"""The job script as a pure function of the run: the same bytes for the same run.

The script runs three steps: ask which nodes Slurm granted, assign the ranks to them, run one agent a node. Besides, it
forwards termination signals to the steps and decides whether the job is requeued. See `docs/slurm.md`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator import __version__, start
from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.cluster.hostlist import compress, expand
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import used_node_count

from .flags import Flags, as_argv, job_flags, step_flags
from .quoting import assignment, check_text, command, directive, file_pattern

#: Prints a task's position in the allocation, its node's name and network address, and what the node lacks of the run
#: folder ($1), the program that starts Python ($2) and the image ($3). Needs no Python and no files.
PROBE = (
    'lacks=; [ -z "$1" ] || [ -r "$1/request.json" ] || lacks=" run-folder"; '
    '[ -z "$2" ] || command -v "$2" >/dev/null || lacks="$lacks program"; '
    '[ -z "$3" ] || [ -e "$3" ] || lacks="$lacks image"; '
    'printf "%s %s %s%s\\n" "$SLURM_NODEID" "$SLURMD_NODENAME" "${SLURM_TOPOLOGY_ADDR:-$SLURMD_NODENAME}" "$lacks"'
)


class JobScript(Struct, frozen=True, kw_only=True):
    """Every input of the script's text."""

    run_id: str
    run_dir: str
    plan: Plan
    options: SlurmOptions
    python: str  # on the nodes, outside any container
    export: tuple[str, ...]  # names of the variables that may enter the job
    python_path: tuple[str, ...] = ()  # folders of the run's own copy of the code
    bind: tuple[str, ...] = ()  # folders to mount in a container: run folder, data, token cache, checkpoints
    sizes: tuple[int, ...] = ()  # node counts of an elastic run, largest first


def render(job: JobScript) -> str:
    """The whole script. OrchError: 65 for contradictory options, 78 for text that cannot be quoted exactly."""
    for path in (job.run_dir, job.python, *job.bind, *job.python_path):
        check_text(path, "path")
    lines = [line for name, value in directives(job).items() if (line := directive(name, value))]
    return "\n".join([*_head(job), *lines, "", *_body(job)]) + "\n"


def directives(job: JobScript) -> Flags:
    """The sbatch flags in the script's `#SBATCH` lines."""
    return job_flags(job.plan, job.options, job.run_id, job.run_dir, job.export, elastic=bool(job.sizes))


#: Flags that may differ between the members of an array, because the array sets its own.
_PER_RUN_FLAGS = ("job-name", "chdir", "output")


def common_flags(jobs: Sequence[JobScript]) -> Flags | None:
    """The sbatch flags that all jobs share, without those that name one run; None if they ask for different things."""
    first, *others = [
        ({name: value for name, value in directives(job).items() if name not in _PER_RUN_FLAGS}, job.options.shell)
        for job in jobs
    ]
    return first[0] if all(other == first for other in others) else None


def render_array(jobs: Sequence[JobScript], name: str) -> str:
    """The script of one array job whose members run the jobs' own scripts from their run folders.

    ValueError when the jobs ask for different things (`common_flags`).
    """
    flags = common_flags(jobs)
    if flags is None:
        raise ValueError("runs that ask for different things are no array")
    shell = jobs[0].options.shell
    own: Flags = {"job-name": f"orch-{name}", "chdir": str(Path(jobs[0].run_dir).parent), "output": "/dev/null"}
    lines = [
        f"#!{shell}",
        f"# orch sweep {name}: {len(jobs)} runs, each with a script and a log in its own folder",
        *(directive(flag, value) for flag, value in {**own, **flags, "array": f"0-{len(jobs) - 1}"}.items()),
        "",
        "umask 077",
        "case $SLURM_ARRAY_TASK_ID in",
        *(f"  {index}) {assignment('run', job.run_dir)} ;;" for index, job in enumerate(jobs)),
        "  *) exit 65 ;;",
        "esac",
        'cd "$run" && exec >> "$run/logs/slurm-$SLURM_JOB_ID.log" 2>&1 || exit 70',
        f'exec {shell} "$run/slurm/job.sbatch"',
    ]
    return "\n".join(line for line in lines if line is not None) + "\n"


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
    task = [*_python(job), "-P", *start.BY_NAME, "orchestrator.slurm.task"]
    needs = [job.run_dir, *_needs(options, job.python)]
    on_this_node = _single_step(job)
    # in an elastic run one agent may end long before the others, so srun must not set a limit then
    agent_flags = as_argv({**step_flags(job.plan, options, elastic), **({"wait": 0} if elastic else {})})
    agents = ["srun", *agent_flags, f"--output={file_pattern(str(Path(job.run_dir, 'logs')))}/slurm-%j-agents.log"]
    agents += ["--open-mode=append", *_container_flags(job), *task, "agent", "--run-dir", job.run_dir]
    attempt = [
        'life="$run/slurm/$job.$times"',
        _on_all(["srun", *steps, options.shell, "-c", PROBE, "probe", *needs], elastic)
        + ' > "$life.nodes" || finish 74',
        *_LACKING,
        f'{command([*on_this_node, *task, "place", "--run-dir", job.run_dir])} --nodes "$life.nodes"',
        "code=$?; [ $code = 0 ] || finish $code",
        '[ ! -e "$run/slurm/over" ] || leave 0 ", the run had ended before"',
        '[ -z "$noticed" ] || finish 75',
        "",
        "# One agent a node. The shell waits in a way that lets a notice through.",
        f"{_on_all(agents, elastic)} &",
        "agents=$!",
        *(_END_STUCK_STEP if elastic else ()),
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
        assignment("excluded", compress([name for text in options.exclude for name in expand(text)])),
        assignment("most", str(options.max_requeues if options.requeue else 0)),
        assignment("most_faults", str(options.max_node_faults if options.requeue else 0)),
        "",
        *_LIFECYCLE,
        "",
        *(f"unset {name}" for name in options.unset),
        *(line for name in options.modules for line in _checked(command(["module", "load", name]), "modules")),
        *(line for text in options.setup for line in _checked(check_text(text, "backend.options.setup"), "setup")),
        *(_TAKEOVER_ENTRY if elastic else ()),
        "",
        *_OWNER,
        *(['cp -- "$0" "$run/slurm/script"'] if elastic else ()),
        "# Where am I? Every task names its node and its place in the network; then the ranks are put on these nodes.",
        *attempt,
    ]


#: Runtimes that are a program on the nodes; Pyxis is a plugin of srun.
_PROGRAMS = {"apptainer": "apptainer", "charliecloud": "ch-run"}


def _on_all(argv: Sequence[str], elastic: bool) -> str:
    """srun on every node of the job; an elastic job asks how many it was granted."""
    where = 'srun --nodes="$full" --ntasks="$full"' if elastic else "srun"
    return f"{where} {command(argv[1:])}"


def _search_paths(job: JobScript) -> list[str]:
    """Puts the run's own code and interpreter first, for steps and workers."""
    joined, lines = command([":".join(job.python_path)]), []
    if job.options.container.runtime != "none":
        # inside an image its own interpreter and packages: nothing of the submitter's, also where $HOME is mounted
        lines += ["unset PYTHONPATH PYTHONHOME VIRTUAL_ENV", "export PYTHONNOUSERSITE=1"]
        lines += [f"export ORCH_SUBMITTER={__version__}", 'export USER="${USER:-$(id -un)}"']
        return [*lines, f"export PYTHONPATH={joined}"] if job.python_path else lines
    if job.python_path:
        lines.append(f"export PYTHONPATH={joined}${{PYTHONPATH:+:$PYTHONPATH}}")
    return [*lines, f'export PATH={command([str(Path(job.python).parent)])}:"$PATH"']


def python_beside_agents(job: JobScript) -> tuple[list[str], list[str]]:
    """srun's flags and the first words of a command that runs Python where the agents run, e.g. in their container."""
    return list(_container_flags(job)), [*_python(job), "-P"]


def _single_step(job: JobScript) -> list[str]:
    """What goes before a Python command on the script's node: nothing, or srun where Python is in a Pyxis container."""
    if job.options.container.runtime != "pyxis":
        return []
    one = {**step_flags(job.plan, job.options, bool(job.sizes)), "nodes": 1, "ntasks-per-node": 1, "relative": 0}
    return ["srun", *as_argv(one), *_container_flags(job)]


def _python(job: JobScript) -> list[str]:
    options = job.options.container
    if options.runtime == "apptainer":
        binds = [f"--bind={mount}" for mount in (*job.bind, *options.mounts)]
        return ["apptainer", "exec", "--nv", f"--pwd={job.run_dir}", *binds, options.image, options.python]
    if options.runtime == "charliecloud":  # needs its mount points in the image, so a mount holds what is below it
        held = tuple(f"{mount.partition(':')[0].rstrip('/')}/" for mount in options.mounts if _same_place(mount))
        binds = [f"--bind={mount}" for mount in (*options.mounts, *(p for p in job.bind if not p.startswith(held)))]
        return ["ch-run", *binds, f"--cd={job.run_dir}", options.image, "--", options.python]
    return [options.python if options.runtime == "pyxis" else job.python]


def _same_place(mount: str) -> bool:
    source, _, target = mount.partition(":")
    return target in ("", source)


def _checked(line: str, option: str) -> list[str]:
    """The user's line, and the end of the job (65) if it fails: what came after it would fail with worse words."""
    return [line, f"check_line $? {command([f'backend.options.{option}: {line}'])}"]


def _needs(options: SlurmOptions, python: str) -> list[str]:
    """What every node must have: the program that starts Python, and the image if it is a file."""
    container = options.container
    if container.runtime == "none":
        return [python]
    image = [] if "://" in container.image else [container.image]
    return [_PROGRAMS[container.runtime], *image] if container.runtime in _PROGRAMS else []


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


#: Signals: the notice before the time limit (USR1) is forwarded to the steps as SIGTERM, as Slurm does for preemption.
#: Workers then save at the next step boundary and exit with 75.
#: Requeueing is decided in `finish` alone. It first asks for the job's state, because `scontrol requeue` would revive a
#: job that is being cancelled; `retry` waits for a controller that restarts. A lost or unhealthy node (74, 76) requeues
#: the job too, `most_faults` times, since Slurm can replace the node. The requeue, excluded nodes and node count go to
#: one scontrol: the requeue ends the script, and a job that had lost nodes would ask only for as many as it kept.
#: `over` marks a job that is not requeued, for `orch status` while Slurm does not answer. Where Slurm itself ends the
#: attempt (`obey`), whether another follows is Slurm's decision.
_LIFECYCLE = f"""\
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
leave() {{ say "code $1$2"; echo "$1" > "$run/slurm/over"; exit "$1"; }}
obey() {{ say "code $1, ended by Slurm$2"; exit "$1"; }}
requeue() {{
  {{
    echo "requeue $job"
    [ -z "$without" ] || echo "update JobId=$job ExcNodeList=$without"
    [ -z "$full" ] || echo "update JobId=$job NumNodes=$full"
  }} | scontrol --quiet >/dev/null
}}

check_line() {{
  [ "$1" != 0 ] || return 0
  say "error: code $1 of $2"
  holder=$(cat "$run/slurm/owner" 2>/dev/null)
  [ "${{holder:-$job}}" != "$job" ] || {{ mkdir -p "$run/slurm" && echo {int(Exit.CONFIG)} > "$run/slurm/over"; }}
  exit {int(Exit.CONFIG)}
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
  asked=$(ls "$run"/intents/*.json 2>/dev/null | tail -n 1)
  if grep -qs '"want":"end"' "$asked"; then retry scancel "$job"; leave $1 ", cancelled"; fi
  [ "$times" -lt "$most" ] || leave $1 ", come back $times times: no more"
  state=$(retry squeue --noheader --jobs="$job" --format=%T)
  [ "$state" = RUNNING ] || obey $1 " ($state)"
  without=$(cat "$run/slurm/exclude" 2>/dev/null)
  say "code $1, comes back${{without:+ without $without}}"
  retry requeue || leave $1 ", and the requeue failed"
  trap - TERM
  sleep 300
}}""".splitlines()  # sleep 300: the requeue kills the script meanwhile


#: One job writes in a run folder: a second one (`sbatch` of the same script) leaves before it writes anything, unless
#: the first has ended. Of several that find it ended, the one that makes the folder `<owner>.ended` goes on.
#: Slurm requeues some jobs whose run has ended (a preemption with GraceTime in 24.11, a lost batch node): they leave.
_OWNER = f"""\
mkdir -p "$run/slurm" || exit 70
until (set -C; echo "$job" > "$run/slurm/owner") 2>/dev/null; do
  owner=$(cat "$run/slurm/owner") || exit 70
  [ "$owner" != "$job" ] || break
  holds=$([ -z "$owner" ] || squeue --noheader --jobs="$owner" --format=%T 2>&1)
  case $holds in
    *nvalid\\ job\\ id*|'')
      [ -n "$owner" ] && mkdir "$run/slurm/$owner.ended" 2>/dev/null || {{ sleep 1; continue; }}
      echo "$job" > "$run/slurm/$job.owner" && mv -f "$run/slurm/$job.owner" "$run/slurm/owner"
      ;;
    *) say "the run belongs to job $owner ($holds): this one leaves"; exit {int(Exit.FENCED)} ;;
  esac
done
[ "$times" = 0 ] || [ ! -s "$run/slurm/over" ] || leave "$(cat "$run/slurm/over")" ", the run had ended before"
""".splitlines()


#: Nodes that lack something. The task `place` decides about them, unless they are all, or this one, where it would run.
_LACKING = f"""\
lacking=
sound=
here=
while read -r _ name _ lacks; do
  [ -n "$lacks" ] || {{ sound=1; continue; }}
  what=$lacks
  say "error: node $name lacks: $lacks"
  lacking=$lacking${{lacking:+,}}$name
  [ "$name" != "$SLURMD_NODENAME" ] || here=1
done < "$life.nodes"
[ -z "$lacking" ] || [ -n "$sound" ] || leave {int(Exit.CONFIG)} ", error: no node has what it needs: $what"
if [ -n "$here" ]; then
  known=$(cat "$run/slurm/exclude" 2>/dev/null || echo "$excluded")
  echo "$known${{known:+,}}$lacking" > "$run/slurm/exclude"
  finish {int(Exit.NODE)}
fi""".splitlines()


#: Lets job/takeover.py call `finish` from another node once this script's node is lost.
_TAKEOVER_ENTRY = """\
export ORCH_SCRIPT_NODE="${ORCH_SCRIPT_NODE:-$SLURMD_NODENAME}"
[ "${1-}" != finish ] || finish "$2"
""".splitlines()


#: When a node is lost the job keeps the others (--no-kill), and the agents' step goes on. Slurm 22.05 may never see a
#: step end that was on a lost node, so the step is killed half a minute after the run has ended.
_END_STUCK_STEP = """\
{
  until [ -e "$run/slurm/ended" ]; do sleep 2; done
  sleep 30; kill "$agents"; sleep 15; kill -KILL "$agents"
} 2>/dev/null &
watch=$!""".splitlines()
