"""Decides before a job is submitted whether it fits, which size starts first, and which jobs must
end before it. Pure.

The input is what Slurm's commands answered; nothing here calls them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from orchestrator.backends.base import After
from orchestrator.errors import OrchError
from orchestrator.plan.document import Frozen, Plan
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import save_seconds, used_node_count
from orchestrator.run.state import RunState
from orchestrator.style import seconds

from .options import SlurmOptions, format_time, parse_time

# ------------------------------------------------------------------------------------------ the
#     partition


def check_partition(
    plan: Plan,
    options: SlurmOptions,
    partition: Mapping[str, str],
) -> None:
    """Refuses a job that the partition's limits would keep pending for ever.

    Most sites enforce those limits late. `partition`: its fields by scontrol, empty when unknown.
    OrchError: 65 over a limit, 76 for too few nodes.
    """
    name = partition.get("PartitionName", "")
    longest_s = _limit_s(partition.get("MaxTime"))
    limit_s = parse_time(options.time) if options.time else None
    if options.time and longest_s is not None and (limit_s is None or limit_s > longest_s):
        raise OrchError(
            f"backend.options.time={options.time} is over the {format_time(longest_s)} that"
            f" partition {name} allows",
            Exit.CONFIG,
        )
    most_nodes = partition.get("MaxNodes", "")
    needed_nodes = used_node_count(plan)
    if most_nodes.isdigit() and needed_nodes > int(most_nodes):
        raise OrchError(
            f"the plan needs {needed_nodes} nodes, partition {name} allows {most_nodes} per job",
            Exit.CONFIG,
        )
    total_nodes = partition.get("TotalNodes", "")
    if total_nodes.isdigit() and needed_nodes > int(total_nodes):
        raise OrchError(
            f"the plan needs {needed_nodes} nodes, partition {name} has {total_nodes}",
            Exit.CAPACITY,
        )


def warnings(
    plan: Plan,
    options: SlurmOptions,
    partition: Mapping[str, str],
    kill_wait_s: int | None,
) -> list[str]:
    """One line for each way in which the job could end before its state is saved.

    `kill_wait_s`: seconds between SIGTERM and SIGKILL, None when unknown.
    """
    save_s = save_seconds(plan, options.checkpoint_gb_per_s)
    lines = []
    save_time = (
        f"a save takes about {save_s:.0f} s (step {plan.time.step_s:.1f} s,"
        f" {options.checkpoint_gb_per_s:g} GB/s per node)"
    )
    if save_s > options.notice_s:
        lines.append(
            f"{save_time}, the signal comes {options.notice_s} s before the time limit: raise"
            " backend.options.notice_s"
        )
    limit_s = parse_time(options.time) if options.time else _limit_s(partition.get("DefaultTime"))
    if limit_s is not None and options.notice_s >= limit_s:
        lines.append(
            f"backend.options.notice_s ({options.notice_s} s) is not shorter than the time limit"
            f" ({limit_s} s): the signal comes at once"
        )
    grace_s = partition.get("GraceTime", "")
    if partition.get("PreemptMode", "OFF") not in ("OFF", "") and grace_s.isdigit():
        if save_s > int(grace_s) + (kill_wait_s or 0):
            lines.append(
                f"{save_time}, a preempted job of partition {partition.get('PartitionName')} has"
                f" {grace_s} s: save often"
            )
        if not options.requeue:
            lines.append(
                "jobs of this partition may be preempted, and backend.options.requeue is false"
            )
    return lines


def local_folder(run_dir: str, mounts: str, exports: str = "") -> list[str]:
    """Warns of a run folder that other nodes do not see.

    Such a folder is in memory, among temporary files, or on a disk of this machine that it does
    not export. `mounts`: text of /proc/mounts. `exports`: lines that begin with a folder which
    this machine exports.
    """
    file_systems = {
        fields[1]: fields[2] for line in mounts.splitlines() if len(fields := line.split()) > 2
    }
    mount_point = max(
        (m for m in file_systems if _holds(m, run_dir)),
        key=len,
        default="/",
    )
    node_folder = next((name for name in _NODE_FOLDERS if run_dir.startswith(f"{name}/")), "")
    temporary = node_folder and not mount_point.startswith(node_folder)
    exported = any(
        _holds(fields[0], run_dir) for line in exports.splitlines() if (fields := line.split())
    )
    if not temporary and (exported or file_systems.get(mount_point) not in _LOCAL_FILE_SYSTEMS):
        return []
    return [
        f"the run folder {run_dir} seems to be visible on this machine alone, but nodes must see"
        " it: set ORCH_HOME or run.dir"
    ]


def _holds(folder: str, path: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


_NODE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
#: File systems in one machine's memory and on its disks.
_LOCAL_FILE_SYSTEMS = (
    "tmpfs",
    "ramfs",
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "zfs",
    "bcachefs",
    "overlay",
)


def _limit_s(limit: str | None) -> int | None:
    return None if limit in (None, "", "NONE", "N/A") else parse_time(limit)


# ------------------------------------------------------------------------------------------ the
#     size that starts first


class StartEstimate(Frozen):
    """The answer of `sbatch --test-only` for one size of a job."""

    nodes: int
    at: str = ""  # local ISO-8601 time, "" when Slurm gave none
    refusal: str = ""  # the reason why Slurm refuses the job, or has no nodes for it today
    code: int = 0  # exit code that belongs to the refusal

    def wait_s(self, now: datetime) -> float | None:
        """Seconds from now, 0 for a time that has passed; None when unknown."""
        if not self.at:
            return None
        return max(0.0, (datetime.fromisoformat(self.at) - now).total_seconds())

    def describe(self, now: datetime) -> str:
        """The estimate as a phrase for people."""
        wait = self.wait_s(now)
        if wait is None:
            return f"no start in sight ({self.refusal})" if self.refusal else "no start in sight"
        if wait < 60:
            return "starts at once"
        in_ = f"{wait / 60:.0f} min" if wait < 3600 else seconds(wait)
        return f"starts about {self.at.replace('T', ' ')}, in {in_}"


def choose_size(starts: Sequence[StartEstimate], now: datetime, within_s: float) -> int:
    """Index of the size to submit: the first that starts within `within_s` seconds, else the one
    that starts first.

    `starts`: one per size, largest first. Without any estimate it is the first size that Slurm does
    not refuse. OrchError, with the exit code of the first refusal, when Slurm refuses all.
    """
    waits = {
        index: wait for index, start in enumerate(starts) if (wait := start.wait_s(now)) is not None
    }
    for index, wait in waits.items():
        if wait <= within_s:
            return index
    if waits:
        return min(waits, key=lambda index: waits[index])
    for index, start in enumerate(starts):
        if not start.refusal:
            return index
    sizes = ", ".join(str(start.nodes) for start in starts)
    raise OrchError(
        f"Slurm accepts none of the sizes {sizes}: {starts[0].refusal}", Exit(starts[0].code)
    )


# ------------------------------------------------------------------------------------------
#     `--after RUN`

_DEPENDENCY_TYPE = {"ok": "afterok", "any": "afterany", "notok": "afternotok"}


def add_dependencies(
    options: Mapping[str, Any], predecessors: Sequence[tuple[After, RunState, str | None]]
) -> dict[str, Any]:
    """`backend.options` with its `dependency` extended by the jobs of `predecessors`.

    A predecessor comes with its run's true state and its job id. A run that has ended adds nothing,
    because Slurm forgets ended jobs and refuses to depend on them. OrchError (64) when its end can
    never start the new run, or when it has not been submitted.
    """
    dependencies = [str(options["dependency"])] if options.get("dependency") else []
    if any("?" in dependency for dependency in dependencies) and predecessors:
        raise OrchError(
            f"--after cannot extend backend.options.dependency={dependencies[0]}, which holds an"
            " `or` (`?`)"
        )
    for after, state, job in predecessors:
        run = after.folder.run_id
        if state.is_final:
            if after.outcome != "any" and (state.state == "done") != (after.outcome == "ok"):
                never = f"a run after {after.outcome}:{run} would never start"
                raise OrchError(f"--after: {run} has ended {state.state}: {never}", Exit.USAGE)
            continue
        if job is None:
            raise OrchError(f"--after: the script of {run} has not been submitted yet", Exit.USAGE)
        dependencies.append(f"{_DEPENDENCY_TYPE[after.outcome]}:{job}")
    return {**options, "dependency": ",".join(dependencies)} if dependencies else dict(options)


def without_dependency(options: Mapping[str, Any]) -> dict[str, Any]:
    """`backend.options` without the jobs for which the run waited before its first attempt.

    A `singleton` dependency stays.
    """
    stays = "singleton" in re.split(r"[,?]", str(options.get("dependency") or ""))
    rest = {name: value for name, value in options.items() if name != "dependency"}
    return {**rest, "dependency": "singleton"} if stays else rest
