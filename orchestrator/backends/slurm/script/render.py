"""The job script as a pure function of the run: the same bytes for the same run.

The script has three steps: it asks which nodes Slurm granted, assigns the ranks to them, and runs
one agent per node. It also forwards termination signals to the steps and decides whether the job
is requeued. See `docs/slurm.md`.
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
    CHECK_PROBE,
    END_STUCK_STEP,
    KEEP_NODE_COUNT,
    LIFECYCLE,
    MARK,
    MODULES,
    OWN_RUN_FOLDER,
    PROBE,
    PROBE_FLAGS,
    PROBE_LIMIT,
    TAKEOVER_ENTRY,
)
from .flags import Flags, as_argv, job_flags, step_flags
from .quoting import assignment, check_text, command, directive, file_pattern

#: The module whose commands the script runs inside the allocation.
TASK_MODULE = "orchestrator.slurm.task"


class JobScript(Struct, frozen=True, kw_only=True):
    """Every input of the script's text."""

    run_id: str
    run_dir: str
    plan: Plan
    options: SlurmOptions
    python: str  # on the nodes, outside any container
    code: str = __version__  # version of orch that an image must have too
    export: tuple[str, ...]  # names of the variables that may enter the job
    python_path: tuple[str, ...] = ()  # folders of the run's own copy of the code
    #: Folders to mount in a container: run folder, data, token cache, checkpoints.
    bind: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  # node counts of an elastic run, largest first


def render(job: JobScript) -> str:
    """The whole script.

    OrchError: 65 for contradictory options, 78 for text that cannot be quoted exactly.
    """
    for path in (job.run_dir, job.python, *job.bind, *job.python_path):
        check_text(path, "path")
    _check_mounts(job)
    lines = [line for name, value in directives(job).items() if (line := directive(name, value))]
    return "\n".join([*_head(job), *lines, "", *_body(job)]) + "\n"


def directives(job: JobScript) -> Flags:
    """The sbatch flags in the script's `#SBATCH` lines."""
    return job_flags(
        job.plan,
        job.options,
        job.run_id,
        job.run_dir,
        job.export,
        elastic=bool(job.sizes),
    )


#: Flags that may differ between the members of an array, because the array sets its own.
_PER_RUN_FLAGS = ("job-name", "chdir", "output")


def common_flags(jobs: Sequence[JobScript]) -> Flags | None:
    """The sbatch flags that all jobs share, without those that name one run.

    Returns None if the jobs differ in a flag or in their shell.
    """
    flags_of_jobs = [
        {name: value for name, value in directives(job).items() if name not in _PER_RUN_FLAGS}
        for job in jobs
    ]
    same_flags = all(flags == flags_of_jobs[0] for flags in flags_of_jobs)
    same_shell = len({job.options.shell for job in jobs}) == 1
    return flags_of_jobs[0] if same_flags and same_shell else None


def render_array(jobs: Sequence[JobScript], name: str) -> str:
    """The script of one array job whose members run the jobs' own scripts from their run folders.

    ValueError when the jobs ask for different things (`common_flags`).
    """
    flags = common_flags(jobs)
    if flags is None:
        raise ValueError("runs with different sbatch flags cannot be one array job")
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
    takeover_entry: list[str] = []
    kept: list[str] = []
    if _keeps_nodes(job):
        kept.append(KEEP_NODE_COUNT)
    if job.sizes:
        takeover_entry = TAKEOVER_ENTRY
        kept.append('cp -- "$0" "$run/slurm/script"')
    return [
        "umask 077",
        *_search_paths(job),
        *_settings(job),
        "",
        *LIFECYCLE,
        *takeover_entry,
        "",
        *_site_setup(job.options),
        "",
        *OWN_RUN_FOLDER,
        *kept,
        "# Every node reports its name and address; then the ranks are assigned to these nodes.",
        *_assign_nodes(job),
        "",
        *_run_agents(job),
        *_end_attempt(job),
    ]


def _settings(job: JobScript) -> list[str]:
    """The variables that the fixed parts of the script read."""
    options = job.options
    node_count = "$SLURM_JOB_NUM_NODES" if _keeps_nodes(job) else ""
    excluded = [name for hosts in options.without for name in expand(hosts)]
    max_requeues = options.max_requeues if options.requeue else 0
    max_node_faults = options.max_node_faults if options.requeue else 0
    return [
        assignment("run", job.run_dir),
        f"node_count={node_count}",
        assignment("excluded_nodes", slurm_list(excluded)),
        assignment("max_requeues", str(max_requeues)),
        assignment("max_node_faults", str(max_node_faults)),
    ]


def _keeps_nodes(job: JobScript) -> bool:
    """Whether the job outlives the loss of a node."""
    return bool(job.sizes) or job.options.no_kill


def _site_setup(options: SlurmOptions) -> list[str]:
    """The user's set-up: variables to remove, modules to load, lines of shell."""
    lines = [f"unset {name}" for name in options.unset]
    if options.modules:
        lines += MODULES
    for name in options.modules:
        lines += _checked(command(["module", "load", name]), "modules")
    for line in options.setup:
        lines += _checked(check_text(line, "backend.options.setup"), "setup")
    return lines


def _assign_nodes(job: JobScript) -> list[str]:
    """Asks the granted nodes for their names, and assigns the ranks to them."""
    elastic = bool(job.sizes)
    probe = [
        "srun",
        *as_argv({**step_flags(job.plan, job.options, elastic), **PROBE_FLAGS}),
        job.options.shell,
        "-c",
        PROBE,
        "probe",
        job.run_dir,
        *_needs(job.options, job.python),
    ]
    limited_probe = f"{command(PROBE_LIMIT)} {_srun_on_all_nodes(probe, elastic)}"
    place_command = command(
        [
            *_single_step(job),
            *_task(job),
            "place",
            "--run-dir",
            job.run_dir,
        ]
    )
    return [
        'attempt="$run/slurm/$job.$restarts"',
        f'(cd /; unset OLDPWD; {limited_probe}) > "$attempt.nodes"',
        f"grep -q '^{MARK} ' \"$attempt.nodes\" || finish {int(Exit.NODE)}",
        *CHECK_PROBE,
        f'{place_command} --nodes "$attempt.nodes"',
        "code=$?; [ $code = 0 ] || finish $code",
        '[ ! -e "$run/slurm/over" ] || end_run 0 ", the run had already ended"',
        f'[ -z "$received" ] || finish {int(Exit.RESTART)}',
    ]


def _run_agents(job: JobScript) -> list[str]:
    """Runs one agent per node, and waits for all of them."""
    elastic = bool(job.sizes)
    flags = step_flags(job.plan, job.options, elastic)
    if elastic:
        flags["wait"] = 0  # no limit: one agent may end long before the others
    logs = file_pattern(str(Path(job.run_dir, "logs")))
    agents = [
        "srun",
        *as_argv(flags),
        f"--output={logs}/slurm-%j-agents.log",
        "--open-mode=append",
        *_container_flags(job),
        *_task(job),
        "agent",
        "--run-dir",
        job.run_dir,
    ]
    lines = [
        "# One agent per node. A signal interrupts `wait`, so the loop waits until srun has ended.",
        f"{_srun_on_all_nodes(agents, elastic)} &",
        "agents=$!",
    ]
    if elastic:
        lines += END_STUCK_STEP
    lines += [
        "while :; do",
        '  wait "$agents"; code=$?',
        '  kill -0 "$agents" 2>/dev/null || break',
        "done",
    ]
    if elastic:
        lines.append('kill "$watchdog" 2>/dev/null')
    return lines


def _end_attempt(job: JobScript) -> list[str]:
    """Replaces srun's exit code by the run's, and ends or requeues the job."""
    outcome = command(
        [
            *_single_step(job),
            *_task(job),
            "outcome",
            "--run-dir",
            job.run_dir,
        ]
    )
    return [f'{outcome} --code "$code"', "finish $?"]


def _task(job: JobScript) -> list[str]:
    """The first words of a command of `job/task.py`."""
    return [*_python(job), "-P", *start.BY_NAME, TASK_MODULE]


#: Runtimes that are a program on the nodes; Pyxis is a plugin of srun.
_PROGRAMS = {"apptainer": "apptainer", "charliecloud": "ch-run"}


def _srun_on_all_nodes(argv: Sequence[str], elastic: bool) -> str:
    """An srun command line for every node of the job; an elastic job counts its nodes at run time.

    `argv` begins with "srun".
    """
    srun = 'srun --nodes="$node_count" --ntasks="$node_count"' if elastic else "srun"
    return f"{srun} {command(argv[1:])}"


def _search_paths(job: JobScript) -> list[str]:
    """Puts the run's own code and interpreter first, for steps and workers."""
    python_path = command([":".join(job.python_path)])
    lines = []
    if job.options.container.runtime != "none":
        # The image's own interpreter and packages count, none of the submitter's, even where $HOME
        # is mounted.
        lines += ["unset PYTHONPATH PYTHONHOME VIRTUAL_ENV", "export PYTHONNOUSERSITE=1"]
        lines += [f"export ORCH_SUBMITTER={job.code}", 'export USER="${USER:-$(id -un)}"']
        return [*lines, f"export PYTHONPATH={python_path}"] if job.python_path else lines
    if job.python_path:
        lines.append(f"export PYTHONPATH={python_path}${{PYTHONPATH:+:$PYTHONPATH}}")
    return [*lines, f'export PATH={command([str(Path(job.python).parent)])}:"$PATH"']


def python_beside_agents(job: JobScript) -> tuple[list[str], list[str]]:
    """srun's flags, and the first words of a command that runs Python where the agents run.

    If the agents run in a container, so does that Python.
    """
    return list(_container_flags(job)), [*_python(job), "-P"]


def _single_step(job: JobScript) -> list[str]:
    """The words before a Python command on the script's node.

    They are srun and its flags where Python is in a Pyxis container, else none.
    """
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
    if options.runtime == "charliecloud":
        # Mount points must exist in the image; a mount covers the folders below it.
        mounted = tuple(
            f"{mount.partition(':')[0].rstrip('/')}/"
            for mount in options.mounts
            if _maps_to_itself(mount)
        )
        unmounted = [path for path in job.bind if not path.startswith(mounted)]
        binds = [f"--bind={mount}" for mount in (*options.mounts, *unmounted)]
        return [
            "ch-run",
            *binds,
            f"--cd={job.run_dir}",
            options.image,
            "--",
            options.python,
        ]
    if options.runtime == "pyxis":
        # srun may look for the program on its own host before there is a container
        # (LaunchParameters=test_exec)
        return ["/usr/bin/env", options.python]
    return [job.python]


_AMD_GPU = re.compile(r"\bAMD\b|Instinct|\bMI[0-9]{2,3}", re.I)

#: Characters that end a path in the mounts of a container runtime.
_SEPARATORS = {"none": "", "pyxis": ":,", "apptainer": ":,", "charliecloud": ":"}


def _check_mounts(job: JobScript) -> None:
    """Raises OrchError (65) for a path that the container's runtime would split into several."""
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
    """The user's line, and a check that ends the job (65) if the line fails.

    Without the check a later command would fail with a less helpful message.
    """
    return [line, f"check_setup $? {command([f'backend.options.{option}: {line}'])}"]


def _needs(options: SlurmOptions, python: str) -> list[str]:
    """The files that every node must have: the program that starts Python, and an image file."""
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
