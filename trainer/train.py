"""The training loop of one worker: check, build, resume, then train until done, terminated or
failed.

Ranks synchronise at each step boundary: one small all-reduce sums the valid tokens of the next
step, whether any rank got a termination signal, and the progress of a background save. So all ranks
save the same step, and the loss has its divisor before the first forward.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.plan.flops import hardware_flops_per_token, model_flops_per_token
from orchestrator.plan.learning_rate import RATE, jump, learning_rate, remembered
from orchestrator.plan.worker import PINS, WorkerEnv, checkpoint_dir, pin_file, replica_dir

from .checkpoint.fence import Fence
from .checkpoint.manager import Checkpoints
from .checkpoint.pins import DataPin, pin_data
from .comm.check import check_env, check_peers
from .comm.connect import TIMEOUT, choose_device, connect
from .comm.control import ControlPath
from .comm.mesh import Mesh
from .comm.settings import apply_settings
from .data.batch import MicroBatch
from .data.build import open_tokens, rate_limited
from .data.fingerprint import as_text, signed
from .data.loader import Loader
from .data.order import micro_batches_at, samples_of_step
from .engine import Engine
from .errors import DataError, NonFinite, Stopped, check_supported, warn
from .host.remote import warn_of_remote_disk
from .metrics.profile import Profile
from .metrics.step_result import StepResult
from .optim.loss_scale import LOWEST
from .precision import Recipe, recipe
from .worker.progress import Progress, ProgressReporter
from .worker.reporter import Reporter
from .worker.termination import TerminationSignal

#: Steps that the host enqueues before it reads what an earlier one gave. On a CPU nothing runs
#: ahead.
LAG = {"cpu": 0, "cuda": 1}
#: Seconds between progress reports of tokenising, at least.
PROGRESS_EVERY_S = 1.0


def train(
    plan: Plan,
    env: WorkerEnv,
    reporter: Reporter,
    termination: TerminationSignal,
    progress: ProgressReporter | None = None,
) -> None:
    """Run the plan's job as worker `env` to its end. Raises the errors that
    `trainer.errors.exit_code` maps.

    `progress`: gets the run as its source.
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
    mesh = Mesh.from_plan(plan, env.rank, timeout=timedelta(seconds=TIMEOUT.total_seconds()))
    loader = _open_data(plan, env, mesh, device, termination, reporter, control)
    run = Run(
        plan, env, mesh, device, recipe(plan.job.train), loader, reporter, termination, control
    )
    if progress is not None:
        progress.source = run.progress
    try:
        run.resume()
        run.loop()
    finally:
        loader.close()
    control.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()


def _open_data(
    plan: Plan,
    env: WorkerEnv,
    mesh: Mesh,
    device: torch.device,
    termination: TerminationSignal,
    reporter: Reporter,
    control: ControlPath,
) -> Loader:
    """The loader over the corpus, the same on all ranks and at each start of the run. Raises
    DataError."""

    def progress(phase: str, done: int, total: int) -> None:
        reporter.event("data_progress", phase=phase, done=done, total=total)
        if termination.received:
            raise Stopped(f"{termination.received} while preparing data: nothing to save yet")

    store = open_tokens(plan.job.data, rate_limited(progress, PROGRESS_EVERY_S))

    def problem_of(keys: list[bytes]) -> str:
        odd = next((rank for rank, key in enumerate(keys) if key != keys[0]), None)
        if odd is None:
            return pinned_problem()
        nodes = plan.ranks[odd].node, plan.ranks[0].node
        return f"rank {odd} on {nodes[0]} reads other text than rank 0 on {nodes[1]} (data.paths)"

    def pinned_problem() -> str:
        pin = pin_file(env.run_dir, PINS["changed-data"])
        where = ", ".join(plan.job.data.paths)
        try:
            return pin_data(pin, DataPin(store.index.key, store.identity), where)
        except DataError as error:
            return str(error)
        except OSError as error:
            reporter.event("pin_failed", error=f"{pin}: {error.strerror or error}")
            return ""

    if problem := control.judge(f"{store.index.key} {store.identity}".encode(), problem_of):
        raise DataError(problem)
    reporter.event(
        "data_ready",
        tokens=store.index.tokens,
        documents=store.index.documents,
        key=store.index.key,
    )
    return Loader(plan, mesh.coord, store, pin_memory=device.type == "cuda")


@dataclass(frozen=True)
class EnqueuedStep:
    """A step that is enqueued and not yet reported."""

    number: int
    samples: int  # consumed before it
    taken: int  # samples of the step, globally
    valid_tokens: int
    lr: float
    start: float  # perf_counter
    boundary_s: float  # spent waiting at its boundary
    fingerprint: str  # of its samples
    memory_bytes: dict[str, int]
    terms: tuple[str, ...]  # names of the loss terms in the result
    result: StepResult


class Run:
    """A run in progress on one rank. `step` counts optimizer steps completed, `samples` those
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
        warn_of_remote_disk(plan.job.train, scratch, env)
        self.engine = Engine(plan, mesh, device, recipe, scratch=scratch)
        folder = checkpoint_dir(plan.job.checkpoint.dir, env.run_dir)
        memory = replica_dir(env.run_dir, env.node)
        self.checkpoints = Checkpoints(
            folder,
            plan,
            Fence.of(env),
            env.rank,
            reporter,
            loader.store.index.key,
            memory,
            control,
            pin=pin_file(env.run_dir, PINS["fresh-start"]),
        )
        self.profile = Profile(plan, env, device, self.engine, reporter)
        self.step = self.samples = 0
        self.training = False  # the loop has begun
        self._broken = 0  # consecutive steps whose gradient was not finite
        self._fingerprint = 0  # of this step's samples, over all replicas
        self._boundary_s = 0.0  # of this step, spent waiting at its boundary
        self._enqueued: deque[EnqueuedStep] = deque()
        self._reported = 0.0  # perf_counter at the end of the latest report

    def progress(self) -> Progress:
        """The current progress; read by the reporting thread at any time."""
        if not self.training:
            return Progress(step=0, phase="start", waiting=None, moves=0)
        counter = self.engine.counter
        timer = self.engine.timer
        inside = counter.waiting_in
        phase = timer.now or "step"
        waiting = (
            f"{inside[0]} ({inside[1]})"
            if inside
            else "the step's boundary"
            if phase == "comm"
            else None
        )
        return Progress(self.step + 1, phase, waiting, counter.started + timer.entered)

    def resume(self) -> None:
        """Start from the newest verified checkpoint of this run, if there is one."""
        checkpoint = self.checkpoints.resume(lambda: list(self.engine.state_pieces(to_write=False)))
        if checkpoint is not None:
            self.step = checkpoint.step
            self.samples = checkpoint.samples
            self.engine.resumed(checkpoint.step, checkpoint.scalars)
            self._say_jump(checkpoint.scalars)

    def _say_jump(self, saved: Mapping[str, float]) -> None:
        """On rank 0, before the first step: one line and an event where this plan's learning rate
        breaks the curve."""
        job = self.plan.job
        text = jump(saved, self.step, job.optim, job.train.steps)
        if not text or self.env.rank:
            return
        following = learning_rate(self.step + 1, job.optim, job.train.steps)
        self.reporter.event(
            "learning_rate_jumps", self.step, saved=saved[RATE], following=following
        )
        warn(text)

    def loop(self) -> None:
        """Train to the plan's last step. Raises Stopped after a termination signal, with everything
        saved."""
        job = self.plan.job
        every = job.checkpoint.every_steps
        replicate_every = job.checkpoint.memory_every_steps
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
            if every and self.step % every == 0:
                # Of state on a disk there is no memory for a copy, to be written while training
                # goes on.
                on_disk = self.engine.offload.optimizer == "disk"
                self._keep(self.checkpoints.save if on_disk else self.checkpoints.start)
                self.engine.optimizer.copied = self.checkpoints.copied
            if self.checkpoints.replicas is not None and self.step % replicate_every == 0:
                self._keep(self.checkpoints.replicas.start)
        self._save()
        self.reporter.event("done", self.step)

    def _agree(self, batches: list[MicroBatch]) -> tuple[int, bool]:
        """(valid tokens of the step over all ranks, whether any rank got a termination signal);
        equal on every rank.

        The same message sums the fingerprints of what the ranks have read: once over the replicas,
        for the report, and over all ranks, which tells whether those that must hold the same
        samples do.
        """
        coord = self.mesh.coord
        counts_samples = (
            coord.tp == coord.pp == coord.cp == 0
        )  # tp, pp and cp ranks hold the same samples
        own_valid_tokens = sum(batch.valid_tokens for batch in batches) if counts_samples else 0
        own_fingerprint = signed(sum(batch.fingerprint for batch in batches))
        stop = int(self.termination.received is not None)
        began = time.perf_counter()
        sums = [
            own_valid_tokens,
            stop,
            self.checkpoints.vote,
            own_fingerprint if counts_samples else 0,
            own_fingerprint,
        ]
        valid_tokens, stop, votes, self._fingerprint, all_fingerprints = self.control.sum_ints(sums)
        self._boundary_s = time.perf_counter() - began
        with self.engine.timer.phase("checkpoint"):
            self.checkpoints.advance(votes)
        copies = self.plan.parallel.tp * self.plan.parallel.pp * self.plan.parallel.cp
        if all_fingerprints != signed(self._fingerprint * copies):
            self._explain_odd_samples(own_fingerprint)
        if not valid_tokens and not stop:
            self._settle()
            raise DataError(f"step {self.step + 1}: no token of the global batch is a target")
        return valid_tokens, stop > 0

    def _explain_odd_samples(self, read: int) -> None:
        """Raise DataError, naming a rank that has read other tokens than one that shares its
        samples. Collective."""
        coords = [place.coord for place in self.plan.ranks]

        def odd_one(everyones: list[bytes]) -> str:
            first = dict[tuple[int, int], int]()
            for rank, coord in enumerate(coords):
                lead = first.setdefault((coord.dp, coord.ep), rank)
                if everyones[rank] != everyones[lead]:
                    nodes = self.plan.ranks[rank].node, self.plan.ranks[lead].node
                    return (
                        f"rank {rank} on {nodes[0]} has read other tokens than rank {lead} on"
                        f" {nodes[1]}"
                    )
            return "the ranks' fingerprints do not add up"

        problem = self.control.judge(as_text(read).encode(), odd_one)
        self._settle()
        raise DataError(f"step {self.step + 1}: {problem}, from the same token files")

    def _stop(self) -> None:
        reason = self.termination.received or "another rank got a termination signal"
        self.reporter.event("stopping", self.step, reason=reason)
        if self.step == 0:
            raise Stopped(f"{reason} before the first step: nothing to save yet")
        self._save(read_back=False)  # a termination signal may leave only seconds
        raise Stopped(f"{reason}: saved at step {self.step}")

    def _keep(self, write: Callable[..., object], *options: bool) -> None:
        """Pass this rank's state to `write` once the steps up to now are found good; time for
        checkpoints."""
        self._settle()
        scalars = self.engine.scalars() | remembered(
            self.step, self.plan.job.optim, self.plan.job.train.steps
        )
        with self.engine.timer.phase("checkpoint"):
            write(
                list(self.engine.state_pieces(to_write=True)),
                self.step,
                self.samples,
                scalars,
                *options,
            )

    def _save(self, read_back: bool = True) -> None:
        """Save to disk now, and then free in-memory replicas."""
        self._keep(self.checkpoints.save, read_back)
        self.checkpoints.remove_replicas()

    def _train_step(self, batches: list[MicroBatch], valid_tokens: int, start: float) -> None:
        """Enqueue a step, then finish those that the host is `LAG` steps ahead of."""
        engine = self.engine
        train = self.plan.job.train
        number = self.step + 1
        lr = learning_rate(number, self.plan.job.optim, train.steps)
        logged = number % train.log_every_steps == 0 or number == train.steps
        measured = logged or self.device.type == "cpu" or self.profile.traces(number)
        engine.measure(measured)
        engine.pipeline.one_by_one = self.profile.watches(number)
        engine.part.expert_meter.start(logged)
        on_device = [batch.to(self.device) for batch in batches]
        with self.profile.step(number) as memory_bytes:
            loss_sum, norm = engine.gradients(on_device, valid_tokens)
            scale = engine.current_scale
            with engine.timer.phase("checkpoint"):
                self.checkpoints.before_update(number)
            engine.update(norm, lr)
        total, terms = (
            (engine.loss_total(loss_sum), engine.loss_term_totals()) if logged else (None, {})
        )
        values = [
            norm,
            loss_sum,
            scale,
            engine.current_scale,
            *terms.values(),
            *([] if total is None else [total]),
        ]
        taken = self.loader.samples_at(self.samples)
        result = StepResult(engine, values, measured, engine.expert_loads())
        counted = (
            number,
            self.samples,
            taken,
            valid_tokens,
            lr,
            start,
            self._boundary_s,
            as_text(self._fingerprint),
        )
        self._enqueued.append(EnqueuedStep(*counted, memory_bytes, tuple(terms), result))
        self.step = number
        self.samples = self.samples + taken
        while len(self._enqueued) > LAG[self.device.type]:
            self._finish(self._enqueued.popleft())

    def _settle(self) -> None:
        """Finish every step that is enqueued."""
        while self._enqueued:
            self._finish(self._enqueued.popleft())

    def _finish(self, step: EnqueuedStep) -> None:
        """Read what a step gave and report it. Raises NonFinite if too many in a row could not be
        applied; the device has left the weights as they were."""
        with self.engine.counter.syncing():
            norm, loss_sum, scale_before, scale_after, *logged_values = step.result.wait()
        finite = math.isfinite(norm)
        broken = not finite and (self.engine.scaler is None or scale_before <= LOWEST)
        self._broken = self._broken + 1 if broken else 0
        if self._broken > self.plan.job.train.skip_non_finite_steps:
            self._explain_non_finite(step, loss_sum, norm)
        if not finite:
            self.reporter.event(
                "step_skipped", step.number, grad_norm=str(norm), loss_scale=scale_after
            )
        terms = dict(zip(step.terms, logged_values, strict=False))
        total = logged_values[len(step.terms) :]
        self._report(step, total[0] / step.valid_tokens if total else None, terms, norm)

    def _explain_non_finite(self, step: EnqueuedStep, loss_sum: float, norm: float) -> None:
        """Raise NonFinite, naming the ranks whose loss is not finite. Collective: all ranks see the
        same norm."""
        own_samples = (
            b"" if math.isfinite(loss_sum) else self._sample_indices(step.samples).encode()
        )
        reports = {
            rank: raw.decode()
            for rank, raw in enumerate(self.control.all_gather_bytes(own_samples))
            if raw
        }
        self.checkpoints.settle()  # a save of good weights may be in progress
        where = "every loss is finite"
        if reports:
            ranks = ", ".join(map(str, reports))
            samples = "; ".join(dict.fromkeys(reports.values()))
            where = (
                f"the loss is not finite on rank {ranks}, whose samples are {samples} in the run's"
                " order"
            )
        before = (
            f"; {self._broken - 1} in a row before it had been skipped" if self._broken > 1 else ""
        )
        raise NonFinite(
            f"step {step.number}: the gradient norm is {norm}; {where} (samples from"
            f" {step.samples}){before}"
        )

    def _sample_indices(self, consumed: int) -> str:
        """This rank's samples of the step after `consumed`, by their index in the run's order."""
        many = micro_batches_at(self.plan.parallel, self.plan.job.train.batch_ramp, consumed)
        rows = samples_of_step(self.plan.parallel, self.mesh.coord, consumed, many)
        return ", ".join(str(index) for row in rows for index in row)

    def _report(
        self, step: EnqueuedStep, loss: float | None, terms: dict[str, float], norm: float
    ) -> None:
        """Report a finished step. Its seconds begin where those of the step before it ended, if
        that was later."""
        plan = self.plan
        now = time.perf_counter()
        times = step.result.times()
        loads = step.result.table()
        seconds = now - max(step.start, self._reported)
        self._reported = now
        train = plan.job.train
        tokens = step.taken * plan.job.train.seq_len
        shape = plan.model, train.seq_len
        again = (train.recompute, train.recompute_layers)
        latents = bool(train.recompute_latents)
        peak = plan.cluster.gpu.peak_flops.get(train.precision)
        per_flop = tokens / (seconds * plan.parallel.world_size * peak) if peak else None
        waited_s = (
            step.boundary_s + sum(times.comm_s.values()) + times.phase_s.get("checkpoint", 0.0)
        )
        piped = times.measured and plan.parallel.pp > 1
        self.reporter.step(
            step=step.number,
            samples=step.samples + step.taken,
            tokens=tokens,
            fingerprint=step.fingerprint,
            step_s=seconds,
            loss=loss,
            loss_terms=terms,
            grad_norm=norm if math.isfinite(norm) else None,
            lr=step.lr,
            phase_s=times.phase_s,
            own_s=max(0.0, seconds - waited_s) if times.measured else None,
            bubble_ratio=times.idle_s / seconds if piped else None,
            comm_bytes=step.result.comm_bytes,
            comm_s=times.comm_s,
            expert_bytes=step.result.level_bytes,
            expert_s=times.level_s,
            memory_bytes=step.memory_bytes,
            mfu=per_flop and per_flop * model_flops_per_token(*shape),
            experts=(
                self.engine.part.expert_meter.loads(loads)
                if loads and self.engine.tells_expert_loads
                else {}
            ),
            hfu=per_flop and per_flop * hardware_flops_per_token(*shape, *again, latents),
        )
