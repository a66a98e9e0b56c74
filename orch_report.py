"""The interface between a training program and orch: one file without dependencies, which does
nothing in programs that orch has not started.

    import orch_report

    orch_report.save_requested()  # from now on a termination signal does not end this process
    for step in range(first_step, steps):
        loss = train_one_step()
        orch_report.report(step=step + 1, loss=loss, tokens=tokens_of_all_ranks)
        if orch_report.must_save():  # the node is going away, or the run must end
            with orch_report.phase("save"):
                save(orch_report.checkpoint_dir())
            orch_report.exit_saved(step + 1)

A copy of this file beside the program works like the installed file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

SAVED = 75  # exit code of a program that has saved and must be started again
AXES = ("tp", "cp", "ep", "pp", "dp")
PHASE_LIMIT_S = 1800.0  # a phase without a sign of progress for longer is a hang
#: How often the ranks agree on `must_save`, in seconds, and after how many calls at the latest: a
#: longer interval would make ranks whose steps suddenly become slow answer late.
_AGREE_EVERY_S = 1.0
_AGREE_EVERY_CALLS = 50


class _Worker:
    """The reports of this process, which the environment variables of its worker connect to orch.

    Children inherit the variables, but not always the pipe: their descriptor of this number may be
    another file. So before each report the descriptor must be the agent's pipe, and no parent
    process may report.
    """

    def __init__(self) -> None:
        descriptor = os.environ.get("ORCH_REPORT_FD", "")
        self.fd = int(descriptor) if descriptor.isdecimal() else None
        self.pipe = os.environ.get("ORCH_REPORT_PIPE", "")  # device:inode; "" under an older agent
        self.reporter = _number("ORCH_REPORT_PID")  # the process that reports; 0: none yet
        self.rank = _number("RANK")
        self.epoch = _number("ORCH_EPOCH")
        self.reported_at = time.monotonic()
        self.step = 0
        self.moves = 0
        self.dropped = 0
        self.phase = "train"
        self.limit_s: float | None = None  # of the phase, None in a step
        self.phase_began = 0.0  # monotonic seconds
        self.paused_s = 0.0  # seconds of phases since the last report
        self.saving_s = 0.0  # seconds of them in which it saved
        self.waits: _GradientWaits | None = None
        self.save_requested: bool | None = None  # None: SIGTERM is not caught yet
        self.agreement = _Agreement()

    def is_reporter(self) -> bool:
        """Whether this process may write into the descriptor that its variables name."""
        if self.fd is None or self.reporter not in (0, os.getpid()) or _is_data_loader():
            return False
        try:
            status = os.fstat(self.fd)
        except (OSError, OverflowError):
            return False
        is_agents_pipe = self.pipe in ("", f"{status.st_dev}:{status.st_ino}")
        return is_agents_pipe and stat.S_ISFIFO(status.st_mode)

    def become_reporter(self) -> None:
        """Makes this process the reporter: from now on none of its children reports."""
        if self.reporter == 0 and self.is_reporter():
            self.reporter = os.getpid()
            os.environ["ORCH_REPORT_PID"] = str(self.reporter)

    def send(self, **report: Any) -> None:
        """Writes one line; drops and counts it if the agent reads too slowly. Does nothing without
        an agent."""
        self.become_reporter()
        if self.fd is None or not self.is_reporter():
            return
        origin = {"rank": self.rank, "epoch": self.epoch}
        known = {name: value for name, value in report.items() if value is not None}
        line = json.dumps({**origin, **known})
        try:
            os.write(self.fd, line.encode() + b"\n")
        except BlockingIOError:
            self.dropped += 1
        except OSError:  # the agent has exited, which ends this process soon
            self.fd = None

    def pulse(self, waiting: str | None = None) -> None:
        """Reports progress: the phase of this process, or the exchange that it waits in."""
        self.moves += 1
        self.send(
            kind="pulse",
            step=self.step + 1 if self.step else 0,  # the step in progress
            phase=self.phase,
            waiting=waiting,
            moves=self.moves,
            limit_s=self.limit_s,
        )

    def enter(self, phase: str, limit_s: float) -> None:
        """Begins a phase that is no step, after the one in progress."""
        self._count_phase()
        self.phase_began = time.monotonic()
        self.phase = phase
        self.limit_s = float(limit_s)
        self.pulse()

    def leave(self) -> None:
        """Ends the phase, if there is one: the next step begins."""
        if self.limit_s is None:
            return
        self._count_phase()
        self.phase = "train"
        self.limit_s = None
        self.pulse()

    def _count_phase(self) -> None:
        if self.limit_s is None:
            return
        seconds = time.monotonic() - self.phase_began
        self.paused_s += seconds
        if self.phase in ("save", "checkpoint"):
            self.saving_s += seconds


class _Agreement:
    """The ranks' agreement on `must_save`: an all-reduce about once per second. Its result also
    sets the number of calls until the next one, so that all ranks meet at the same call."""

    def __init__(self) -> None:
        self.reached = False
        self._calls = 0  # since the last all-reduce
        self._interval = 1  # calls between two
        self._agreed_at = time.monotonic()

    def look(self, requested: bool) -> None:
        """Counts one call of this rank, and agrees with the other ranks if it is time."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            self.reached = requested
            return
        self._calls += 1
        if self._calls < self._interval:
            return
        now = time.monotonic()
        call_s = (now - self._agreed_at) / self._calls
        requests, slowest_call_s = _maxima(dist, [float(requested), call_s])
        self.reached = requests > 0
        calls_per_interval = int(_AGREE_EVERY_S / max(slowest_call_s, 1e-6))
        most_calls = min(2 * self._interval, _AGREE_EVERY_CALLS)
        self._interval = min(max(calls_per_interval, 1), most_calls)
        self._calls = 0
        self._agreed_at = now


class _GradientWaits:
    """Measures how long each step of a data-parallel model waits for the other ranks' gradients.

    The wait lies between the backward pass, which ends about when the model's first parameter has
    its gradient, and the optimizer's step. Accelerators are timed by events, which are read in a
    later step, so that nothing waits for them.
    """

    def __init__(self, model: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._backward_done: Any = None
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=16)  # (begin, end), not yet read
        self._backwards = 0  # backward passes of this step so far
        self._usual_backwards = 1  # more than one if the program accumulates gradients
        self._parameter = next(
            (parameter for parameter in model.parameters() if parameter.requires_grad), None
        )
        if self._parameter is not None:
            self._parameter.register_post_accumulate_grad_hook(self._on_backward)
            register_optimizer_step_pre_hook(self._on_optimizer_step)

    def _on_backward(self, parameter: Any) -> None:
        self._backwards += 1
        self._backward_done = self._now()
        if self._backwards >= self._usual_backwards:
            _worker.pulse(waiting="all-reduce of gradients")

    def _on_optimizer_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if self._backward_done is None:
            return
        self._waits.append((self._backward_done, self._now()))
        self._backward_done = None
        self._usual_backwards = self._backwards
        self._backwards = 0
        _worker.pulse()

    def _now(self) -> Any:
        """Returns monotonic seconds, or an event in the order of an accelerator's work."""
        assert self._parameter is not None
        device = self._parameter.device.type
        if device == "cpu":
            return time.monotonic()
        import torch

        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    def take_seconds(self) -> float | None:
        """Returns the wait of the latest step that is known and was not returned before."""
        waited_s = None
        while self._waits:
            begin, end = self._waits[0]
            if isinstance(begin, float):
                waited_s = end - begin
            elif end.query():
                waited_s = begin.elapsed_time(end) / 1000
            else:
                break
            self._waits.popleft()
        return waited_s


def _maxima(dist: Any, numbers: list[float]) -> list[float]:
    """Returns the maximum over all ranks of each number; all ranks get the same ones."""
    import torch

    device = "cpu" if _has_backend(dist, "cpu") else _own_device()
    values = torch.tensor(numbers, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    maxima: list[float] = values.tolist()
    return maxima


def _has_backend(dist: Any, device_type: str) -> bool:
    """Whether the ranks can communicate tensors of this type of device."""
    backends = [entry.split(":")[0] for entry in dist.get_backend_config().split(",")]
    return device_type in backends


def _accelerator() -> str:
    """Returns the type of this machine's accelerator, "cpu" if there is none."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def _own_device() -> str:
    """Returns this rank's accelerator: the current one, or that of its local rank if the program
    has chosen none."""
    import torch

    device_type = _accelerator()
    if device_type == "cpu":
        return device_type
    index = torch.accelerator.current_device_index()
    local_rank = _number("LOCAL_RANK")
    if index == 0 and local_rank < torch.accelerator.device_count():
        index = local_rank
    return f"{device_type}:{index}"


def _is_data_loader() -> bool:
    """Whether this process is a worker of torch's DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _number(name: str) -> int:
    """Returns the number in an environment variable; 0 if it is unset, empty or not a number."""
    digits = os.environ.get(name, "")
    return int(digits) if digits.isdecimal() else 0


_worker = _Worker()


def active() -> bool:
    """Whether this process reports to an orch agent. False outside orch, and in a child process
    that did not inherit the agent's pipe or whose parent reports."""
    return _worker.is_reporter()


def report(
    step: int, loss: float | None = None, tokens: int = 0, samples: int = 0, **metrics: float
) -> None:
    """Reports that `step` optimizer steps are done. Status, metrics, goodput and hang detection use
    the reports.

    loss: the loss of the global batch. tokens: tokens of this step on all ranks. samples: samples
    that all ranks have consumed since the start. metrics: grad_norm, lr, mfu and hfu as ratios,
    step_s in seconds (default: the time since the last call without phases), own_s: the seconds of
    the step without waiting for other ranks (default: measured if the model is `watch`ed). A value
    that is not finite is left out.
    """
    now = time.monotonic()
    unknown = metrics.keys() - {"grad_norm", "lr", "mfu", "hfu", "step_s", "own_s"}
    if unknown:
        raise TypeError(f"orch_report.report does not know {', '.join(sorted(unknown))}")
    step_s = max(0.0, now - _worker.reported_at - _worker.paused_s)
    fields: dict[str, Any] = {
        "step": int(step),
        "tokens": int(tokens),
        "samples": int(samples),
        "step_s": step_s,
    }
    numbers = metrics if loss is None else {**metrics, "loss": loss}
    for name, value in numbers.items():
        if math.isfinite(value):  # JSON has no other numbers
            fields[name] = float(value)
    if _worker.saving_s:
        fields["phase_s"] = {"checkpoint": _worker.saving_s}
    waited_s = _worker.waits.take_seconds() if _worker.waits else None
    if waited_s is not None:
        fields.setdefault("own_s", max(0.0, fields["step_s"] - waited_s))
    _worker.send(kind="step", dropped_reports=_worker.dropped, **fields)
    _worker.reported_at = now
    _worker.paused_s = 0.0
    _worker.saving_s = 0.0
    _worker.step = int(step)
    _worker.pulse()


def watch(model: Any) -> None:
    """Measures from now on how long each step waits for the gradients of other ranks, so that a
    slow node is named and not those that wait for it. Call it once, before or after the model is
    wrapped by DistributedDataParallel; the callbacks for transformers and Lightning do.

    It measures data parallelism whose gradients are exchanged after the backward pass. Under FSDP
    and tensor parallelism, whose ranks also wait in the middle of a step, no node counts as slow.
    """
    if active() and _worker.waits is None:
        _worker.waits = _GradientWaits(model)
        _worker.pulse()  # from now on a hang is noticed


@contextlib.contextmanager
def phase(name: str, limit_s: float = PHASE_LIMIT_S) -> Iterator[None]:
    """Reports that this process saves, evaluates or compiles meanwhile, which does not count as a
    hang until `limit_s` seconds have passed without a sign of progress (`alive`) from any rank:

        with orch_report.phase("save"):
            torch.save(state, path)

    The time does not count as part of a step.
    """
    outer_phase = _worker.phase
    outer_limit_s = _worker.limit_s
    _worker.enter(name, limit_s)
    try:
        yield
    finally:
        if outer_limit_s is None:
            _worker.leave()
        else:
            _worker.enter(outer_phase, outer_limit_s)


def alive(phase: str | None = None, limit_s: float | None = None) -> None:
    """Reports progress between two steps, for example after each batch of an evaluation, so that
    the program does not count as hanging for the next `limit_s` seconds.

    phase: what the program does; default: the `phase` that it is in. limit_s: default: that of this
    phase, else 1800.
    """
    own_phase = _worker.phase
    own_limit_s = _worker.limit_s
    if phase or own_limit_s is None:
        _worker.phase = phase or "pause"
    if limit_s is None:
        limit_s = PHASE_LIMIT_S if own_limit_s is None else own_limit_s
    _worker.limit_s = float(limit_s)
    _worker.pulse()
    _worker.phase = own_phase
    _worker.limit_s = own_limit_s


def saved(step: int, seconds: float | None = None, size: int | None = None) -> None:
    """Reports that the checkpoint of `step` is durable, with the seconds that training waited for
    it and its size in bytes, if they are known."""
    known_fields: dict[str, float] = {}
    if seconds is not None:
        known_fields |= {"stall_s": float(seconds), "seconds": float(seconds)}
    if size is not None:
        known_fields["bytes"] = int(size)
    _worker.send(kind="event", name="checkpoint_saved", step=int(step), fields=known_fields)


def save_requested() -> bool:
    """Whether this worker must save and exit, because of a preemption, a cancel or a resize. Call
    it once at the start and after each step: the first call catches SIGTERM, which would otherwise
    end the process. It must be in the main thread, or it raises RuntimeError.

    The ranks receive the request within moments of each other, not at the same step: programs
    whose ranks save together use `must_save`.
    """
    _worker.become_reporter()
    if _worker.save_requested is None:
        _listen(signal.getsignal(signal.SIGTERM))
    return bool(_worker.save_requested)


def must_save() -> bool:
    """Whether all ranks must save now and exit: the same answer on every rank at the same call.
    Each rank must call it equally often, after each step.

    The ranks agree by an all-reduce of two numbers over torch's default process group, at every
    call if steps are long, and about once per second if they are short. Without a process group it
    is the answer of `save_requested`.
    """
    requested = save_requested()
    if not _worker.agreement.reached:
        _worker.agreement.look(requested)
    return _worker.agreement.reached


def _listen(previous_handler: Any = None) -> None:
    """Catches SIGTERM; the handler calls `previous_handler`, too.

    A forked child gets the default action again, as multiprocessing's pools expect. The signal is
    held back during a fork: Python forgets one that reaches a child before its first line.
    """
    masks = threading.local()

    def request_save(number: int, frame: Any) -> None:
        _worker.save_requested = True
        if callable(previous_handler):
            previous_handler(number, frame)

    def hold_back() -> None:
        masks.before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before_fork)

    def end_by_signal() -> None:
        if signal.getsignal(signal.SIGTERM) is request_save:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_through()

    try:
        signal.signal(signal.SIGTERM, request_save)
    except ValueError:
        raise RuntimeError(
            "orch_report.save_requested or must_save must first be called in the main thread: call"
            " it once where the program starts, before other threads do"
        ) from None
    os.register_at_fork(
        before=hold_back,
        after_in_parent=let_through,
        after_in_child=end_by_signal,
    )
    _worker.save_requested = bool(_worker.save_requested)


def exit_saved(step: int) -> NoReturn:
    """Ends this process after a save. Under orch, the exit code requests another start."""
    saved(step)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not change the exit code
    sys.exit(SAVED if "ORCH_RUN_ID" in os.environ else 0)


def checkpoint_dir(default: str | os.PathLike[str] = "checkpoints") -> Path:
    """Creates and returns the folder for checkpoints, which is the same for every start of the run;
    `default` outside orch."""
    if "ORCH_RUN_DIR" not in os.environ:
        path = Path(default)
    else:
        configured = _plan()["job"]["checkpoint"]["dir"]
        path = Path(configured or Path(os.environ["ORCH_RUN_DIR"], "checkpoints"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def mesh(device_type: str | None = None, axes: tuple[str, ...] = AXES) -> Any:
    """Returns torch's DeviceMesh of the plan: its axes from the outermost to the innermost, each
    rank where the plan has placed it.

    device_type: default: this machine's accelerator if there is one and the process group has a
    backend for it, else "cpu". axes: the axes of the mesh, out of tp, cp, ep, pp and dp; the others
    must have degree 1. Outside orch, all ranks form the axis dp. Every rank must call it, after
    init_process_group.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if "ORCH_PLAN" not in os.environ:
        shape = {"dp": dist.get_world_size()}
        order = ["dp"]
    else:
        parallel = _plan()["parallel"]
        shape = {axis: parallel[axis] for axis in AXES}
        order = list(reversed(parallel["order"]))
        missing = [f"{axis}={shape[axis]}" for axis in AXES if axis not in axes and shape[axis] > 1]
        if missing:
            raise ValueError(f"the plan has {', '.join(missing)}, which is missing in axes")
        order = [axis for axis in order if axis in axes]
    ranks = torch.arange(dist.get_world_size()).reshape([shape[axis] for axis in order])
    if device_type is None:
        accelerator = _accelerator()
        device_type = accelerator if _has_backend(dist, accelerator) else "cpu"
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(order))


class _TransformersReporter:
    """The callback for transformers without its base class, which is imported only when needed."""

    step: int | None = None  # the last step, until it is reported with its loss
    seen_tokens = 0  # tokens before that step
    must_save = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        save_requested()
        if others.get("model") is not None:
            watch(others["model"])
        self.seen_tokens = state.num_input_tokens_seen
        self.step_ended_at = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        self.step = state.global_step
        self.step_s = now - self.step_ended_at
        self.step_ended_at = now
        self.must_save = must_save()
        if self.must_save:
            control.should_save = control.should_training_stop = True
        self.announce_pause(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.announce_pause(control)

    def announce_pause(self, control: Any) -> None:
        """Reports the save and the evaluation that follow; the Trainer logs and evaluates first."""
        if control.should_evaluate:
            _worker.enter("evaluation", PHASE_LIMIT_S)
        elif control.should_save:
            _worker.enter("save", PHASE_LIMIT_S)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.report_step(args, state, logs or {})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if _worker.limit_s is not None:  # the pause since the last step is no part of this one
            self.step_ended_at = time.monotonic()
            _worker.leave()
        self.report_step(args, state, {})

    def report_step(self, args: Any, state: Any, logs: Any) -> None:
        if self.step is None:
            return
        names = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
        metrics = {ours: float(logs[theirs]) for theirs, ours in names.items() if theirs in logs}
        tokens = int(state.num_input_tokens_seen - self.seen_tokens)
        self.seen_tokens = state.num_input_tokens_seen
        samples = (
            self.step * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        report(self.step, tokens=tokens, samples=samples, step_s=self.step_s, **metrics)
        self.step = None

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        alive("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save:
            _worker.enter("save", PHASE_LIMIT_S)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.report_step(args, state, {})
        if self.must_save:
            exit_saved(state.global_step)
        _worker.enter("end", PHASE_LIMIT_S)  # the program may evaluate and save its result


def hf_callback() -> Any:
    """Returns a callback for the `Trainer` of transformers (and of TRL): it reports each optimizer
    step, and when the run must save, it lets the Trainer save a checkpoint and ends the process. It
    does nothing outside orch.

    The loss is reported at the steps that the Trainer logs; tokens if
    `include_num_input_tokens_seen` counts them. To resume, use
    `trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))`; every rank must create
    the folder first: `os.makedirs(output_dir, exist_ok=True)`.
    """
    from transformers import TrainerCallback

    class OrchCallback(_TransformersReporter, TrainerCallback):
        pass

    return OrchCallback() if active() else TrainerCallback()


def accelerate_tracker() -> Any:
    """Returns a tracker for `Accelerator(log_with=...)`: `accelerator.log({"loss": ...}, step=...)`
    reports the step. It reports loss (or train_loss), tokens, samples, grad_norm, lr and step_s,
    and ignores other names. It does nothing outside orch.

    accelerate calls trackers on its main process alone, so a hang is noticed after
    `backend.start_hang_after_s` and no rank is named: call `report` on every rank for more.
    """
    from accelerate.tracking import GeneralTracker

    class OrchTracker(GeneralTracker):
        name = "orch"
        requires_logging_directory = False
        main_process_only = False
        step = 0  # the step whose values are held until its loss comes, or another step
        held: dict[str, float] = {}

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: int | None = None, **_: Any) -> None:
            names = ("loss", "tokens", "samples", "grad_norm", "lr", "step_s")
            known = {name: values[name] for name in names if name in values}
            if "train_loss" in values:
                known.setdefault("loss", values["train_loss"])
            if step is None or not known:
                return
            if step != self.step:
                self.finish()
            self.step = step
            self.held = {**self.held, **known}
            if "loss" in self.held:
                self.finish()

        def finish(self) -> None:
            held = self.held
            self.held = {}
            if held and self.step > _worker.step:
                report(self.step, **held)  # type: ignore[arg-type]

    return OrchTracker()


def lightning_callback(folder: str | os.PathLike[str] | None = None) -> Any:
    """Returns a callback for Lightning's `Trainer`: it reports each optimizer step, and when the
    run must save, it saves `step-<N>.ckpt` into the folder (default: `checkpoint_dir()`) and ends
    the process. It does nothing outside orch.

    The loss is reported every `log_every_n_steps`: `train_loss` or `loss` if the module logs one,
    else the loss of this rank. To resume, use
    `trainer.fit(..., ckpt_path=orch_report.newest_checkpoint())`.
    """
    package = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    base: Any = __import__(package, fromlist=["Callback"]).Callback

    class OrchCallback(base):
        step = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            # Replaces Lightning's handler, which starts a collective in the middle of a step.
            _listen()
            watch(module)
            self.step = trainer.global_step

        def on_train_batch_start(self, *_: Any) -> None:
            _worker.leave()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            step = trainer.global_step
            if step == self.step:  # gradient accumulation: the step is not complete
                return
            self.step = step
            loss = None
            if step % trainer.log_every_n_steps == 0:
                metrics = trainer.callback_metrics
                rank_loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
                loss = next(
                    (metrics[name] for name in ("train_loss", "loss") if name in metrics), rank_loss
                )
            report(step, loss=None if loss is None else float(loss))
            if must_save():
                target = Path(folder or checkpoint_dir()) / f"step-{step:09}.ckpt"
                partial = target.with_suffix(".part")
                trainer.save_checkpoint(partial)
                if trainer.is_global_zero:
                    partial.replace(target)
                trainer.strategy.barrier()
                exit_saved(step)

        def on_validation_start(self, *_: Any) -> None:
            _worker.enter("evaluation", PHASE_LIMIT_S)

        def on_validation_batch_end(self, *_: Any) -> None:
            alive()

        def on_save_checkpoint(self, *_: Any) -> None:
            _worker.enter("save", PHASE_LIMIT_S)

        def on_train_end(self, *_: Any) -> None:
            _worker.enter("end", PHASE_LIMIT_S)  # the program may evaluate and save its result

    return OrchCallback() if active() else base()


def newest_checkpoint(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Returns the newest checkpoint that `lightning_callback` has saved in the folder, or None;
    None outside orch without a folder."""
    if folder is None and not active():
        return None
    return max(Path(folder or checkpoint_dir()).glob("step-*.ckpt"), default=None)


def _plan() -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(Path(os.environ["ORCH_PLAN"]).read_text())
    return plan
