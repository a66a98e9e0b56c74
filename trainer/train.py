"""The training loop of one worker: check, build, resume, then train until done, terminated or
failed.

Ranks synchronise at each step boundary: one small all-reduce sums the valid tokens of the next
step, the ranks that got a termination signal, and the progress of a background save. So all ranks
save the same step, and the loss has its divisor before the first forward.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.plan.learning_rate import RATE, jump, learning_rate, remembered
from orchestrator.plan.worker import PINS, WorkerEnv, checkpoint_dir, pin_file, replica_dir

from .checkpoint.fence import Fence
from .checkpoint.manager import Checkpoints
from .checkpoint.run_data import odd_samples, open_data
from .comm.check import check_env, check_peers
from .comm.connect import TIMEOUT, choose_device, connect
from .comm.control import ControlPath
from .comm.mesh import Mesh
from .comm.settings import apply_settings
from .data.batch import MicroBatch
from .data.fingerprint import as_text, signed
from .data.loader import Loader
from .data.order import micro_batches_at, samples_of_step
from .engine import Engine
from .errors import DataError, NonFinite, Stopped, check_supported, warn
from .host.remote import check_remote_disk
from .metrics.profile import Profile
from .metrics.step_report import EnqueuedStep, StepReports
from .metrics.step_result import StepResult, logged_values
from .optim.loss_scale import LOWEST
from .precision import Recipe, recipe
from .worker.progress import Progress, ProgressReporter
from .worker.reporter import Reporter
from .worker.termination import TerminationSignal

#: Steps that the host enqueues before it reads the result of an earlier one, by type of device. On
#: a CPU nothing runs ahead.
LAG = {"cpu": 0, "cuda": 1}


def train(
    plan: Plan,
    env: WorkerEnv,
    reporter: Reporter,
    termination: TerminationSignal,
    progress: ProgressReporter | None = None,
) -> None:
    """Runs the plan's job as worker `env` to its end. Raises the errors that
    `trainer.errors.exit_code` maps.

    `progress` reports the progress of the run.
    """
    check_env(plan, env)
    check_supported(plan)
    apply_settings(plan)
    device = choose_device(plan, env)
    if termination.received:
        raise Stopped(f"{termination.received} before the first step: nothing to save yet")
    control = connect(env, device)
    check_peers(plan, env, control)
    reporter.event("ranks_checked", plan=plan.hash, world_size=env.world_size)
    mesh = Mesh.from_plan(
        plan,
        env.rank,
        timeout=timedelta(seconds=TIMEOUT.total_seconds()),
    )
    store = open_data(plan, env, reporter, termination, control)
    loader = Loader(plan, mesh.coord, store, pin_memory=device.type == "cuda")
    run = Run(
        plan,
        env,
        mesh,
        device,
        recipe(plan.job.train),
        loader=loader,
        reporter=reporter,
        termination=termination,
        control=control,
    )
    if progress is not None:
        progress.source = run.progress
    try:
        run.resume()
        run.loop()
    finally:
        loader.close()
    control.barrier()  # no rank leaves while another still reads from it
    dist.destroy_process_group()


class Run:
    """A run in progress on one rank. `step` counts completed optimizer steps, `samples` the samples
    consumed globally."""

    def __init__(
        self,
        plan: Plan,
        env: WorkerEnv,
        mesh: Mesh,
        device: torch.device,
        recipe: Recipe,
        loader: Loader,
        reporter: Reporter,
        termination: TerminationSignal,
        control: ControlPath,
    ):
        self.control = control
        self.plan = plan
        self.env = env
        self.mesh = mesh
        self.device = device
        self.loader = loader
        self.reporter = reporter
        self.termination = termination
        torch.manual_seed(plan.job.train.seed)
        scratch = Path(env.run_dir) / "offload"
        check_remote_disk(plan.job.train, scratch, env)
        self.engine = Engine(plan, mesh, device, recipe, scratch=scratch)
        self.checkpoints = Checkpoints(
            checkpoint_dir(plan.job.checkpoint.dir, env.run_dir),
            plan,
            Fence.of(env),
            rank=env.rank,
            reporter=reporter,
            data=loader.store.index.key,
            memory=replica_dir(env.run_dir, env.node),
            control=control,
            pin=pin_file(env.run_dir, PINS["fresh-start"]),
        )
        self.profile = Profile(plan, env, device, self.engine, reporter)
        self.reports = StepReports(plan, self.engine, reporter)
        self.step = 0
        self.samples = 0
        self.training = False  # whether the loop has begun
        self._non_finite = 0  # consecutive steps whose gradient was not finite
        self._fingerprint = 0  # of this step's samples, over all replicas
        self._boundary_s = 0.0  # seconds that this step waited at its boundary
        self._enqueued: deque[EnqueuedStep] = deque()

    def progress(self) -> Progress:
        """Returns the current progress; the reporting thread calls it at any time."""
        if not self.training:
            return Progress(step=0, phase="start", waiting=None, moves=0)
        counter = self.engine.counter
        timer = self.engine.timer
        phase = timer.now or "step"
        waiting = "the step's boundary" if phase == "comm" else None
        if transfer := counter.waiting_in:
            waiting = f"{transfer[0]} ({transfer[1]})"
        return Progress(self.step + 1, phase, waiting, counter.started + timer.entered)

    def resume(self) -> None:
        """Starts from the newest verified checkpoint of this run, if there is one."""
        checkpoint = self.checkpoints.resume(lambda: list(self.engine.state_pieces(to_write=False)))
        if checkpoint is not None:
            self.step = checkpoint.step
            self.samples = checkpoint.samples
            self.engine.resumed(checkpoint.step, checkpoint.scalars)
            self._report_rate_jump(checkpoint.scalars)

    def _report_rate_jump(self, saved: Mapping[str, float]) -> None:
        """Warns on rank 0, before the first step, if this plan's learning rate does not continue
        the saved curve."""
        job = self.plan.job
        warning = jump(saved, self.step, job.optim, job.train.steps)
        if not warning or self.env.rank:
            return
        following = learning_rate(self.step + 1, job.optim, job.train.steps)
        self.reporter.event(
            "learning_rate_jumps",
            self.step,
            saved=saved[RATE],
            following=following,
        )
        warn(warning)

    def loop(self) -> None:
        """Trains to the plan's last step. Raises Stopped after a termination signal, once
        everything is saved."""
        job = self.plan.job
        self.training = True
        while self.step < job.train.steps:
            start = time.perf_counter()
            with self.engine.timer.phase("data"):
                batches = self.loader.step(self.samples)
            with self.engine.timer.phase("comm"):
                valid_tokens, stop = self._agree(batches)
            if stop:
                self._stop()
            self._train_step(batches, valid_tokens, start)
            if self.step == job.train.steps:
                break
            self._start_checkpoints()
        self._save()
        self.reporter.event("done", self.step)

    def _start_checkpoints(self) -> None:
        """Starts the save and the replica in memory that are due after this step."""
        job = self.plan.job.checkpoint
        if job.every_steps and self.step % job.every_steps == 0:
            # State on a disk does not fit into memory, where a background save copies it.
            on_disk = self.engine.offload.optimizer == "disk"
            self._write_state(self.checkpoints.save if on_disk else self.checkpoints.start)
            self.engine.optimizer.copied = self.checkpoints.copied
        if self.checkpoints.replicas is not None and self.step % job.memory_every_steps == 0:
            self._write_state(self.checkpoints.replicas.start)

    def _agree(self, batches: list[MicroBatch]) -> tuple[int, bool]:
        """Returns (valid tokens of the step over all ranks, whether any rank got a termination
        signal); equal on every rank.

        The same message sums the fingerprints of the ranks' samples twice: over the replicas, for
        the report, and over all ranks, to check that tp, pp and cp ranks hold the same samples.
        """
        coord = self.mesh.coord
        counts_samples = coord.tp == coord.pp == coord.cp == 0
        own_valid_tokens = sum(batch.valid_tokens for batch in batches) if counts_samples else 0
        own_fingerprint = signed(sum(batch.fingerprint for batch in batches))
        stop = int(self.termination.received is not None)
        began = time.perf_counter()
        replica_fingerprint = own_fingerprint if counts_samples else 0
        vote = self.checkpoints.vote
        sums = [own_valid_tokens, stop, vote, replica_fingerprint, own_fingerprint]
        valid_tokens, stop, votes, self._fingerprint, all_fingerprints = self.control.sum_ints(sums)
        self._boundary_s = time.perf_counter() - began
        with self.engine.timer.phase("checkpoint"):
            self.checkpoints.advance(votes, stopping=stop > 0)
        copies = self.plan.parallel.tp * self.plan.parallel.pp * self.plan.parallel.cp
        if all_fingerprints != signed(self._fingerprint * copies):
            self._raise_odd_samples(own_fingerprint)
        if not valid_tokens and not stop:
            self._finish_all()
            raise DataError(f"step {self.step + 1}: no token of the global batch is a target")
        return valid_tokens, stop > 0

    def _raise_odd_samples(self, own_fingerprint: int) -> None:
        """Raises DataError, naming a rank that has read other tokens than a rank that shares its
        samples. Collective."""

        def find_problem(fingerprints: list[bytes]) -> str:
            return odd_samples(self.plan, fingerprints)

        problem = self.control.judge(as_text(own_fingerprint).encode(), find_problem)
        self._finish_all()
        raise DataError(f"step {self.step + 1}: {problem}, from the same token files")

    def _stop(self) -> None:
        """Saves and raises Stopped."""
        reason = self.termination.received or "another rank got a termination signal"
        self.reporter.event("stopping", self.step, reason=reason)
        if self.step == 0:
            raise Stopped(f"{reason} before the first step: nothing to save yet")
        self._save(read_back=False)  # a termination signal may leave only seconds
        raise Stopped(f"{reason}: saved at step {self.step}")

    def _write_state(self, write: Callable[..., object], *options: bool) -> None:
        """Passes this rank's state to `write` once all steps so far have proved finite. The time
        counts as that of checkpoints."""
        self._finish_all()
        job = self.plan.job
        scalars = self.engine.scalars() | remembered(self.step, job.optim, job.train.steps)
        with self.engine.timer.phase("checkpoint"):
            pieces = list(self.engine.state_pieces(to_write=True))
            write(pieces, self.step, self.samples, scalars, *options)

    def _save(self, read_back: bool = True) -> None:
        """Saves to disk now, then frees the replicas in memory."""
        self._write_state(self.checkpoints.save, read_back)
        self.checkpoints.remove_replicas()

    def _train_step(self, batches: list[MicroBatch], valid_tokens: int, start: float) -> None:
        """Enqueues a step, then finishes the steps that the host is more than `LAG` ahead of."""
        engine = self.engine
        train = self.plan.job.train
        number = self.step + 1
        lr = learning_rate(number, self.plan.job.optim, train.steps)
        logged = number % train.log_every_steps == 0 or number == train.steps
        measured = logged or self.device.type == "cpu" or self.profile.traces(number)
        self._set_measurements(number, logged=logged, measured=measured)
        on_device = [batch.to(self.device) for batch in batches]
        with self.profile.step(number) as memory_bytes:
            loss_sum, norm = engine.gradients(on_device, valid_tokens)
            scale = engine.current_scale
            # Before the update: it begins to gather weights, which takes until the next step.
            terms, totals = logged_values(engine, loss_sum, logged)
            expert_loads = engine.expert_loads()
            with engine.timer.phase("checkpoint"):
                self.checkpoints.before_update(number)
            engine.update(norm, lr)
        values = [
            norm,
            loss_sum,
            scale,
            engine.current_scale,
            *totals,
        ]
        step = EnqueuedStep(
            number=number,
            samples_before=self.samples,
            step_samples=self.loader.samples_at(self.samples),
            valid_tokens=valid_tokens,
            lr=lr,
            start=start,
            boundary_s=self._boundary_s,
            fingerprint=as_text(self._fingerprint),
            memory_bytes=memory_bytes,
            terms=terms,
            result=StepResult(engine, values, measured, expert_loads),
        )
        self._enqueued.append(step)
        self.step = number
        self.samples += step.step_samples
        while len(self._enqueued) > LAG[self.device.type]:
            self._finish(self._enqueued.popleft())

    def _set_measurements(self, number: int, *, logged: bool, measured: bool) -> None:
        self.engine.measure(measured)
        self.engine.pipeline.one_by_one = self.profile.watches(number)
        self.engine.part.expert_meter.start(logged)

    def _finish_all(self) -> None:
        """Finishes every enqueued step."""
        while self._enqueued:
            self._finish(self._enqueued.popleft())

    def _finish(self, step: EnqueuedStep) -> None:
        """Reads and reports the result of a step. Raises NonFinite if too many steps in a row could
        not be applied; the device has left the weights unchanged."""
        with self.engine.counter.syncing():
            norm, loss_sum, scale_before, scale_after, *logged_values = step.result.wait()
        finite = math.isfinite(norm)
        broken = not finite and (self.engine.scaler is None or scale_before <= LOWEST)
        self._non_finite = self._non_finite + 1 if broken else 0
        if self._non_finite > self.plan.job.train.skip_non_finite_steps:
            self._raise_non_finite(step, loss_sum, norm)
        if not finite:
            self.reporter.event(
                "step_skipped", step.number, grad_norm=str(norm), loss_scale=scale_after
            )
        terms = dict(zip(step.terms, logged_values, strict=False))
        loss_total = logged_values[len(step.terms) :]
        loss = loss_total[0] / step.valid_tokens if loss_total else None
        self.reports.report(step, loss, terms, norm)

    def _raise_non_finite(self, step: EnqueuedStep, loss_sum: float, norm: float) -> None:
        """Raises NonFinite, naming the ranks whose loss is not finite. Collective: all ranks see
        the same norm."""
        own_samples = ""
        if not math.isfinite(loss_sum):
            own_samples = self._sample_indices(step.samples_before)
        samples_by_rank = {
            rank: samples.decode()
            for rank, samples in enumerate(self.control.all_gather_bytes(own_samples.encode()))
            if samples
        }
        self.checkpoints.settle()  # a save of good weights may be in progress
        cause = "every loss is finite"
        if samples_by_rank:
            ranks = ", ".join(map(str, samples_by_rank))
            samples = "; ".join(dict.fromkeys(samples_by_rank.values()))
            cause = (
                f"the loss is not finite on rank {ranks}, whose samples are {samples} in the run's"
                " order"
            )
        skipped = self._non_finite - 1
        history = f"; {skipped} in a row before it had been skipped" if skipped else ""
        raise NonFinite(
            f"step {step.number}: the gradient norm is {norm}; {cause} (samples from"
            f" {step.samples_before}){history}"
        )

    def _sample_indices(self, consumed: int) -> str:
        """Returns the indices, in the run's order, of this rank's samples in the step after
        `consumed` samples."""
        par = self.plan.parallel
        micro_batches = micro_batches_at(par, self.plan.job.train.batch_ramp, consumed)
        rows = samples_of_step(par, self.mesh.coord, consumed, micro_batches)
        return ", ".join(str(index) for row in rows for index in row)
