"""Bytes against the papers' closed variants and published component figures (memory.csv rows,
cited)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.cost.memory.activations import activations
from orchestrator.cost.memory.deferred_weight_gradients import SPLIT_BACKWARD, peak_points
from orchestrator.cost.memory.kernels import Kernels
from orchestrator.cost.memory.layer_activations import layer_tensors
from orchestrator.cost.memory.rank_memory import rank_state_bytes, zero_buffers
from orchestrator.cost.memory.unequal_stages import StageBytes, unequal_peak
from orchestrator.cost.model.layers import expert_params, layer_params, parameter_count
from orchestrator.cost.time.pipeline import in_flight, in_flight_on_rank
from orchestrator.cost.workload import Workload
from orchestrator.plan import document as doc
from orchestrator.plan.schedules import SCHEDULES, Kind, build, illegal
from tests.beds.plans import make_plan, tiny_model

from . import shapes

GIB = 1 << 30
SEVERAL_STAGES = ("interleaved", "zbv", "dualpipe", "dualpipev")  # of a rank
#: Megatron-LM as Korthikanti et al. ran it: no fused attention, dropout, inputs gathered again in
#: backward.
MEGATRON = Kernels(fused_attention=False, selective="core", keep_sent=False)
# name: layers, hidden, heads, pp, vpp, micro-batch (arXiv 2205.05198, table 3; tp 8, s 2048)
KORTHIKANTI = {
    "22B": (48, 6144, 64, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 3, 1),
    "530B": (105, 20480, 128, 35, 3, 1),
    "1T": (128, 25600, 160, 64, 1, 1),
}


def korthikanti(name: str, sp: bool, recompute: str):
    layers, hidden, heads, pp, vpp, mbs = KORTHIKANTI[name]
    model = shapes.model(
        name, layers, hidden, heads, heads, 4 * hidden, 51200, style="gpt", dropout=0.1
    )
    plan = make_plan(
        model=tiny_model(layers=pp * vpp), pp=pp, vpp=vpp, micro_batches=256, seq_len=2048
    )
    parallel = structs.replace(
        plan.parallel,
        **dict(tp=8, sp=sp, micro_batch_size=mbs, schedule="interleaved" if vpp > 1 else "1f1b"),
        stage_layers=[layers // (pp * vpp)] * (pp * vpp),
    )
    return model, parallel, structs.replace(plan.job.train, precision="bf16", recompute=recompute)


@pytest.mark.parametrize(
    ("row", "name", "sp", "recompute", "gib"),
    [
        ("mem-002", "22B", False, "none", 59.25),
        ("mem-003", "22B", True, "selective", 9.56),
        ("mem-005", "175B", False, "none", 66.84),
        ("mem-006", "175B", True, "selective", 12.35),
        ("mem-008", "530B", False, "none", 114.02),
        ("mem-009", "530B", True, "selective", 23.08),
        ("mem-011", "1T", False, "none", 131.25),
        ("mem-012", "1T", True, "selective", 26.56),
    ],
)
def test_activations_of_korthikanti_figure_1(row, name, sp, recompute, gib):
    model, parallel, train = korthikanti(name, sp, recompute)
    activation_bytes = activations(Workload(model, parallel, train), MEGATRON)[0]
    if (
        parallel.pp == 1
    ):  # the figure counts the layers; one stage alone also holds final norm and logits
        layers = structs.replace(parallel, stage_layers=[model.layers, 0], pp=2)
        activation_bytes = (
            activations(Workload(model, layers, train), MEGATRON)[0] / in_flight(layers)[0]
        )
    assert activation_bytes / GIB == pytest.approx(gib, rel=0.002)


@pytest.mark.parametrize(
    ("row", "name", "gib"), [("mem-001", "22B", 45.56), ("mem-004", "175B", 45.56)]
)
def test_states_of_korthikanti_figure_1(row, name, gib):
    """bf16 weights, fp32 gradients and optimizer: 18 bytes for each parameter of the layers."""
    model, parallel, train = korthikanti(name, True, "selective")
    layer = layer_params(model, 0)
    per_rank = model.layers / parallel.pp * ((layer.attention + layer.ffn) / 8 + layer.replicated)
    states = rank_state_bytes(round(per_rank), 0, structs.replace(parallel, zero=0), train)
    assert (states.params + states.grads + states.optimizer) / GIB == pytest.approx(gib, rel=0.003)


@pytest.mark.parametrize(
    ("zero", "precision", "grads", "bytes_per_parameter"),
    [  # planning.md C2, memory.csv mem-031 to mem-038, d = 4
        (0, "bf16", "fp32", (2, 4, 12)),
        (1, "bf16", "fp32", (2, 4, 3)),
        (0, "fp32", "fp32", (4, 4, 8)),
        (1, "fp32", "fp32", (4, 4, 2)),
        (0, "bf16", "bf16", (2, 2, 12)),
        (1, "bf16", "bf16", (2, 2, 3)),
        (2, "bf16", "bf16", (2, 0.5, 3)),
        (1, "fp64", "fp64", (8, 8, 4)),  # for verification: everything in double
        (3, "fp64", "fp64", (2, 2, 4)),
        (
            3,
            "bf16",
            "bf16",
            (1, 0.5, 2),
        ),  # mem-038 has 0.5 and 3: here the shard itself is the master copy
    ],
)
def test_states_of_every_zero_stage(zero, precision, grads, bytes_per_parameter):
    plan = make_plan(dp=4, zero=zero)
    train = structs.replace(plan.job.train, precision=precision, grad_dtype=grads)
    state_bytes = rank_state_bytes(1000, 0, plan.parallel, train)
    assert (
        state_bytes.params / 1000,
        state_bytes.grads / 1000,
        state_bytes.optimizer / 1000,
    ) == bytes_per_parameter


def test_experts_shard_over_their_own_data_parallel_group():
    plan = make_plan(dp=4, zero=1)
    parallel = structs.replace(plan.parallel, ep=2)
    dense, experts = (
        rank_state_bytes(*counts, parallel, plan.job.train) for counts in ((1000, 0), (0, 1000))
    )
    assert dense.optimizer == 1000 * 8 / 8 and experts.optimizer == 1000 * 8 / 4


def held(rank: int, **kwargs) -> float:
    return in_flight(make_plan(model=tiny_model(layers=16), **kwargs).parallel)[rank]


def test_micro_batches_in_flight():
    assert [held(rank, pp=4, micro_batches=8) for rank in range(4)] == [4, 3, 2, 1]
    assert held(0, pp=4, micro_batches=2) == 2
    assert held(3, pp=4, micro_batches=8, schedule="afab") == 8
    # arXiv 2205.05198 section 4.2.3: interleaving holds 1 + (p-1)/(p*v) times 1F1B's layers on the
    # first rank
    assert held(0, pp=4, vpp=2, micro_batches=8, schedule="interleaved") / 2 == 4 * (1 + 3 / 8)


def test_recompute_and_sequence_parallel_save_what_they_should():
    model = shapes.llama3_8b()
    plan = make_plan(tp=4, micro_batches=1, seq_len=8192)

    def kept(recompute: doc.Train = None, **parallel) -> float:
        par = structs.replace(plan.parallel, stage_layers=[model.layers], **parallel)
        return activations(
            Workload(model, par, structs.replace(plan.job.train, recompute=recompute or "none"))
        )[0]

    assert kept("full") < kept() / 5
    assert kept(sp=True) < kept(sp=False)
    assert (
        kept("full") < kept("selective") < kept()
    )  # ours makes norms and activations again, not attention


def test_fused_attention_keeps_only_statistics():
    model = shapes.llama3_8b()
    plan = make_plan(seq_len=8192)
    workload = Workload(model, plan.parallel, plan.job.train)

    def per_token(kernels: Kernels) -> dict[str, float]:
        return {tensor.writer: tensor.size for tensor in layer_tensors(workload, 0, kernels)}

    assert per_token(Kernels())["statistics"] == 4 * 32
    plain = per_token(Kernels(fused_attention=False))
    assert plain["scores"] == 32 * 8192 * 8  # softmax output twice, fp32


def test_what_zero_holds_whole_for_a_while():
    """`orch report` has measured it: ZeRO-2 keeps buckets under way, ZeRO-3 the blocks that it
    computes."""
    model = shapes.llama3_8b()
    plan = make_plan(dp=8, bucket_bytes=25 << 20)

    def held(zero: int, **parallel) -> float:
        par = structs.replace(plan.parallel, zero=zero, **parallel)
        return zero_buffers(Workload(model, par, structs.replace(plan.job.train, precision="bf16")))

    block = layer_params(model, 0)
    block = block.attention + block.ffn + block.replicated
    tables = 2 * model.vocab * model.hidden
    assert held(0) == held(1) == 0
    assert held(2) == 3 * (25 << 20)
    assert held(2, bucket_bytes=1 << 40) == 2 * 4 * parameter_count(model), (
        "one bucket saves nothing"
    )
    assert held(3) == 2 * (2 * block + tables) + 4 * 2 * block
    assert held(3, pp=2) == 2 * parameter_count(model) / 2 + 4 * 2 * block
    # an expert is whole on the ranks of its place in the expert mesh alone
    mixture = shapes.mixtral_8x7b()
    par = structs.replace(plan.parallel, zero=3, pp=2, ep=8)
    experts = expert_params(mixture)
    train = structs.replace(plan.job.train, precision="bf16")
    spread, replicated = (
        zero_buffers(Workload(mixture, structs.replace(par, ep=ep), train)) for ep in (8, 1)
    )
    assert replicated - spread >= 2 * experts * 7 / 8 / 2


def test_dropout_keeps_probabilities_and_masks():
    model = shapes.llama3_8b()
    plan = make_plan(seq_len=4096)
    dropped = structs.replace(model, dropout=0.1)
    par = structs.replace(plan.parallel, stage_layers=[model.layers], micro_batches=1)
    plain_bytes, dropout_bytes = (
        activations(Workload(variant, par, plan.job.train))[0] for variant in (model, dropped)
    )
    assert (
        dropout_bytes - plain_bytes > model.layers * model.heads * 4096 * 4096 * (4 + 4 + 1) * 0.99
    )


@given(
    st.sampled_from(sorted(SPLIT_BACKWARD)),
    st.integers(2, 7),
    st.integers(1, 40),
    st.floats(0.2, 5),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_what_waits_for_weight_gradients_is_counted_on_the_schedule(name, pp, m, waits, data):
    """Most bytes before or after an I, where what waits for I weighs 1 and what waits for W
    `waits`."""
    vpp = SCHEDULES[name].vpp[0]
    if illegal(name, pp, m, vpp):
        return
    rank = data.draw(st.integers(0, pp - 1))
    full = waiting = 0
    peak = 0.0
    for kind, *_ in build(name, pp, m, vpp).orders[rank]:
        full += (kind is Kind.F) - (kind in (Kind.B, Kind.I))
        waiting += (kind is Kind.I) - (kind is Kind.W)
        peak = max(peak, full + waits * waiting)
    plan = SimpleNamespace(schedule=name, pp=pp, vpp=vpp, micro_batches=m)
    points = peak_points(
        plan, rank, in_flight_on_rank(name, pp, vpp, m, rank) if waits <= 1 else None
    )
    peak_bound = max(max(a + waits * b, a - 1 + waits * (b + 1)) for a, b in points)
    assert peak_bound >= peak * (
        1 - 1e-9
    )  # a whole backward where an I might have been is the safe side
    if name in ("zb_h1", "zb_h2"):
        assert peak_bound == pytest.approx(peak)


@given(st.sampled_from(("dualpipe", "dualpipev")), st.integers(1, 8), st.integers(0, 20), st.data())
@settings(max_examples=60, deadline=None)
def test_points_of_a_full_bidirectional_pipeline_are_those_of_its_schedule(
    name, half, extra_batches, data
):
    directions = 2 if name == "dualpipe" else 1
    pp = half * directions
    m = 2 * pp + extra_batches * directions
    rank = data.draw(st.integers(0, pp - 1))
    full = waiting = 0
    points = set()
    for kind, *_ in SCHEDULES[name].order(rank, pp, m, SCHEDULES[name].vpp[0]):
        if kind in (Kind.B, Kind.I):
            points.add((full, waiting))
        full += (kind is Kind.F) - (kind in (Kind.B, Kind.I))
        waiting += (kind is Kind.I) - (kind is Kind.W)
    highest = [point for point in points if not any(_above(rival, point) for rival in points)]
    plan = SimpleNamespace(schedule=name, pp=pp, vpp=SCHEDULES[name].vpp[0], micro_batches=m)
    assert peak_points(plan, rank) == sorted(highest, reverse=True)


def _above(upper, lower):
    return upper != lower and upper[0] >= lower[0] and upper[1] >= lower[1]


@given(
    st.sampled_from(("interleaved", "afab", "zbv", "dualpipe", "dualpipev")),
    st.integers(2, 6),
    st.integers(1, 30),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_unequal_stages_are_counted_on_the_schedule(name, pp, m, data):
    """Most bytes at the start of a backward, with a weight of its own for each stage and a head on
    the last."""
    vpp = (
        data.draw(st.sampled_from((2, 3)))
        if name in ("interleaved", "afab")
        else SCHEDULES[name].vpp[0]
    )
    if illegal(name, pp, m, vpp):
        return
    rank = data.draw(st.integers(0, pp - 1))
    schedule = build(name, pp, m, vpp)
    sizes = st.floats(0, 9)
    stages = [
        StageBytes(*data.draw(st.tuples(*[sizes] * len(StageBytes._fields))))
        for _ in range(schedule.model_stages)
    ]
    stages = [
        stage_bytes._replace(deferred=stage_bytes.deferred + stage_bytes.head_deferred)
        for stage_bytes in stages
    ]
    held = tuple(sorted({stage % schedule.model_stages for _, stage, _ in schedule.orders[rank]}))
    now = dict.fromkeys(held, 0), dict.fromkeys(held, 0)
    peak = 0.0
    for kind, stage, _ in schedule.orders[rank]:
        at = stage % schedule.model_stages
        stage_bytes = stages[at]
        split = kind is Kind.I
        if kind in (Kind.B, Kind.I):
            held_bytes = sum(
                now[0][s] * (stages[s].stored + stages[s].head) + now[1][s] * stages[s].deferred
                for s in held
            )
            layers = (
                held_bytes
                - stage_bytes.head
                + stage_bytes.during
                + (stage_bytes.head_deferred if split else 0.0)
            )
            end = (
                held_bytes
                - stage_bytes.head
                - stage_bytes.stored
                + stage_bytes.deferred
                + stage_bytes.in_last
            )
            peak = max(
                peak, layers, max(end, held_bytes + stage_bytes.in_head) if split else held_bytes
            )
        now[0][at] += (kind is Kind.F) - (kind in (Kind.B, Kind.I))
        now[1][at] += split - (kind is Kind.W)
    planned_peak = unequal_peak((name, pp, m, vpp), rank, held, [stages[stage] for stage in held])
    assert planned_peak == pytest.approx(peak)
