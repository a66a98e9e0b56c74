"""The job script as a pure function of the run: the same bytes for the same run.

The script runs three steps: ask which nodes Slurm granted, assign the ranks to them, run one agent
a node. Besides, it forwards termination signals to the steps and decides whether the job is
requeued. See `docs/slurm.md`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from orchestrator import __version__, start
from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.cluster.hostlist import expand, slurm_list
from orchestrator.errors import OrchError
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import used_node_count

from .fixed import (
    END_STUCK_STEP,
    CHECK_PROBE,
    LIFECYCLE,
    MARK,
    MODULES,
    CLAIM_RUN_FOLDER,
    PROBE,
    PROBE_FLAGS,
    PROBE_LIMIT,
    TAKEOVER_ENTRY,
)
from .flags import Flags, as_argv, job_flags, step_flags
from .quoting import assignment, check_text, command, directive, file_pattern


class JobScript(Struct, frozen=True, kw_only=True):
    """Every input of the script's text."""

    run_id: str
    run_dir: str
    plan: Plan
    options: SlurmOptions
    python: str  # on the nodes, outside any container
    code: str = __version__  # of orch, that an image must have too
    export: tuple[str, ...]  # names of the variables that may enter the job
    python_path: tuple[str, ...] = ()  # folders of the run's own copy of the code
    bind: tuple[
        str, ...
    ] = ()  # folders to mount in a container: run folder, data, token cache, checkpoints
    sizes: tuple[int, ...] = ()  # node counts of an elastic run, largest first


def render(job: JobScript) -> str:
    """The whole script. OrchError: 65 for contradictory options, 78 for text that cannot be quoted
    exactly."""
    for path in (job.run_dir, job.python, *job.bind, *job.python_path):
        check_text(path, "path")
    _check_mounts(job)
    lines = [line for name, value in directives(job).items() if (line := directive(name, value))]
    return "\n".join([*_head(job), *lines, "", *_body(job)]) + "\n"


def directives(job: JobScript) -> Flags:
    """The sbatch flags in the script's `#SBATCH` lines."""
    return job_flags(
        job.plan, job.options, job.run_id, job.run_dir, job.export, elastic=bool(job.sizes)
    )


#: Flags that may differ between the members of an array, because the array sets its own.
_PER_RUN_FLAGS = ("job-name", "chdir", "output")


def common_flags(jobs: Sequence[JobScript]) -> Flags | None:
    """The sbatch flags that all jobs share, without those that name one run; None if they ask for
    different things."""
    first, *other_jobs = [
        (
            {name: value for name, value in directives(job).items() if name not in _PER_RUN_FLAGS},
            job.options.shell,
        )
        for job in jobs
    ]
    return first[0] if all(job_choice == first for job_choice in other_jobs) else None


def render_array(jobs: Sequence[JobScript], name: str) -> str:
    """The script of one array job whose members run the jobs' own scripts from their run folders.

    ValueError when the jobs ask for different things (`common_flags`).
    """
    flags = common_flags(jobs)
    if flags is None:
        raise ValueError("runs that ask for different things are no array")
    shell = jobs[0].options.shell
    array_flags: Flags = {
        "job-name": f"orch-{name}",
        "chdir": str(Path(jobs[0].run_dir).parent),
        "output": "/dev/null",
    }
    lines = [
        f"#!{shell}",
        f"# orch sweep {name}: {len(jobs)} runs, each with a script and a log in its own folder",
        *(
            directive(flag, value)
            for flag, value in {**array_flags, **flags, "array": f"0-{len(jobs) - 1}"}.items()
        ),
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
        sizes = ", ".join(map(str, job.sizes))
        lines.append(
            f"# {used_node_count(job.plan)} nodes. It may start on {sizes}: sbatch --nodes=N"
            " this-file"
        )
    return lines


def _body(job: JobScript) -> list[str]:
    options = job.options
    elastic = bool(job.sizes)
    steps = step_flags(job.plan, options, elastic)
    task = [*_python(job), "-P", *start.BY_NAME, "orchestrator.slurm.task"]
    needs = [job.run_dir, *_needs(options, job.python)]
    probe = [
        "srun",
        *as_argv({**steps, **PROBE_FLAGS}),
        options.shell,
        "-c",
        PROBE,
        "probe",
        *needs,
    ]
    on_this_node = _single_step(job)
    # in an elastic run one agent may end long before the others, so srun must not set a limit then
    agent_flags = as_argv({**steps, **({"wait": 0} if elastic else {})})
    agents = [
        "srun",
        *agent_flags,
        f"--output={file_pattern(str(Path(job.run_dir, 'logs')))}/slurm-%j-agents.log",
    ]
    agents += [
        "--open-mode=append",
        *_container_flags(job),
        *task,
        "agent",
        "--run-dir",
        job.run_dir,
    ]
    attempt = [
        'life="$run/slurm/$job.$times"',
        f'(cd /; unset OLDPWD; {command(PROBE_LIMIT)} {_srun_on_all_nodes(probe, elastic)}) > "$life.nodes"',
        f"grep -q '^{MARK} ' \"$life.nodes\" || finish {int(Exit.NODE)}",
        *CHECK_PROBE,
        (
            f"{command([*on_this_node, *task, 'place', '--run-dir', job.run_dir])} --nodes"
            ' "$life.nodes"'
        ),
        "code=$?; [ $code = 0 ] || finish $code",
        '[ ! -e "$run/slurm/over" ] || leave 0 ", the run had ended before"',
        '[ -z "$noticed" ] || finish 75',
        "",
        "# One agent a node. The shell waits in a way that lets a notice through.",
        f"{_srun_on_all_nodes(agents, elastic)} &",
        "agents=$!",
        *(END_STUCK_STEP if elastic else ()),
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
        assignment(
            "excluded", slurm_list([name for text in options.without for name in expand(text)])
        ),
        assignment("most", str(options.max_requeues if options.requeue else 0)),
        assignment("most_faults", str(options.max_node_faults if options.requeue else 0)),
        "",
        *LIFECYCLE,
        *(TAKEOVER_ENTRY if elastic else ()),
        "",
        *(f"unset {name}" for name in options.unset),
        *(MODULES if options.modules else ()),
        *(
            line
            for name in options.modules
            for line in _checked(command(["module", "load", name]), "modules")
        ),
        *(
            line
            for text in options.setup
            for line in _checked(check_text(text, "backend.options.setup"), "setup")
        ),
        "",
        *CLAIM_RUN_FOLDER,
        *(['cp -- "$0" "$run/slurm/script"'] if elastic else ()),
        (
            "# Where am I? Every task names its node and its place in the network; then the ranks"
            " are put on these nodes."
        ),
        *attempt,
    ]


#: Runtimes that are a program on the nodes; Pyxis is a plugin of srun.
_PROGRAMS = {"apptainer": "apptainer", "charliecloud": "ch-run"}


def _srun_on_all_nodes(argv: Sequence[str], elastic: bool) -> str:
    """srun on every node of the job; an elastic job asks how many it was granted."""
    srun = 'srun --nodes="$full" --ntasks="$full"' if elastic else "srun"
    return f"{srun} {command(argv[1:])}"


def _search_paths(job: JobScript) -> list[str]:
    """Puts the run's own code and interpreter first, for steps and workers."""
    python_path = command([":".join(job.python_path)])
    lines = []
    if job.options.container.runtime != "none":
        # inside an image its own interpreter and packages: nothing of the submitter's, also where
        # $HOME is mounted
        lines += ["unset PYTHONPATH PYTHONHOME VIRTUAL_ENV", "export PYTHONNOUSERSITE=1"]
        lines += [f"export ORCH_SUBMITTER={job.code}", 'export USER="${USER:-$(id -un)}"']
        return [*lines, f"export PYTHONPATH={python_path}"] if job.python_path else lines
    if job.python_path:
        lines.append(f"export PYTHONPATH={python_path}${{PYTHONPATH:+:$PYTHONPATH}}")
    return [*lines, f'export PATH={command([str(Path(job.python).parent)])}:"$PATH"']


def python_beside_agents(job: JobScript) -> tuple[list[str], list[str]]:
    """srun's flags and the first words of a command that runs Python where the agents run, e.g. in
    their container."""
    return list(_container_flags(job)), [*_python(job), "-P"]


def _single_step(job: JobScript) -> list[str]:
    """What goes before a Python command on the script's node: nothing, or srun where Python is in a
    Pyxis container."""
    if job.options.container.runtime != "pyxis":
        return []
    single_flags = {
        **step_flags(job.plan, job.options, bool(job.sizes)),
        "nodes": 1,
        "ntasks-per-node": 1,
        "relative": 0,
    }
    return ["srun", *as_argv(single_flags), *_container_flags(job)]


def _python(job: JobScript) -> list[str]:
    options = job.options.container
    if options.runtime == "apptainer":
        binds = [f"--bind={mount}" for mount in (*job.bind, *options.mounts)]
        gpus = "--rocm" if _AMD_GPU.search(job.plan.cluster.gpu.name) else "--nv"
        return [
            "apptainer",
            "exec",
            gpus,
            f"--pwd={job.run_dir}",
            *binds,
            options.image,
            options.python,
        ]
    if (
        options.runtime == "charliecloud"
    ):  # needs its mount points in the image, so a mount holds what is below it
        mounted = tuple(
            f"{mount.partition(':')[0].rstrip('/')}/"
            for mount in options.mounts
            if _maps_to_itself(mount)
        )
        binds = [
            f"--bind={mount}"
            for mount in (*options.mounts, *(p for p in job.bind if not p.startswith(mounted)))
        ]
        return ["ch-run", *binds, f"--cd={job.run_dir}", options.image, "--", options.python]
    if options.runtime == "pyxis":
        # srun may look for the program on its own host before there is a container
        # (LaunchParameters=test_exec)
        return ["/usr/bin/env", options.python]
    return [job.python]


_AMD_GPU = re.compile(r"\bAMD\b|Instinct|\bMI[0-9]{2,3}", re.I)

#: Characters that end a path in the mounts of a container runtime.
_SEPARATORS = {"none": "", "pyxis": ":,", "apptainer": ":,", "charliecloud": ":"}


def _check_mounts(job: JobScript) -> None:
    """OrchError (65) for a path that the container's runtime would take for several."""
    runtime = job.options.container.runtime
    separators = _SEPARATORS[runtime]
    several = [
        mount for mount in job.options.container.mounts if "," in separators and "," in mount
    ]
    for path in (
        *(path for path in job.bind if any(char in path for char in separators)),
        *several,
    ):
        raise OrchError(
            f"container: {path!r} cannot be mounted: {runtime} splits it at {separators!r}",
            Exit.CONFIG,
        )


def _maps_to_itself(mount: str) -> bool:
    source, _, target = mount.partition(":")
    return target in ("", source)


def _checked(line: str, option: str) -> list[str]:
    """The user's line, and the end of the job (65) if it fails: what came after it would fail with
    worse words."""
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
