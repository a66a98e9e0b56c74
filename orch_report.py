"""The interface between a training program and orch: one file without dependencies, which does
nothing in programs that orch has not started.

    import orch_report

    orch_report.save_requested()  # from now on a termination signal does not end this process
    for step in range(first_step, steps):
        loss = train_one_step()
        orch_report.report(step=step + 1, loss=loss, tokens=tokens_of_all_ranks)
        if orch_report.save_requested():  # the node is going away, or the run must end
            save(orch_report.checkpoint_dir())
            orch_report.exit_saved(step + 1)

A copy of this file beside the program works like the installed file.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

SAVED = 75  # exit code of a program that has saved and must be started again
AXES = ("tp", "cp", "ep", "pp", "dp")


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
        self.save_requested: bool | None = None  # None: SIGTERM is not caught yet

    def is_reporter(self) -> bool:
        """Whether this process may write into the descriptor that its variables name."""
        if self.fd is None or self.reporter not in (0, os.getpid()):
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
    step_s in seconds (default: the time since the last call).
    """
    now = time.monotonic()
    elapsed = now - _worker.reported_at
    _worker.reported_at = now
    unknown = metrics.keys() - {"grad_norm", "lr", "mfu", "hfu", "step_s"}
    if unknown:
        raise TypeError(f"orch_report.report does not know {', '.join(sorted(unknown))}")
    numbers = {name: float(value) for name, value in metrics.items()}
    fields = {
        "step": int(step),
        "tokens": int(tokens),
        "samples": int(samples),
        "step_s": elapsed,
        **numbers,
    }
    if loss is not None:
        fields["loss"] = float(loss)
    _worker.send(kind="step", dropped_reports=_worker.dropped, **fields)
    _worker.step = int(step)
    alive("train")


def alive(phase: str) -> None:
    """Reports progress between two steps, for example in an evaluation or a long save, so that the
    program does not count as hanging."""
    _worker.moves += 1
    _worker.send(kind="pulse", step=_worker.step, phase=phase, moves=_worker.moves)


def saved(step: int, seconds: float | None = None, size: int | None = None) -> None:
    """Reports that the checkpoint of `step` is durable, with the seconds that training waited for
    it and its size in bytes, if they are known."""
    fields = {"stall_s": seconds, "seconds": seconds, "bytes": size}
    known_fields = {name: value for name, value in fields.items() if value is not None}
    _worker.send(kind="event", name="checkpoint_saved", step=int(step), fields=known_fields)


def save_requested() -> bool:
    """Whether this worker must save and exit, because of a preemption, a cancel or a resize. Call
    it in the main thread, once at the start and after each step: the first call catches SIGTERM,
    which would otherwise end the process.

    The ranks receive the request within moments of each other, not at the same step: agree on a
    step with an all-reduce of this value.
    """
    _worker.become_reporter()
    if _worker.save_requested is None:
        _listen(signal.getsignal(signal.SIGTERM))
    return bool(_worker.save_requested)


def _listen(previous_handler: Any = None) -> None:
    """Catches SIGTERM; the handler calls `previous_handler`, too."""
    _worker.save_requested = bool(_worker.save_requested)

    def request_save(number: int, frame: Any) -> None:
        _worker.save_requested = True
        if callable(previous_handler):
            previous_handler(number, frame)

    signal.signal(signal.SIGTERM, request_save)


def exit_saved(step: int) -> NoReturn:
    """Ends this process after a save. Under orch, the exit code requests another start."""
    saved(step)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not change the exit code
    sys.exit(SAVED if active() else 0)


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


def mesh(device_type: str = "cpu", axes: tuple[str, ...] = AXES) -> Any:
    """Returns torch's DeviceMesh of the plan: its axes from the outermost to the innermost, each
    rank where the plan has placed it.

    axes: the axes of the mesh, out of tp, cp, ep, pp and dp; the others must have degree 1. Outside
    orch, all ranks form the axis dp. Every rank must call it, after init_process_group.
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
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(order))


class _TransformersReporter:
    """The callback for transformers without its base class, which is imported only when needed."""

    step: int | None = None  # the last step, until it is reported with its loss
    seen_tokens = 0  # tokens before that step
    must_save = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        save_requested()
        self.seen_tokens = state.num_input_tokens_seen
        self.step_ended_at = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        self.step = state.global_step
        self.step_s = now - self.step_ended_at
        self.step_ended_at = now
        self.must_save = _any_rank(save_requested(), args.device)
        if self.must_save:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.report_step(args, state, logs or {})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
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

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.report_step(args, state, {})
        if self.must_save:
            exit_saved(state.global_step)


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
    and ignores other names. It does nothing outside orch."""
    from accelerate.tracking import GeneralTracker

    class OrchTracker(GeneralTracker):
        name = "orch"
        requires_logging_directory = False
        main_process_only = False

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: int | None = None, **_: Any) -> None:
            loss = values.get("loss", values.get("train_loss"))
            if step is not None:
                names = ("tokens", "samples", "grad_norm", "lr", "step_s")
                report(step, loss=loss, **{name: values[name] for name in names if name in values})

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
            self.step = trainer.global_step

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
            if trainer.strategy.reduce_boolean_decision(save_requested(), all=False):
                target = Path(folder or checkpoint_dir()) / f"step-{step:09}.ckpt"
                partial = target.with_suffix(".part")
                trainer.save_checkpoint(partial)
                if trainer.is_global_zero:
                    partial.replace(target)
                trainer.strategy.barrier()
                exit_saved(step)

        def on_validation_batch_end(self, *_: Any) -> None:
            alive("evaluation")

    return OrchCallback() if active() else base()


def newest_checkpoint(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Returns the newest checkpoint that `lightning_callback` has saved in the folder, or None;
    None outside orch without a folder."""
    if folder is None and not active():
        return None
    return max(Path(folder or checkpoint_dir()).glob("step-*.ckpt"), default=None)


def _any_rank(flag: bool, device: Any) -> bool:
    """Returns whether the flag is set on any rank; all ranks get the same answer."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return flag
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def _plan() -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(Path(os.environ["ORCH_PLAN"]).read_text())
    return plan
