"""The search finds what costing every layout finds, keeps what is given, and answers the same every
time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.config.compose import load
from orchestrator.config.schema import BatchRampSpec
from orchestrator.cost.memory.deferred_weight_gradients import SPLIT_BACKWARD
from orchestrator.cost.time.pipeline import in_flight_on_rank, weights_at_end
from orchestrator.errors import OrchError
from orchestrator.plan.model import Mtp
from orchestrator.plan.schedules import SCHEDULES, Kind, build, peak_in_flight, simulate
from orchestrator.plan.schedules.makespan import Steps
from orchestrator.plan.schedules.registry import illegal
from orchestrator.plan.schedules.simulate import Costs
from orchestrator.plan.schedules.turns import TURNS, makespan
from orchestrator.plan.supported import broken
from orchestrator.plan.trained import TRAINER, refusal
from orchestrator.planner.search.bound import least_of_column
from orchestrator.planner.search.layout import Layout
from tests.reference.every_layout import every_layout, front

from . import configs, shapes
from .configs import build_plan


def small_model(moe: bool, layers: int = 4):
    base = shapes.mixtral_8x7b() if moe else shapes.llama3_8b()
    changed = {"layers": layers, "max_seq_len": 8192}
    if moe:
        changed["moe"] = structs.replace(base.moe, first_dense_layers=1)
    return structs.replace(base, **changed)


@st.composite
def cases(draw):
    nodes, gpus = draw(st.sampled_from([(1, 2), (1, 4), (2, 2), (2, 4), (3, 2)]))
    leaf = draw(st.sampled_from([1, nodes]))
    levels = [("leaf", leaf, draw(st.sampled_from([1.0, 8.0]))), ("spine", nodes, 1.0)]
    spec = configs.cluster(nodes, gpus, levels, domain_nodes=draw(st.sampled_from([1, leaf])))
    model = small_model(draw(st.booleans()), draw(st.integers(2, 5)))
    if draw(st.integers(0, 2)) == 0:
        tied = draw(st.booleans())
        depth = draw(st.integers(1, 2))
        model = structs.replace(model, mtp=Mtp(depth=depth), tied_embeddings=tied)
    given_ = {}
    for key, values in (
        ("tp", [1, 2]),
        ("pp", [1, 2]),
        ("zero", [1, 3]),
        ("micro_batch_size", [1, 2]),
    ):
        if draw(st.integers(0, 3)) == 0:
            given_[key] = draw(st.sampled_from(values))
    for key, values in (
        ("sp", [True, False]),
        ("cp_method", ["zigzag", "ring", "allgather", "ulysses"]),
    ):
        if draw(st.integers(0, 2)) == 0:
            given_[key] = draw(st.sampled_from(values))
    if spec.nvlink.domain_nodes == 1:
        spec = structs.replace(
            spec, nvlink=structs.replace(spec.nvlink, switched=draw(st.booleans()))
        )
    gib = draw(st.sampled_from([16, 24, 40, 80]))
    spec = structs.replace(spec, gpu=structs.replace(spec.gpu, memory_gib=gib))
    train = {
        "seq_len": draw(st.sampled_from([1024, 4096])),
        "global_batch_samples": draw(st.sampled_from([4, 6, 16])),
    }
    software = draw(
        st.sampled_from(["orch", "orch", "megatron_2021", "nemo", "torchtitan", "deepspeed_2021"])
    )
    auto_config = configs.config(spec, model, {"auto": True, **given_}, **train)
    return structs.replace(auto_config, cost=structs.replace(auto_config.cost, software=software))


@given(cases())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_equals_costing_every_layout(config):
    everything = every_layout(config)
    answer = configs.search(config, any_layout=True).run()
    assert (
        [costed.layout for costed in answer.front]
        == [costed.layout for costed in front(everything)]
        if everything
        else True
    )
    assert bool(everything) == bool(answer.front)


@pytest.mark.parametrize("moe", [False, True])
def test_narrow_gradients_are_searched(moe):
    """Their all-to-alls cost more across nodes than rings, and ZeRO-1 and -2 alone run them."""
    config = configs.config(
        configs.cluster(2, 2),
        small_model(moe),
        {"auto": True},
        seq_len=1024,
        global_batch_samples=16,
        grad_wire="bf16",
    )
    answer = configs.search(config, any_layout=True).run()
    everything = front(every_layout(config))
    assert [costed.layout for costed in answer.front] == [costed.layout for costed in everything]
    for costed in configs.search(config).run().front:
        mesh = costed.layout.mesh
        assert costed.layout.zero in (1, 2) or mesh.dp * mesh.cp * mesh.ep == 1
        costs_as_much_as_its_bounds(config)


def test_the_memory_of_an_answer_is_that_of_its_plan():
    """Tokens that go by domain have more communicators than those that go directly."""
    model = small_model(moe=True)
    many = structs.replace(model.moe, experts=16, top_k=8, ffn_hidden=2048)
    config = configs.config(
        configs.cluster(2, 4),
        structs.replace(model, moe=many),
        {"auto": True, "ep": 8},
        seq_len=1024,
        global_batch_samples=16,
    )
    front_layouts = configs.search(config, any_layout=True).run().front
    exchanges = {costed.solution.parallel.expert_all_to_all for costed in front_layouts}
    assert "hierarchical" in exchanges
    for costed in front_layouts:
        assert build_plan(costed.config).memory.total == costed.memory.total


@given(cases())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_layout_costs_less_than_its_bounds(config):
    costs_as_much_as_its_bounds(config)


@pytest.mark.parametrize(
    ("gpus", "parallel"),
    [
        (2, {"cp": 2}),  # an all-gather has a communicator that gradients do not share
        (8, {"tp": 1, "pp": 2, "schedule": "dualpipe"}),  # two copies share theirs
    ],
)
def test_bounds_of_memory_count_no_communicator_that_a_layout_may_lack(gpus, parallel):
    costs_as_much_as_its_bounds(
        configs.config(
            configs.cluster(1, gpus),
            small_model(moe=False),
            {"auto": True, **parallel},
            seq_len=1024,
            global_batch_samples=16,
        )
    )


def test_bounds_of_memory_count_no_gradients_that_leave_for_the_host():
    config = configs.config(
        configs.cluster(1, 4),
        small_model(moe=False),
        {"auto": True, "tp": 1, "pp": 2, "zero": 3, "schedule": "zb_h1"},
        seq_len=1024,
        global_batch_samples=16,
    )
    train = structs.replace(config.train, offload="host")
    costs_as_much_as_its_bounds(structs.replace(config, train=train))


def costs_as_much_as_its_bounds(config):
    search = configs.search(config, any_layout=True)
    families = [
        (column, search.base(mesh, column.options))
        for column in search.columns()
        for mesh in column.meshes
    ]
    for column, family in families:
        assert least_of_column(column.meshes, column.layers) <= family.least_seconds() * (1 + 1e-9)
    single = [
        (family, fold, option)
        for column, family in families
        for fold, options in column.options
        for option in options
    ]
    for family, base in (
        (family, search.base(family.mesh, [(fold, [option])])) for family, fold, option in single
    ):
        assert family.least_seconds() <= base.least_seconds() * (1 + 1e-9)
        for branch in base.branches(search.space.recompute, search.space.zeros(base.mesh)):
            least_bytes = branch.least_bytes()
            least_s = branch.least_s
            assert base.least_seconds() <= least_s * (1 + 1e-9)
            for pipeline, schedules in search.pipelines(branch):
                for schedule, sharded in itertools.product(schedules, branch.sharded):
                    if not search.space.shards(base.mesh, schedule)(sharded.par.zero):
                        continue
                    size = pipeline.bytes_of(pipeline.kept(schedule), sharded)
                    seconds = pipeline.seconds_of(sharded)
                    assert least_bytes <= size and max(least_s, pipeline.least_s) <= seconds * (
                        1 + 1e-9
                    )
                    layout = Layout(
                        base.mesh, branch.recompute, sharded.par.zero, schedule, pipeline.vpp
                    )
                    with_schedule = pipeline.seconds_with(schedule, sharded)
                    costed = search.exact_costs.of_layout(layout)
                    assert seconds <= with_schedule
                    if costed is not None:
                        assert size <= costed.memory.total + 8 and with_schedule <= costed.step_s
                        assert costed.solution.best.lower_bound_s <= costed.step_s


def test_few_nodes_of_a_large_search_are_bounded():
    """There are five million legal layouts. What is bounded beyond the answer's neighbours is time
    of whoever waits."""
    config = load(["+cluster=h100x16384", "model=llama3_405b", "parallel=auto"])
    counts = configs.search(config).run(near=0.0).counts
    assert counts.legal > 5e6 and counts.costed <= 6
    assert counts.bounded <= 6000


def test_the_same_on_every_run_and_the_same_as_the_plan():
    config = configs.config(
        configs.cluster(2, 4), shapes.llama3_8b(), {"auto": True}, global_batch_samples=32
    )
    first = configs.search(config).run().front
    second = configs.search(config).run().front
    assert [(a.layout, a.step_s, a.memory) for a in first] == [
        (b.layout, b.step_s, b.memory) for b in second
    ]
    plan = build_plan(first[0].config)
    best = first[0]
    assert (
        structs.replace(plan.time, sd=0.0) == best.solution.time
        and plan.time.sd > 0
        and plan.memory.total == best.memory.total
    )
    assert plan.parallel == best.solution.parallel


def test_what_is_given_is_kept():
    parallel = {"auto": True, "tp": 2, "zero": 1, "schedule": "1f1b"}
    train = {"global_batch_samples": 32, "recompute": "full"}
    config = configs.config(configs.cluster(2, 4), shapes.llama3_8b(), parallel, **train)
    for costed in configs.search(config).run().front:
        mesh = costed.layout.mesh
        assert (mesh.tp, costed.layout.zero, costed.layout.schedule, costed.layout.recompute) == (
            2,
            1,
            "1f1b",
            "full",
        )


RAMPS = st.sampled_from([None, BatchRampSpec(start_samples=2, over_samples=64)])


@given(cases(), RAMPS)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_trainer_runs_what_is_chosen(config, ramp):
    config = structs.replace(config, train=structs.replace(config.train, batch_ramp=ramp))
    search = configs.search(config)
    for mesh in search.space.meshes():
        for layout in search.space.layouts(mesh):
            if layout.recompute == "none" and layout.vpp <= 2:
                case = search.exact_costs.case(search.space.fixed(layout))
                assert broken(case, TRAINER) is None and broken(case) is None, layout


def test_layouts_that_a_setting_forbids_are_not_legal():
    """Ranks that would cut blocks of the optimizer's state: none of them is counted, and the search
    finds another."""
    spec = structs.replace(configs.cluster(1, 8), device="cpu")
    model = structs.replace(small_model(False), kv_heads=8, ffn_hidden=14080)
    config = configs.config(spec, model, {"auto": True}, global_batch_samples=16)
    optim = structs.replace(config.optim, state="8bit")
    search = configs.search(structs.replace(config, optim=optim))
    meshes = list(search.space.meshes())
    assert {mesh.tp for mesh in meshes} == {1, 2, 4}
    for mesh in meshes:
        layout = next(iter(search.space.layouts(mesh)))
        assert broken(search.exact_costs.case(search.space.fixed(layout)), TRAINER) is None, layout
    assert search.run().front


def test_nothing_fits_is_an_empty_front():
    config = configs.config(
        configs.cluster(1, 2), shapes.llama3_70b(), {"auto": True}, global_batch_samples=2
    )
    assert configs.search(config).run().front == []


def test_a_table_is_not_searched():
    parallel = {"auto": True, "schedule_file": "mine.csv"}
    with pytest.raises(OrchError, match="schedule_file"):
        configs.search(configs.config(configs.cluster(1, 2), shapes.llama3_8b(), parallel))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 4), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_activations_in_flight_are_those_counted_on_the_schedule(name, pp, vpp, m):
    if illegal(name, pp, m, vpp) or pp == 1:
        return
    counted = peak_in_flight(build(name, pp, m, vpp))
    closed = [in_flight_on_rank(name, pp, vpp, m, r) for r in range(pp)]
    if (
        name == "interleaved" and m % pp
    ):  # the last round is not full: the closed form is on the safe side
        assert all(have <= bound for have, bound in zip(counted, closed, strict=True))
    else:
        assert closed == list(counted)


@given(st.sampled_from(sorted(SPLIT_BACKWARD)), st.integers(1, 8), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_last_backward_of_a_rank_is_its_first_stage_s(name, pp, m):
    vpp = SCHEDULES[name].vpp[0]
    if illegal(name, pp, m, vpp):
        return
    schedule = build(name, pp, m, vpp)
    for rank, order in enumerate(schedule.orders):
        last = max(at for at, action in enumerate(order) if action.kind is not Kind.W)
        assert schedule.model_stage(order[last].stage) == min(
            map(schedule.model_stage, schedule.stages_of(rank))
        )
        assert weights_at_end(name, pp, m, vpp, rank) == len(order) - 1 - last


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 20),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_makespan_is_the_simulation_s(name, pp, vpp, m, data):
    if illegal(name, pp, m, vpp):
        return
    seconds = st.lists(st.floats(0.1, 3), min_size=pp * vpp, max_size=pp * vpp).map(tuple)
    costs = [data.draw(seconds) for _ in range(3)]
    schedule = build(name, pp, m, vpp)
    seconds = Steps(schedule).makespan(*costs)
    if name in TURNS:
        assert makespan(name, (pp, m, vpp), *costs) == seconds  # the same sums, to the last bit
    assert seconds == pytest.approx(simulate(schedule, Costs(*costs)).makespan, rel=1e-12)


@given(st.integers(1, 6), st.integers(1, 20), st.data())
@settings(max_examples=30, deadline=None)
def test_half_of_dualpipe_takes_as_long_as_all_of_it(half, micro_batches, data):
    seconds = st.lists(st.floats(0.1, 3), min_size=2 * half, max_size=2 * half).map(tuple)
    costs = [data.draw(seconds) for _ in range(3)]
    full_seconds = Steps(build("dualpipe", 2 * half, 2 * micro_batches)).makespan(*costs)
    assert (
        Steps(build("dualpipev", half, micro_batches, 2)).makespan(*costs) == full_seconds
    )  # the same sums, to the last bit


@st.composite
def expert_cases(draw):
    """A small model with experts on a small cluster; all keys given but the degrees and how the
    experts fold."""
    nodes, gpus = draw(st.sampled_from([(1, 4), (2, 2), (2, 4), (4, 2), (3, 4)]))
    leaf = draw(st.sampled_from([1, nodes]))
    over = draw(st.sampled_from([1.0, 8.0]))
    spec = configs.cluster(nodes, gpus, [("leaf", leaf, over), ("spine", nodes, 1.0)])
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    base = small_model(True, 2)
    moe = structs.replace(
        base.moe,
        groups=groups,
        top_groups=max(1, groups // 2),
        first_dense_layers=0,
        ffn_hidden=1024,
    )
    if draw(st.booleans()):
        moe = structs.replace(moe, shared_ffn_hidden=1024)
    parallel = {"auto": True, "zero": draw(st.sampled_from([0, 1])), "vpp": 1, "schedule": "1f1b"}
    parallel |= {"cp_method": draw(st.sampled_from(["zigzag", "ulysses"])), "micro_batch_size": 1}
    train = {
        "seq_len": 2048,
        "global_batch_samples": draw(st.sampled_from([12, 24])),
        "recompute": "none",
    }
    return configs.config(spec, structs.replace(base, moe=moe), parallel, **train)


@given(expert_cases())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_plan_of_any_fold_is_faster(config):
    """The fastest of `build_plan` over every factorisation of the ranks, every mesh of the experts
    in them, and both ways of their tokens: none of it is the search's own enumeration."""
    answer = configs.search(config).run(near=0.0)
    times = dict[tuple[object, ...], float]()
    gpus = config.cluster.nodes * config.cluster.gpus_per_node
    divisors = [divisor for divisor in range(1, gpus + 1) if gpus % divisor == 0]
    for tp, cp, ep, pp in itertools.product(divisors, repeat=4):
        if gpus % (tp * cp * ep * pp):
            continue
        for etp, fold_cp, exchange in itertools.product(
            divisors, (None, True), (None, "hierarchical")
        ):
            if (
                tp % etp
                or (fold_cp and cp == 1)
                or (exchange and tp // etp * ep * (cp if fold_cp else 1) == 1)
            ):
                continue
            for sp in (True, False) if tp > 1 else (False,):
                layout = {
                    "tp": tp,
                    "cp": cp,
                    "ep": ep,
                    "pp": pp,
                    "etp": etp,
                    "fold_cp": fold_cp,
                    "sp": sp,
                }
                layout |= {"auto": False, "expert_all_to_all": exchange}
                try:
                    plan = build_plan(
                        structs.replace(config, parallel=structs.replace(config.parallel, **layout))
                    )
                except OrchError:
                    continue
                if plan.memory.total <= plan.memory.capacity and not refusal(plan):
                    times[tuple(layout.values())] = plan.time.step_s
    assert bool(times) == bool(answer.front)
    if times:
        assert answer.front[0].step_s == pytest.approx(min(times.values()), rel=1e-5)
        assert build_plan(answer.front[0].config).time.step_s == pytest.approx(
            answer.front[0].step_s, rel=1e-9
        )
