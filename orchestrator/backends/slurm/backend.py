"""The Slurm backend: one sbatch job per run and one agent per node, on a file system that every
node shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator import start
from orchestrator.backends.base import (
    After,
    ArraySubmission,
    Backend,
    Choice,
    NodeExclusion,
    NodeExec,
    Queueing,
    Rendering,
    TopologySource,
    off_bad_nodes,
    read_record,
)
from orchestrator.cluster.importers.slurm import parse_topology
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError, check_installed
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.plan.codec import from_json
from orchestrator.planner.placement.rank_assignment import used_node_count
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import ask, wants_end
from orchestrator.run.put_back import asked_to_resume
from orchestrator.run.request import LaunchRequest, SubmissionBundle, check_variables
from orchestrator.run.state import RunState, read_state

from .commands import Slurm
from .live_cluster import read_cluster
from .options import (
    SlurmOptions,
    check_environment,
    check_rendering,
    from_environment,
    read_options,
)
from .preflight import (
    StartEstimate,
    add_dependencies,
    check_partition,
    choose_size,
    local_folder,
    warnings,
    without_dependency,
)
from .queue import Job
from .record import (
    SlurmRecord,
    combined_state,
    is_over,
    is_stale,
    last_log_error,
    record_job,
    script_exit_code,
    state_without_slurm,
    submitted_path,
    submitted_plan,
    submitted_request,
)
from .script.render import JobScript, render
from .states import job_state

if TYPE_CHECKING:
    from .job.step import JobStep
    from .submission import JobWatcher

_PLAN_TIMEOUT_S = 3.0  # for start estimates in `orch plan`, which are optional
_STEP_S = 120.0  # for a further step to start; a busy controller is slow
_MAX_ESTIMATES = 16  # sizes for which `orch plan` asks


class SlurmBackend(
    Backend, Queueing, NodeExclusion, ArraySubmission, Rendering, TopologySource, NodeExec
):
    """Runs as jobs of the Slurm cluster that this machine's commands reach."""

    name = "slurm"

    @cached_property
    def _slurm(self) -> Slurm:
        return Slurm(timeout_s=30.0)

    @cached_property
    def _watcher(self) -> JobWatcher:
        from .submission import JobWatcher  # submitit takes 0.2 s to import

        return JobWatcher(self._slurm)

    def brings_python(self, options: Mapping[str, Any]) -> bool:
        container = options.get("container")
        return isinstance(container, Mapping) and container.get("runtime", "none") != "none"

    def check(self, request: LaunchRequest) -> None:
        """Refuses bad options or variables of sbatch (65), and a machine without Slurm (76)."""
        check_environment(read_options(request.backend_options), os.environ)
        check_installed("submitit", "submitting to Slurm")
        self._slurm.run(["sbatch", "--version"])

    def script(self, request: LaunchRequest, plan: Plan) -> str:
        """The job script of a run, as `submit` sends it and `orch render` prints it."""
        return render(self.job_of(request, plan))

    def job_of(self, request: LaunchRequest, plan: Plan) -> JobScript:
        """The inputs of the job script. Slurm is asked only for `topology: auto`."""
        options = self._options(request)
        mounted = [
            request.run_dir,
            *_program_folder(request),
            plan.job.data.cache_dir,
            plan.job.checkpoint.dir,
        ]
        mounted += [path for path in plan.job.data.paths if path.startswith("/")]
        return JobScript(
            run_id=request.run_id,
            run_dir=request.run_dir,
            plan=plan,
            options=options,
            python=request.agents[0].argv[0],
            code=start.code_version() if options.container.runtime != "none" else "",
            export=tuple(request.environment.names),
            python_path=tuple(request.environment.python_path_first),
            bind=tuple(dict.fromkeys(filter(None, mounted))),
            sizes=tuple(request.sizes),
        )

    def choose(self, bundles: Sequence[SubmissionBundle], environ: Mapping[str, str]) -> Choice:
        """Chooses the size of an elastic job by the starts that `sbatch --test-only` estimates.

        OrchError when Slurm refuses all of several sizes; a single size is never refused here.
        """
        slurm = Slurm(environ, timeout_s=30.0)
        now = datetime.now()
        slurm.check_controller()
        within_s = read_options(bundles[0].request.backend_options).start_within_s
        starts: list[StartEstimate] = []
        for bundle in bundles:
            starts.append(self._start(bundle, slurm))
            wait = starts[-1].wait_s(now)
            if wait is not None and wait <= within_s:
                break  # smaller sizes are not needed
        if len(bundles) == 1:
            return Choice(0, [starts[0].describe(now)])
        index = choose_size(starts, now, within_s)
        lines = [f"{start.nodes} nodes: {start.describe(now)}" for start in starts]
        sizes = ", ".join(str(size) for size in bundles[0].request.sizes)
        return Choice(index, [*lines, f"taken: {starts[index].nodes} nodes, of the sizes {sizes}"])

    def starts(self, bundles: Iterable[SubmissionBundle], environ: Mapping[str, str]) -> list[str]:
        """A phrase per bundle that says when it would start; "" beyond the first `_MAX_ESTIMATES`.

        OrchError after at most `_PLAN_TIMEOUT_S` when no Slurm answers.
        """
        slurm = Slurm(environ, timeout_s=_PLAN_TIMEOUT_S)
        now = datetime.now()
        slurm.check_controller()
        return [
            self._start(bundle, slurm).describe(now) if index < _MAX_ESTIMATES else ""
            for index, bundle in enumerate(bundles)
        ]

    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        self.check(bundle.request)
        bundle = _with_shell_options(bundle)
        plan = from_json(bundle.contents["plan.json"])
        script = self.script(bundle.request, plan)
        warning_lines = _preflight(bundle.request, plan, self._slurm)
        with create_run_folder(bundle, self.name) as folder:
            self._send(folder, script, environ)
        _print_warnings(warning_lines)  # last, so that a refusal is a single line
        return bundle.request.handle

    def submit_all(
        self, bundles: Sequence[SubmissionBundle], environ: Mapping[str, str]
    ) -> list[str]:
        """Submits all runs or none: as one array job if their flags agree, else as one job each."""
        from .submission import submit_all

        self.check(bundles[0].request)
        bundles = [_with_shell_options(bundle) for bundle in bundles]
        plans = [from_json(bundle.contents["plan.json"]) for bundle in bundles]
        jobs = [
            self.job_of(bundle.request, plan) for bundle, plan in zip(bundles, plans, strict=True)
        ]
        slurm = Slurm(environ)
        warning_lines: list[str] = []
        for bundle, job in zip(bundles, jobs, strict=True):
            warning_lines += _preflight(bundle.request, job.plan, self._slurm)
            slurm.check_script(render(job))
        with ExitStack() as stack:
            folders = [
                stack.enter_context(create_run_folder(bundle, self.name)) for bundle in bundles
            ]
            for folder, id_ in zip(folders, submit_all(jobs, slurm, self._watcher), strict=True):
                record_job(folder, id_)
        _print_warnings(warning_lines)
        return [bundle.request.handle for bundle in bundles]

    def render(self, bundle: SubmissionBundle) -> str:
        """Prepares the run folder as `submit` does, and returns the script instead of submitting
        it."""
        check_environment(read_options(bundle.request.backend_options), os.environ)
        check_rendering(os.environ)
        bundle = _with_shell_options(bundle)
        script = self.script(bundle.request, from_json(bundle.contents["plan.json"]))
        with create_run_folder(bundle, self.name):
            return script

    def resume(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> str:
        """Submits a new job for the run folder, from the plan as submitted; returns the handle.

        The size of an elastic run is chosen once more. The job does not wait for the jobs of
        `--after` a second time. OrchError (64) while the run is active.
        """
        if self.is_alive(folder):
            raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
        request = submitted_request(folder)
        check_variables(request, environ)
        job = self._find_job(folder)
        if job is not None and is_stale(folder, job):
            self._slurm.cancel(job.id)
        options = without_dependency(request.backend_options)
        request = off_bad_nodes(folder, msgspec.structs.replace(request, backend_options=options))
        script = self.script(request, self._plan_to_resume(folder, request, environ))
        slurm = folder.path / "slurm"
        # without these files counts start at 0 and every node is allowed
        with asked_to_resume(folder, slurm / "faults", slurm / "exclude", slurm / "over"):
            self._send(folder, script, environ)
        return request.handle

    def after(self, options: Mapping[str, Any], predecessors: Sequence[After]) -> dict[str, Any]:
        """`backend.options` extended by the runs to wait for.

        OrchError (64) for a run of another backend.
        """
        runs = []
        for after in predecessors:
            recorded_state = read_state(after.folder)
            if recorded_state.backend != self.name:
                run = f"run {after.folder.run_id} is of the backend {recorded_state.backend}"
                raise OrchError(f"--after: {run}, not {self.name}")
            job = self._find_job(after.folder)
            state = recorded_state
            # The job of a run that is over is not waited for: it may still end as PREEMPTED.
            if not is_over(recorded_state, script_exit_code(after.folder)):
                state = self.state(after.folder)
            runs.append((after, state, job.id if job else None))
        return add_dependencies(options, runs)

    def cancel(self, folder: RunFolder, force: bool) -> None:
        """Signals the script, which lets the workers save and does not requeue the job.

        A job that has not started, or that is cancelled by force, ends at once. If the disk does
        not take the request, another signal tells the script not to requeue the job.
        """
        job = self._find_job(folder)
        if job is None or job_state(job.state).ended or is_stale(folder, job):
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        signal = "USR1"
        try:
            ask(folder, "end", force=force)
        except OrchError as error:
            signal = "USR2"
            _print_warnings([f"{error.message}; the cancel goes through Slurm alone"])
        started = job_state(job.state).phase in ("running", "stopping")
        if started and not force:
            # the script forwards the signal, and does not requeue the job
            self._slurm.cancel(job.id, f"--signal={signal}", "--batch")
        else:
            self._slurm.cancel(job.id)
        self._watcher.clear()

    def is_alive(self, folder: RunFolder) -> bool:
        job = self._find_job(folder)
        return job is not None and not job_state(job.state).ended and not is_stale(folder, job)

    def state(self, folder: RunFolder) -> RunState:
        """The run's state from Slurm's answer and the run folder.

        While Slurm does not answer, the folder alone counts.
        """
        try:
            job = self._find_job(folder)
        except OrchError as error:
            return state_without_slurm(
                read_state(folder), script_exit_code(folder) is not None, error.message
            )
        submitted = read_record(folder, SlurmRecord) is not None
        state = read_state(folder)  # read after Slurm's answer, so that it is not older
        unreported = job is not None and job_state(job.state).ended and not state.is_final
        last_line = last_log_error(folder) if unreported else ""
        return combined_state(
            state,
            job,
            cancel_asked=wants_end(folder) is not None,
            submitted=submitted,
            script_exit=script_exit_code(folder),
            last_line=last_line,
        )

    def exec_on_node(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        node: str,
        argv: Callable[[str, int], list[str]],
    ) -> JobStep:
        """Starts a step of the run's job, in the container of its agents if they have one."""
        from .job.step import JobStep
        from .job.task import environment
        from .script.render import python_beside_agents

        record = read_record(folder, SlurmRecord)
        if record is None:
            raise OrchError(f"run {folder.run_id} has no job", Exit.USAGE)
        node_state = read_state(folder).nodes.get(node)
        if node_state is None or node_state.pid is None:
            raise OrchError(f"node {node} of run {folder.run_id} has no agent", Exit.CAPACITY)
        flags, python = python_beside_agents(self.job_of(request, load_plan(folder.plan)))
        slurm = Slurm({**os.environ, **environment(request, os.environ)}, timeout_s=_STEP_S)
        arguments = argv(str(folder.path), node_state.pid)
        return JobStep(slurm, record.job_id, node, [*flags, *python, *arguments])

    def live_topology(self, which: str) -> Topology:
        """The cluster as it is now. `which`: a partition, "" for all partitions."""
        return read_cluster(which or None, self._slurm)

    # ---------------------------------------------------------------------------------- parts

    def _options(self, request: LaunchRequest) -> SlurmOptions:
        """The options, with `topology: auto` replaced by what the cluster has."""
        options = _effective_options(request)
        if options.topology != "auto":
            return options
        kind = parse_topology(self._slurm.topology()).kind
        return msgspec.structs.replace(options, topology="none" if kind == "flat" else kind)

    def _plan_to_resume(
        self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]
    ) -> Plan:
        """The submitted plan; for an elastic run the plan of the size that starts soonest."""
        submitted = submitted_path(folder.plan)
        if not request.sizes:
            return load_plan(submitted if submitted.exists() else folder.plan)
        plans = [submitted_plan(folder, size).read_bytes() for size in request.sizes]
        bundles = [
            SubmissionBundle(request=request, contents={"plan.json": plan}) for plan in plans
        ]
        return from_json(plans[self.choose(bundles, environ).chosen])

    def _start(self, bundle: SubmissionBundle, slurm: Slurm) -> StartEstimate:
        plan = from_json(bundle.contents["plan.json"])
        nodes = used_node_count(plan)
        options = _effective_options(bundle.request)
        try:
            _check_partitions(plan, options, slurm)
            return StartEstimate(
                nodes=nodes, at=slurm.start_estimate(self.script(bundle.request, plan))
            )
        except OrchError as error:
            return StartEstimate(nodes=nodes, refusal=error.message, code=int(error.exit))

    def _send(self, folder: RunFolder, script: str, environ: Mapping[str, str]) -> None:
        from .submission import ScriptExecutor

        job = ScriptExecutor(folder.path / "slurm", script, Slurm(environ)).launch(self._watcher)
        record_job(folder, job.job_id)

    def _find_job(self, folder: RunFolder) -> Job | None:
        return self._watcher.job_of(folder)


def _preflight(request: LaunchRequest, plan: Plan, slurm: Slurm) -> list[str]:
    """Warnings about the job. OrchError if the partition would keep it pending for ever."""
    options = _effective_options(request)
    partition = _check_partitions(plan, options, slurm)
    mounts = _read_files("/proc/mounts")
    exports = _read_files("/etc/exports", "/var/lib/nfs/etab")
    local = local_folder(request.run_dir, mounts, exports)
    return [*warnings(plan, options, partition, slurm.kill_wait_s()), *local]


def _effective_options(request: LaunchRequest) -> SlurmOptions:
    """The options of the request, completed by this shell's variables of sbatch."""
    return read_options(_option_values(request))


def _with_shell_options(bundle: SubmissionBundle) -> SubmissionBundle:
    """The bundle with this shell's variables of sbatch as options.

    The run must keep them, because another shell may resume it.
    """
    request = msgspec.structs.replace(
        bundle.request, backend_options=_option_values(bundle.request)
    )
    return msgspec.structs.replace(bundle, request=request)


def _option_values(request: LaunchRequest) -> dict[str, Any]:
    """`backend.options` of the request, completed by this shell's variables of sbatch."""
    options = request.backend_options
    return {**options, **from_environment(read_options(options), os.environ)}


def _check_partitions(plan: Plan, options: SlurmOptions, slurm: Slurm) -> dict[str, str]:
    """The fields of the first partition in the options that can take the job.

    If none can, the OrchError of the last one is raised.
    """
    refusal: OrchError | None = None
    for name in (options.partition or "").split(","):
        partition = slurm.partition(name or None)
        try:
            check_partition(plan, options, partition)
        except OrchError as error:
            refusal = error
        else:
            return partition
    assert refusal
    raise refusal


def _program_folder(request: LaunchRequest) -> list[str]:
    """The folder in which the user's program runs, if that is outside the run folder
    (`--in-place`)."""
    if request.worker.bundled or request.code.kind != "none":
        return []
    return [request.worker.cwd]


def _read_files(*paths: str) -> str:
    """The text of those files that can be read, joined."""
    contents = []
    for path in paths:
        with suppress(OSError):
            contents.append(Path(path).read_text(errors="replace"))
    return "\n".join(contents)


def _print_warnings(lines: Iterable[str]) -> None:
    for line in dict.fromkeys(lines):
        print(f"orch: warning: {line}", file=sys.stderr)
