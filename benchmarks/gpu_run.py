"""A run on the GPUs of this machine that is broken twice and stopped once: does it go on, with each
sample once?

    python -m benchmarks.gpu_run [--steps 1500] [--dry]

Submits a small decoder of wide layers through the command line, kills a worker twice (`orch
drill`), cancels the run, resumes it and reads its report. The run must end well, the drill must
have been noticed and got over both times, and each sample must have been trained exactly once,
beside the steps that a fault undid. Seconds and bytes are shown beside what the plan said; they are
not judged.

Writes benchmarks/results/gpu_run.json and ends with 1 if the run did not do what it must. Without
CUDA it says so and ends with 0; `--dry` does the same with a tiny model on the CPU and writes
nothing. Three minutes on one H100.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.vs_torch.harness import conditions

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu_run.json"
RUN = "gpu-run"
TRIALS = 2
#: 185 million parameters in the widths of Llama 3.2 1B: steps of 40 ms, saves of 2.6 GB.
WIDE = ["model=llama32_1b", "model.layers=2", "model.vocab=32000", "train.seq_len=2048"]
#: Seconds from fault to fault: the second one finds a checkpoint.
EVERY_S = 20.0
DRY_EVERY_S = 2.0


class Orch:
    """The command line, with a home of its own."""

    def __init__(self, home: str):
        self._environment = os.environ | {"ORCH_HOME": home}

    def __call__(self, *words: str) -> str:
        """What a verb prints. Raises CalledProcessError where it ends with anything but 0."""
        command = [sys.executable, "-m", "orchestrator.cli.main", *words]
        done = subprocess.run(
            command, env=self._environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout


def submission(gpus: int, steps: int) -> list[str]:
    """The words of the run; without GPUs those of a tiny one on the CPU."""
    job = ["cluster=h100x8", *WIDE] if gpus else ["cluster=local"]
    workers = max(gpus, 1)
    return [
        *job,
        "cluster.nodes=1",
        f"cluster.gpus_per_node={workers}",
        "backend=local",
        f"parallel=dp{workers}_zero1",
        f"train.global_batch_samples={8 * workers}",
        f"train.steps={steps}",
        "train.log_every_steps=1",
        f"checkpoint.every_steps={max(steps // 5, 1)}",
    ]


def measure(gpus: int, steps: int) -> dict[str, Any]:
    """The drill's score and the report of the whole run."""
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as home:
        orch = Orch(home)
        print(
            orch("submit", *submission(gpus, steps), "--run-id", RUN).splitlines()[-1], flush=True
        )
        every_s = EVERY_S if gpus else DRY_EVERY_S
        trials = ["--faults", "kill_worker", "--trials", str(TRIALS), "--every-s", str(every_s)]
        drill = json.loads(orch("drill", RUN, *trials, "--json"))
        orch("cancel", RUN)
        print(orch("resume", RUN, "--follow").splitlines()[-1], flush=True)
        report = json.loads(orch("report", RUN, "--json"))
    return {"drill": drill["score"][0], "report": report}


def problems(found: dict[str, Any], steps: int) -> list[str]:
    """What is not as it must be."""
    report = found["report"]
    drill = found["drill"]
    wrong = []
    if drill["recovered"] != TRIALS:
        wrong.append(f"{drill['recovered']} of {TRIALS} faults were got over: {drill['problems']}")
    if report["state"] != "done" or report["steps"]["completed"] != steps:
        wrong.append(
            f"the run ended as {report['state']} after {report['steps']['completed']} of {steps}"
            " steps"
        )
    if len(report["faults"]) < TRIALS:
        wrong.append(f"the report knows of {len(report['faults'])} faults")
    if report["samples"]["problems"]:
        wrong.append(f"samples: {report['samples']['problems']}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_run", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.dry:
        print("skipped: this machine has no CUDA device")
        return 0
    gpus = 0 if args.dry else torch.cuda.device_count()
    try:
        found = measure(gpus, args.steps)
    except subprocess.CalledProcessError as error:  # it has said why
        print(f"FAILED: orch {' '.join(error.cmd[3:])} ended with {error.returncode}")
        return 1
    wrong = problems(found, args.steps)
    report = found["report"]
    drill = found["drill"]
    row = {
        "recovered": drill["recovered"],
        "noticed_s": drill["noticed_s"]["p50"],
        "stepping_s": drill["stepping_s"]["p50"],
        "lost_steps": drill["lost_steps"]["p50"],
        "epochs": len(report["epochs"]),
        "ettr": report["goodput"]["ettr"],
        "step_s": {key: report["step_s"][key] for key in ("planned", "measured")},
        "memory": report["memory"],
    }
    print(json.dumps(row))
    print("\n".join(wrong) or "each sample once, and all faults got over")
    if not args.dry:
        device = torch.cuda.get_device_name()
        record = {
            "device": device,
            "gpus": gpus,
            **row,
            "wrong": wrong,
            "conditions": conditions(**vars(args)),
        }
        RESULT.write_text(json.dumps(record, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
