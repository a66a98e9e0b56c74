"""Trains the small jobs of `cases` with `python -m trainer` itself, and has `python -m
tests.independent.oracle` judge what they have written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct

from orchestrator.errors import OrchError, how_to_install
from orchestrator.plan import Exit, Plan, to_json
from orchestrator.plan.worker import WorkerEnv
from orchestrator.run.store_socket import StoreSocket
from orchestrator.verify.run_cells import last_line

from .cases import RESUME_AT, Case, Refusal

#: The folder from which `tests` is imported.
ROOT = Path(__file__).resolve().parents[2]


class Bound(Struct, frozen=True):
    """The worst case of one quantity, relative to its size."""

    error: float
    bound: float
    where: str


class Verdict(Struct, kw_only=True):
    """The verdict of one case."""

    name: str
    precision: str
    refused: str = ""  # why the layout is not run
    failed: str = ""  # one line, if a rank ended with another code than 0
    problems: list[str] = []  # without a size
    worst: dict[str, Bound] = {}  # by quantity
    steps: int = 0
    skipped: int = 0  # steps that overflowed in fp16
    seconds: float = 0.0  # of the judge

    @property
    def equal(self) -> bool:
        inside = all(bound.error <= bound.bound for bound in self.worst.values())
        return bool(self.worst) and inside and not (self.problems or self.failed or self.refused)

    @property
    def word(self) -> str:
        if self.refused:
            return "refused"
        if self.failed:
            return "failed"
        return "equal" if self.equal else "DIFFERENT"


def check_installed() -> None:
    """Raises OrchError if a package that the oracle needs is missing."""
    if find_spec("transformers") is None:
        raise OrchError(
            f"the independent oracle needs transformers: {how_to_install('transformers')}",
            Exit.USAGE,
        )


# ----------------------------------------------------------------------------------------------
#     running and judging


@contextmanager
def _program(module: str, errors: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts a Python program that answers each line with a line; it ends with the block."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str], errors: Path) -> Any:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise OrchError(f"{errors.stem} stopped: {last_line(errors)}", Exit.INTERNAL)
    return json.loads(line)


def judged(cases: Sequence[Case | Refusal], home: Path) -> Iterator[Verdict]:
    """Runs every case and yields its verdict. The judge works on a case while the next one runs."""
    waiting: list[Case] = []
    ranks_errors = home / "ranks.stderr"
    judge_errors = home / "judge.stderr"
    with (
        _program("tests.independent.start_ranks", ranks_errors) as ranks,
        _program("tests.independent.oracle", judge_errors) as judge,
    ):
        for number, case in enumerate(cases):
            if isinstance(case, Refusal):
                yield Verdict(name=case.name, precision=case.precision, refused=case.reason)
                continue
            folder = home / f"case-{number}"
            folders = write_runs(case, folder)
            if case.start == "harsh":
                scale, good_steps = case.scale
                request = {"verb": "prepare", "run": str(folders[0])}
                _send(judge, request | {"loss_scale": scale, "good": good_steps})
                if waiting:
                    yield read_answer(waiting.pop(0), _answer(judge, judge_errors))
                _answer(judge, judge_errors)
            failed = _run(case, folders, ranks, ranks_errors)
            if failed:
                yield Verdict(name=case.name, precision=case.precision, failed=failed)
                continue
            runs = [str(run) for run in folders]
            _send(judge, {"verb": "judge", "start": case.start, "runs": runs})
            if waiting:
                yield read_answer(waiting.pop(0), _answer(judge, judge_errors))
            waiting.append(case)
        while waiting:
            yield read_answer(waiting.pop(0), _answer(judge, judge_errors))


def read_answer(case: Case, answer: dict[str, Any]) -> Verdict:
    """Returns the verdict in the judge's answer."""
    worst = {quantity: Bound(**bound) for quantity, bound in answer.pop("worst").items()}
    return Verdict(name=case.name, precision=case.precision, worst=worst, **answer)


def write_runs(case: Case, folder: Path) -> tuple[Path, Path]:
    """Creates the folders of both runs, each with its plan."""
    folders = folder / "begun", folder / "resumed"
    for run, plan in zip(folders, case.plans, strict=True):
        run.mkdir(parents=True)
        (run / "plan.json").write_bytes(to_json(plan))
    return folders


def hand_over(begun: Path, resumed: Path) -> str:
    """Copies the first run's checkpoint of step `RESUME_AT` to the second run. Returns why that is
    not possible, or ""."""
    name = f"checkpoints/step-{RESUME_AT:08d}"
    if not (begun / name).is_dir():
        return f"{begun.name}: step {RESUME_AT} was not saved"
    shutil.copytree(begun / name, resumed / name)
    return ""


def _run(case: Case, folders: tuple[Path, Path], ranks: subprocess.Popen[str], errors: Path) -> str:
    """Runs both runs of a case. Returns why it has failed, or ""."""
    for number, (run, plan) in enumerate(zip(folders, case.plans, strict=True)):
        if number and (missing := hand_over(*folders)):
            return missing
        with StoreSocket("127.0.0.1", listens=False) as store:
            _send(ranks, job_of(plan, run, store.port))
            codes = _answer(ranks, errors)
        failed_rank = next((rank for rank, code in enumerate(codes) if code), None)
        if failed_rank is not None:
            log_lines = (
                (run / f"rank-{failed_rank:05d}.log")
                .read_text(errors="replace")
                .strip()
                .splitlines()
            )
            last_words = log_lines[-1] if log_lines else "its log is empty"
            return f"{run.name}: rank {failed_rank} ended with {codes[failed_rank]}: {last_words}"
    return ""


def job_of(plan: Plan, run: Path, port: int) -> dict[str, Any]:
    """Returns the job for `start_ranks`. `port` is that of rank 0's store."""
    ranks = []
    for placement in plan.ranks:
        env = WorkerEnv(
            rank=placement.rank,
            local_rank=placement.gpu,
            world_size=plan.parallel.world_size,
            local_world_size=plan.cluster.gpus_per_node,
            node_rank=plan.cluster.node_names.index(placement.node),
            master_addr="127.0.0.1",
            master_port=port,
            run_id="independent",
            epoch=0,
            node=placement.node,
            plan=str(run / "plan.json"),
            plan_hash=plan.hash,
            run_dir=str(run),
            report_fd=None,
        )
        name = f"rank-{placement.rank:05d}"
        files = {"log": str(run / f"{name}.log"), "reports": str(run / f"{name}.jsonl")}
        ranks.append({"environment": env.variables(), **files})
    return {"plan": str(run / "plan.json"), "ranks": ranks}
