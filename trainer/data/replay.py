"""`python -m trainer.data.replay PLAN`: reads the data of steps a second time. `orch verify --data`
starts it.

stdin has one JSON object per line, `TrainedStep`; stdout gets one `Replayed` per line. The order of
samples is the same for every layout (`trainer.data.order`), so one process can read the samples of
all ranks of any epoch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from orchestrator.plan import Exit, PlanError, from_json
from trainer.data.build import open_tokens
from trainer.data.fingerprint import as_text, fingerprint
from trainer.data.order import SampleOrder
from trainer.errors import DataError, exit_code


class TrainedStep(Struct, frozen=True):
    """A step that took the indices `first` to `last` - 1 of the data order."""

    step: int
    first: int
    last: int


class Replayed(Struct, frozen=True):
    """The fingerprint of the step's samples, or why they cannot be read."""

    step: int
    fingerprint: str = ""
    problem: str = ""


def main(plan_file: str) -> int:
    """Runs the program; an error is one line on stderr and the exit code of the contract."""
    try:
        job = from_json(Path(plan_file).read_bytes()).job
        store = open_tokens(job.data)
        if not store.samples(job.train.seq_len):
            raise DataError(
                f"the corpus has {store.index.tokens} tokens, one sample needs"
                f" {job.train.seq_len + 1}"
            )
    except (DataError, PlanError, OSError) as error:
        print(f"trainer.data.replay: {error}", file=sys.stderr)
        return exit_code(error)
    order = SampleOrder(store.samples(job.train.seq_len), job.data.seed)
    for line in sys.stdin.buffer:
        step = msgspec.json.decode(line, type=TrainedStep)
        sample_range = range(step.first, step.last)
        try:
            windows = (store.window(order(sample), job.train.seq_len) for sample in sample_range)
            total = sum(
                fingerprint([sample], [window])
                for sample, window in zip(sample_range, windows, strict=True)
            )
            replayed = Replayed(step.step, as_text(total))
        except DataError as error:
            replayed = Replayed(step.step, problem=str(error))
        sys.stdout.buffer.write(msgspec.json.encode(replayed) + b"\n")
    sys.stdout.flush()
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
