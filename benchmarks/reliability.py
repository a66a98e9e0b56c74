"""The table of trials: every fault, every victim position, many times, under orch and under stock
torchrun.

    python benchmarks/reliability.py [--trials 20] [--systems orch,torchrun] [--faults …]
    [--positions …] [--page]

Three nodes of one rank each on this machine. The ranks are `together.py` (no torch: the figures are
the launcher's); for faults of checkpoints they are the bundled trainer with its tiny model. Under
orch the faults are those of `orch drill` in a run that goes on and on; a node that is lost comes
back as a spare. Under torchrun every trial is a new job.

Each trial is a line of benchmarks/results/reliability.jsonl as soon as it is over, and what is
there is not done again: stop it whenever you like, and start it once more. Rounds go over all rows,
so that what there is is even. `--page` writes the table into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import reliability_page  # noqa: E402
from benchmarks.torchrun_trials import torchrun_trial  # noqa: E402
from orchestrator.backends.base import get_backend  # noqa: E402
from orchestrator.drill.faults import KINDS, Injection  # noqa: E402
from orchestrator.drill.targets import LocalTargets  # noqa: E402
from orchestrator.drill.trial import DrilledRun, Trial  # noqa: E402
from orchestrator.errors import OrchError  # noqa: E402
from orchestrator.observe.goodput.ledger import ledger  # noqa: E402
from orchestrator.observe.timeline import read_events  # noqa: E402
from orchestrator.run.folder import RunFolder  # noqa: E402
from orchestrator.run.request import read_request  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "reliability.jsonl"
POSITIONS = ("rank0", "coordinator", "other")
NODES = 3
HEARTBEAT_TIMEOUT_S = 3.0
LIMIT_S = 90.0
STEP_S = 0.05
TRAINER = ("bit_flip", "disk_full")  # faults that need real checkpoints
SLOW = ("slow_worker",)  # also with the trainer, which tells its own compute time
BUDDY = (
    "kill_worker",
    "kill_node",
)  # also with the trainer, which keeps each step in the memory of two nodes
WORKERS = {
    "host": "stand-ins",
    "cable": "stand-ins",
    "trainer": "trainer",
    "buddy": "trainer, copies in memory",
}
#: seconds that a fault lasts: longer than silence is borne, and than it is from one save to the
#: next
FOR_S = {"notice": 2.0, "slow_worker": 4.0, "disk_full": 6.0}
LASTS_S = 5.0
SLOW_S = 20.0
DISK = "size=256m"  # of the trainer's checkpoints
# until a run is whole, which is not measured: a busy machine imports torch for minutes
WHOLE_S = 600.0
BACK_S = 0.2
TRAINER_BACK_S = 5.0  # after which a lost node is there again, and, with the trainer, imports torch


class OrchRun:
    """One run that takes many injections. `kind`: "host" (spares), "cable" (network namespaces),
    "trainer", "buddy"."""

    def __init__(self, home: Path, kind: str):
        self.home = home
        self.kind = kind
        self.run_id = f"{kind}-{time.strftime('%H%M%S')}-{os.getpid() % 1000}"
        self.environment = os.environ | {"ORCH_HOME": str(home), "OMP_NUM_THREADS": "1"}
        words = [
            "submit",
            "cluster=local_nodes",
            f"nodes=2..{NODES}",
            f"cluster.nodes={NODES}",
            "cluster.gpus_per_node=1",
            "train.seq_len=64",
        ]
        words += [
            "train.global_batch_samples=6",
            f"backend.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}",
        ]
        words += ["train.steps=1000000", "backend.max_restarts=100000", "checkpoint.every_steps=5"]
        back_s = TRAINER_BACK_S if kind in ("trainer", "buddy") else BACK_S
        words += [
            f"backend.options.restart_lost_nodes_after_s={back_s}",
            "backend.options.grow_after_s=0.2",
        ]
        if kind == "cable":
            words += ["backend.options.network=namespaces", "backend.options.link_gbit_per_s=1"]
        else:
            words += ["backend.options.spare_nodes=1"]
        command = ["--in-place", "--", sys.executable, str(ROOT / "benchmarks" / "together.py")]
        trains = kind in ("trainer", "buddy")
        words += [f"checkpoint.memory_every_steps={int(kind == 'buddy')}"] if trains else []
        self.disk = home / f"disk-{self.run_id}"
        if trains and mounted(self.disk):
            words += [f"checkpoint.dir={self.disk}"]
        self.orch(*words, "--run-id", self.run_id, *([] if trains else command))
        folder = RunFolder(home / "runs" / self.run_id)
        request = read_request(folder)
        self.range = DrilledRun(folder, get_backend("local"), request, LIMIT_S)
        self.targets = LocalTargets(folder, request)

    def orch(self, *words: str, check: bool = True) -> None:
        argv = [sys.executable, "-m", "orchestrator.cli.main", *words]
        subprocess.run(argv, env=self.environment, cwd=ROOT, check=check, stdout=subprocess.DEVNULL)

    def trial(self, fault: str, position: str, pick: float) -> Trial:
        """In the whole run: all seats are taken, and where there are spares one stands by."""
        end = time.monotonic() + WHOLE_S
        while not self._whole():
            if time.monotonic() > end:
                raise OrchError(f"the run did not become whole again: {self.range.state().reason}")
            time.sleep(0.05)
        if fault == "bit_flip":
            self._wait_saves(end)
        for_s = SLOW_S if self.kind == "trainer" and fault in SLOW else FOR_S.get(fault, LASTS_S)
        return self.range.run_trial(Injection(fault, position, pick), self.targets, for_s)

    def _whole(self) -> bool:
        state = self.range.state()
        if state.is_final:
            raise OrchError(f"the run has ended: {state.state}, {state.reason}")
        with_ranks = [
            node for node in state.nodes.values() if node.state == "running" and node.ranks
        ]
        spares = [
            node
            for node in state.nodes.values()
            if node.state in ("running", "joined") and not node.ranks
        ]
        if (
            state.state != "running"
            or len(with_ranks) < NODES
            or not (spares or self.kind == "cable")
        ):
            return False
        if self.kind not in ("trainer", "buddy"):
            return True
        # trials begin when all have imported torch: that is not what is measured
        marks = read_events(self.range.folder, state.nodes)
        warm = {mark.node: mark.at for mark in marks if mark.name == "workers_warm"}
        return all(
            warm.get(mark.node, 0.0) >= mark.at for mark in marks if mark.name == "agent_started"
        )

    def _wait_saves(self, end: float) -> None:
        while time.monotonic() < end:
            try:
                return self.targets.check("bit_flip")
            except OrchError:
                time.sleep(0.1)

    def witnesses(self, since: float) -> dict:
        """What else must hold: one writer an epoch, each sample once; and whether a damaged
        checkpoint was found."""
        state = self.range.state()
        marks = read_events(self.range.folder, state.nodes)
        began = Counter(mark.epoch for mark in marks if mark.name == "epoch_began")
        book = ledger(self.range.steps(state))
        return {
            "two_writers": max(began.values(), default=0) > 1,
            "samples_wrong": book.problems[:3],
            "rejected": any(
                mark.name == "checkpoint_rejected" and mark.at >= since for mark in marks
            ),
        }

    def close(self) -> None:
        self.orch("cancel", "--force", self.run_id, check=False)
        if self.disk.is_mount():
            subprocess.run(["umount", str(self.disk)], check=False)


def mounted(folder: Path) -> bool:
    """A small filesystem of its own, so that a full disk is one; False where this user may not
    mount."""
    folder.mkdir()
    return not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(folder)], check=False
    ).returncode


def kind_of(fault: str) -> str:
    return "cable" if fault == "partition" else "trainer" if fault in TRAINER else "host"


def orch_trial(
    runs: dict[str, OrchRun], home: Path, kind: str, fault: str, position: str, pick: float
) -> dict:
    """A row's next trial; a run that has failed is replaced for the one after it, one of another
    kind makes room."""
    for other in runs.keys() - {kind}:
        runs.pop(other).close()
    try:
        if kind not in runs:
            runs[kind] = OrchRun(home, kind)
        found = msgspec.to_builtins(runs[kind].trial(fault, position, pick))
        found |= runs[kind].witnesses(found["at"])
    except (OrchError, subprocess.CalledProcessError) as error:
        found = {
            "fault": fault,
            "position": position,
            "ok": False,
            "problem": str(error),
            "at": time.time(),
        }
    if not found["ok"] and kind in runs:
        runs.pop(kind).close()
    return found


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(args: argparse.Namespace) -> list[tuple[str, str, str, str]]:
    """(system, kind of run, fault, position) of everything that was asked for, those of one kind
    together."""
    faults = args.faults.split(",") if args.faults else list(KINDS)
    kinds = [
        (kind, fault)
        for kind in ("host", "cable", "trainer")
        for fault in faults
        if kind_of(fault) == kind
    ]
    kinds += [("trainer", fault) for fault in faults if fault in SLOW]
    kinds += [("buddy", fault) for fault in faults if fault in BUDDY]
    found = [
        ("orch", kind, fault, position)
        for kind, fault in kinds
        for position in args.positions.split(",")
    ]
    # torchrun has no checkpoints of its own
    found += [("torchrun", *row[1:]) for row in found if row[1] in ("host", "cable")]
    return [row for row in found if row[0] in args.systems.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--systems", default="orch,torchrun")
    parser.add_argument("--faults", default="", help=", ".join(KINDS))
    parser.add_argument("--positions", default=",".join(POSITIONS))
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="stop after this long; 0: when all are done"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="run folders go there and stay")
    parser.add_argument("--page", action="store_true", help="only write docs/reliability.md")
    args = parser.parse_args()
    if args.page:
        reliability_page.write(read(args.out), ROOT / "docs" / "reliability.md")
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    machine = f"{os.cpu_count()} CPUs {platform.machine()}, Linux {platform.release()}"
    end = time.monotonic() + args.minutes * 60 if args.minutes else float("inf")
    args.out.parent.mkdir(exist_ok=True)
    runs: dict[str, OrchRun] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: the runs end too
    with tempfile.TemporaryDirectory(
        prefix="orch-reliability-", ignore_cleanup_errors=True
    ) as temporary:
        home = str(args.keep.absolute() if args.keep else temporary)
        try:
            for number in range(args.trials):
                for system, kind, fault, position in rows(args):
                    row = {
                        "system": system,
                        "fault": fault,
                        "position": position,
                        "workers": WORKERS[kind],
                    }
                    have = sum(1 for line in read(args.out) if row.items() <= line.items())
                    if have > number or time.monotonic() > end:
                        continue
                    if system == "orch":
                        found = orch_trial(
                            runs, Path(home), kind, fault, position, (number * 0.37) % 1
                        )
                    else:
                        found = torchrun_trial(
                            Path(home), fault, position, FOR_S.get(fault, LASTS_S), LIMIT_S
                        )
                    if found is None:
                        print(
                            f"{number + 1:>3} {system:<9}{fault:<13}{position:<12}did not come to"
                            " step",
                            flush=True,
                        )
                        continue
                    found |= row
                    found |= {"commit": commit.stdout.strip(), "machine": machine}
                    found["load"] = round(os.getloadavg()[0], 1)
                    with args.out.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                    says = "goes on" if found["ok"] else f"FAILED {found['problem']}"
                    times = f"noticed {found.get('noticed_s')} steps {found.get('stepping_s')}"
                    print(
                        f"{number + 1:>3} {system:<9}{fault:<13}{position:<12}{says}  {times}",
                        flush=True,
                    )
        finally:
            for run in runs.values():
                run.close()


if __name__ == "__main__":
    main()
