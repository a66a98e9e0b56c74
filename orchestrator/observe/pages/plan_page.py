"""A plan as a readable page: what it is, where the ranks are, what fits, where the time goes, what
to watch.

`render(plan, style)` is pure text; colour and width come from the caller. Works at 80 columns and
without colour.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.observe.pages.placement_grid import grid
from orchestrator.plan import AXES, Plan, batch
from orchestrator.plan.document import Certificate
from orchestrator.plan.expert_mesh import axes, expert_mesh
from orchestrator.plan.interval import plus_minus
from orchestrator.style import (
    CATEGORY_COLOUR,
    COMMUNICATION,
    COMPUTE,
    GRAY,
    GREEN,
    IDLE,
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
    nesting = f"  (nesting {' < '.join(_moving(plan))})" if len(_moving(plan)) > 1 else ""
    rows = [
        ("cluster", _cluster(plan)),
        (
            "ranks",
            (
                f"{par.world_size}:"
                f" {_degrees(plan) or 'one process'}{f'  zero={par.zero}' * bool(par.zero)}{nesting}"
            ),
        ),
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
    par = plan.parallel
    model = plan.model
    cluster = plan.cluster
    train = plan.job.train
    degrees = _degrees(plan) or "one GPU"
    options = (
        [f"zero={par.zero}"]
        + ([f"vpp={par.vpp}"] if par.vpp > 1 else [])
        + (["sp"] if par.sp else [])
    )
    if axes(par) != ("ep",):
        options.append("experts etp={} ep={} edp={}".format(*expert_mesh(par)))
    options += ["all-to-all by domain"] if par.expert_all_to_all == "hierarchical" else []
    rows = [
        (
            "model",
            (
                f"{model.name}, {si(model.parameters)} parameters, {model.layers} layers, hidden"
                f" {model.hidden}"
            ),
        ),
        ("cluster", _cluster(plan)),
        *(
            [("links", f"{cluster.measured.source} (cluster.measured=false: as described)")]
            if cluster.measured
            else []
        ),
        (
            "parallel",
            f"{degrees}  {'  '.join(options)}  ({par.schedule}, nesting {' < '.join(_moving(plan))})",
        ),
        (
            "batch",
            (
                f"{par.global_batch_samples} samples = {si(par.global_batch_tokens)} tokens a step:"
                f" {_shares(plan)}, sequences of {train.seq_len}"
            ),
        ),
        (
            "train",
            (
                f"{train.precision}, gradients {train.grad_dtype}, recompute {train.recompute},"
                f" {train.steps} steps = {si(train.steps * par.global_batch_tokens)} tokens"
                f" in {_days(train.steps * plan.time.step_s)}"
            ),
        ),
        ("plan", plan.hash[:16]),
    ]
    return _rows("Plan", rows, style)


def _rows(title: str, rows: Sequence[tuple[str, str]], style: Style) -> str:
    lines = [style.title(title)]
    for name, content in rows:
        wrapped = textwrap.wrap(content, max(20, style.width - 11))
        lines.append(f"{style.paint(f'{name:<10}', GRAY)} {wrapped[0]}")
        lines += [" " * 11 + continuation for continuation in wrapped[1:]]
    return "\n".join(lines)


def _shares(plan: Plan) -> str:
    par = plan.parallel
    replicas = par.dp * par.ep
    if not par.replica_micro_batches:
        return f"{par.micro_batches} micro-batches of {par.micro_batch_size} x {replicas} replicas"
    shares = f"{batch.text(par)} of {par.micro_batch_size} on {replicas} replicas"
    return f"{shares}, which are idle for {batch.idle(par):.1%} of the time"


def _moving(plan: Plan) -> list[str]:
    return [axis for axis in plan.parallel.order if getattr(plan.parallel, axis) > 1] or ["-"]


def _days(value: float) -> str:
    return seconds(value) if value < 48 * 3600 else f"{value / 86400:,.0f} days"


def _placement(plan: Plan, style: Style) -> str:
    lines = [style.title("Placement"), *grid(plan, style), ""]
    folded = (
        [] if plan.program or plan.parallel.ep > 1 or expert_mesh(plan.parallel).ep == 1 else ["ep"]
    )
    for axis in [*_moving(plan), *folded]:
        if axis == "-":
            lines.append("one rank: nothing to communicate")
            break
        placement = plan.placement[axis]
        count = len(plan.groups[axis])
        size = getattr(plan.parallel, axis)
        if axis == "ep" and not plan.program:
            size = expert_mesh(plan.parallel).ep
            count = plan.parallel.world_size // size
        sent = ", ".join(
            f"{si(sent_bytes, 'B')} on {level}"
            for level, sent_bytes in placement.bytes_per_step_by_level.items()
        )
        groups = f"{count} group{'s' * (count > 1)} of {size}"
        description = f"{MEANING[axis]}: {groups}, within {placement.worst_level}"
        description += "" if plan.program else f"; {sent or 'nothing'} a step and rank"
        first, *continuation = textwrap.wrap(description, style.width - 3)
        lines += [
            f"{style.paint(axis, bold=True)} {first}",
            *(f"   {line}" for line in continuation),
        ]
    if plan.certificate and plan.parallel.world_size > 1:
        lines += textwrap.wrap(_certificate(plan.certificate), style.width)
    return "\n".join(lines)


def _certificate(certificate: Certificate) -> str:
    margin = (
        "faster" if certificate.exact else f"more than {max(certificate.gap, 0.001):.1%} faster"
    )
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
        bar = style.bar(size / memory.capacity, cells, CATEGORY_COLOUR[name])
        lines.append(
            f"{name:<12} {three(size / scale):>8}  {bar} {percent(size / memory.capacity):>4}"
        )
    fits = memory.total <= memory.capacity
    verdict = (
        style.paint("fits", GREEN, bold=True)
        if fits
        else style.paint("DOES NOT FIT", RED, bold=True)
    )
    bar = style.bar(memory.total / memory.capacity, cells, GREEN if fits else RED)
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
        bar = style.bar(value / time.step_s, cells, colours.get(name, COMMUNICATION))
        lines.append(f"{name:<16} {seconds(value):>9} {bar} {percent(value / time.step_s):>4}")
    lines.append("")
    rates = f"{plan.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, MFU {plan.mfu:.1%},"
    lines += textwrap.wrap(
        f"{rates} pipeline bubble {time.bubble_ratio:.1%} of the step", style.width
    )
    label = "limited by "
    lines += textwrap.wrap(label + time.limited_by, style.width, subsequent_indent=" " * len(label))
    if time.profile:
        software = "" if time.software == "orch" else f", as {time.software} would run it"
        lines += textwrap.wrap(f"parameters {time.profile}{software}", style.width)
    return "\n".join(lines)


def _warnings(plan: Plan, style: Style) -> str:
    lines = [style.title("Warnings")]
    for warning in plan.warnings:
        mark = style.paint("!", YELLOW, bold=True)
        wrapped = textwrap.wrap(warning, style.width - 2)
        lines.append(f"{mark} {wrapped[0]}")
        lines += ["  " + continuation for continuation in wrapped[1:]]
    return "\n".join(lines)


def explanation(found: Explanation, step_s: float, sd: float = 0.0, width: int = 80) -> str:
    """The part of `orch plan --explain`: what the step is made of, why it does not fit, what to
    change."""
    lines = ["Why", f"the step, {seconds(step_s)}{plus_minus(sd)}, is:"]
    lines += [
        f"  {term.seconds:>9.4g} s  {term.seconds / step_s:>6.1%}  {term.name}"
        for term in found.terms
    ]
    lines += fold(f"limited by {found.limited_by}", width, len("limited by "))
    if (load := found.experts) is not None:
        how = {"bias": "by moved biases", "loss": "by the loss", "none": "by nothing"}[
            load.balanced_by
        ]
        between = f" ({load.low:.2f} to {load.high:.2f})" if load.factor > 1 else ""
        text = (
            f"experts: the fullest rank is planned with {load.factor:.2f} times the mean"
            f" load{between}, balanced {how}: {seconds(load.costs_s)} of the step"
        )
        lines += fold(text, width, len("experts: "))
    for text in found.not_counted:
        lines += fold(f"not counted: {text}", width, len("not counted: "))
    if found.over_bytes:
        lines += [
            "",
            f"It does not fit: the fullest rank lacks {found.over_bytes / GIB:.2f} GiB. It holds:",
        ]
        for name, size in found.categories:
            alone = "  (without it the plan would fit)" if size >= found.over_bytes else ""
            lines.append(f"  {size / GIB:>9.2f} GiB  {name}{alone}")
    what = "that make it fit, fastest first" if found.over_bytes else "that make it faster"
    head = f"Changes {what} (one thing each of {found.tried} tried; else the best of all layouts):"
    lines += ["", *fold(head, width)]
    for change in found.changes:
        faster = f"{change.step_s:.4g} s a step ({-change.saves_s / step_s:+.1%})"
        memory = f"{change.memory.total / GIB:.1f} GiB ({-change.frees_bytes / GIB:+.1f})"
        words = f"  {' '.join(change.words):<30}"
        one = f"{words}  {faster:<24}  {memory}"
        lines += (
            [one]
            if len(one) <= width
            else [*fold(words.rstrip(), width, 4), f"{'':<34}{faster:<24}  {memory}"]
        )
    if not found.changes:
        lines.append(
            "  none: nothing fits these GPUs"
            if found.over_bytes
            else "  none: no single change is faster"
        )
    if found.warnings:
        lines += ["", "Warnings, each with its price:"]
        lines += [part for line in found.warnings for part in fold(f"  {line}", width, 4)]
    return "\n".join(lines)
