"""What an agent hands to a worker, and what a worker says back.

To the worker: torchrun's environment variables, so that any torchrun script runs unchanged, plus a
few of our own. From the worker: one JSON object a line on the inherited file descriptor
`ORCH_REPORT_FD`. Writes never block training: a full pipe drops the line and counts it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from .expert_load import ExpertLoad

#: The format of checkpoints that workers write.
CHECKPOINT = "orch.checkpoint/2"
#: The file of a checkpoint that describes its others.
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8})")


class WorkerEnv(Struct, frozen=True, kw_only=True):
    """A worker's identity. Read from the environment once, in the trainer's `__main__`, never
    inside layers."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int  # index of the node in the plan's node order
    master_addr: str
    master_port: int
    run_id: str
    epoch: int  # plan epoch: fencing token, grows with every restart
    node: str  # node name as the agent reported it, compared with the plan before step 0
    plan: str  # path of plan.json
    plan_hash: str
    run_dir: str
    report_fd: int | None
    store_fd: int | None = (
        None  # rank 0: a socket that listens at master_addr:master_port, for the store
    )
    nodes: int = 0  # that have ranks; 0: all have as many as this one
    max_restarts: int = 0

    def variables(self) -> dict[str, str]:
        """The environment variables of this worker (torchrun's names first)."""
        values: dict[str, object] = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nodes or self.world_size // max(self.local_world_size, 1),
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": self.epoch,
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
            "TORCHELASTIC_ERROR_FILE": Path(
                self.run_dir, "logs", f"error-{self.epoch}-{self.rank}.json"
            ),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "ORCH_RUN_ID": self.run_id,
            "ORCH_EPOCH": self.epoch,
            "ORCH_NODE": self.node,
            "ORCH_PLAN": self.plan,
            "ORCH_PLAN_HASH": self.plan_hash,
            "ORCH_RUN_DIR": self.run_dir,
        }
        if self.report_fd is not None:
            values["ORCH_REPORT_FD"] = self.report_fd
        if self.store_fd is not None:
            values["ORCH_STORE_FD"] = self.store_fd
        return {name: str(value) for name, value in values.items()}

    @classmethod
    def read(cls, env: Mapping[str, str]) -> WorkerEnv:
        """Raises ValueError naming the first missing or malformed variable."""

        def text(name: str) -> str:
            if name not in env:
                raise ValueError(
                    f"environment variable {name} is not set (workers are started by an orch agent)"
                )
            return env[name]

        def number(name: str) -> int:
            try:
                return int(text(name))
            except ValueError as error:
                raise ValueError(f"environment variable {name}: {error}") from None

        return cls(
            rank=number("RANK"),
            local_rank=number("LOCAL_RANK"),
            world_size=number("WORLD_SIZE"),
            local_world_size=number("LOCAL_WORLD_SIZE"),
            node_rank=number("GROUP_RANK"),
            master_addr=text("MASTER_ADDR"),
            master_port=number("MASTER_PORT"),
            run_id=text("ORCH_RUN_ID"),
            epoch=number("ORCH_EPOCH"),
            node=text("ORCH_NODE"),
            plan=text("ORCH_PLAN"),
            plan_hash=text("ORCH_PLAN_HASH"),
            run_dir=text("ORCH_RUN_DIR"),
            report_fd=int(env["ORCH_REPORT_FD"]) if env.get("ORCH_REPORT_FD") else None,
            store_fd=int(env["ORCH_STORE_FD"]) if env.get("ORCH_STORE_FD") else None,
        )


def checkpoint_dir(plan_dir: str, run_dir: str) -> Path:
    """Where a run's checkpoints live: the plan's `checkpoint.dir`, or the run folder's
    `checkpoints`."""
    return Path(plan_dir) if plan_dir else Path(run_dir) / "checkpoints"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every committed checkpoint, newest first. Committed means renamed, not
    verified."""
    with contextlib.suppress(FileNotFoundError):
        while True:
            folders = [
                (int(match[1]), path)
                for path in folder.iterdir()
                if (match := _STEP.fullmatch(path.name))
            ]
            checkpoints = sorted(
                ((step, path) for step, path in folders if path.is_dir()), reverse=True
            )
            if checkpoints or all(path.exists() for _, path in folders):
                return checkpoints  # else all were replaced by newer ones since they were listed: list again
    return []


#: What `orch resume --allow` allows, and the pin that it removes: see `trainer.checkpoint.pins`.
PINS = {"changed-data": "data", "fresh-start": "saved"}


def pin_file(run_dir: str | Path, pin: str) -> Path:
    """Where a run remembers what a later start must find again; `pin`: a value of `PINS`."""
    return Path(run_dir) / "pins" / f"{pin}.json"


def claims_folder(run_dir: str | Path) -> Path:
    """Where the coordinators of an elastic run claim its epochs, one file each, named by the
    number."""
    return Path(run_dir) / "claims"


def newest_claim(folder: str | Path) -> int:
    """The newest epoch that anybody has claimed, -1 for none. Whoever holds an older one must not
    write any more."""
    try:
        return max((int(name) for name in os.listdir(folder) if name.isdecimal()), default=-1)
    except FileNotFoundError:
        return -1


def trace_file(run_dir: str | Path, rank: int) -> Path:
    """A rank's timeline of the first steps (`metrics.trace_steps`), in Chrome's trace format."""
    return Path(run_dir) / "traces" / f"rank-{rank:05d}.json"


def choices_file(run_dir: str | Path, step: int, rank: int) -> Path:
    """Which experts a rank's tokens chose in a step (`job.record_choices`): safetensors,
    docs/experts.md."""
    return Path(run_dir) / "choices" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors"


def replica_dir(run_dir: str | Path, node: str) -> Path:
    """Folder of a node's in-memory replicas of a run's state. Whoever ends a run deletes it.

    Named by the run folder's path and inode, so that a later run of the same name does not find
    what a killed one left; and by the node, because several nodes of the local backend share one
    machine.
    """
    folder = Path(run_dir).resolve()
    names = (f"{folder}\0{folder.stat().st_ino}", node)
    digests = [
        hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16] for name in names
    ]
    return Path("/dev/shm") / f"orch-{os.getuid()}" / f"{folder.name}-{digests[0]}" / digests[1]


class StepReport(Struct, kw_only=True, tag_field="kind", tag="step", omit_defaults=True):
    """One rank's account of one optimizer step. Seconds, bytes, ratios."""

    rank: int
    epoch: int
    step: int  # 1-based: steps completed
    samples: int  # consumed so far, globally
    tokens: int  # of this step, globally
    step_s: float
    loss: float | None = (
        None  # mean over the global valid tokens; the same number on every rank that has it
    )
    loss_terms: dict[
        str, float
    ] = {}  # what else was added to the loss, by name, divided; not part of `loss`
    grad_norm: float | None = None  # before clipping
    lr: float | None = None
    phase_s: dict[str, float] = {}  # data, forward, backward, optimizer, comm, checkpoint
    own_s: float | None = None  # of the step, without waiting for others and without saving
    comm_bytes: dict[str, int] = {}  # sent this step, by axis
    comm_s: dict[str, float] = {}
    expert_bytes: dict[str, int] = {}  # of axis ep, by level: nvlink (inside a domain), network
    expert_s: dict[str, float] = {}  # exposed, the same
    memory_bytes: dict[str, int] = {}  # params, grads, optimizer, activations, buffers, total
    mfu: float | None = None
    hfu: float | None = None
    experts: dict[
        str, ExpertLoad
    ] = {}  # by layer; of sampled steps, from one rank of those with the same layers
    fingerprint: str = ""  # of the step's samples, over all ranks: `trainer.data.fingerprint`
    bubble_ratio: float | None = (
        None  # share of the step in which this rank waits for other pipeline stages
    )
    dropped_reports: int = 0


#: Groups of `metrics.pattern`: what can be read from the printed lines of a program that sends no
#: reports.
PRINTED = ("step", "loss", "tokens", "samples", "lr", "grad_norm")


class EventReport(Struct, kw_only=True, tag_field="kind", tag="event", omit_defaults=True):
    """Something that happened once: data_progress, ranks_checked, checkpoint_saved, resumed,
    stopping, done, failed.

    `failed` may say which `cause` it was (`orchestrator.run.state.WORKER_CAUSES`), next to its
    `error`.
    """

    rank: int
    epoch: int
    name: str
    step: int | None = None
    fields: dict[str, str | int | float | bool | None] = {}


class ProgressReport(Struct, kw_only=True, tag_field="kind", tag="pulse", omit_defaults=True):
    """What a rank does now, about twice a second. While the run makes no step, a rank whose reports
    show no advance, or have stopped, is ended and its run restarted; ranks that never sent one are
    not judged. Users' programs may send it too, so its kind keeps its name."""

    rank: int
    epoch: int
    step: int  # in progress; 0 before the first
    # start, data, forward, backward, optimizer, comm, checkpoint, or a word of the program's own
    phase: str
    waiting: str | None = None  # the collective that it waits in
    moves: int = 0  # grows with every advance


Report = StepReport | EventReport | ProgressReport
