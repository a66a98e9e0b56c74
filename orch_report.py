"""What a training program tells orch, and asks it: one file without dependencies, silent where orch
has not started it.

    import orch_report

    orch_report.save_requested()  # from here on a notice does not end this process
    for step in range(first_step, steps):
        loss = train_one_step()
        orch_report.report(step=step + 1, loss=loss, tokens=tokens_of_all_ranks)
        if orch_report.save_requested():  # the node will go, or the run is to end
            save(orch_report.checkpoint_dir())
            orch_report.exit_saved(step + 1)

A copy of this file beside a program works as the installed one does.
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

SAVED = 75  # the exit code of a program that has saved and wants to be started again
AXES = ("tp", "cp", "ep", "pp", "dp")


class _Worker:
    """What this process has told. It knows orch by the environment variables of its worker.

    Children inherit the variables, but not always the pipe: in them the number may be a file of
    their own. So before each report the descriptor must be the very pipe that the agent made, and
    no process above this one reports.
    """

    def __init__(self) -> None:
        told = os.environ.get("ORCH_REPORT_FD", "")
        self.fd = int(told) if told.isdecimal() else None
        self.pipe = os.environ.get("ORCH_REPORT_PIPE", "")  # device:inode; "" under an older agent
        self.reporter = _number("ORCH_REPORT_PID")  # the process that reports; 0: none yet
        self.rank = _number("RANK")
        self.epoch = _number("ORCH_EPOCH")
        self.told_at = time.monotonic()
        self.step = self.moves = self.dropped = 0
        self.asked: bool | None = None  # None: nobody listens for the signal yet

    def is_reporter(self) -> bool:
        """Whether this process may write into the descriptor that its variables name."""
        if self.fd is None or self.reporter not in (0, os.getpid()):
            return False
        try:
            found = os.fstat(self.fd)
        except (OSError, OverflowError):
            return False
        same = self.pipe in ("", f"{found.st_dev}:{found.st_ino}")
        return same and stat.S_ISFIFO(found.st_mode)

    def claim(self) -> None:
        """From now on no child of this process reports in its place."""
        if self.reporter == 0 and self.is_reporter():
            self.reporter = os.getpid()
            os.environ["ORCH_REPORT_PID"] = str(self.reporter)

    def send(self, **report: Any) -> None:
        """One line; dropped and counted where the agent reads too slowly. Nothing without an
        agent."""
        self.claim()
        if self.fd is None or not self.is_reporter():
            return
        known = {"rank": self.rank, "epoch": self.epoch}
        line = json.dumps(
            {**known, **{name: value for name, value in report.items() if value is not None}}
        )
        try:
            os.write(self.fd, line.encode() + b"\n")
        except BlockingIOError:
            self.dropped += 1
        except OSError:  # the agent is gone, and will end this process
            self.fd = None


def _number(name: str) -> int:
    """0 where the variable is unset, empty or no number."""
    found = os.environ.get(name, "")
    return int(found) if found.isdecimal() else 0


_worker = _Worker()


def active() -> bool:
    """Whether this process reports to an orch agent: False outside orch, and in a child that did
    not inherit the agent's pipe or whose parent reports."""
    return _worker.is_reporter()


def report(
    step: int, loss: float | None = None, tokens: int = 0, samples: int = 0, **more: float
) -> None:
    """Tell that `step` optimizer steps are done: status, metrics, goodput and hang detection follow
    from it.

    loss: of the global batch. tokens: of this step, on all ranks. samples: consumed by all ranks
    since the start. more: grad_norm, lr, mfu, hfu as ratios, step_s in seconds (default: the time
    since the last call).
    """
    now = time.monotonic()
    elapsed = now - _worker.told_at
    _worker.told_at = now
    unknown = more.keys() - {"grad_norm", "lr", "mfu", "hfu", "step_s"}
    if unknown:
        raise TypeError(f"orch_report.report does not know {', '.join(sorted(unknown))}")
    numbers = {name: float(value) for name, value in more.items()}
    told = {
        "step": int(step),
        "tokens": int(tokens),
        "samples": int(samples),
        "step_s": elapsed,
        **numbers,
    }
    if loss is not None:
        told["loss"] = float(loss)
    _worker.send(kind="step", dropped_reports=_worker.dropped, **told)
    _worker.step = int(step)
    alive("train")


def alive(phase: str) -> None:
    """Tell that the program advances between two steps, in an evaluation or a long save: it does
    not hang."""
    _worker.moves += 1
    _worker.send(kind="pulse", step=_worker.step, phase=phase, moves=_worker.moves)


def saved(step: int, seconds: float | None = None, size: int | None = None) -> None:
    """Tell that a checkpoint of `step` steps is durable; how long training waited for it, and its
    bytes, if known."""
    fields = {"stall_s": seconds, "seconds": seconds, "bytes": size}
    known = {name: value for name, value in fields.items() if value is not None}
    _worker.send(kind="event", name="checkpoint_saved", step=int(step), fields=known)


def save_requested() -> bool:
    """Whether this worker was told to save and to end: by a preemption, a cancel, a resize. For the
    main thread to ask, once at the start and after each step: the first call catches SIGTERM, which
    ends the process until then.

    All ranks are told within moments, not at the same step: agree on one (an all-reduce of this
    value).
    """
    _worker.claim()
    if _worker.asked is None:
        _listen(signal.getsignal(signal.SIGTERM))
    return bool(_worker.asked)


def _listen(before: Any = None) -> None:
    """Catch SIGTERM; `before` is called as well."""
    _worker.asked = bool(_worker.asked)

    def asked(number: int, frame: Any) -> None:
        _worker.asked = True
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, asked)


def exit_saved(step: int) -> NoReturn:
    """End this process after a save: with the exit code that asks orch for another start when there
    is one."""
    saved(step)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would make this a death by signal
    sys.exit(SAVED if active() else 0)


def checkpoint_dir(default: str | os.PathLike[str] = "checkpoints") -> Path:
    """The folder for checkpoints, the same for every start of the run; `default` outside orch. It
    is made."""
    if "ORCH_RUN_DIR" not in os.environ:
        path = Path(default)
    else:
        path = Path(
            _plan()["job"]["checkpoint"]["dir"] or Path(os.environ["ORCH_RUN_DIR"], "checkpoints")
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def mesh(device_type: str = "cpu", axes: tuple[str, ...] = AXES) -> Any:
    """torch's DeviceMesh of the plan: its axes outermost first, each rank where the plan has placed
    it.

    axes: which of tp, cp, ep, pp and dp the mesh has; those left out must be of degree 1. Outside
    orch: all ranks are the axis dp. Every rank calls it, after init_process_group.
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
        lost = [f"{axis}={shape[axis]}" for axis in AXES if axis not in axes and shape[axis] > 1]
        if lost:
            raise ValueError(f"the plan has {', '.join(lost)}, which axes leaves out")
        order = [axis for axis in order if axis in axes]
    ranks = torch.arange(dist.get_world_size()).reshape([shape[axis] for axis in order])
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(order))


def hf_callback() -> Any:
    """A callback for the `Trainer` of transformers (and of TRL): it reports each optimizer step,
    and when the run is asked to save it lets the Trainer save a checkpoint, and ends. Nothing
    outside orch.

    The loss comes at the steps that the Trainer logs; tokens where `include_num_input_tokens_seen`
    counts them. The next start goes on with
    `trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))`, for which every rank
    makes the folder first: `os.makedirs(output_dir, exist_ok=True)`.
    """
    from transformers import TrainerCallback

    class OrchCallback(TrainerCallback):
        step: int | None = None  # done, and not yet reported: its loss is logged after it
        seen = 0  # tokens before it
        asked = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            save_requested()
            self.seen = state.num_input_tokens_seen
            self.at = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            now = time.monotonic()
            self.step = state.global_step
            self.step_s = now - self.at
            self.at = now
            self.asked = _any_rank(save_requested(), args.device)
            if self.asked:
                control.should_save = control.should_training_stop = True

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any
        ) -> None:
            self.tell(args, state, logs or {})

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.tell(args, state, {})

        def tell(self, args: Any, state: Any, logs: Any) -> None:
            if self.step is None:
                return
            names = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
            known = {ours: float(logs[theirs]) for theirs, ours in names.items() if theirs in logs}
            tokens = int(state.num_input_tokens_seen - self.seen)
            self.seen = state.num_input_tokens_seen
            samples = (
                self.step
                * args.train_batch_size
                * args.gradient_accumulation_steps
                * args.world_size
            )
            report(self.step, tokens=tokens, samples=samples, step_s=self.step_s, **known)
            self.step = None

        def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            alive("evaluation")

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            saved(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.tell(args, state, {})
            if self.asked:
                exit_saved(state.global_step)

    return OrchCallback() if active() else TrainerCallback()


def accelerate_tracker() -> Any:
    """A tracker for `Accelerator(log_with=...)`: `accelerator.log({"loss": ...}, step=...)` reports
    the step. Known names: loss (or train_loss), tokens, samples, grad_norm, lr, step_s; others are
    left out. Nothing outside orch."""
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

        def log(self, values: Any, step: int | None = None, **more: Any) -> None:
            loss = values.get("loss", values.get("train_loss"))
            if step is not None:
                names = ("tokens", "samples", "grad_norm", "lr", "step_s")
                report(step, loss=loss, **{name: values[name] for name in names if name in values})

    return OrchTracker()


def lightning_callback(folder: str | os.PathLike[str] | None = None) -> Any:
    """A callback for Lightning's `Trainer`: it reports each optimizer step, and when the run is
    asked to save it saves `step-<N>.ckpt` into the folder (default: `checkpoint_dir()`), and ends.
    Nothing outside orch.

    The loss comes every `log_every_n_steps`: `train_loss` or `loss` where the module logs one, else
    this rank's. The next start goes on with `trainer.fit(...,
    ckpt_path=orch_report.newest_checkpoint())`.
    """
    package = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    base: Any = __import__(package, fromlist=["Callback"]).Callback

    class OrchCallback(base):
        step = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            # in place of Lightning's handler, which starts a collective wherever the signal finds
            # it
            _listen()
            self.step = trainer.global_step

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            step = trainer.global_step
            if step == self.step:  # an accumulated batch
                return
            self.step = step
            loss = None
            if step % trainer.log_every_n_steps == 0:
                known = trainer.callback_metrics
                mine = outputs.get("loss") if isinstance(outputs, dict) else outputs
                loss = next((known[name] for name in ("train_loss", "loss") if name in known), mine)
            report(step, loss=None if loss is None else float(loss))
            if trainer.strategy.reduce_boolean_decision(save_requested(), all=False):
                target = Path(folder or checkpoint_dir()) / f"step-{step:09}.ckpt"
                part = target.with_suffix(".part")
                trainer.save_checkpoint(part)
                if trainer.is_global_zero:
                    part.replace(target)
                trainer.strategy.barrier()
                exit_saved(step)

        def on_validation_batch_end(self, *_: Any) -> None:
            alive("evaluation")

    return OrchCallback() if active() else base()


def newest_checkpoint(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """The last that `lightning_callback` has saved there; None before the first, and outside orch
    without a folder."""
    if folder is None and not active():
        return None
    return max(Path(folder or checkpoint_dir()).glob("step-*.ckpt"), default=None)


def _any_rank(mine: bool, device: Any) -> bool:
    """Whether it is so on any rank: all get the same answer."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return mine
    told = torch.tensor(int(mine), device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


def _plan() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["ORCH_PLAN"]).read_text())
    return found
