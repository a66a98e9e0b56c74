"""`orch report [run]`: compares the measurements of a run with its plan, and draws the memory of
its first steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.observe.expert_loads import Loads
    from orchestrator.observe.rank_trace import Timeline
    from orchestrator.plan import Plan
    from orchestrator.run.folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        help="handle, id, or the beginning of one (default: the newest run)",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="show the memory of this rank (default: the one with the most planned memory)",
    )
    parser.add_argument(
        "--experts",
        metavar="FILE",
        type=Path,
        help="draw the load of each expert over the steps (.png, .svg or .html)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw the memory over time (.png, .svg or .html)",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.api import Run
    from orchestrator.observe.expert_loads import loads_of

    for name, path in (("--plot", args.plot), ("--experts", args.experts)):
        if path:
            from orchestrator.observe.plots.plan_picture import ending

            ending(path, name)  # refuses a wrong file name before the work
    job = Run.find(args.run)
    plan = job.plan()
    folder = job.folder
    lines = job.steps()
    report = job.report(lines)
    loads = loads_of(lines)
    if args.experts:
        _plot_experts(args.experts, folder.run_id, plan, loads)
    _add_drift(report, plan, folder.run_id)
    timeline = _timeline(
        folder,
        plan,
        args.rank,
        needed=args.rank is not None or args.plot is not None,
    )
    if args.plot and timeline is not None:
        _plot(args.plot, folder.run_id, plan, timeline)
    if args.json:
        _print_json(report, plan, timeline)
    else:
        from orchestrator.cli.terminal import style
        from orchestrator.observe.pages.report_page import render

        print(render(report, plan, style(), timeline, loads))
    return Exit.DONE


def _add_drift(report: dict[str, Any], plan: Plan, run_id: str) -> None:
    """Adds the causes of the difference between the measured and the predicted step, if that is
    more than one standard deviation."""
    step = report["step_s"]
    if step.get("z") is None or abs(step["z"]) <= 1.0:
        return
    from orchestrator.accuracy.calibrate.drift import drift

    difference = drift(plan, step["measured"])
    step["attribution"] = [cause._asdict() for cause in difference.attribution]
    step["drift"] = [
        f"{cause.text} ({cause.share:.0%} of the difference)" for cause in difference.attribution
    ]
    step["drift"].append(f"orch calibrate --from {run_id} corrects the predictions")


def _timeline(
    folder: RunFolder,
    plan: Plan,
    rank: int | None,
    needed: bool,
) -> Timeline | None:
    """Returns the recorded memory of the requested rank; by default that of the rank with the most
    planned memory if it was recorded, else of the first recorded one."""
    from orchestrator.observe.rank_trace import read_timeline, recorded_ranks
    from orchestrator.plan.worker import trace_file

    if rank is not None and not 0 <= rank < len(plan.ranks):
        raise OrchError(
            f"run {folder.run_id} has no rank {rank}: 0 to {len(plan.ranks) - 1}", Exit.USAGE
        )
    traced_ranks = recorded_ranks(trace_file(folder.path, 0).parent)
    if rank is None:
        if not traced_ranks and not needed:
            return None
        rank = (
            plan.memory.worst_rank
            if plan.memory.worst_rank in traced_ranks or not traced_ranks
            else traced_ranks[0]
        )
    return read_timeline(trace_file(folder.path, rank), rank)


def _print_json(report: dict, plan: Plan, timeline: Timeline | None) -> None:
    from orchestrator.cli.terminal import print_json
    from orchestrator.observe.pages.report_page import formulas

    document = {**report, "formulas": formulas(report, plan)}
    if timeline is not None:
        steps = [
            {
                "name": step.name,
                "seconds": step.end - step.start,
                "peak": timeline.peak(step),
            }
            for step in timeline.steps
        ]
        memory = [{"at": sample.at, **sample.bytes} for sample in timeline.memory]
        document["timeline"] = {
            "rank": timeline.rank,
            "steps": steps,
            "memory": memory,
        }
    print_json(document)


def _plot(path: Path, run_id: str, plan: Plan, timeline: Timeline) -> None:
    from orchestrator.observe.plots.memory_picture import figure
    from orchestrator.observe.plots.plan_picture import write

    title = f"{plan.model.name or 'program'} on {plan.cluster.name}: {run_id}"
    notes = [
        f"{step.name}: peak {sum(timeline.peak(step).values()):,} bytes" for step in timeline.steps
    ]
    write(figure(timeline, title), path, title, notes)


def _plot_experts(path: Path, run_id: str, plan: Plan, loads: Loads) -> None:
    from orchestrator.observe.plots.expert_picture import figure
    from orchestrator.observe.plots.plan_picture import write

    if not loads:
        reason = (
            "its model has no experts"
            if plan.model.moe is None
            else "no step was sampled yet (train.log_every_steps)"
        )
        raise OrchError(f"--experts {path}: run {run_id} has no expert loads: {reason}", Exit.USAGE)
    title = f"load by expert: {run_id}"
    notes = [f"layer {layer}: {len(steps)} steps" for layer, steps in loads.items()]
    write(figure(loads, title), path, title, notes, "--experts")
