"""The bundled trainer with a fault: rank 1 computes for ever in step 4 of epoch 0; there is no room
to save until the run folder has a file `room`.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import trainer.__main__
from trainer.checkpoint import save
from trainer.engine import Engine

RANK = int(os.environ["RANK"])
EPOCH = int(os.environ["ORCH_EPOCH"])
RUN = Path(os.environ["ORCH_RUN_DIR"])


def compute_for_ever() -> None:
    while True:
        pass


def main() -> None:
    update = Engine.update
    write = save.write_tensors

    def faulty_update(engine, *arguments):
        if (RANK, EPOCH, engine.optimizer.step_count) == (1, 0, 3):
            compute_for_ever()
        return update(engine, *arguments)

    def faulty_write(path, tensors):
        if "step-00000005" not in str(path) and not (RUN / "room").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, tensors)

    Engine.update = faulty_update
    save.write_tensors = faulty_write
    trainer.__main__.main([])


if __name__ == "__main__":
    main()
