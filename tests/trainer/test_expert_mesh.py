"""The expert mesh against its definition: which ranks hold which experts, by coordinates."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from orchestrator.plan.document import Moe
from orchestrator.plan.expert_mesh import expert_mesh, position
from orchestrator.plan.trained import problems
from tests.beds.plans import make_plan, tiny_model
from trainer.comm.mesh import members_of

MODEL = tiny_model(moe=Moe(experts=8, top_k=2, ffn_hidden=8))


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("fold_cp", [False, True])
@pytest.mark.parametrize("order", list(permutations(("tp", "cp", "ep")))[:4])
def test_groups_hold_each_expert_once(etp, fold_cp, order):
    degrees = {"tp": 4, "cp": 2, "ep": 2, "dp": 2, "pp": 2}
    nested = (*order, "dp", "pp")
    plan = make_plan(**degrees, etp=etp, fold_cp=fold_cp, order=nested, zero=1, zero_group=4, model=MODEL)
    mesh = expert_mesh(plan.parallel)
    assert mesh.etp * mesh.ep * mesh.edp == 4 * 2 * 2 * 2, "a factorisation of a stage's ranks"

    def held(rank):  # naive: (stage, run of experts, slice of each)
        coord = plan.ranks[rank].coord
        return coord.pp, position(plan.parallel, coord), coord.tp % etp

    world = range(plan.parallel.world_size)
    for rank in world:
        stage, run, slice_ = held(rank)
        experts, etp_group, same, whole = (
            members_of(plan, name, rank) for name in ("experts", "etp", "expert_grad", "expert_model")
        )
        assert [held(peer) for peer in experts] == [(stage, other, slice_) for other in range(mesh.ep)]
        assert sorted(held(peer) for peer in etp_group) == [(stage, run, part) for part in range(etp)]
        assert list(same) == [peer for peer in world if held(peer) == held(rank)] and len(same) == mesh.edp
        every = sorted(product(range(2), range(mesh.ep), range(etp)))
        assert sorted(held(peer) for peer in whole) == every, "each expert once, on all stages"
        shard, replica = (members_of(plan, f"expert_{name}", rank) for name in ("shard", "replica"))
        assert set(shard) & set(replica) == {rank} and len(shard) * len(replica) == mesh.edp


def test_a_plan_names_the_legal_words():
    moe = tiny_model(moe=Moe(experts=8, top_k=2, ffn_hidden=8))

    def refused(**degrees):
        return next(problems(make_plan(**degrees, model=moe)), None)

    assert refused(tp=4, etp=1) is None and refused(tp=2, cp=2, etp=1, fold_cp=True) is None
    assert refused(tp=4, etp=3) == "etp=3 does not divide tp=4; legal: 1, 2, 4"
    assert refused(ep=3) == "ep=3 does not divide 8 experts; nearest: ep=2 or ep=4"
    assert refused(tp=2, etp=1, ep=3) == "ep=6 (over tp, ep) does not divide 8 experts; nearest: ep=4 or ep=8"
    assert "needs sequence parallelism" in refused(tp=2, etp=1, sp=False)
    assert "no experts" in next(problems(make_plan(tp=2, etp=1)))
