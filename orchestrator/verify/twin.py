"""The digital twin: ranks of a plan, run by the trainer's own code without data and peers, and
compared with the plan.

`python -m trainer.twin` runs a rank at full size under fake tensors, and reports its bytes of
memory by category and every transfer of a step. This module compares those with the planner's
predictions for the same pipeline rank.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET, structs

from orchestrator import start
from orchestrator.cost.memory.rank_memory import context_bytes, memory_by_pp_rank
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.model.layers import dense_and_moe
from orchestrator.cost.model.stages import held_layers, rank_stages
from orchestrator.cost.software import SOFTWARE
from orchestrator.cost.time.expert_exchange import phases
from orchestrator.cost.time.fabric import NO_PATH
from orchestrator.cost.time.traffic import Traffic, step_traffic
from orchestrator.cost.workload import Workload
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, seal, to_json
from orchestrator.plan.cluster import NVLINK, SELF
from orchestrator.plan.document import Memory
from orchestrator.plan.hierarchy import expert_groups, hierarchy, is_hierarchical
from orchestrator.plan.schedules import TABLE, copies_of, illegal
from orchestrator.plan.twin import RankRun, Transfer

from .run_cells import last_line, running

TOLERANCE = 0.05  # share of the planned figure
#: Categories below this share of a rank's memory, and transfers below this share of its bytes, are
#: not judged.
SMALL = 0.005
STATES = ("params", "grads", "optimizer", "activations")
#: Names of operations: in the trainer -> in the plan.
OPERATION = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
}
OPERATION |= {"all-to-all": "all_to_all", "send": "p2p", "rotate": "p2p", "receive": "receive"}


class Compared(NamedTuple):
    """One figure of one rank."""

    rank: int
    what: str  # "memory: grads", "tp all_gather, bytes", "tp, level"
    planned: float | str
    found: float | str
    off: float  # found / planned - 1; infinite if the plan has nothing, or levels differ
    judged: bool

    @property
    def differs(self) -> bool:
        return self.judged and not abs(self.off) <= TOLERANCE


def ranks_to_run(plan: Plan) -> list[int]:
    """Returns a rank of every distinct pipeline stage; of equal stages the first and the last,
    which have the most and the fewest micro-batches in flight."""
    equal_stages: dict[tuple[object, ...], list[int]] = defaultdict(list)
    last = len(plan.parallel.stage_layers) - 1
    for pp_rank, stages in enumerate(rank_stages(plan.parallel)):
        ranges = [held_layers(plan.model, plan.parallel, stage) for stage in stages]
        layers = sum(map(len, ranges))
        moe_layers = sum(dense_and_moe(plan.model, held.start, held.stop)[1] for held in ranges)
        kind = (layers, moe_layers, stages.count(0), stages.count(last))
        equal_stages[kind].append(pp_rank)
    chosen = {pp_ranks[index] for pp_ranks in equal_stages.values() for index in (0, -1)}
    lowest_rank = {rank.coord.pp: rank.rank for rank in reversed(plan.ranks)}
    return [lowest_rank[pp_rank] for pp_rank in sorted(chosen)]


def evenly_chosen(plan: Plan) -> Plan:
    """Returns the plan with experts that are chosen equally often, as the twin chooses them."""
    if plan.parallel.expert_imbalance is UNSET:
        return plan
    parallel = structs.replace(plan.parallel, expert_imbalance=UNSET)
    return seal(structs.replace(plan, parallel=parallel))


def shortened(plan: Plan) -> Plan:
    """Returns the plan with the fewest micro-batches that need the same memory on every rank.
    Further micro-batches repeat the transfers of the last ones."""
    par = plan.parallel
    if par.schedule == TABLE or par.replica_micro_batches or plan.job.train.batch_ramp:
        return plan
    full_totals = _totals(plan)
    for count in range(par.pp, par.micro_batches):
        samples = par.micro_batch_size * count * par.dp * par.ep
        tokens = samples * plan.job.train.seq_len
        fewer = structs.replace(
            par,
            micro_batches=count,
            accumulation=count,
            global_batch_samples=samples,
            global_batch_tokens=tokens,
        )
        shorter = structs.replace(plan, parallel=fewer)
        if (
            illegal(par.schedule, par.pp, count, par.vpp) is None
            and _totals(shorter) == full_totals
        ):
            return seal(shorter)
    return plan


def _totals(plan: Plan) -> list[int]:
    return [account.total for account in _accounts(plan)]


def _accounts(plan: Plan) -> list[Memory]:
    """Returns the planned memory of each pipeline rank under the bundled trainer."""
    recipe = recipe_of("orch", plan.job.optim)
    return memory_by_pp_rank(
        Workload.of_plan(plan),
        plan.cluster,
        recipe,
        plan.job.matmul,
    )


def run(plan: Plan, ranks: Sequence[int]) -> Iterator[RankRun]:
    """Runs the ranks, and yields the second step of each in order. Raises OrchError (65) if the
    trainer does not run the plan."""
    with tempfile.TemporaryDirectory(prefix="orch-twin-") as folder:
        path = Path(folder) / "plan.json"
        errors = Path(folder) / "stderr"
        path.write_bytes(to_json(plan))
        rank_list = ",".join(map(str, ranks))
        command = [
            *start.command("trainer.twin"),
            str(path),
            "--ranks",
            rank_list,
        ]
        finished = 0
        with running(command, errors, os.environ) as (lines, wait):
            for line in lines:
                finished += 1
                yield msgspec.json.decode(line, type=RankRun)
            code = wait()
        if code or finished < len(ranks):
            message = last_line(errors).removeprefix("trainer.twin: ")
            known = code in set(Exit)
            raise OrchError(message, Exit(code) if known else Exit.INTERNAL)


def compare(plan: Plan, rank_run: RankRun) -> list[Compared]:
    """Compares the memory by category, and the transfers by axis and operation, of one rank."""
    pp_rank = plan.ranks[rank_run.rank].coord.pp
    return [*_memory(plan, rank_run, pp_rank), *_transfers(plan, rank_run, pp_rank)]


def _memory(plan: Plan, rank_run: RankRun, pp_rank: int) -> Iterator[Compared]:
    account = _accounts(plan)[pp_rank]
    # A twin has tensors, but no CUDA context.
    total = account.total - context_bytes(account, plan.cluster.device)
    for name in STATES:
        planned = getattr(account, name)
        judged = max(planned, rank_run.memory[name]) > SMALL * total
        yield _compared(
            rank_run.rank,
            f"memory: {name}",
            planned,
            rank_run.memory[name],
            judged,
        )
    yield _compared(
        rank_run.rank,
        "memory: peak",
        total,
        rank_run.peak["total"],
        True,
    )


def _transfers(plan: Plan, rank_run: RankRun, pp_rank: int) -> Iterator[Compared]:
    planned = _planned_bytes(plan, rank_run.rank, pp_rank)
    sent = _sent_bytes(rank_run)
    total = max(sum(planned.values()), sum(sent.values()))
    for key in sorted(planned.keys() | sent.keys()):
        axis, operation = key
        judged = max(planned[key], sent[key]) > SMALL * total
        figure = f"{axis} {operation}, bytes"
        yield _compared(rank_run.rank, figure, planned[key], sent[key], judged)
    yield from _levels(plan, rank_run)


def _planned_bytes(plan: Plan, rank: int, pp_rank: int) -> dict[tuple[str, str], float]:
    """Returns the planned bytes of a step by (axis, operation)."""
    planned: dict[tuple[str, str], float] = defaultdict(float)
    workload = Workload(plan.model, plan.parallel, plan.job.train, SOFTWARE["orch"])
    traffic = step_traffic(workload)[pp_rank]
    for exchange in traffic:
        share = _share_of_direct(plan, rank, exchange) if exchange.axis == "ep" else 1.0
        planned[exchange.axis, exchange.operation] += exchange.sent_bytes * share
        if exchange.axis == "pp" and exchange.operation == "p2p":
            # The neighbours answer every message with a gradient of the same size.
            planned["pp", "receive"] += exchange.sent_bytes
    return planned


def _sent_bytes(rank_run: RankRun) -> dict[tuple[str, str], float]:
    """Returns the bytes of a step that the rank has sent by (axis, operation)."""
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for index in rank_run.sequence:
        transfer = rank_run.transfers[index]
        if transfer.axis == "norm":  # a single number, for the norm of the gradient
            continue
        axis = transfer.axis if transfer.axis in ("tp", "cp", "ep", "pp") else "dp"
        sent[axis, OPERATION.get(transfer.operation, transfer.operation)] += transfer.bytes
    return sent


def _share_of_direct(plan: Plan, rank: int, exchange: Traffic) -> float:
    """Returns the bytes that an exchange of experts' tokens sends by NVLink domain, if the plan
    does so, as a share of those that it would send directly."""
    group = hierarchy(plan, rank)
    peers = len(group.inside) * len(group.across) - 1
    near = (len(group.inside) - 1) / peers
    direct = structs.replace(
        NO_PATH,
        nvlink_s=1.0,
        share={NVLINK: near, "network": 1 - near},
    )
    return sum(
        sum(phase.share.values())
        for phase in phases(direct, plan.model, plan.parallel, exchange.carried)
    )


def _levels(plan: Plan, rank_run: RankRun) -> Iterator[Compared]:
    """Compares the highest level that the transfers of an axis cross with that of the rank's group
    in the plan. The level may be lower only on axes whose transfers span a part of the group:
    between stages, around a ring, and in groups of ZeRO shards.
    """
    par = plan.parallel
    by_ring = par.cp_method in ("ring", "zigzag")
    spans_group = {
        "tp": True,
        "cp": not by_ring,
        "pp": False,
        "dp": not par.zero_group,
        "ep": True,
    }
    for axis in spans_group:
        transfers = [transfer for transfer in rank_run.transfers if transfer.axis == axis]
        if not transfers:
            continue
        members = _members(plan, axis, rank_run.rank)
        planned = tier_of(plan, members)
        measured = _worst(plan, {level_of(plan, transfer) for transfer in transfers})
        # Gradients are summed over cp and ep, too, and experts may fold over tp and cp: the
        # placement of these axes alone does not have their level.
        if axis not in ("dp", "ep"):
            worst = plan.placement[axis].worst_level
            planned = min(planned, worst, key=lambda level: _height(plan, level))
        beyond = _height(plan, measured) > _height(plan, planned)
        differs = beyond or (spans_group[axis] and measured != planned)
        yield Compared(
            rank=rank_run.rank,
            what=f"{axis}, level",
            planned=planned,
            found=measured,
            off=float("inf") if differs else 0.0,
            judged=True,
        )


def _members(plan: Plan, axis: str, rank: int) -> set[int]:
    """Returns the ranks of a rank's group on an axis. Gradients are summed over all ranks with the
    same weights: if a pipeline holds the model twice, these include the ranks of the opposite
    stage. Tokens go to all ranks that share a layer's experts; if they go by NVLink domain, to
    those of the exchange between domains, which goes furthest."""
    if axis == "ep":
        if is_hierarchical(plan):
            return set(hierarchy(plan, rank).across)
        return set(next(ranks for ranks in expert_groups(plan) if rank in ranks))
    holders = {rank}
    if axis == "dp" and copies_of(plan.parallel) > 1:
        pipeline = next(ranks for ranks in plan.groups["pp"] if rank in ranks)
        holders.add(pipeline[-1 - pipeline.index(rank)])
    groups = plan.groups["grad" if axis == "dp" else axis]
    return {member for ranks in groups if holders & set(ranks) for member in ranks}


def _compared(
    rank: int,
    figure: str,
    planned: float,
    measured: float,
    judged: bool,
) -> Compared:
    if planned:
        off = measured / planned - 1
    else:
        off = float("inf") if measured else 0.0
    return Compared(
        rank=rank,
        what=figure,
        planned=planned,
        found=measured,
        off=off,
        judged=judged,
    )


def level_of(plan: Plan, transfer: Transfer) -> str:
    """Returns the highest tier that a transfer crosses."""
    return tier_of(plan, transfer.ranks)


def tier_of(plan: Plan, ranks: Collection[int]) -> str:
    """Returns the highest tier that a group of ranks crosses."""
    index = {name: number for number, name in enumerate(plan.cluster.node_names)}
    nodes = {index[plan.ranks[rank].node] for rank in ranks}
    if len(ranks) == 1:
        return SELF
    tiers = [
        (NVLINK, plan.cluster.nvlink_domains),
        *((level.name, level.switches) for level in plan.cluster.levels),
    ]
    for name, blocks in tiers:
        if any(nodes <= set(block) for block in blocks):
            return name
    return tiers[-1][0]


def _height(plan: Plan, level: str) -> int:
    return [SELF, NVLINK, *(tier.name for tier in plan.cluster.levels)].index(level)


def _worst(plan: Plan, levels: set[str]) -> str:
    return max(levels, key=lambda level: _height(plan, level))
