"""The expert mesh against its definition: which ranks hold which experts, by coordinates."""

from __future__ import annotations

from itertools import combinations, permutations, product

import pytest

from orchestrator.plan import hierarchy
from orchestrator.plan.document import Moe
from orchestrator.plan.expert_mesh import expert_mesh, position
from orchestrator.plan.trained import problems
from tests.beds.plans import make_plan, tiny_model
from trainer.comm.mesh import DOMAIN_GROUPS, groups_used, members_of

MODEL = tiny_model(moe=Moe(experts=8, top_k=2, ffn_hidden=8))


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("fold_cp", [False, True])
@pytest.mark.parametrize("order", list(permutations(("tp", "cp", "ep")))[:4])
def test_groups_hold_each_expert_once(etp, fold_cp, order):
    degrees = {"tp": 4, "cp": 2, "ep": 2, "dp": 2, "pp": 2}
    nested = (*order, "dp", "pp")
    plan = make_plan(
        **degrees, etp=etp, fold_cp=fold_cp, order=nested, zero=1, zero_group=4, model=MODEL
    )
    mesh = expert_mesh(plan.parallel)
    assert mesh.etp * mesh.ep * mesh.edp == 4 * 2 * 2 * 2, "a factorisation of a stage's ranks"

    def held(rank):  # naive: (stage, run of experts, slice of each)
        coord = plan.ranks[rank].coord
        return coord.pp, position(plan.parallel, coord), coord.tp % etp

    world = range(plan.parallel.world_size)
    for rank in world:
        stage, run, slice_ = held(rank)
        experts, etp_group, grad_group, model_group = (
            members_of(plan, name, rank)
            for name in ("experts", "etp", "expert_grad", "expert_model")
        )
        assert [held(peer) for peer in experts] == [
            (stage, expert_run, slice_) for expert_run in range(mesh.ep)
        ]
        assert sorted(held(peer) for peer in etp_group) == [
            (stage, run, etp_slice) for etp_slice in range(etp)
        ]
        assert (
            list(grad_group) == [peer for peer in world if held(peer) == held(rank)]
            and len(grad_group) == mesh.edp
        )
        every = sorted(product(range(2), range(mesh.ep), range(etp)))
        assert sorted(held(peer) for peer in model_group) == every, (
            "each expert once, on all stages"
        )
        shard, replica = (members_of(plan, f"expert_{name}", rank) for name in ("shard", "replica"))
        assert set(shard) & set(replica) == {rank} and len(shard) * len(replica) == mesh.edp


@pytest.mark.parametrize(
    "layout",
    [
        dict(ep=4, nodes=2),
        dict(ep=4, dp=2, nodes=4),
        dict(tp=2, ep=4, nodes=4),
        dict(tp=2, ep=4, etp=1, nodes=2),
        dict(cp=4, ep=2, fold_cp=True, nodes=4),
        dict(ep=4, nodes=4),
    ],
)
def test_domain_groups_by_their_definition(layout):
    """Inside: same NVLink domain; across: one rank of each domain, all in the same place of
    theirs."""
    plan = make_plan(**layout, expert_all_to_all="hierarchical", model=MODEL)
    assert hierarchy.problem(plan) is None and hierarchy.is_hierarchical(plan)
    groups = hierarchy.expert_groups(plan)
    for rank in plan.ranks:
        experts, inside, across = (
            members_of(plan, name, rank.rank) for name in ("experts", *DOMAIN_GROUPS)
        )
        assert list(experts) in groups
        assert [peer for peer in experts if plan.ranks[peer].node == rank.node] == list(inside)
        assert (
            len({plan.ranks[peer].node for peer in across})
            == len(across)
            == len(experts) // len(inside)
        )
        assert set(inside) & set(across) == {rank.rank}
        positions = [members_of(plan, "experts_inside", peer).index(peer) for peer in across]
        assert len(set(positions)) == 1 and list(across) == sorted(across)
    assert set(DOMAIN_GROUPS) <= set(groups_used(plan))
    assert not set(DOMAIN_GROUPS) & set(groups_used(make_plan(**layout, model=MODEL)))


def test_tokens_that_cannot_go_by_domain_are_refused_with_what_can():
    def refused(moe=MODEL.moe, **layout):
        plan = make_plan(**layout, expert_all_to_all="hierarchical", model=tiny_model(moe=moe))
        problem = hierarchy.problem(plan)
        assert problem is None or problem in problems(plan)
        return problem

    assert refused(ep=4, nodes=1) is None, "one domain: straight"
    assert "without expert parallelism; legal: direct" in refused(dp=2)
    assert "have 6 + 2 of them" in refused(ep=8, dp=3, nodes=4)
    assert "some groups of 4 ranks" in refused(ep=4, dp=3, nodes=2)
    limited = Moe(experts=8, top_k=2, ffn_hidden=8, groups=2, top_groups=1)
    assert refused(limited, ep=4, nodes=2) is None
    assert "nearest: 2 domains (ep=2)" in refused(limited, ep=4, nodes=4)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (4, 4), (2, 1)])
@pytest.mark.parametrize("domains", [1, 2])
def test_expected_landings_against_every_choice(groups, top_groups, domains):
    moe = Moe(experts=8, top_k=2, ffn_hidden=8, groups=groups, top_groups=top_groups)
    landings = []
    for chosen in combinations(range(groups), top_groups):
        held = [expert for expert in range(8) if expert // (8 // groups) in chosen]
        landings += [
            len({expert // (8 // domains) for expert in pair}) for pair in combinations(held, 2)
        ]
    assert hierarchy.landings(moe, domains) == pytest.approx(
        sum(landings) / len(landings), rel=1e-12
    )


def test_a_plan_names_the_legal_words():
    moe = tiny_model(moe=Moe(experts=8, top_k=2, ffn_hidden=8))

    def refused(**degrees):
        return next(problems(make_plan(**degrees, model=moe)), None)

    assert refused(tp=4, etp=1) is None and refused(tp=2, cp=2, etp=1, fold_cp=True) is None
    assert refused(tp=4, etp=3) == "etp=3 does not divide tp=4; legal: 1, 2, 4"
    assert refused(ep=3) == "ep=3 does not divide 8 experts; nearest divisors: 2 and 4"
    assert (
        refused(tp=2, etp=1, ep=3)
        == "ep=6 (over tp, ep) does not divide 8 experts; nearest divisors: 4 and 8"
    )
    assert "needs sequence parallelism" in refused(tp=2, etp=1, sp=False)
    assert "no experts" in next(problems(make_plan(tp=2, etp=1)))
