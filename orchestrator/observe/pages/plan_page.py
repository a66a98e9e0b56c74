"""Renders a plan as a page: job, placement of the ranks, memory, time of a step, warnings.

`render(plan, style)` is pure text; colour and width come from the caller. The page works at 80
columns and without colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.observe.colours import CATEGORY, COMMUNICATION, COMPUTE, IDLE
from orchestrator.observe.pages.placement_grid import grid
from orchestrator.plan import AXES, Plan, batch
from orchestrator.plan.document import AxisPlacement, Certificate
from orchestrator.plan.expert_mesh import axes, expert_mesh
from orchestrator.plan.interval import plus_minus
from orchestrator.style import (
    GREEN,
    RED,
    YELLOW,
    Style,
    fold,
    percent,
    seconds,
    si,
    three,
)

if TYPE_CHECKING:
    from orchestrator.planner.explain import Explanation

GIB = 1 << 30
CATEGORIES = ("params", "grads", "optimizer", "activations", "buffers")
MEANING = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "pipeline",
    "dp": "data parallel",
}


def render(plan: Plan, style: Style | None = None) -> str:
    """The page, without a final newline."""
    style = style or Style()
    if plan.program:
        sections = [_program_header(plan, style), _placement(plan, style)]
    else:
        sections = [
            _header(plan, style),
            _placement(plan, style),
            _memory(plan, style),
            _time(plan, style),
        ]
    if plan.warnings:
        sections.append(_warnings(plan, style))
    return "\n\n".join(sections)


def _program_header(plan: Plan, style: Style) -> str:
    par = plan.parallel
    moving = _moving(plan)
    ranks = f"{par.world_size}: {_degrees(plan) or 'one process'}"
    if par.zero:
        ranks += f"  zero={par.zero}"
    if len(moving) > 1:
        ranks += f"  (nesting {' < '.join(moving)})"
    rows = [
        ("cluster", _cluster(plan)),
        ("ranks", ranks),
        ("plan", plan.hash[:16]),
    ]
    return _rows("Plan of a program", rows, style)


def _cluster(plan: Plan) -> str:
    cluster = plan.cluster
    spare = len(cluster.node_names) - -(-plan.parallel.world_size // cluster.gpus_per_node)
    nodes = (
        f"{cluster.name}: {len(cluster.node_names)} nodes x {cluster.gpus_per_node}"
        f" {cluster.gpu.name}"
    )
    return nodes + (f", {spare} of them spare" if spare else "")


def _degrees(plan: Plan) -> str:
    return "  ".join(
        f"{axis}={getattr(plan.parallel, axis)}"
        for axis in AXES
        if getattr(plan.parallel, axis) > 1
    )


def _header(plan: Plan, style: Style) -> str:
    rows = [
        ("model", _model(plan)),
        ("cluster", _cluster(plan)),
        *_links(plan),
        ("parallel", _layout(plan)),
        ("batch", _batch(plan)),
        ("train", _training(plan)),
        ("plan", plan.hash[:16]),
    ]
    return _rows("Plan", rows, style)


def _model(plan: Plan) -> str:
    model = plan.model
    shape = f"{model.layers} layers, hidden {model.hidden}"
    return f"{model.name}, {si(model.parameters)} parameters, {shape}"


def _links(plan: Plan) -> list[tuple[str, str]]:
    measured = plan.cluster.measured
    if not measured:
        return []
    return [("links", f"{measured.source} (cluster.measured=false: as described)")]


def _layout(plan: Plan) -> str:
    par = plan.parallel
    options = [f"zero={par.zero}"]
    if par.vpp > 1:
        options.append(f"vpp={par.vpp}")
    if par.sp:
        options.append("sp")
    if axes(par) != ("ep",):
        mesh = expert_mesh(par)
        options.append(f"experts etp={mesh.etp} ep={mesh.ep} edp={mesh.edp}")
    if par.expert_all_to_all == "hierarchical":
        options.append("all-to-all by domain")
    degrees = _degrees(plan) or "one GPU"
    nesting = " < ".join(_moving(plan))
    return f"{degrees}  {'  '.join(options)}  ({par.schedule}, nesting {nesting})"


def _batch(plan: Plan) -> str:
    par = plan.parallel
    size = f"{par.global_batch_samples} samples = {si(par.global_batch_tokens)} tokens per step"
    return f"{size}: {_shares(plan)}, sequences of {plan.job.train.seq_len}"


def _training(plan: Plan) -> str:
    train = plan.job.train
    tokens = si(train.steps * plan.parallel.global_batch_tokens)
    precision = f"{train.precision}, gradients {train.grad_dtype}, recompute {train.recompute}"
    duration = _days(train.steps * plan.time.step_s)
    return f"{precision}, {train.steps} steps = {tokens} tokens in {duration}"


def _rows(title: str, rows: Sequence[tuple[str, str]], style: Style) -> str:
    return "\n".join([style.title(title), *style.rows(rows, 11)])


def _shares(plan: Plan) -> str:
    par = plan.parallel
    replicas = par.dp * par.ep
    if not par.replica_micro_batches:
        return f"{par.micro_batches} micro-batches of {par.micro_batch_size} x {replicas} replicas"
    shares = f"{batch.describe(par)} of {par.micro_batch_size} on {replicas} replicas"
    return f"{shares}, which are idle for {batch.idle(par):.1%} of the time"


def _moving(plan: Plan) -> list[str]:
    return [axis for axis in plan.parallel.order if getattr(plan.parallel, axis) > 1] or ["-"]


def _days(value: float) -> str:
    return seconds(value) if value < 48 * 3600 else f"{value / 86400:,.0f} days"


def _placement(plan: Plan, style: Style) -> str:
    lines = [style.title("Placement"), *grid(plan, style), ""]
    for axis in _placed_axes(plan):
        line = f"{axis} {MEANING[axis]}: {_groups(plan, axis)}"
        if not plan.program:
            line += f"; {_traffic(plan.placement[axis])}"
        first, *continuation = style.fold(line, 3)
        lines.append(style.paint(axis, bold=True) + first.removeprefix(axis))
        lines += continuation
    if plan.parallel.world_size == 1:
        lines.append("one rank: nothing to communicate")
    elif plan.certificate:
        lines += style.fold(_certificate(plan.certificate))
    return "\n".join(lines)


def _placed_axes(plan: Plan) -> list[str]:
    """The axes that communicate: also ep if experts fold over other axes."""
    if plan.parallel.world_size == 1:
        return []
    axes = _moving(plan)
    has_experts = not plan.program and expert_mesh(plan.parallel).ep > 1
    return [*axes, "ep"] if has_experts and plan.parallel.ep == 1 else axes


def _groups(plan: Plan, axis: str) -> str:
    count = len(plan.groups[axis])
    size = getattr(plan.parallel, axis)
    if axis == "ep" and not plan.program:
        size = expert_mesh(plan.parallel).ep
        count = plan.parallel.world_size // size
    level = plan.placement[axis].worst_level
    return f"{count} group{'s' * (count > 1)} of {size}, within {level}"


def _traffic(placement: AxisPlacement) -> str:
    """Bytes that the busiest rank sends on each level."""
    sizes = [(si(size, "B"), level) for level, size in placement.bytes_per_step_by_level.items()]
    if not sizes:
        return "nothing per step and rank"
    (first_size, first_level), *further_sizes = sizes
    first = f"{first_size} per step and rank on {first_level}"
    return ", ".join([first, *(f"{size} on {level}" for size, level in further_sizes)])


def _certificate(certificate: Certificate) -> str:
    margin = "faster"
    if not certificate.exact:
        margin = f"more than {max(certificate.gap, 0.001):.1%} faster"
    return f"no other placement of these degrees on these nodes is {margin}"


def _memory(plan: Plan, style: Style) -> str:
    memory = plan.memory
    cells = max(10, min(40, style.width - 40))
    coord = plan.ranks[memory.worst_rank].coord
    unit, scale = ("GiB", 1 << 30) if memory.total >= 1 << 30 else ("MiB", 1 << 20)
    stage = f", pipeline stage {coord.pp}" if plan.parallel.pp > 1 else ""
    lines = [style.title(f"Memory of the fullest rank ({memory.worst_rank}{stage}), {unit}")]
    for name in CATEGORIES:
        size = getattr(memory, name)
        bar = style.bar(size / memory.capacity, cells, CATEGORY[name])
        lines.append(
            f"{name:<12} {three(size / scale):>8}  {bar} {percent(size / memory.capacity):>4}"
        )
    fits = memory.total <= memory.capacity
    verdict = (
        style.paint("fits", GREEN, bold=True)
        if fits
        else style.paint("DOES NOT FIT", RED, bold=True)
    )
    bar = style.bar(
        memory.total / memory.capacity,
        cells,
        GREEN if fits else RED,
    )
    share = f"{memory.total / memory.capacity:>4.0%}"
    end = f"of {three(memory.capacity / scale)}{plus_minus(memory.sd)}: "
    fits_here = (
        24 + cells + len(share) + len(end) + len("fits" if fits else "DOES NOT FIT") + 1
        <= style.width
    )
    lines.append(
        f"{'total':<12} {three(memory.total / scale):>8}  {bar} {share}"
        + f" {end}{verdict}" * fits_here
    )
    if not fits_here:
        lines.append(f"{'':<13}{end}{verdict}")
    for name, size in (("on the host", memory.host), ("on the disk", memory.disk)):
        if size:
            lines.append(f"{name:<12} {three(size / scale):>8}")
    return "\n".join(lines)


def _time(plan: Plan, style: Style) -> str:
    time = plan.time
    cells = max(10, min(40, style.width - 40))
    lines = [
        style.title(f"Time of one step: {seconds(time.step_s)}{plus_minus(time.sd)} (predicted)")
    ]
    exposed = {
        f"{axis} communication": value for axis, value in time.exposed_comm_s.items() if value > 0
    }
    rest = max(0.0, time.step_s - time.compute_s - sum(exposed.values()))
    colours = {"compute": COMPUTE, "pipeline bubble": IDLE}
    for name, value in {"compute": time.compute_s, **exposed, "pipeline bubble": rest}.items():
        if name == "pipeline bubble" and plan.parallel.pp == 1:
            continue
        bar = style.bar(
            value / time.step_s,
            cells,
            colours.get(name, COMMUNICATION),
        )
        lines.append(f"{name:<16} {seconds(value):>9} {bar} {percent(value / time.step_s):>4}")
    lines.append("")
    rates = f"{plan.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, MFU {plan.mfu:.1%},"
    lines += style.fold(f"{rates} pipeline bubble {time.bubble_ratio:.1%} of the step")
    label = "limited by "
    lines += style.fold(label + time.limited_by, len(label))
    if time.profile:
        software = "" if time.software == "orch" else f", as {time.software} would run it"
        lines += style.fold(f"parameters {time.profile}{software}")
    return "\n".join(lines)


def _warnings(plan: Plan, style: Style) -> str:
    lines = [style.title("Warnings")]
    for warning in plan.warnings:
        lines += style.fold(f"{style.paint('!', YELLOW, bold=True)} {warning}", 2)
    return "\n".join(lines)


_BALANCED = {
    "bias": "balanced by bias updates",
    "loss": "balanced by a loss term",
    "none": "not balanced",
}


def explanation(
    plan_costs: Explanation,
    step_s: float,
    sd: float = 0.0,
    width: int = 80,
) -> str:
    """The section of `orch plan --explain`: the terms of the step, the reason why the plan does not
    fit, and the changes that help."""
    lines = ["Why", f"the step, {seconds(step_s)}{plus_minus(sd)}, is:"]
    lines += [
        f"  {term.seconds:>9.4g} s  {term.seconds / step_s:>6.1%}  {term.name}"
        for term in plan_costs.terms
    ]
    lines += fold(f"limited by {plan_costs.limited_by}", width, len("limited by "))
    if (load := plan_costs.experts) is not None:
        interval = f" ({load.low:.2f} to {load.high:.2f})" if load.factor > 1 else ""
        experts = (
            f"experts: the fullest rank is planned with {load.factor:.2f} times the mean"
            f" load{interval}, {_BALANCED[load.balanced_by]}: {seconds(load.costs_s)} of the step"
        )
        lines += fold(experts, width, len("experts: "))
    if plan_costs.buckets:
        lines += fold(f"gradient buckets: {plan_costs.buckets}", width, len("gradient buckets: "))
    if plan_costs.context_bytes:
        context = (
            f"memory: {plan_costs.context_bytes / GIB:.2f} GiB of the buffers are the device's"
            " context and NCCL's communicators"
        )
        lines += fold(context, width, len("memory: "))
    for omission in plan_costs.not_counted:
        lines += fold(f"not counted: {omission}", width, len("not counted: "))
    lines += _missing_memory(plan_costs)
    lines += _changes(plan_costs, step_s, width)
    if plan_costs.warnings:
        lines += ["", "Warnings, each with its price:"]
        for warning in plan_costs.warnings:
            lines += fold(f"  {warning}", width, 4)
    return "\n".join(lines)


def _missing_memory(plan_costs: Explanation) -> list[str]:
    missing = plan_costs.over_bytes
    if not missing:
        return []
    lines = ["", f"It does not fit: the fullest rank lacks {missing / GIB:.2f} GiB. It holds:"]
    for name, size in plan_costs.categories:
        remark = "  (without it the plan would fit)" if size >= missing else ""
        lines.append(f"  {size / GIB:>9.2f} GiB  {name}{remark}")
    return lines


def _changes(plan_costs: Explanation, step_s: float, width: int) -> list[str]:
    purpose = "that make it faster"
    none = "  none: no single change is faster"
    if plan_costs.over_bytes:
        purpose = "that make it fit, fastest first"
        none = "  none: nothing fits these GPUs"
    head = (
        f"Changes {purpose} ({plan_costs.tried} single changes tried; if none helps, the best of"
        " all layouts):"
    )
    lines = ["", *fold(head, width)]
    for change in plan_costs.changes:
        step = f"{change.step_s:.4g} s per step ({-change.saves_s / step_s:+.1%})"
        memory = f"{change.memory.total / GIB:.1f} GiB ({-change.frees_bytes / GIB:+.1f})"
        name = f"  {' '.join(change.overrides):<30}"
        line = f"{name}  {step:<26}  {memory}"
        if len(line) <= width:
            lines.append(line)
        else:
            lines += [*fold(name.rstrip(), width, 4), f"{'':<34}{step:<26}  {memory}"]
    return lines if plan_costs.changes else [*lines, none]
