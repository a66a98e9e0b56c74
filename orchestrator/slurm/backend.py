"""The slurm backend: one sbatch job a run, one agent a node. What is shared is a file system that every node sees."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import cached_property

import msgspec

from orchestrator.errors import OrchError
from orchestrator.launch.deliver import delivered
from orchestrator.launch.local import Cancel, prepare_resume
from orchestrator.launch.request import LaunchRequest, Parcel
from orchestrator.launch.run_folder import RunFolder, write_private
from orchestrator.launch.state import RunState, read_state
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.plan.codec import from_json
from orchestrator.topology.slurm import parse_topology

from .commands import Slurm
from .options import SlurmOptions, read_options
from .preflight import check_partition, warnings
from .queue import Job
from .record import SlurmRecord, find_job, read_record, verdict, write_record
from .render import JobScript, render
from .states import meaning


class SlurmBackend:
    name = "slurm"
    agent_flags = ()

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
        options = self._options(request)
        work = [request.run_dir, plan.job.data.cache_dir, plan.job.checkpoint.dir]
        work += [path for path in plan.job.data.paths if path.startswith("/")]
        return render(
            JobScript(
                run_id=request.run_id,
                run_dir=request.run_dir,
                plan=plan,
                options=options,
                python=request.agents[0].argv[0],
                export=tuple(request.environment.names),
                python_path=tuple(request.environment.python_path_first),
                bind=tuple(dict.fromkeys(filter(None, work))),
            )
        )

    def submit(self, parcel: Parcel, environ: Mapping[str, str]) -> str:
        self.check(parcel.request)
        plan = from_json(parcel.contents["plan.json"])
        text = self.script(parcel.request, plan)
        self._look_ahead(parcel.request, plan)
        with delivered(parcel, self.name) as folder:
            self._send(folder, text, environ)
        return parcel.request.handle

    def render(self, parcel: Parcel) -> str:
        """Everything that `submit` does but the submission: the script's text, its run folder being ready."""
        text = self.script(parcel.request, from_json(parcel.contents["plan.json"]))
        with delivered(parcel, self.name):
            return text

    def resume(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> str:
        """A new job in the old folder. The plan as it was submitted counts, not what became of it on the last nodes."""
        if self.is_alive(folder):
            raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
        submitted = folder.path / "plan.submitted.json"
        text = self.script(request, load_plan(submitted if submitted.exists() else folder.plan))
        prepare_resume(folder)
        for name in ("faults", "exclude"):  # a new count, and another chance for every node
            (folder.path / "slurm" / name).unlink(missing_ok=True)
        self._send(folder, text, environ)
        return request.handle

    def cancel(self, folder: RunFolder, force: bool) -> None:
        """Ask for a save by SIGTERM to the steps; a job that has not started, or by force, is simply ended."""
        job = self._job(folder)
        if job is None or meaning(job.state).over:
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        wish = Cancel(at=time.time(), uid=os.geteuid(), force=force)
        write_private(folder.cancel, msgspec.json.encode(wish))
        started = meaning(job.state).phase in ("running", "stopping")
        if started and not force:
            self._slurm.cancel(job.id, "--signal=USR1", "--batch")  # the script passes it on, and does not come back
        else:
            self._slurm.cancel(job.id)
        self._watcher.clear()

    def is_alive(self, folder: RunFolder) -> bool:
        job = self._job(folder)
        return job is not None and not meaning(job.state).over

    def state(self, folder: RunFolder) -> RunState:
        """Slurm's answer and the run folder's together; the folder's alone while the controller is away."""
        try:
            job = self._job(folder)
        except OrchError as error:
            state = read_state(folder)
            return state if state.is_final else msgspec.structs.replace(state, reason=error.message)
        sent = read_record(folder) is not None
        return verdict(read_state(folder), job, folder.cancel.exists(), sent)  # the file after the scheduler

    # ---------------------------------------------------------------------------------- parts

    def _options(self, request: LaunchRequest) -> SlurmOptions:
        """The options with `topology: auto` answered by the cluster."""
        options = read_options(request.backend_options)
        if options.topology != "auto":
            return options
        kind = parse_topology(self._slurm.topology()).kind
        return msgspec.structs.replace(options, topology="none" if kind == "flat" else kind)

    def _look_ahead(self, request: LaunchRequest, plan: Plan) -> None:
        """Refuse what would wait for ever; warn on standard error of notices that are too short for a save."""
        options = read_options(request.backend_options)
        partition = self._slurm.partition(options.partition)
        check_partition(plan, options, partition)
        for line in warnings(plan, options, partition, self._slurm.kill_wait_s()):
            print(f"orch: warning: {line}", file=sys.stderr)

    def _send(self, folder: RunFolder, text: str, environ: Mapping[str, str]) -> None:
        from .submission import ScriptExecutor

        slurm = Slurm(environ)
        executor = ScriptExecutor(folder.path / "slurm", text, slurm)
        job = executor.launch(self._watcher)
        write_record(folder, SlurmRecord(job_id=job.job_id, submitted_at=time.time()))

    def _job(self, folder: RunFolder) -> Job | None:
        record = read_record(folder)
        jobs = self._watcher.look([record.job_id] if record else [])
        return find_job(folder.run_id, record, jobs)
