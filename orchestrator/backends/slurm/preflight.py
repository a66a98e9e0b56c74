"""Before a job is sent: does it fit its partition, and does a save fit into the notice? Pure, from what Slurm says."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.errors import OrchError
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit
from orchestrator.planner.placement.rank_assignment import save_seconds, used_node_count

from .options import SlurmOptions
from .script import duration


def check_partition(plan: Plan, options: SlurmOptions, partition: Mapping[str, str]) -> None:
    """Refuse (65) what Slurm would accept and keep pending for ever: limits are enforced late on most sites."""
    name = partition.get("PartitionName", "")
    longest = _seconds(partition.get("MaxTime"))
    wanted = duration.parse(options.time) if options.time else None
    if options.time and longest is not None and (wanted is None or wanted > longest):
        most = duration.render(longest)
        raise OrchError(
            f"backend.options.time={options.time} is over the {most} that partition {name} allows", Exit.CONFIG
        )
    most_nodes, need = partition.get("MaxNodes", ""), used_node_count(plan)
    if most_nodes.isdigit() and need > int(most_nodes):
        raise OrchError(f"the plan needs {need} nodes, partition {name} allows {most_nodes} a job", Exit.CONFIG)
    have = partition.get("TotalNodes", "")
    if have.isdigit() and need > int(have):
        raise OrchError(f"the plan needs {need} nodes, partition {name} has {have}", Exit.CAPACITY)


def warnings(plan: Plan, options: SlurmOptions, partition: Mapping[str, str], kill_wait_s: int | None) -> list[str]:
    """What to know before the run starts, one line each: notices that are too short for a save, and none at all."""
    need, lines = save_seconds(plan, options.checkpoint_gb_per_s), []
    how = (
        f"a save takes about {need:.0f} s (step {plan.time.step_s:.1f} s, {options.checkpoint_gb_per_s:g} GB/s a node)"
    )
    if need > options.notice_s:
        lines.append(f"{how}, the notice before the time limit is {options.notice_s} s: raise backend.options.notice_s")
    limit = duration.parse(options.time) if options.time else _seconds(partition.get("DefaultTime"))
    if limit is not None and options.notice_s >= limit:
        lines.append(
            f"the notice ({options.notice_s} s) is not shorter than the time limit ({limit} s): it comes at once"
        )
    grace = partition.get("GraceTime", "")
    if partition.get("PreemptMode", "OFF") not in ("OFF", "") and grace.isdigit():
        if need > int(grace) + (kill_wait_s or 0):
            lines.append(
                f"{how}, a preempted job of partition {partition.get('PartitionName')} has {grace} s: save often"
            )
        if not options.requeue:
            lines.append("jobs of this partition may be preempted, and backend.options.requeue is false")
    return lines


def _seconds(text: str | None) -> int | None:
    if text in (None, "", "NONE", "N/A"):
        return None
    return duration.parse(text)
