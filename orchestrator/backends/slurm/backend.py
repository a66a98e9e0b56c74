"""The slurm backend: one sbatch job a run, one agent a node. What is shared is a file system that every node sees."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

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
    read_record,
    write_record,
)
from orchestrator.cluster.importers.slurm import parse_topology
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.plan.codec import from_json
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest, SubmissionBundle
from orchestrator.run.state import RunState, prepare_resume, read_state, write_cancel

from .array import refuse_impossible, send_all
from .commands import Slurm
from .dependency import add_dependencies, without_dependency
from .options import SlurmOptions, read_options
from .preflight import check_partition, warnings
from .queue import Job
from .record import (
    SlurmRecord,
    find_job,
    kept,
    submitted_plan,
    submitted_request,
    unheard,
    verdict,
)
from .script.flags import used_node_count
from .script.render import JobScript, render
from .starts import Start, choose
from .states import meaning

if TYPE_CHECKING:
    from .job.step import JobStep

_GLANCE_S = 3.0  # for a question that nobody has asked for
_STEP_S = 120.0  # for a further step to start; a busy controller takes its time
_ASKED = 16  # sizes, in `orch plan`


class SlurmBackend(Backend, Queueing, NodeExclusion, ArraySubmission, Rendering, TopologySource, NodeExec):
    name = "slurm"

    @cached_property
    def _slurm(self) -> Slurm:
        return Slurm(timeout_s=30.0)

    @cached_property
    def _watcher(self):
        from .submission import LiveWatcher  # submitit takes 0.2 s to import

        return LiveWatcher(self._slurm)

    def check(self, request: LaunchRequest) -> None:
        """Whether Slurm answers here, and the options make sense."""
        read_options(request.backend_options)
        self._slurm.run(["sbatch", "--version"])

    def script(self, request: LaunchRequest, plan: Plan) -> str:
        """The job script of a run, as `submit` sends it and `orch render` prints it."""
        return render(self.job_of(request, plan))

    def job_of(self, request: LaunchRequest, plan: Plan) -> JobScript:
        """Everything that the script depends on."""
        options = self._options(request)
        work = [request.run_dir, plan.job.data.cache_dir, plan.job.checkpoint.dir]
        work += [path for path in plan.job.data.paths if path.startswith("/")]
        return JobScript(
            run_id=request.run_id,
            run_dir=request.run_dir,
            plan=plan,
            options=options,
            python=request.agents[0].argv[0],
            export=tuple(request.environment.names),
            python_path=tuple(request.environment.python_path_first),
            bind=tuple(dict.fromkeys(filter(None, work))),
            sizes=tuple(request.sizes),
        )

    def choose(self, bundles: Sequence[SubmissionBundle], environ: Mapping[str, str]) -> Choice:
        """The size of an elastic job to send now, and when Slurm would start each (`sbatch --test-only`).

        Raises OrchError when it takes none of several sizes; one size alone is never refused here.
        """
        slurm, now = Slurm(environ, timeout_s=30.0), datetime.now()
        slurm.check_controller()
        within_s = read_options(bundles[0].request.backend_options).start_within_s
        starts: list[Start] = []
        for bundle in bundles:
            starts.append(self._start(bundle, slurm))
            wait = starts[-1].wait_s(now)
            if wait is not None and wait <= within_s:
                break  # smaller ones need not be asked for
        if len(bundles) == 1:
            return Choice(0, [starts[0].text(now)])
        index = choose(starts, now, within_s)
        lines = [f"{start.nodes} nodes: {start.text(now)}" for start in starts]
        sizes = ", ".join(str(size) for size in bundles[0].request.sizes)
        return Choice(index, [*lines, f"taken: {starts[index].nodes} nodes, of the sizes {sizes}"])

    def starts(self, bundles: Iterable[SubmissionBundle], environ: Mapping[str, str]) -> list[str]:
        """When each would start, for a plan's page. OrchError soon when there is no Slurm here, or it does not answer.

        A long list is cut off where the largest sizes have been asked for.
        """
        slurm, now = Slurm(environ, timeout_s=_GLANCE_S), datetime.now()
        slurm.check_controller()
        return [self._start(bundle, slurm).text(now) if index < _ASKED else "" for index, bundle in enumerate(bundles)]

    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        self.check(bundle.request)
        plan = from_json(bundle.contents["plan.json"])
        text = self.script(bundle.request, plan)
        for line in self._warned(bundle.request, plan):
            print(f"orch: warning: {line}", file=sys.stderr)
        with create_run_folder(bundle, self.name) as folder:
            self._send(folder, text, environ)
        return bundle.request.handle

    def submit_all(self, bundles: Sequence[SubmissionBundle], environ: Mapping[str, str]) -> list[str]:
        """All of these runs or none: one array job where they ask for the same, else one job each."""
        self.check(bundles[0].request)
        plans = [from_json(bundle.contents["plan.json"]) for bundle in bundles]
        jobs = [self.job_of(bundle.request, plan) for bundle, plan in zip(bundles, plans, strict=True)]
        slurm = Slurm(environ)
        said: dict[str, None] = {}
        for bundle, job in zip(bundles, jobs, strict=True):
            said |= dict.fromkeys(self._warned(bundle.request, job.plan))
            refuse_impossible(slurm, render(job))
        for line in said:
            print(f"orch: warning: {line}", file=sys.stderr)
        with ExitStack() as stack:
            folders = [stack.enter_context(create_run_folder(bundle, self.name)) for bundle in bundles]
            for folder, id_ in zip(folders, send_all(jobs, slurm, self._watcher), strict=True):
                write_record(folder, SlurmRecord(job_id=id_, submitted_at=time.time()))
        return [bundle.request.handle for bundle in bundles]

    def render(self, bundle: SubmissionBundle) -> str:
        """Everything that `submit` does but the submission: the script's text, its run folder being ready."""
        text = self.script(bundle.request, from_json(bundle.contents["plan.json"]))
        with create_run_folder(bundle, self.name):
            return text

    def resume(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> str:
        """A new job in the old folder. The plan as it was submitted counts, not what became of it on the last nodes.

        An elastic run chooses its size anew. What it once waited for (`--after`) it does not wait for again.
        """
        if self.is_alive(folder):
            raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
        request = submitted_request(folder)
        options = without_dependency(request.backend_options)
        request = msgspec.structs.replace(request, backend_options=options)
        text = self.script(request, self._submitted(folder, request, environ))
        prepare_resume(folder)
        for name in ("faults", "exclude", "over"):  # a new count, and another chance for every node
            (folder.path / "slurm" / name).unlink(missing_ok=True)
        self._send(folder, text, environ)
        return request.handle

    def after(self, options: Mapping[str, Any], wishes: Sequence[After]) -> dict[str, Any]:
        """`backend.options` with the runs to wait for. OrchError (64) for one that this cluster knows nothing of."""
        found = []
        for wish in wishes:
            name = read_state(wish.folder).backend
            if name != self.name:
                raise OrchError(f"--after: run {wish.folder.run_id} is of the backend {name}, not {self.name}")
            job = self._find(wish.folder)
            found.append((wish, self.state(wish.folder), job.id if job else None))
        return add_dependencies(options, found)

    def without(self, options: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
        """`backend.options` with nodes that Slurm must not give."""
        known = options.get("exclude", [])
        return {**options, "exclude": [*([known] if isinstance(known, str) else known), *nodes]}

    def cancel(self, folder: RunFolder, force: bool) -> None:
        """Ask for a save by SIGTERM to the steps; a job that has not started, or by force, is simply ended."""
        job = self._find(folder)
        if job is None or meaning(job.state).over:
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        write_cancel(folder, force)
        started = meaning(job.state).phase in ("running", "stopping")
        if started and not force:
            self._slurm.cancel(job.id, "--signal=USR1", "--batch")  # the script passes it on, and does not come back
        else:
            self._slurm.cancel(job.id)
        self._watcher.clear()

    def is_alive(self, folder: RunFolder) -> bool:
        job = self._find(folder)
        return job is not None and not meaning(job.state).over

    def state(self, folder: RunFolder) -> RunState:
        """Slurm's answer and the run folder's together; the folder's alone while the controller is away."""
        try:
            job = self._find(folder)
        except OrchError as error:
            return unheard(read_state(folder), (folder.path / "slurm" / "over").exists(), error.message)
        sent = read_record(folder, SlurmRecord) is not None
        return verdict(read_state(folder), job, folder.cancel.exists(), sent)  # the file after the scheduler

    def exec_on_node(
        self, folder: RunFolder, request: LaunchRequest, node: str, argv: Callable[[str, int], list[str]]
    ) -> JobStep:
        """A step of the run's job, in the container of its agents where they have one."""
        from .job.step import JobStep
        from .job.task import environment
        from .script.render import beside_agents

        record = read_record(folder, SlurmRecord)
        if record is None:
            raise OrchError(f"run {folder.run_id} has no job", Exit.USAGE)
        known = read_state(folder).nodes.get(node)
        if known is None or known.pid is None:
            raise OrchError(f"node {node} of run {folder.run_id} has no agent", Exit.CAPACITY)
        flags, python = beside_agents(self.job_of(request, load_plan(folder.plan)))
        slurm = Slurm({**os.environ, **environment(request, os.environ)}, timeout_s=_STEP_S)
        return JobStep(slurm, record.job_id, node, [*flags, *python, *argv(str(folder.path), known.pid)])

    def live_topology(self, which: str) -> Topology:
        """`which`: a partition, "" for all of them."""
        from .cluster_source import live_topology

        return live_topology(which or None, self._slurm)

    # ---------------------------------------------------------------------------------- parts

    def _options(self, request: LaunchRequest) -> SlurmOptions:
        """The options with `topology: auto` answered by the cluster."""
        options = read_options(request.backend_options)
        if options.topology != "auto":
            return options
        kind = parse_topology(self._slurm.topology()).kind
        return msgspec.structs.replace(options, topology="none" if kind == "flat" else kind)

    def _submitted(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> Plan:
        submitted = kept(folder.plan)
        if not request.sizes:
            return load_plan(submitted if submitted.exists() else folder.plan)
        plans = [submitted_plan(folder, size).read_bytes() for size in request.sizes]
        bundles = [SubmissionBundle(request=request, contents={"plan.json": plan}) for plan in plans]
        return from_json(plans[self.choose(bundles, environ).index])

    def _start(self, bundle: SubmissionBundle, slurm: Slurm) -> Start:
        plan = from_json(bundle.contents["plan.json"])
        nodes, options = used_node_count(plan), read_options(bundle.request.backend_options)
        try:
            check_partition(plan, options, slurm.partition(options.partition))
            return Start(nodes=nodes, at=slurm.start_estimate(self.script(bundle.request, plan)))
        except OrchError as error:
            return Start(nodes=nodes, refusal=error.message, code=int(error.exit))

    def _warned(self, request: LaunchRequest, plan: Plan) -> list[str]:
        """Refuse what would wait for ever; warnings of notices that are too short for a save."""
        options = read_options(request.backend_options)
        partition = self._slurm.partition(options.partition)
        check_partition(plan, options, partition)
        return warnings(plan, options, partition, self._slurm.kill_wait_s())

    def _send(self, folder: RunFolder, text: str, environ: Mapping[str, str]) -> None:
        from .submission import ScriptExecutor

        slurm = Slurm(environ)
        executor = ScriptExecutor(folder.path / "slurm", text, slurm)
        job = executor.launch(self._watcher)
        write_record(folder, SlurmRecord(job_id=job.job_id, submitted_at=time.time()))

    def _find(self, folder: RunFolder) -> Job | None:
        record = read_record(folder, SlurmRecord)
        jobs = self._watcher.look([record.job_id] if record else [])
        return find_job(folder.run_id, record, jobs)
