"""The files of a run folder: who writes each of them, and what it holds.

`docs/reference/files.md` is written from this list. Tests compare it with the folders of real runs.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class RunFile(NamedTuple):
    """A file of a run folder, or several of the same kind."""

    #: Path inside the run folder. `<word>` stands for a part that differs, a final `/` for
    #: everything in a folder.
    name: str
    writer: str
    form: str  # how its content is written; with the name of its schema if it has one
    meaning: str


RUN_FILES = (
    RunFile(
        "request.json",
        "submit",
        "JSON, `orch.request/1`",
        "what was requested: command, variables by name, agents, limits",
    ),
    RunFile(
        "plan.json",
        "submit; the coordinator of an elastic run",
        "JSON, `orch.plan/1`",
        "the plan in force; it is sealed by its hash",
    ),
    RunFile(
        "plan.nodes<N>.json",
        "submit",
        "JSON, `orch.plan/1`",
        "the plan of each size of an elastic run",
    ),
    RunFile(
        "plan.submitted.json",
        "the job on Slurm, a pod on Kubernetes",
        "JSON, `orch.plan/1`",
        "the plan as it was submitted, before ranks were assigned to the real nodes",
    ),
    RunFile(
        "config.yaml",
        "submit",
        "YAML",
        "the resolved configuration; values of secrets are left out",
    ),
    RunFile(
        "code.json",
        "submit",
        "JSON",
        "the commit and the uncommitted paths of the folder that was copied",
    ),
    RunFile("code/", "submit", "files", "the copy of the program's folder"),
    RunFile(
        "code.tar.gz",
        "submit",
        "gzip-compressed tar",
        "the same, packed, where nodes do not share folders",
    ),
    RunFile(
        "secret.key",
        "submit",
        "32 bytes in hexadecimal",
        "the key of the control channel; whoever reads it can speak to the run's agents",
    ),
    RunFile(
        "run.lock",
        "supervisor, agents",
        "empty",
        "held (flock) while any process of the run exists",
    ),
    RunFile(
        "state.json",
        "one at a time: backend, coordinator, backend",
        "JSON, `orch.state/1`",
        "state, epochs with their causes, nodes, restarts, exit code",
    ),
    RunFile("backend.json", "the backend", "JSON", "process ids, job ids or object names"),
    RunFile(
        "intents/<number>.json",
        "`orch cancel`, `resume`, `resize`",
        "JSON",
        "what users requested, in their order; the newest counts, and none is ever removed",
    ),
    RunFile(
        "claims/<epoch>",
        "the coordinator of an elastic run",
        "JSON",
        "the lease on an epoch: which process may write; never removed",
    ),
    RunFile(
        "coordinator.json",
        "the coordinator",
        "JSON",
        "host and port of the control channel; in elastic runs also node, epoch and heartbeats",
    ),
    RunFile("logs/rank-<rank>.log", "workers", "text", "standard output and error of a rank"),
    RunFile("logs/agent-<node>.log", "agents", "text", "what the agent of a node did"),
    RunFile("logs/supervisor.log", "the local supervisor", "text", "what it did"),
    RunFile("logs/slurm-<job>.log", "the job on Slurm", "text", "output of the job script"),
    RunFile(
        "stacks/epoch-<epoch>-rank-<rank>.txt",
        "agents",
        "text",
        "where a worker was when its run hung: its Python frames and the kernel's view",
    ),
    RunFile(
        "events/<node>.jsonl",
        "agents",
        "JSON lines",
        "what agents, coordinator and workers did: [Events](events.md)",
    ),
    RunFile(
        "metrics/<node>.jsonl",
        "agents",
        "JSON lines",
        "every step of every rank, as it was reported or printed",
    ),
    RunFile(
        "metrics.sd.json",
        "the coordinator",
        "JSON, Prometheus' file_sd",
        "addresses of the metrics pages, until the run ends",
    ),
    RunFile(
        "metrics.sd/<run>.json",
        "the coordinator of a run on Kubernetes",
        "JSON, Prometheus' file_sd",
        "as `metrics.sd.json`; on other backends it is in a folder that all runs share",
    ),
    RunFile(
        "report.json",
        "the process that writes the final state",
        "JSON, `orch.report/1`",
        "planned against measured; where the time went",
    ),
    RunFile(
        "drills.jsonl",
        "`orch drill`",
        "JSON lines",
        "every fault that was injected on purpose, and its consequence",
    ),
    RunFile(
        "checkpoints/",
        "workers",
        "`orch.checkpoint/2` of the bundled trainer; a program's own files",
        "saved states; `checkpoint.dir` may name another folder",
    ),
    RunFile(
        "pins/<name>.json",
        "rank 0 of the bundled trainer",
        "JSON",
        "facts that later starts must find unchanged: the text, that the run has saved",
    ),
    RunFile(
        "traces/rank-<rank>.json",
        "workers of the bundled trainer",
        "JSON, Chrome's trace format",
        "timeline and memory of the first steps (`metrics.trace_steps`)",
    ),
    RunFile(
        "choices/<step>/<rank>.safetensors",
        "workers of the bundled trainer",
        "safetensors",
        "which experts tokens chose, if the plan records it",
    ),
    RunFile(
        "offload/",
        "workers of the bundled trainer",
        "raw memory",
        "state on disk (`train.offload=disk`) while the run is alive",
    ),
    RunFile("slurm/job.sbatch", "submit", "bash", "the script of the job"),
    RunFile("slurm/owner", "the job on Slurm", "text", "id of the job that may write here"),
    RunFile("slurm/over", "the job on Slurm", "text", "exit code of a run that has ended"),
    RunFile(
        "slurm/faults",
        "the job on Slurm",
        "text",
        "attempts that ended with 74 or 76: job, attempt, exit code",
    ),
    RunFile("slurm/exclude", "the job on Slurm", "text", "nodes that the next attempt leaves out"),
    RunFile(
        "slurm/placement.json",
        "the job on Slurm",
        "JSON",
        "how the real placement differs from the plan, with its predicted cost",
    ),
    RunFile(
        "slurm/",
        "submit, the job on Slurm",
        "text and JSON",
        "records of single attempts and of submitit",
    ),
    RunFile(
        "kubernetes/placement.json",
        "pod 0",
        "JSON",
        "how the real placement differs from the plan, with its predicted cost",
    ),
    RunFile(
        "kubernetes/waiting/<pod>",
        "pods of an elastic run",
        "JSON",
        "the pods that are present and wait for an attempt",
    ),
    RunFile(
        "kubernetes/attempts/<name>",
        "pods of an elastic run",
        "JSON",
        "the attempts, with the pods and the plan of each",
    ),
    RunFile(
        ".<file>.<pid>.<random>.tmp",
        "whoever writes the file",
        "as the file",
        "a file of any folder that is being written; a writer that was killed leaves it behind",
    ),
)
#: Whole files are moved to their names (`run.folder.write_private`), in every folder.
_UNFINISHED = RUN_FILES[-1]


def described(path: str) -> RunFile | None:
    """Returns the description of a file, by its path in the run folder; None if it has none."""
    if _pattern(_UNFINISHED.name).fullmatch(path.rpartition("/")[2]):
        return _UNFINISHED
    return next((file for file in RUN_FILES if _pattern(file.name).fullmatch(path)), None)


def _pattern(name: str) -> re.Pattern[str]:
    pattern = "[^/]+".join(map(re.escape, re.split(r"<[^>]+>", name)))
    return re.compile(f"{pattern}.*" if name.endswith("/") else pattern)
