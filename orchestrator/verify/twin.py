"""The digital twin: ranks of a plan run by the trainer's own code without data and peers, held
against the plan.

`python -m trainer.twin` runs one rank at full size under fake tensors; it answers with its bytes of
memory by category and every transfer of a step. Here those are compared with what the planner
expects of the same pipeline rank.
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

TOLERANCE = 0.05  # of the plan's figure
#: Categories smaller than this share of a rank's memory, and axes of less than this share of its
#: bytes, are not judged.
SMALL = 0.005
STATES = ("params", "grads", "optimizer", "activations")
#: What the trainer calls an operation -> what the plan does.
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
    off: float  # found / planned - 1; infinite where one of them is nothing
    judged: bool

    @property
    def differs(self) -> bool:
        return self.judged and not abs(self.off) <= TOLERANCE


def ranks_to_run(plan: Plan) -> list[int]:
    """A rank of every distinct pipeline stage, and of equal stages the first and the last, which
    hold most and fewest micro-batches in flight."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    last = len(plan.parallel.stage_layers) - 1
    for pp_rank, stages in enumerate(rank_stages(plan.parallel)):
        ranges = [held_layers(plan.model, plan.parallel, stage) for stage in stages]
        kinds = sum(dense_and_moe(plan.model, part.start, part.stop)[1] for part in ranges)
        alike[sum(map(len, ranges)), kinds, stages.count(0), stages.count(last)].append(pp_rank)
    wanted = sorted({place for places in alike.values() for place in (places[0], places[-1])})
    first = {
        rank.coord.pp: rank.rank for rank in reversed(plan.ranks)
    }  # the lowest rank of each stage
    return [first[place] for place in wanted]


def evenly_chosen(plan: Plan) -> Plan:
    """`plan` with experts that are chosen equally often, as its twin chooses them."""
    if plan.parallel.expert_imbalance is UNSET:
        return plan
    return seal(
        structs.replace(plan, parallel=structs.replace(plan.parallel, expert_imbalance=UNSET))
    )


def shortened(plan: Plan) -> Plan:
    """`plan` with as few micro-batches as keep the memory of every rank: more of them repeat what
    the last ones do."""
    par = plan.parallel
    if par.schedule == TABLE or par.replica_micro_batches or plan.job.train.batch_ramp:
        return plan
    whole = _totals(plan)
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
        if illegal(par.schedule, par.pp, count, par.vpp) is None and _totals(shorter) == whole:
            return seal(shorter)
    return plan


def _totals(plan: Plan) -> list[int]:
    return [account.total for account in _accounts(plan)]


def _accounts(plan: Plan) -> list[Memory]:
    """Of each pipeline rank, as the bundled trainer has it."""
    recipe = recipe_of("orch", plan.job.optim)
    return memory_by_pp_rank(
        Workload(plan.model, plan.parallel, plan.job.train), plan.cluster, recipe, plan.job.matmul
    )


def run(plan: Plan, ranks: Sequence[int]) -> Iterator[RankRun]:
    """The second step of each rank, in order. Raises OrchError (65) where the trainer does not run
    the plan."""
    with tempfile.TemporaryDirectory(prefix="orch-twin-") as folder:
        path = Path(folder) / "plan.json"
        errors = Path(folder) / "stderr"
        path.write_bytes(to_json(plan))
        command = [*start.command("trainer.twin"), str(path), "--ranks", ",".join(map(str, ranks))]
        done = 0
        with running(command, errors, os.environ) as (lines, wait):
            for line in lines:
                done += 1
                yield msgspec.json.decode(line, type=RankRun)
            code = wait()
        if code or done < len(ranks):
            why = last_line(errors).removeprefix("trainer.twin: ")
            raise OrchError(why, Exit(code) if code in set(Exit) else Exit.INTERNAL)


def compare(plan: Plan, found: RankRun) -> list[Compared]:
    """Memory by category, and transfers by axis and operation, of one rank."""
    pp_rank = plan.ranks[found.rank].coord.pp
    return [*_memory(plan, found, pp_rank), *_transfers(plan, found, pp_rank)]


def _memory(plan: Plan, found: RankRun, pp_rank: int) -> Iterator[Compared]:
    account = _accounts(plan)[pp_rank]
    total = account.total - context_bytes(account, plan.cluster.device)  # a twin has tensors alone
    for name in STATES:
        planned = getattr(account, name)
        enough = max(planned, found.memory[name]) > SMALL * total
        yield _compared(found.rank, f"memory: {name}", planned, found.memory[name], enough)
    yield _compared(found.rank, "memory: peak", total, found.peak["total"], True)


def _transfers(plan: Plan, found: RankRun, pp_rank: int) -> Iterator[Compared]:
    expected: dict[tuple[str, str], float] = defaultdict(float)
    for item in step_traffic(Workload(plan.model, plan.parallel, plan.job.train, SOFTWARE["orch"]))[
        pp_rank
    ]:
        share = _share_of_direct(plan, found.rank, item) if item.axis == "ep" else 1.0
        expected[item.axis, item.operation] += item.sent_bytes * share
        if (
            item.axis == "pp" and item.operation == "p2p"
        ):  # both neighbours answer every message with a gradient
            expected["pp", "receive"] += item.sent_bytes
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for index in found.sequence:
        one = found.transfers[index]
        if one.axis == "norm":  # one number for the gradient's norm
            continue
        axis = one.axis if one.axis in ("tp", "cp", "ep", "pp") else "dp"
        sent[axis, OPERATION.get(one.operation, one.operation)] += one.bytes
    everything = max(sum(expected.values()), sum(sent.values()))
    for key in sorted(expected.keys() | sent.keys()):
        enough = max(expected[key], sent[key]) > SMALL * everything
        yield _compared(found.rank, f"{key[0]} {key[1]}, bytes", expected[key], sent[key], enough)
    yield from _levels(plan, found)


def _share_of_direct(plan: Plan, rank: int, item: Traffic) -> float:
    """Bytes that an exchange of experts' tokens sends, by domain where the plan asks for that, over
    what it sends directly."""
    group = hierarchy(plan, rank)
    near = (len(group.inside) - 1) / (len(group.inside) * len(group.across) - 1)
    direct = structs.replace(NO_PATH, nvlink_s=1.0, share={NVLINK: near, "network": 1 - near})
    return sum(
        sum(one.share.values()) for one in phases(direct, plan.model, plan.parallel, item.carried)
    )


def _levels(plan: Plan, found: RankRun) -> Iterator[Compared]:
    """The highest level that transfers of an axis cross, against that of the rank's group in the
    plan. Only where no transfer has the whole group may it be lower: between stages, around a ring,
    of shards within a part of the group.
    """
    par = plan.parallel
    by_ring = par.cp_method in ("ring", "zigzag")
    whole = {"tp": True, "cp": not by_ring, "pp": False, "dp": not par.zero_group, "ep": True}
    for axis in whole:
        seen = [one for one in found.transfers if one.axis == axis]
        if not seen:
            continue
        members = _members(plan, axis, found.rank)
        planned = tier_of(plan, members)
        real = _worst(plan, {level_of(plan, one) for one in seen})
        if axis not in (
            "dp",
            "ep",
        ):  # gradients are summed over cp and ep, too, and experts may fold over tp and cp
            planned = min(
                planned, plan.placement[axis].worst_level, key=lambda level: _height(plan, level)
            )
        beyond = _height(plan, real) > _height(plan, planned)
        off = float("inf") if beyond or (whole[axis] and real != planned) else 0.0
        yield Compared(found.rank, f"{axis}, level", planned, real, off, True)


def _members(plan: Plan, axis: str, rank: int) -> set[int]:
    """Ranks of a rank's group on an axis. Gradients are summed over all that hold the same weights:
    where a pipeline holds the model twice, the ranks of the opposite stage, too. Tokens go to all
    that share a layer's experts; where they go by domain, these exchange in parts, of which that
    between domains goes furthest."""
    if axis == "ep":
        by_domain = is_hierarchical(plan)
        together = next(ranks for ranks in expert_groups(plan) if rank in ranks)
        return set(hierarchy(plan, rank).across if by_domain else together)
    holders = {rank}
    if axis == "dp" and copies_of(plan.parallel) > 1:
        pipeline = next(ranks for ranks in plan.groups["pp"] if rank in ranks)
        holders.add(pipeline[-1 - pipeline.index(rank)])
    groups = plan.groups["grad" if axis == "dp" else axis]
    return {one for ranks in groups if holders & set(ranks) for one in ranks}


def _compared(rank: int, what: str, planned: float, found: float, judged: bool) -> Compared:
    off = found / planned - 1 if planned else (0.0 if not found else float("inf"))
    return Compared(rank, what, planned, found, off, judged)


def level_of(plan: Plan, transfer: Transfer) -> str:
    """The highest tier that a transfer crosses."""
    return tier_of(plan, transfer.ranks)


def tier_of(plan: Plan, ranks: Collection[int]) -> str:
    """The highest tier that a group of ranks crosses."""
    index = {name: at for at, name in enumerate(plan.cluster.node_names)}
    nodes = {index[plan.ranks[rank].node] for rank in ranks}
    if len(ranks) == 1:
        return SELF
    tiers = [
        (NVLINK, plan.cluster.nvlink_domains),
        *((level.name, level.switches) for level in plan.cluster.levels),
    ]
    return next(
        (name for name, blocks in tiers if any(nodes <= set(block) for block in blocks)),
        tiers[-1][0],
    )


def _height(plan: Plan, level: str) -> int:
    return [SELF, NVLINK, *(one.name for one in plan.cluster.levels)].index(level)


def _worst(plan: Plan, levels: set[str]) -> str:
    return max(levels, key=lambda level: _height(plan, level))
