"""`python -m trainer --plan plan.json` runs one worker. Agents start it; its exit code is part of
the contract in `orch --help`."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from typing import NoReturn

from orchestrator.plan import Exit, PlanError, load_plan
from orchestrator.plan.worker import WorkerEnv

from .errors import TrainerError, cause_of, exit_code, is_peer_loss
from .worker.progress import ProgressReporter
from .worker.reporter import Reporter
from .worker.termination import TerminationSignal


def main(argv: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(
        "python -m trainer", description="One worker of a training run."
    )
    parser.add_argument("--plan", help="path of plan.json (default: $ORCH_PLAN)")
    parser.add_argument(
        "--final-checkpoint",
        action="store_true",
        help="do not train: save the newest in-memory replica to disk",
    )
    args = parser.parse_args(argv)
    try:
        env = WorkerEnv.read(os.environ)
    except ValueError as error:
        print(f"trainer: {error}", file=sys.stderr)
        _leave(Exit.USAGE)
    # Before the imports, so that a signal during them is reported, too.
    termination = TerminationSignal().install()
    faulthandler.register(signal.SIGQUIT)  # stacks of all threads to stderr, even of a hung worker
    reporter = Reporter(env.report_fd, env.rank, env.epoch)
    progress = ProgressReporter(reporter).start()
    code = Exit.DONE
    try:
        plan = load_plan(args.plan or env.plan)
        if args.final_checkpoint:
            from .checkpoint.replicas.final_checkpoint import run_final_checkpoint

            run_final_checkpoint(plan, env, reporter)
        else:
            # After the plan: an invalid one is refused before a second of imports.
            from .train import train

            train(plan, env, reporter, termination, progress)
    except BaseException as error:
        code = _explain(error, env, reporter)
    progress.stop()
    reporter.close()
    _leave(code)


def _explain(error: BaseException, env: WorkerEnv, reporter: Reporter) -> Exit:
    """Prints one line, and the traceback of an unknown error; reports one event; returns the exit
    code."""
    code = exit_code(error)
    lines = str(error).splitlines() or [type(error).__name__]
    if is_peer_loss(error):
        message = f"a peer is gone or silent ({lines[0]})"
    elif isinstance(error, TrainerError | PlanError):
        message = lines[0]
    else:
        message = f"{type(error).__name__}: {lines[0]}"
        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            traceback.print_exception(error)
    name = "stopped" if code == Exit.RESTART and isinstance(error, TrainerError) else "failed"
    with contextlib.suppress(OSError):
        print(f"trainer: rank {env.rank} on {env.node}: {message}", file=sys.stderr, flush=True)
    cause = cause_of(error)
    reporter.event(
        name,
        error=message,
        exit=int(code),
        **({"cause": cause} if cause else {}),
    )
    return code


def _leave(code: Exit) -> NoReturn:
    # sys.exit would run the destructors of process groups, which wait for a lost peer or abort the
    # process.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
