"""The numbers that `benchmarks.guard` guards, each with its canary: fixed work of the same kind, of
nothing of ours.

A canary and a number's work take turns, so that a slower or a busier machine meets both alike: what
is compared is how many canaries a number costs. Work of the processor alone is measured in its
seconds (user and system, of a process and all that it has started and waited for), and what waits
for disks and other processes in seconds of the clock.
"""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from benchmarks.recovery import Trial
from benchmarks.search import ORCH, ROOT, cpu_seconds

Work = Callable[[], float]  # does it once, and says how many seconds that took


class Turn(NamedTuple):
    """Seconds of a number's work, and the mean of those of the canaries right before and after
    it."""

    work: float
    canary: float

    @property
    def ratio(self) -> float:
        return self.work / self.canary


def in_turns(work: Work, canary: Work, rounds: int) -> list[Turn]:
    canary()  # the first start of anything finds no byte code
    turns = []
    before = canary()
    for _ in range(rounds):
        seconds = work()
        after = canary()
        turns.append(Turn(seconds, (before + after) / 2))
        before = after
    return turns


@dataclass(frozen=True)
class Number:
    """`measure(rounds)` gives the turns of one measurement."""

    what: str
    canary: str
    rounds: int
    measure: Callable[[int], list[Turn]]


# ------------------------------------------------------------------------------------------
#     commands, in processor time

PYTHON = [sys.executable, "-c", "pass"]
#: Objects, dictionaries, floats and modules of the standard library: what a plan and a search are
#: made of.
PLAIN = [
    sys.executable,
    "-c",
    """
import argparse, asyncio, dataclasses, decimal, email.message, http.client, json, logging, typing, unittest

@dataclasses.dataclass(frozen=True)
class Layout:
    tp: int
    pp: int

    @property
    def size(self):
        return self.tp * self.pp

seen = {}
for turn in range(4):
    for tp in range(1, 160):
        for pp in range(1, 160):
            layout = Layout(tp, pp)
            seen[tp, pp] = seen.get((pp, tp), 0.5) * 0.5 + max(layout.size / (tp + pp), 1.0)
best = sorted(seen.items(), key=lambda item: item[1])[:100]
json.dumps([f"tp{tp}_pp{pp}: {value:.3f}" for (tp, pp), value in best])
""",
]


def of_command(command: list[str], canary: list[str], rounds: int) -> list[Turn]:
    """Processor time, with the configuration composed before and without a plan in the cache."""
    with tempfile.TemporaryDirectory() as cache:

        def work() -> float:
            shutil.rmtree(Path(cache, "orch", "plan"), ignore_errors=True)
            return cpu_seconds(command, cache)

        work()  # composes its configuration
        return in_turns(work, lambda: cpu_seconds(canary, cache), rounds)


PLAIN_CANARY = "a process of plain Python work, processor time"


def command(what: str, *words: str) -> Number:
    return Number(what, PLAIN_CANARY, 7, partial(of_command, [ORCH, *words], PLAIN))


def search(what: str, cluster: str, model: str) -> Number:
    return command(
        f"orch plan, parallel=auto, {what}",
        "plan",
        f"+cluster={cluster}",
        f"model={model}",
        "parallel=auto",
    )


def of_help(rounds: int) -> list[Turn]:
    return of_command([ORCH, "--help"], PYTHON, rounds)


ROWS = 1000


def of_predict(rounds: int) -> list[Turn]:
    """Rows of tests/planner/strangers.csv, again and again with other batches."""
    with (ROOT / "tests" / "planner" / "strangers.csv").open(newline="") as file:
        known = [row for row in csv.DictReader(file) if row["global_batch"]]
    rows = []
    for at in range(ROWS):
        row = dict(known[at % len(known)])
        row["id"] = f"row-{at}"
        row["global_batch"] = str(int(row["global_batch"]) * (1 + at // len(known)))
        rows.append(row)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "rows.csv")
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return of_command([ORCH, "predict", "--table", str(table)], PLAIN, rounds)


# ------------------------------------------------------------------------------------------ the
#     trainer, in one process


def of_rank(measure: Callable[..., list[Turn]], *args: object) -> list[Turn]:
    """In a rank of its own, of one thread: it takes the models and torch's memory away with it."""
    from trainer.verify.ranks import run_ranks

    def rank(index: int) -> list[Turn]:
        import torch

        torch.set_num_threads(1)
        return measure(*args)

    return [Turn(*turn) for turn in run_ranks(rank, 1)[0]]


def of_steps(model: str, rounds: int) -> list[Turn]:
    import torch

    from benchmarks.vs_torch.common import Batches, Ours
    from orchestrator import api as orch

    plan = orch.plan(f"model={model}", "cluster.nodes=1", "cluster.gpus_per_node=1", "parallel=ddp")
    step = Ours(plan, 0, Batches(plan, 0))
    step()
    tokens = torch.randn(512, plan.model.hidden)
    up = torch.randn(plan.model.hidden, plan.model.ffn_hidden, requires_grad=True)
    down = torch.randn(plan.model.ffn_hidden, plan.model.hidden, requires_grad=True)

    def products() -> None:
        for _ in range(30):
            (torch.tanh(tokens @ up) @ down).sum().backward()

    return in_turns(lambda: processor_seconds(step), lambda: processor_seconds(products), rounds)


def processor_seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


STATE_MIB = 96
MEMORY = Path("/dev/shm")  # of Linux


def of_checkpoint(load: bool, rounds: int) -> list[Turn]:
    """Saved at once, read back and durable; or the newest one verified and read into tensors.

    Processor time, in memory where there is enough: seconds of a disk differ by half from one save
    to the next.
    """
    import torch

    from tests.beds.plans import make_plan
    from tests.trainer.states import KINDS, Recorder
    from trainer.checkpoint.fence import Fence
    from trainer.checkpoint.format import StatePiece
    from trainer.checkpoint.manager import Checkpoints
    from trainer.parallel.params import whole

    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 20 * STATE_MIB * 2**20
    with tempfile.TemporaryDirectory(prefix="orch-guard-", dir=MEMORY if roomy else None) as home:
        shape = (STATE_MIB * 2**20 // (4 * 1024 * len(KINDS)), 1024)
        pieces = [
            StatePiece(kind, whole("w", shape), 0, torch.randn(shape).flatten()) for kind in KINDS
        ]
        data = torch.cat([piece.data for piece in pieces]).numpy()
        steps = count(1)
        files = count()

        def opened() -> Checkpoints:
            manager = Checkpoints(Path(home, "orch"), make_plan(), Fence("guard", 0), 0, Recorder())
            manager.resume(lambda: pieces)
            return manager

        run = opened()

        def save() -> None:
            run.save(pieces, next(steps), 0)

        def write() -> Path:
            path = Path(home, str(next(files)))
            with path.open("wb") as file:
                file.write(data)
                hashlib.sha256(data).digest()
                os.fsync(file.fileno())
            return path

        def read(path: Path) -> None:
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256").digest()
            path.read_bytes()

        def write_and_read() -> None:
            path = write()
            read(path)
            path.unlink()

        save()
        written = write()
        work = opened if load else save
        canary = partial(read, written) if load else write_and_read
        return in_turns(lambda: processor_seconds(work), lambda: processor_seconds(canary), rounds)


# -------------------------------------------------------------------------------- runs of three
#     nodes, in clock seconds

#: What of a start and of a restart a busier machine does not stretch, so that a canary with it
#: grows as they do: found from runs at load averages of 7 and 11.
START_WAIT_S = 0.8
RESTART_WAIT_S = 0.18
#: `tree.py SECONDS [DEPTH]`: three processes that start one each, DEPTH deep, after a wait of so
#: many seconds.
TREE = """
import subprocess, sys, time
import json, threading
seconds, depth = float(sys.argv[1]), int(sys.argv[2])
grown = [[sys.executable, __file__, "0", str(depth - 1)]] * (3 if seconds else 1) * (depth > 0)
time.sleep(seconds)
grown = [subprocess.Popen(words) for words in grown]
sys.exit(max([one.wait() for one in grown], default=0))
"""


def tree(home: Path, seconds: float, depth: int) -> float:
    path = home / "tree.py"
    path.write_text(TREE)
    start = time.perf_counter()
    subprocess.run([sys.executable, str(path), str(seconds), str(depth)], check=True)
    return time.perf_counter() - start


def started(home: Path, name: str) -> tuple[Trial, float]:
    """A run of three nodes on this machine, a stand-in worker on each; from the call of submit to
    its first step."""
    began = time.time()
    trial = Trial(home, name, trainer=False)
    steps = trial.wait(lambda: [line["at"] for line in trial.lines("metrics")], "the first step")
    return trial, min(steps) - began


def of_submit(rounds: int) -> list[Turn]:
    with tempfile.TemporaryDirectory(prefix="orch-guard-") as folder:
        names = (f"guard-{at}" for at in count())

        def work() -> float:
            name = next(names)
            trial, seconds = started(Path(folder), name)
            trial.end(name)
            return seconds

        return in_turns(work, lambda: tree(Path(folder), START_WAIT_S, 4), rounds)


def stepping_again(trial: Trial) -> float:
    return trial.run("kill_worker")["stepping_s"]


KILLS = 3  # of a run: so many restarts Trial allows


def of_kills(rounds: int) -> list[Turn]:
    """From the kill of a worker to the first step of the next epoch."""
    with tempfile.TemporaryDirectory(prefix="orch-guard-") as folder:
        home = Path(folder)
        turns: list[Turn] = []
        while len(turns) < rounds:
            name = f"guard-{len(turns)}"
            trial, _ = started(home, name)
            turns += in_turns(
                partial(stepping_again, trial), lambda: tree(home, RESTART_WAIT_S, 1), KILLS
            )
            trial.end(name)
        return turns[:rounds]


PRODUCTS = "products of matrices and their gradients, processor time"
FILES = "a file written, hashed, flushed and read, processor time"
PROCESSES = "a tree of processes and a wait, seconds of the clock"
NUMBERS = {
    "help": Number("orch --help", "start of a bare Python, processor time", 25, of_help),
    "plan": command(
        "orch plan of the main line", "plan", "+cluster=h100x64", "parallel=tp8_pp4_zero1"
    ),
    "search_64": search("8B on 64 GPUs", "h100x64", "llama3_8b"),
    "search_1024": search("70B on 1,024 GPUs", "h100x1024", "llama3_70b"),
    "search_16384": search("405B on 16,384 GPUs", "h100x16384", "llama3_405b"),
    "predict": Number(f"orch predict, {ROWS:,} rows", PLAIN_CANARY, 7, of_predict),
    "step_tiny": Number("a step of model=tiny", PRODUCTS, 15, partial(of_rank, of_steps, "tiny")),
    "step_tiny_moe": Number(
        "a step of model=tiny_moe", PRODUCTS, 15, partial(of_rank, of_steps, "tiny_moe")
    ),
    "save": Number(f"a save of {STATE_MIB} MiB", FILES, 9, partial(of_rank, of_checkpoint, False)),
    "load": Number(f"a load of {STATE_MIB} MiB", FILES, 9, partial(of_rank, of_checkpoint, True)),
    "submit": Number("orch submit to the first step", PROCESSES, 7, of_submit),
    "killed_worker": Number("a worker's kill to the next step", PROCESSES, 12, of_kills),
}
