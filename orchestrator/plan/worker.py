"""Defines the messages between an agent and its workers, and the files of a run that both use.

An agent gives a worker torchrun's environment variables, so that every torchrun script runs
unchanged, and a few of its own. A worker sends one JSON object per line on the inherited file
descriptor `ORCH_REPORT_FD`. Writes never block training: if the pipe is full, the line is dropped
and counted.
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
#: The format of the token files that workers make of a corpus.
TOKENS = "orch.tokens/2"
#: The file of a checkpoint that describes its others.
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8})")


class WorkerEnv(Struct, frozen=True, kw_only=True):
    """A worker's identity. The trainer's `__main__` reads it from the environment once; layers
    never do."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int  # index of the node in the plan's node order
    master_addr: str
    master_port: int
    run_id: str
    epoch: int  # plan epoch: fencing token, grows with every restart
    node: str  # node name that the agent reported, compared with the plan before step 0
    plan: str  # path of plan.json
    plan_hash: str
    run_dir: str
    report_fd: int | None
    #: rank 0's socket for the store, which listens at master_addr:master_port
    store_fd: int | None = None
    nodes: int = 0  # number of nodes with ranks; 0: all have as many ranks as this one
    max_restarts: int = 0

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of this worker (torchrun's names first)."""
        error_file = Path(self.run_dir, "logs", f"error-{self.epoch}-{self.rank}.json")
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
            "TORCHELASTIC_ERROR_FILE": error_file,
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
        """Reads the worker's variables. Raises ValueError with the first missing or malformed
        one."""

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

        def descriptor(name: str) -> int | None:
            return int(env[name]) if env.get(name) else None

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
            report_fd=descriptor("ORCH_REPORT_FD"),
            store_fd=descriptor("ORCH_STORE_FD"),
        )


def checkpoint_dir(plan_dir: str, run_dir: str) -> Path:
    """The folder of a run's checkpoints: the plan's `checkpoint.dir`, or `checkpoints` in the run
    folder."""
    return Path(plan_dir) if plan_dir else Path(run_dir) / "checkpoints"


def committed(folder: Path) -> list[tuple[int, Path]]:
    """Lists (step, folder) of every committed checkpoint, newest first. Committed means renamed to
    its final name, not verified."""
    with contextlib.suppress(FileNotFoundError):
        while True:
            folders = [
                (int(match[1]), path)
                for path in folder.iterdir()
                if (match := _STEP.fullmatch(path.name))
            ]
            checkpoints = sorted(
                ((step, path) for step, path in folders if path.is_dir()),
                reverse=True,
            )
            # If newer checkpoints have replaced all of them since the listing, list again.
            if checkpoints or all(path.exists() for _, path in folders):
                return checkpoints
    return []


#: Choices of `orch resume --allow` -> the pin that each removes: see `trainer.checkpoint.pins`.
PINS = {"changed-data": "data", "fresh-start": "saved"}


def pin_file(run_dir: str | Path, pin: str) -> Path:
    """The file with a fact of the run that later starts must find unchanged. `pin`: a value of
    `PINS`."""
    return Path(run_dir) / "pins" / f"{pin}.json"


def lease_folder(run_dir: str | Path) -> Path:
    """The folder of the coordinators' leases on the epochs of an elastic run. Each lease is one
    file, named by its epoch's number."""
    return Path(run_dir) / "claims"


def newest_lease(folder: str | Path) -> int:
    """The newest epoch that has a lease, or -1. The holder of an older lease must stop writing."""
    try:
        return max((int(name) for name in os.listdir(folder) if name.isdecimal()), default=-1)
    except FileNotFoundError:
        return -1


def trace_file(run_dir: str | Path, rank: int) -> Path:
    """The file of a rank's timeline of its first steps (`metrics.trace_steps`), in Chrome's trace
    format."""
    return Path(run_dir) / "traces" / f"rank-{rank:05d}.json"


def choices_file(run_dir: str | Path, step: int, rank: int) -> Path:
    """The file of the experts that a rank's tokens chose in a step (`job.record_choices`), in
    safetensors format: see docs/experts.md."""
    return Path(run_dir) / "choices" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors"


def replica_dir(run_dir: str | Path, node: str) -> Path:
    """The folder of a node's in-memory replicas of a run's state. Whoever ends a run deletes it.

    Its name contains the run folder's path and inode, so that a later run of the same name does not
    find replicas that a killed run left; and the node, because several nodes of the local backend
    share one machine.
    """
    folder = Path(run_dir).resolve()
    names = (f"{folder}\0{folder.stat().st_ino}", node)
    digests = [
        hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16] for name in names
    ]
    return Path("/dev/shm") / f"orch-{os.getuid()}" / f"{folder.name}-{digests[0]}" / digests[1]


class StepReport(Struct, kw_only=True, tag_field="kind", tag="step", omit_defaults=True):
    """The measurements of one rank in one optimizer step. Seconds, bytes, ratios."""

    rank: int
    epoch: int
    step: int  # 1-based: steps completed
    samples: int  # consumed so far, globally
    tokens: int  # of this step, globally
    step_s: float
    #: mean over the global valid tokens; equal on all ranks that have it
    loss: float | None = None
    #: further terms of the loss by name, divided in the same way; not part of `loss`
    loss_terms: dict[str, float] = {}
    grad_norm: float | None = None  # before clipping
    lr: float | None = None
    phase_s: dict[str, float] = {}  # data, forward, backward, optimizer, comm, checkpoint
    own_s: float | None = None  # seconds of the step without waits for other ranks and saves
    comm_bytes: dict[str, int] = {}  # sent this step, by axis
    comm_s: dict[str, float] = {}
    expert_bytes: dict[str, int] = {}  # of axis ep, by level: nvlink (inside a domain), network
    expert_s: dict[str, float] = {}  # exposed seconds of axis ep, by level
    #: params, grads, optimizer, activations, buffers, total; on a GPU the allocator's reserved and
    #: inactive_split
    memory_bytes: dict[str, int] = {}
    mfu: float | None = None
    hfu: float | None = None
    #: by layer; only in sampled steps, and from one of the ranks with the same layers
    experts: dict[str, ExpertLoad] = {}
    fingerprint: str = ""  # of the step's samples, over all ranks: `trainer.data.fingerprint`
    #: share of the step in which this rank waits for other pipeline stages
    bubble_ratio: float | None = None
    dropped_reports: int = 0


#: Groups of `metrics.pattern`: the numbers that can be read from the printed lines of a program
#: that sends no reports.
PRINTED = ("step", "loss", "tokens", "samples", "lr", "grad_norm")


class EventReport(Struct, kw_only=True, tag_field="kind", tag="event", omit_defaults=True):
    """A single event: data_progress, ranks_checked, checkpoint_saved, resumed, stopping, done,
    failed.

    `failed` has an `error` and may have a `cause` (`orchestrator.run.state.WORKER_CAUSES`).
    """

    rank: int
    epoch: int
    name: str
    step: int | None = None
    fields: dict[str, str | int | float | bool | None] = {}


#: Phases of the trainer that may take longer than a step.
SLOW_PHASES = ("start", "checkpoint")


class ProgressReport(Struct, kw_only=True, tag_field="kind", tag="pulse", omit_defaults=True):
    """A rank's current activity, sent about twice per second.

    While the run completes no step, a rank whose reports show no progress or have stopped is ended,
    and its run restarts; a rank that never sent such a report is not judged. Users' programs may
    send it too, so its kind "pulse" cannot change.
    """

    rank: int
    epoch: int
    step: int  # in progress; 0 before the first
    #: start, data, forward, backward, optimizer, comm, checkpoint, or the program's own word
    phase: str
    waiting: str | None = None  # the collective in which the rank waits
    moves: int = 0  # grows with every sign of progress
    #: Seconds without progress that the phase may take; None: the phase is part of a step.
    limit_s: float | None = None

    @property
    def is_pause(self) -> bool:
        """Whether the rank does something that may take longer than a step."""
        return self.limit_s is not None or self.phase in SLOW_PHASES


Report = StepReport | EventReport | ProgressReport
