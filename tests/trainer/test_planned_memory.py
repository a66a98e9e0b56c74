"""The planner's account of memory against the storages of the trainer's own ranks, layout by
layout.

States to the byte, on every rank. Activations (what is kept for backward, at its peak) within 5 %
of the fullest rank of each pipeline stage. `python -m tests.trainer.test_planned_memory` prints the
table of docs/accuracy.md.
"""

from __future__ import annotations

from statistics import mean
from typing import NamedTuple

import pytest
from msgspec import UNSET, structs

from orchestrator.cost.memory import rank_memory as memory
from orchestrator.cost.memory.kept_tensors import copies_per_token
from orchestrator.cost.workload import Workload
from orchestrator.plan import Plan, seal
from orchestrator.plan.document import Memory
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.model import Mla, Moe
from tests.beds.plans import make_plan, tiny_model
from tests.trainer import samples
from tests.trainer.pairs import launches
from tests.trainer.samples import engine_of
from tests.trainer.together import run_together, told
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.metrics.memory import StepMemory
from trainer.model.experts import Experts
from trainer.verify.samples import micro_batch

LLAMA = {
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn_hidden": 160,
    "vocab": 512,
    "layers": 4,
}
GPT = LLAMA | {
    "norm": "layer",
    "mlp": "plain",
    "position": "learned",
    "activation": "gelu",
    "bias": True,
}
GPT |= {"tied_embeddings": True, "max_seq_len": 128}
BERT = GPT | samples.BERT
PIPE = {"pp": 2, "micro_batches": 4}
DROPS = LLAMA | {"dropout": 0.1}
PACKED = {"isolate_documents": True}
HOST = {"optimizer": "host"}  # as JSON: test_gpu sends layouts to another process
AWAY = HOST | {"weights": True}

QUICK = {
    "one process": {},
    "bf16": {"precision": "bf16"},
    "tp4, two key-value heads": {"tp": 4},
    "tp2 selective": {"tp": 2, "recompute": "selective"},
    "pp2": PIPE,
    "cp2 selective": {"cp": 2, "recompute": "selective"},
    "dp2 zero3 bf16": {"dp": 2, "zero": 3, "precision": "bf16"},
    "8 bits": {"matmul": "fp8_tensor"},
    "norms of heads": {"model": LLAMA | {"qk_norm": True}},
    "dropout": {"model": DROPS},
    "packed documents": PACKED,
    "BERT": {"model": BERT},
    "dp2 zero1 bf16, on the host": {"dp": 2, "zero": 1, "precision": "bf16", "offload": HOST},
    "dp2 zero2, on the host": {"dp": 2, "zero": 2, "offload": HOST},
    "dp2 zero3 bf16, on the host": {"dp": 2, "zero": 3, "precision": "bf16", "offload": HOST},
    "dp2 zero3 bf16, weights on the host": {
        "dp": 2,
        "zero": 3,
        "precision": "bf16",
        "offload": AWAY,
    },
}
MORE = {
    "norms of heads, selective": {"model": LLAMA | {"qk_norm": True}, "recompute": "selective"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "two samples": {"micro_batch_size": 2},
    "tp2": {"tp": 2},
    "tp2 in pieces": {"tp": 2, "tp_pieces": 4},
    "tp2 without sp": {"tp": 2, "sp": False},
    "tp2 without sp, selective": {"tp": 2, "sp": False, "recompute": "selective"},
    "pp2 selective": PIPE | {"recompute": "selective"},
    "pp2 full": PIPE | {"recompute": "full"},
    "pp2 interleaved": PIPE | {"vpp": 2, "schedule": "interleaved"},
    "pp2 all forward first": PIPE | {"schedule": "afab"},
    "pp2 zbv": PIPE | {"vpp": 2, "schedule": "zbv"},
    "pp2 dualpipe": PIPE | {"schedule": "dualpipe"},
    "cp2 zigzag": {"cp": 2},
    "cp2 all-gather": {"cp": 2, "cp_method": "allgather"},
    "cp2 ulysses": {"cp": 2, "cp_method": "ulysses"},
    "cp2 full": {"cp": 2, "recompute": "full"},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "pp2 dp2 zero3": PIPE | {"dp": 2, "zero": 3},
    "pp2 dp2 zero3 zb_h1": PIPE | {"dp": 2, "zero": 3, "schedule": "zb_h1"},
    "pp2 dp2 zero3 zb_h1 bf16": (
        PIPE | {"dp": 2, "zero": 3, "schedule": "zb_h1", "precision": "bf16"}
    ),
    "pp2 dp2 zero3 zb_h1, on the host": (
        PIPE | {"dp": 2, "zero": 3, "schedule": "zb_h1", "offload": HOST}
    ),
    "tp2 pp2 dp2 zero1": PIPE | {"tp": 2, "dp": 2, "zero": 1},
    "pp2 zb_h1": PIPE | {"schedule": "zb_h1"},
    "pp2 zb_h1 selective": PIPE | {"schedule": "zb_h1", "recompute": "selective"},
    "tp2 pp2 zb_h1": PIPE | {"tp": 2, "schedule": "zb_h1"},
    "pp4 zb_h2": {"pp": 4, "micro_batches": 8, "schedule": "zb_h2"},
    "GPT, tied": {"model": GPT},
    "bf16, 8 bits in blocks": {"matmul": "fp8_block", "precision": "bf16"},
    "tp2, 8 bits": {"matmul": "fp8_tensor", "tp": 2},
    "tp2 without sp, 8 bits": {"matmul": "fp8_tensor", "tp": 2, "sp": False},
    "on the host": {"offload": HOST},
    "dp2 zero3, on the host": {"dp": 2, "zero": 3, "offload": HOST},
    "dp2 zero3, weights on the host": {"dp": 2, "zero": 3, "offload": AWAY},
    "pp2 dp2 zero3, weights on the host": PIPE | {"dp": 2, "zero": 3, "offload": AWAY},
    "ep2 dp2 zero3, weights on the host": {
        "dp": 2,
        "ep": 2,
        "zero": 3,
        "offload": AWAY,
        "model": LLAMA | {"moe": Moe(experts=8, top_k=2, ffn_hidden=48)},
    },
    "tp2 pp2, on the host": PIPE | {"tp": 2, "offload": HOST},
    "GPT, tied, pp2": PIPE | {"model": GPT},
    "BERT, dropout": {"model": BERT | {"dropout": 0.1}},
    "BERT, selective": {"model": BERT, "recompute": "selective"},
    "BERT, full": {"model": BERT, "recompute": "full"},
    "BERT, tp2": {"model": BERT, "tp": 2},
    "BERT, tp2 without sp, selective": {
        "model": BERT,
        "tp": 2,
        "sp": False,
        "recompute": "selective",
    },
    "BERT, tp2 selective": {"model": BERT, "tp": 2, "recompute": "selective"},
    "BERT, cp2": {"model": BERT, "cp": 2},
    "BERT, cp2 all-gather": {"model": BERT, "cp": 2, "cp_method": "allgather"},
    "BERT, pp2": PIPE | {"model": BERT},
    "BERT, pp2 zb_h1": PIPE | {"model": BERT, "schedule": "zb_h1"},
    "GPT, tied, pp2 zb_h1": PIPE | {"model": GPT, "schedule": "zb_h1"},
    "BERT, pp2 zb_h1 full": PIPE | {"model": BERT, "schedule": "zb_h1", "recompute": "full"},
    "BERT, dp2 zero3": {"model": BERT, "dp": 2, "zero": 3},
    "dropout, bf16": {"model": DROPS, "precision": "bf16"},
    "dropout, selective": {"model": DROPS, "recompute": "selective"},
    "dropout, full": {"model": DROPS, "recompute": "full"},
    "dropout, tp2": {"model": DROPS, "tp": 2},
    "dropout, pp2 selective": PIPE | {"model": DROPS, "recompute": "selective"},
    "packed documents, bf16": PACKED | {"precision": "bf16"},
    "packed documents, selective": PACKED | {"recompute": "selective"},
    "packed documents, tp2": PACKED | {"tp": 2},
    "packed documents, cp2": PACKED | {"cp": 2},
    "packed documents, cp2 ulysses": PACKED | {"cp": 2, "cp_method": "ulysses"},
    "packed documents, dropout, two samples": PACKED | {"model": DROPS, "micro_batch_size": 2},
    "dropout, two samples": {"model": DROPS, "micro_batch_size": 2},
    "8 bits, full": {"matmul": "fp8_tensor", "recompute": "full"},
    "8 bits, some linears wide": {"matmul": "fp8_tensor", "matmul_wide": ["wk", "wo", "down"]},
    "8 bits, some linears wide, full": {
        "matmul": "fp8_tensor",
        "matmul_wide": ["up", "first"],
        "recompute": "full",
    },
    "tp2, 8 bits, some linears wide": {
        "matmul": "fp8_tensor",
        "matmul_wide": ["wq", "1.wo", "last"],
        "tp": 2,
    },
    "pp2, 8 bits, first layer wide": PIPE | {"matmul": "fp8_tensor", "matmul_wide": ["first"]},
}
_LATENT = Mla(
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
LATENT = LLAMA | {"kv_heads": 4, "mla": _LATENT}
UNEQUAL = LATENT | {
    "mla": structs.replace(_LATENT, q_lora_rank=0, v_head_dim=24)
}  # values as wide as keys
MIXTURE = LLAMA | {"moe": Moe(experts=8, top_k=2, ffn_hidden=48)}
WIDE = LLAMA | {"moe": Moe(experts=4, top_k=2, ffn_hidden=128)}  # experts wider than hidden
MANY = LLAMA | {"moe": Moe(experts=16, top_k=8, ffn_hidden=48)}
SHARED = LLAMA | {
    "moe": Moe(experts=8, top_k=3, ffn_hidden=48, shared_ffn_hidden=64, first_dense_layers=1)
}
DEEPSEEK = LATENT | {"moe": SHARED["moe"]}
AGAIN = {"recompute": "selective"}
BY_DOMAIN = {"nodes": 2, "expert_all_to_all": "hierarchical"}
FULL = {"recompute": "full"}
FP8 = {"matmul": "fp8_tensor"}
IN_BLOCKS = {"matmul": "fp8_block"}
#: Layers of latent attention and of experts.
SPECIAL = {
    "latents": {"model": LATENT},
    "latents, selective": {"model": LATENT} | AGAIN,
    "experts": {"model": MIXTURE},
    "wide experts, selective": {"model": WIDE} | AGAIN,
    "shared experts, bf16": {"model": SHARED, "precision": "bf16"},
    "deepseek ep2": {"model": DEEPSEEK, "ep": 2},
}
MORE_SPECIAL = {
    "latents again, selective": {"model": LATENT, "latents": True} | AGAIN,
    "latents, full": {"model": LATENT, "recompute": "full"},
    "values as wide as keys": {"model": UNEQUAL},
    "latents, tp2": {"model": LATENT, "tp": 2},
    "latents, tp2 selective": {"model": LATENT, "tp": 2} | AGAIN,
    "latents, cp2": {"model": LATENT, "cp": 2},
    "latents, dropout": {"model": LATENT | {"dropout": 0.1}},
    "values as wide as keys, packed documents": PACKED | {"model": UNEQUAL},
    "experts, bf16": {"model": MIXTURE, "precision": "bf16"},
    "experts, full, bf16": {"model": MIXTURE, "precision": "bf16", "recompute": "full"},
    "experts, tp2 full": {"model": MIXTURE, "tp": 2, "recompute": "full"},
    "experts, ep2 full": {"model": MIXTURE, "ep": 2, "recompute": "full"},
    "experts, ep2 tp2 full": {"model": MIXTURE, "ep": 2, "tp": 2, "recompute": "full"},
    "many choices, tp4": {"model": MANY, "tp": 4},
    "many choices, ep4": {"model": MANY, "ep": 4},
    "many choices, ep2 tp2": {"model": MANY, "ep": 2, "tp": 2},
    "many choices, by domain": {"model": MANY, "ep": 4} | BY_DOMAIN,
    "experts, tp2 selective": {"model": MIXTURE, "tp": 2} | AGAIN,
    "experts, tp2 without sp": {"model": MIXTURE, "tp": 2, "sp": False},
    "experts, pp2 zb_h1": PIPE | {"model": MIXTURE, "schedule": "zb_h1"},
    "experts ep2": {"model": MIXTURE, "ep": 2},
    "experts ep2 zero3": {"model": MIXTURE, "ep": 2, "zero": 3},
    "experts ep2 zero3 bf16": {"model": MIXTURE, "ep": 2, "zero": 3, "precision": "bf16"},
    "wide experts": {"model": WIDE},
    "shared experts, full": {"model": SHARED, "recompute": "full"},
    "shared experts, tp2": {"model": SHARED, "tp": 2},
    "shared experts, ep2 selective": {"model": SHARED, "ep": 2} | AGAIN,
    "deepseek, tp2 selective": {"model": DEEPSEEK, "tp": 2} | AGAIN,
    "deepseek, tp2 etp1": {"model": DEEPSEEK, "tp": 2, "etp": 1},
    "deepseek, pp2": PIPE | {"model": DEEPSEEK},
    "deepseek, pp2 zb_h1": PIPE | {"model": DEEPSEEK, "schedule": "zb_h1"},
    "experts, ep2 selective": {"model": MIXTURE, "ep": 2} | AGAIN,
    "experts, ep4 selective": {"model": MIXTURE, "ep": 4} | AGAIN,
    "experts, ep4 full": {"model": MIXTURE, "ep": 4} | FULL,
    "experts, ep2 tp2 selective": {"model": MIXTURE, "ep": 2, "tp": 2} | AGAIN,
    "experts, tp4 selective": {"model": MIXTURE, "tp": 4} | AGAIN,
    "experts, tp4 full": {"model": MIXTURE, "tp": 4} | FULL,
    "experts, tp2 etp1": {"model": MIXTURE, "tp": 2, "etp": 1},
    "experts, tp2 etp1 selective": {"model": MIXTURE, "tp": 2, "etp": 1} | AGAIN,
    "experts, tp2 etp1 full": {"model": MIXTURE, "tp": 2, "etp": 1} | FULL,
    "experts, tp4 etp1": {"model": MIXTURE, "tp": 4, "etp": 1},
    "latents, tp2, 8 bits": FP8 | {"model": LATENT, "tp": 2},
    "experts, ep2, 8 bits": FP8 | {"model": MIXTURE, "ep": 2},
    "many choices, full, 8 bits": FP8 | {"model": MANY} | FULL,
    "deepseek, full, 8 bits in blocks": IN_BLOCKS | {"model": DEEPSEEK} | FULL,
    "deepseek ep2, 8 bits in blocks": IN_BLOCKS | {"model": DEEPSEEK, "ep": 2},
    "deepseek, 8 bits, some linears wide": FP8
    | {"model": DEEPSEEK, "matmul_wide": ["experts.down", "shared.up", "wkv", "wo"]},
    "experts, 8 bits, theirs wide": FP8
    | {"model": MIXTURE, "matmul_wide": ["experts.gate", "up", "down"]},
}
STATES = ("params", "grads", "optimizer", "host")


def plan_of(layout: dict) -> Plan:
    values = dict(layout)
    matmul = values.pop("matmul", "")
    latents = values.pop("latents", UNSET)
    plan = make_plan(model=tiny_model(**values.pop("model", LLAMA)), seq_len=128, **values)
    train = structs.replace(plan.job.train, recompute_latents=latents)
    return seal(structs.replace(plan, job=structs.replace(plan.job, matmul=matmul, train=train)))


def measured(rank: int, plan: Plan) -> dict[str, dict[str, int] | int]:
    """Bytes by category: states as they are between steps, the rest at its peak in a step after the
    first, the lowest one: a thread of gloo that gets no processor lets go of what it has sent late,
    which an exchange of tokens makes likely. Gradients that wait with their matrix's input for a
    later W are kept for backward as well."""
    engine = engine_of(plan, rank)
    routed_rows = count_routed_rows(engine)
    step_memory = StepMemory.of_engine(engine)
    peaks = list[int]()
    batches = [
        micro_batch(plan, indices, packed=plan.job.data.isolate_documents)
        for indices in samples_of_step(plan.parallel, engine.mesh.coord, 0)
    ]
    for _ in range(3 if expert_mesh(plan.parallel).ep == 1 else 8):
        with step_memory.measure({}):
            engine.update(engine.gradients(batches, 1000)[1], 1e-3)
        peaks.append(max(point.held["activations"] for point in step_memory.points()))
    held = {name: step_memory.points()[0].held[name] for name in STATES}
    held["activations"] = min(peaks[1:])
    return {
        "held": held,
        "rows": max(routed_rows, default=0),
        "pp": engine.mesh.coord.pp,
        "padding": _padding(engine) if plan.parallel.zero < 3 else 0,
    }


def count_routed_rows(engine: Engine) -> list[int]:
    """Returns a list that gets the rows of every layer's experts at each of their forwards."""
    routed_rows = list[int]()
    for stage in engine.part.stages:
        for module in stage.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(lambda _, args: routed_rows.append(len(args[0])))
    return routed_rows


def _padding(engine: Engine) -> int:
    """Elements of this rank's buckets that no parameter uses: each starts at a round address."""
    total = sum(tensor.numel() for tensor in engine.buckets.param_tensors())
    return total - sum(param.numel() for _, param, _ in engine.part.parameters())


class Row(NamedTuple):
    """What a pipeline stage was planned and measured to hold, in bytes."""

    planned: dict[str, int]
    held: dict[str, int]  # activations: the mean of ranks with different experts
    padding: int  # elements
    #: Activations of the fullest rank, planned for the fullest layer of experts, and measured.
    fullest: tuple[int, int]


def measure(layouts: dict[str, dict]) -> dict[str, list[Row]]:
    """The rows of each layout, all on equally many ranks."""
    plans = {name: plan_of(layout) for name, layout in layouts.items()}
    (world,) = {plan.parallel.world_size for plan in plans.values()}
    rank_records = run_together(measured, world, {name: (plan,) for name, plan in plans.items()})
    return {name: rows(plan, rank_records[name]) for name, plan in plans.items()}


def rows(plan: Plan, ranks: list[dict]) -> list[Row]:
    """A row a pipeline stage, measured on its fullest rank. Activations where ranks have different
    experts are a mean: a plan's experts are chosen equally often, those of a test are not."""
    result = []
    worst = accounts(with_load(plan, max(record["rows"] for record in ranks)))
    for stage, account in enumerate(accounts(plan)):
        stage_ranks = [record for record in ranks if record["pp"] == stage]
        held = {
            name: max(record["held"][name] for record in stage_ranks)
            for name in (*STATES, "activations")
        }
        fullest = (worst[stage].activations, held["activations"])
        if expert_mesh(plan.parallel).ep > 1:
            held["activations"] = round(
                mean(record["held"]["activations"] for record in stage_ranks)
            )
        planned = {name: getattr(account, name) for name in held}
        result.append(Row(planned, held, stage_ranks[0]["padding"], fullest))
    return result


def accounts(plan: Plan) -> list[Memory]:
    return memory.memory_by_pp_rank(Workload.of_plan(plan), plan.cluster, matmul=plan.job.matmul)


def with_load(plan: Plan, routed_rows: int) -> Plan:
    """The plan for a layer of experts in which the fullest rank computes so many rows."""
    if expert_mesh(plan.parallel).ep == 1 or plan.model.moe is None:
        return plan
    workload = Workload.of_plan(plan)
    mean_rows = copies_per_token(workload, plan.model.moe) * workload.tokens
    factor = max(1.0, routed_rows / mean_rows)
    return seal(
        structs.replace(plan, parallel=structs.replace(plan.parallel, expert_imbalance=factor))
    )


LAYOUTS = QUICK | MORE | SPECIAL | MORE_SPECIAL


@pytest.mark.process
@pytest.mark.parametrize("layouts", launches({(name,): layout for name, layout in LAYOUTS.items()}))
def test_planned_is_measured(layouts):
    assert_planned_is_measured(layouts)


def assert_planned_is_measured(layouts: dict[str, dict]) -> None:
    """Checks layouts on equally many ranks."""
    for name, stage_rows in measure(layouts).items():
        for planned, held, padding, (planned_worst, worst) in stage_rows:
            with told(name):
                # fp32: the only padded cases
                padded = {
                    "params": 4 * padding,
                    "grads": 4 * padding,
                    "optimizer": 8 * padding,
                    "host": 0,
                }
                assert {
                    category: held[category] - planned[category] for category in STATES
                } == padded
                assert planned["activations"] == pytest.approx(held["activations"], rel=0.05)
                assert worst <= 1.05 * planned_worst


def main() -> None:
    print(
        f"{'layout':<40}{'stage':>6}{'states':>12}{'planned':>12}{'activations':>13}{'planned':>12}"
    )
    for name, layout in LAYOUTS.items():
        for stage, (planned, held, padding, _) in enumerate(measure({name: layout})[name]):
            states = sum(held[category] for category in STATES) - 16 * padding
            off = planned["activations"] / held["activations"] - 1
            equal = (
                "equal" if states == sum(planned[category] for category in STATES) else "NOT EQUAL"
            )
            print(
                f"{name:<40}{stage:>6}{states:>12,}{equal:>12}{held['activations']:>13,}{off:>+12.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
