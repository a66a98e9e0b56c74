"""Many runs at once: one array job where they ask Slurm for the same, else one job each, all or none.

A member of an array is the run's own job script under another number: everything that differs between the runs (plan,
folder, log) is in that script, so only the directives have to agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .commands import Slurm
from .script.flags import Flags
from .script.quoting import assignment, directive
from .script.render import JobScript, directives, render

if TYPE_CHECKING:
    from .submission import LiveWatcher

#: What may differ between the members, since the array has its own.
_OF_ONE = ("job-name", "chdir", "output")


def common_flags(jobs: Sequence[JobScript]) -> Flags | None:
    """sbatch's flags of all the jobs, without those that name one run; None when they ask for different things."""
    first, *others = [
        ({name: value for name, value in directives(job).items() if name not in _OF_ONE}, job.options.shell)
        for job in jobs
    ]
    return first[0] if all(other == first for other in others) else None


def render_array(jobs: Sequence[JobScript], name: str) -> str:
    """The script of an array of these runs, whose own scripts lie in their folders. Pure, as `render` is.

    Raises ValueError when the runs do not agree on what they ask for: then there is no array of them.
    """
    flags = common_flags(jobs)
    if flags is None:
        raise ValueError("runs that ask for different things are no array")
    shell = jobs[0].options.shell
    own: Flags = {"job-name": f"orch-{name}", "chdir": str(Path(jobs[0].run_dir).parent), "output": "/dev/null"}
    lines = [directive(flag, value) for flag, value in {**own, **flags, "array": f"0-{len(jobs) - 1}"}.items()]
    return (
        "\n".join(
            [
                f"#!{shell}",
                f"# orch sweep {name}: {len(jobs)} runs, each with a script and a log in its own folder",
                *filter(None, lines),
                "",
                "umask 077",
                "case $SLURM_ARRAY_TASK_ID in",
                *(f"  {index}) {assignment('run', job.run_dir)} ;;" for index, job in enumerate(jobs)),
                "  *) exit 65 ;;",
                "esac",
                'cd "$run" && exec >> "$run/logs/slurm-$SLURM_JOB_ID.log" 2>&1 || exit 70',
                f'exec {shell} "$run/slurm/job.sbatch"',
            ]
        )
        + "\n"
    )


def refuse_impossible(slurm: Slurm, text: str) -> None:
    """Let Slurm judge a script without taking it. OrchError for a mistake in it; busy or absent nodes are none."""
    try:
        slurm.start_estimate(text)
    except OrchError as error:
        if error.exit != Exit.CAPACITY:
            raise


def send_all(jobs: Sequence[JobScript], slurm: Slurm, watcher: LiveWatcher) -> list[str]:
    """Submit the runs, whose folders are ready; their job ids. When one is refused, none is left in the queue."""
    from .submission import ScriptExecutor

    executors = [ScriptExecutor(Path(job.run_dir, "slurm"), render(job), slurm) for job in jobs]
    for executor in executors:
        executor.write()
    if common_flags(jobs) is not None:
        text = render_array(jobs, jobs[0].run_id)
        array = ScriptExecutor(Path(jobs[0].run_dir, "slurm"), text, slurm, "array.sbatch").launch(watcher)
        return [f"{array.job_id}_{index}" for index in range(len(jobs))]
    ids: list[str] = []
    try:
        for executor in executors:
            ids.append(executor.launch(watcher, "--hold").job_id)  # none starts before the last is accepted
        slurm.run(["scontrol", "release", ",".join(ids)])
    except BaseException:
        for id_ in ids:
            with contextlib.suppress(OrchError):
                slurm.cancel(id_)
        raise
    return ids
