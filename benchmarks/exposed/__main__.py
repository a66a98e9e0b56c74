"""python -m benchmarks.exposed

How much communication nothing hides, technique by technique, in the plan and in the trainer's own
order of calls. Each layout of Llama 3.2 1B (two of 8B) runs two steps on four fake GPUs
(tests/beds/fakegpu), which record what every stream is given; the second one is then played on a
simulated device (`tests.beds.fakegpu.replay`). There a collective takes the seconds that the plan's cost model has
for its bytes, and kernels take those that the plan has for products, attention and the rest. What
differs is then the order of calls, or what the plan does not know of it. Writes
benchmarks/results/exposed.json and a table of docs/gpu.md.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.exposed import steps
from benchmarks.exposed.steps import plan_for
from benchmarks.gpu_node.cases import LARGE, SMALL
from benchmarks.pages import filled
from orchestrator.cost.dual import value_of
from orchestrator.cost.of_plan import context_of, cost_of
from orchestrator.cost.time import collective
from orchestrator.cost.time.step_time import StepCost
from orchestrator.plan import Plan
from tests.beds import fakegpu
from tests.beds.fakegpu import Note, replay

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "exposed.json"
PAGE = ROOT / "docs" / "gpu.md"
#: As many tokens in sequences of four times the length.
LONG = ("train.seq_len=16384", "train.global_batch_samples=2")
#: Model and words.
LAYOUTS = {
    "ZeRO-0": (SMALL, "parallel=dp4_zero0"),
    "ZeRO-1": (SMALL, "parallel=dp4_zero1"),
    "ZeRO-2": (SMALL, "parallel=dp4_zero2"),
    "ZeRO-3": (SMALL, "parallel=dp4_zero3"),
    "ZeRO-2, shards of 2": (SMALL, "parallel=dp4_zero2", "parallel.zero_group=2"),
    "ZeRO-3, shards of 2": (SMALL, "parallel=dp4_zero3", "parallel.zero_group=2"),
    "TP + SP": (SMALL, "parallel=tp4"),
    "TP + SP, four pieces": (SMALL, "parallel=tp4", "parallel.tp_pieces=4"),
    "TP": (SMALL, "parallel=tp4", "parallel.sp=false"),
    "CP zigzag": (SMALL, "parallel=cp4", "parallel.cp_method=zigzag"),
    "CP allgather": (SMALL, "parallel=cp4", "parallel.cp_method=allgather"),
    "CP ulysses": (SMALL, "parallel=cp4", "parallel.cp_method=ulysses"),
    "8B, TP + SP, in one piece": (LARGE, "parallel=tp4", "parallel.tp_pieces=1", *LONG),
    "8B, TP + SP, in four pieces": (LARGE, "parallel=tp4", *LONG),
}
#: NCCL's call -> (the operation of the cost model, whether its bytes are one rank's part).
OPERATIONS = {
    "ncclAllReduce": ("all_reduce", False),
    "ncclAllGather": ("all_gather", True),
    "ncclReduceScatter": ("reduce_scatter", True),
    "ncclAlltoAll": ("all_to_all", True),
    "ncclSend": ("p2p", False),
}
#: Work of attention's kernels, by a part of their names, relative to each other.
ATTENTION = {"flash_fwd_kernel": 1.0, "flash_bwd_dq_dk_dv": 2.5}


class Recording(NamedTuple):
    """Two steps of a rank."""

    notes: list[Note]
    second: int  # the number of the call with which the second begins
    axes: dict[int, str]  # of the communicators


def main() -> None:
    rows = {name: measured(layout) for name, layout in LAYOUTS.items()}
    RESULT.write_text(json.dumps(rows, indent=2) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), "exposed", table(rows)))
    print(table(rows))


def measured(layout: tuple[str, ...]) -> dict[str, float]:
    """A row: seconds of a step, planned and played."""
    plan = plan_for(layout)
    record = fakegpu.call(steps.recorded, layout)
    axes = {int(communicator): axis for communicator, axis in record["axes"].items()}
    notes = [Note(*note) for note in record["notes"]]
    recording = Recording(notes, record["second"], axes)
    return compared(plan, recording)


def compared(plan: Plan, recording: Recording) -> dict[str, float]:
    """Seconds of a step, of the plan and of the recorded calls: communication of all axes."""
    cost = cost_of(plan)
    clock = Clock(plan, cost, recording)
    played = replay.play(recording.notes, clock.kernel_s, clock.collective_s, recording.second)
    planned_s = sum(map(value_of, cost.exposed.values())) / value_of(cost.factor)
    return {
        "computed_s": played.computed,
        "sent_s": sum(played.sent.values()),
        "planned_s": planned_s,
        "played_s": sum(played.exposed.values()),
    }


class Clock:
    """Seconds of recorded calls, from the terms of a plan's cost."""

    def __init__(self, plan: Plan, cost: StepCost, recording: Recording):
        self.cost = cost
        self.axes = recording.axes
        self.rate = context_of(plan).rate
        terms = {name: value_of(seconds) for name, seconds in cost.terms().items()}
        stream = replay.stream_of_products(recording.notes)
        kernels = [
            note
            for note in recording.notes[recording.second :]
            if note.kind == "K" and note.stream == stream
        ]
        products = [index for index, note in enumerate(kernels) if replay.is_product(note)]
        kernels = kernels[: products[-1] + 1]  # the optimizer's follow
        flops = sum(note.bytes for note in kernels if replay.is_product(note))
        attention = sum(map(attention_share, kernels))
        others = Counter(replay.is_product(note) or attention_share(note) > 0 for note in kernels)
        self.product_s = (terms["gemm"] + terms["head"]) / flops
        self.attention_s = terms["attention"] / attention
        self.other_s = terms["elementwise"] / others[False]
        self.stream = stream

    def kernel_s(self, note: Note) -> float:
        if replay.is_product(note):
            return self.product_s * note.bytes
        if share := attention_share(note):
            return self.attention_s * share
        return self.other_s if note.stream == self.stream else 0.0

    def collective_s(self, note: Note) -> tuple[str, float]:
        axis = self.axes.get(note.event, "dp")
        if note.name not in OPERATIONS or not note.bytes:
            return axis, 0.0
        operation, is_part = OPERATIONS[note.name]
        size = note.bytes * note.a if is_part else note.bytes
        pattern = collective.PATTERN[operation]
        varying = ("cp", "ep", "dp") if axis == "dp" else (axis,)
        keys = [(varying, pattern), (varying, "shard")]  # near replicas that share one copy
        path = next((self.cost.paths[key] for key in keys if key in self.cost.paths), None)
        if path is None:  # the norm's few bytes
            return axis, 0.0
        links = self.rate.tensor if axis == "tp" else self.rate.ring
        return axis, value_of(collective.seconds(operation, size, note.a, path, links))


def attention_share(note: Note) -> float:
    """The work of a kernel of attention, in forwards of one layer; 0 of others."""
    return next((share for part, share in ATTENTION.items() if part in note.name), 0.0)


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "| layout | computed | communicated | exposed, planned | exposed, played |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = (f"{1e3 * seconds:.1f}" for seconds in row.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
