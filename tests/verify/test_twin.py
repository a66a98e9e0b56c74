"""`orch twin`: which ranks run, how many micro-batches are enough, and what is named as a
difference."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from orchestrator.cli.main import main
from orchestrator.cost.memory.rank_memory import memory_by_pp_rank
from orchestrator.cost.software import SOFTWARE
from orchestrator.cost.time.traffic import step_traffic
from orchestrator.cost.workload import Workload
from orchestrator.plan.hierarchy import expert_groups
from orchestrator.plan.twin import RankRun, Transfer
from orchestrator.verify.twin import (
    OPERATION,
    compare,
    evenly_chosen,
    level_of,
    ranks_to_run,
    shortened,
)
from tests.planner import configs, shapes


def plan_of(parallel: dict, **train):
    return configs.planned(shapes.llama3_8b(), parallel, configs.cluster(4, 8), **train)


def test_a_rank_of_each_stage_and_the_outer_ones_of_equal_stages():
    plan = plan_of({"tp": 2, "pp": 8, "zero": 1}, global_batch_samples=64)
    stages = [plan.ranks[rank].coord.pp for rank in ranks_to_run(plan)]
    assert {0, 1, 6, 7} <= set(stages) and stages == sorted(
        stages
    )  # where layers are uneven, others too
    assert ranks_to_run(plan_of({"tp": 8, "zero": 1}, global_batch_samples=64)) == [0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2"])
def test_fewer_micro_batches_hold_as_much_memory(schedule):
    plan = plan_of({"tp": 2, "pp": 4, "zero": 1, "schedule": schedule}, global_batch_samples=512)
    short = shortened(plan)
    assert short.parallel.micro_batches < plan.parallel.micro_batches == 128
    assert short.parallel.micro_batches <= 4 * plan.parallel.pp
    totals = [
        [
            account.total
            for account in memory_by_pp_rank(
                Workload(sized_plan.model, sized_plan.parallel, sized_plan.job.train),
                sized_plan.cluster,
            )
        ]
        for sized_plan in (plan, short)
    ]
    assert totals[0] == totals[1]


def test_all_forwards_first_need_all_micro_batches():
    plan = plan_of({"tp": 2, "pp": 4, "zero": 1, "schedule": "afab"}, global_batch_samples=32)
    assert shortened(plan) == plan


GROUPS = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "grad"}


def as_planned(plan, rank: int) -> RankRun:
    """What a twin finds that is exactly the plan."""
    pp_rank = plan.ranks[rank].coord.pp
    account = memory_by_pp_rank(Workload(plan.model, plan.parallel, plan.job.train), plan.cluster)[
        pp_rank
    ]
    names = {value: key for key, value in OPERATION.items() if key not in ("rotate", "receive")}
    groups = {
        axis: next(g for g in plan.groups[name] if rank in g) for axis, name in GROUPS.items()
    }
    groups["pp"] = groups["pp"][:2]  # its neighbour
    groups["ep"] = next(g for g in expert_groups(plan) if rank in g)
    transfers = [
        Transfer(
            operation=names[item.operation],
            axis=item.axis,
            bytes=round(item.sent_bytes),
            ranks=groups[item.axis],
        )
        for item in step_traffic(
            Workload(plan.model, plan.parallel, plan.job.train, SOFTWARE["orch"])
        )[pp_rank]
    ]
    transfers += [
        structs.replace(transfer, operation="receive")
        for transfer in transfers
        if transfer.axis == "pp" and transfer.operation == "send"
    ]
    held = {
        name: getattr(account, name) for name in ("params", "grads", "optimizer", "activations")
    }
    return RankRun(
        rank=rank,
        micro_batches=plan.parallel.micro_batches,
        transfers=transfers,
        sequence=list(range(len(transfers))),
        memory=held,
        peak={"total": account.total - account.context},
        seconds=1.0,
        process_bytes=1,
    )


def test_what_is_as_planned_differs_in_nothing_and_more_than_5_percent_is_named():
    plan = plan_of({"tp": 2, "pp": 4, "zero": 1}, global_batch_samples=64)
    rank_run = as_planned(plan, 0)
    assert [comparison.what for comparison in compare(plan, rank_run) if comparison.differs] == []
    fuller_run = structs.replace(
        rank_run,
        memory=rank_run.memory | {"activations": round(rank_run.memory["activations"] * 1.06)},
    )
    assert [comparison.what for comparison in compare(plan, fuller_run) if comparison.differs] == [
        "memory: activations"
    ]
    none = structs.replace(
        rank_run, sequence=[at for at in rank_run.sequence if rank_run.transfers[at].axis != "dp"]
    )
    assert {comparison.what for comparison in compare(plan, none) if comparison.differs} == {
        "dp reduce_scatter, bytes",
        "dp all_gather, bytes",
    }
    deaf = structs.replace(
        rank_run,
        sequence=[at for at in rank_run.sequence if rank_run.transfers[at].operation != "receive"],
    )
    assert [comparison.what for comparison in compare(plan, deaf) if comparison.differs] == [
        "pp receive, bytes"
    ]
    far = [
        structs.replace(transfer, ranks=[0, 16]) if transfer.axis == "tp" else transfer
        for transfer in rank_run.transfers
    ]
    assert "tp, level" in {
        comparison.what
        for comparison in compare(plan, structs.replace(rank_run, transfers=far))
        if comparison.differs
    }


@pytest.mark.parametrize(
    ("layout", "axis", "ranks"),
    [
        ({"tp": 2, "zero": 1}, "dp", [0, 2]),  # of all replicas only one, on the same node
        ({"tp": 2, "zero": 1}, "dp", [0]),
        ({"tp": 8, "cp": 2, "zero": 1}, "dp", [0, 1]),  # gradients are summed over cp, too
        ({"tp": 8, "cp": 2, "cp_method": "ulysses"}, "cp", [0, 1]),
        ({"tp": 4, "zero": 1}, "tp", [0, 8]),
        ({"tp": 4, "zero": 1}, "tp", [0]),
        ({"tp": 2, "pp": 4, "order": ["tp", "pp", "cp", "ep", "dp"]}, "pp", [0, 16]),
        ({"tp": 2, "cp": 4, "cp_method": "zigzag"}, "cp", [0, 31]),
    ],
)
def test_transfers_of_another_level_than_planned_are_named(layout, axis, ranks):
    """Also of a lower one, where each transfer has the whole group."""
    plan = plan_of(layout, global_batch_samples=64)
    rank_run = as_planned(plan, 0)
    assert [comparison.what for comparison in compare(plan, rank_run) if comparison.differs] == []
    moved = [
        structs.replace(transfer, ranks=ranks) if transfer.axis == axis else transfer
        for transfer in rank_run.transfers
    ]
    differ = [
        comparison.what
        for comparison in compare(plan, structs.replace(rank_run, transfers=moved))
        if comparison.differs
    ]
    assert differ == [f"{axis}, level"]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"ep": 8, "tp": 2}, [0, 2]),  # on two nodes
        ({"ep": 4}, [0, 8]),
        ({"tp": 4, "etp": 1}, [0]),
        ({"tp": 4, "etp": 1}, [0, 31]),
        (
            {"ep": 8, "order": ["tp", "dp", "ep", "cp", "pp"], "expert_all_to_all": "hierarchical"},
            [0, 1],
        ),
    ],
)
def test_tokens_that_go_to_experts_of_another_level_are_named(layout, ranks):
    """Folded over tp, and by domain, too."""
    model = shapes.mixtral_8x7b()
    cluster = configs.cluster(4, 8)
    plan = configs.planned(model, {"zero": 1} | layout, cluster, global_batch_samples=64)
    rank_run = as_planned(plan, 0)
    assert levels_that_differ(plan, rank_run) == []
    moved = [
        structs.replace(transfer, ranks=ranks) if transfer.axis == "ep" else transfer
        for transfer in rank_run.transfers
    ]
    assert levels_that_differ(plan, structs.replace(rank_run, transfers=moved)) == ["ep, level"]


def levels_that_differ(plan, rank_run: RankRun) -> list[str]:
    return [
        comparison.what
        for comparison in compare(plan, rank_run)
        if comparison.differs and comparison.what.endswith("level")
    ]


def test_a_twin_is_held_against_a_plan_whose_experts_are_chosen_equally_often():
    plan = configs.planned(shapes.mixtral_8x7b(), {"ep": 8, "zero": 1}, global_batch_samples=64)
    even = evenly_chosen(plan)
    totals = [
        memory_by_pp_rank(
            Workload(costed_plan.model, costed_plan.parallel, costed_plan.job.train),
            costed_plan.cluster,
        )[0].activations
        for costed_plan in (plan, even)
    ]
    assert plan.parallel.expert_imbalance > 1.1 and totals[0] > 1.05 * totals[1]
    assert evenly_chosen(even) is even


def test_the_level_of_a_group_is_the_highest_that_it_crosses():
    plan = plan_of({"tp": 8, "zero": 1}, global_batch_samples=64)

    def level(*ranks: int) -> str:
        return level_of(plan, Transfer(operation="send", axis="pp", bytes=1, ranks=list(ranks)))

    assert (level(0), level(0, 7), level(0, 8), level(7, 31)) == ("self", "nvlink", "leaf", "leaf")


@pytest.mark.process
def test_the_command_runs_the_trainer_and_ends_with_0_where_the_plan_is_true(capsys):
    overrides = ["+cluster=h100x8", "model=llama32_1b", "model.layers=4", "parallel=tp2_pp2_zero1"]
    code = main(
        ["twin", *overrides, "train.seq_len=1024", "train.global_batch_samples=64", "--json"]
    )
    twin_report = json.loads(capsys.readouterr().out)
    assert code == 0 and twin_report["of"] == 32 and twin_report["micro_batches"] < 32
    assert [len(rank["compared"]) > 8 for rank in twin_report["ranks"]] == [True, True]
    assert not any(
        comparison["differs"] for rank in twin_report["ranks"] for comparison in rank["compared"]
    )


LAYOUTS = (
    "model=tiny parallel=dp8_zero3",
    "model=tiny parallel=dp8_zero1 optim.kind=sgd",
    "model=tiny model.mtp={depth:2} parallel=tp2_pp2_dp2_zero1",
    "model=gpt2 model.mtp={depth:1} parallel=dp8_zero1 train.recompute=full",
    "model=gpt2 parallel=dp8_zero3",
    "model=gpt2 parallel=dp8_zero1 train.recompute=full",
    "model=llama32_1b parallel=dp8_zero3 parallel.zero_group=4 train.recompute=full",
    "model=llama32_1b parallel=cp2_dp4_zero3 train.recompute=selective",
    "model=llama32_1b parallel=pp4_dp2_zero1 train.recompute=full",
    "model=llama32_1b parallel=pp2_dp4_zero3",
    "model=llama32_1b parallel=pp4_dp2_zero3 train.recompute=full",
    "model=llama32_1b parallel=tp2_pp2_dp2_zero3",
    "model=llama32_1b parallel=pp2_dp4_zero3 parallel.schedule=zb_h1",
    "model=tiny_moe parallel=pp2_ep2_dp2_zero3",
    (
        "model=llama32_1b parallel=tp8_zero1 parallel.sp=false train.recompute=full"
        " train.partition_activations=true"
    ),
    "model=tiny_mla parallel=ep4_dp2_zero1",
    "model=mixtral_8x7b parallel=tp2_ep4_zero1",
    "model=qwen3_30b_a3b parallel=ep8_zero1 train.seq_len=2048",
)
#: More layers repeat what four do, in four times the time: they run with `make verify`.
SHORT = [f"{layout_overrides} model.layers=4" for layout_overrides in LAYOUTS]
WHOLE = [
    pytest.param(layout_overrides, marks=pytest.mark.full)
    for layout_overrides in LAYOUTS
    if "tiny" not in layout_overrides
]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [*SHORT, *WHOLE])
def test_every_moment_of_a_step_is_planned(overrides, capsys):
    """Peaks at the loss, where backward begins, where a layer is recomputed; what ZeRO-3 gathers
    once and twice, and what each stage of a pipeline gathers, and has of a block's and a table's
    gradients until they are reduced."""
    code = main(["twin", "+cluster=h100x8", *overrides.split()])
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "train.offload=disk train.offload_dir=DIR",
            "train.offload=disk: orch twin has no disk; legal: none, host",
        ),
        (
            "train.offload=disk train.offload_weights=true",
            "train.offload=disk: orch twin has no disk",
        ),
        (
            "train.offload_activations=disk train.recompute=full",
            "train.offload_activations=disk: orch twin has no",
        ),
        (
            "train.offload=host train.offload_delayed=true",
            "train.offload_delayed=true: orch twin runs one step",
        ),
    ],
)
def test_an_offload_that_it_does_not_see_is_refused_before_it_takes_space(
    overrides, says, tmp_path, capsys
):
    assert (
        main(["twin", "parallel=tp2", *overrides.replace("DIR", str(tmp_path / "own")).split()])
        == 65
    )
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not (tmp_path / "own").exists()


def test_what_it_cannot_run_is_refused(capsys):
    words = ["+cluster=h100x64", "model=llama3_8b", "parallel=tp8", "train.matmul=fp8_row"]
    assert main(["twin", *words]) == 65
    assert "fp8_row: the trainer does not run it yet" in capsys.readouterr().err


@pytest.mark.process
def test_what_lies_on_the_host_is_run(capsys):
    overrides = [
        "train.offload=host",
        "train.offload_activations=host",
        "train.recompute=full",
        "model.layers=2",
    ]
    code = main(["twin", "+cluster=h100x8", "model=tiny", "parallel=dp8_zero1", *overrides])
    assert code == 0, capsys.readouterr().out
