"""Seeded bugs of routers and experts, for the independent oracle. As in `mutations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.nn.functional as F

import trainer.comm.mesh as mesh
import trainer.model.experts as experts
import trainer.model.init as init
import trainer.model.router as router
import trainer.parallel.apply as apply
import trainer.parallel.data.buckets as buckets
import trainer.parallel.expert.load as load
from trainer.parallel.expert.dispatch import ExpertDispatch

from .mutations import Mutation

#: Numbers of cases, by their model (`tests.independent.cases.EXPERTS`).
V3, MIXTRAL, V2, QWEN3 = range(4)
EP2 = ("ep2", "ep2")

MUTATIONS: list[Mutation] = []


def adder(mutations: list[Mutation]) -> Callable:
    """The decorator that appends a mutation to a list."""

    def mutation(
        name: str,
        by: str,
        number: int = V3,
        precision: str = "fp64",
        layouts: tuple[str, str] = EP2,
        first: bool = False,
    ) -> Callable:
        def add(
            patch: Callable[[pytest.MonkeyPatch], None],
        ) -> Callable[[pytest.MonkeyPatch], None]:
            mutations.append(Mutation(name, by, precision, layouts, number, patch, first))
            return patch

        return add

    return mutation


mutation = adder(MUTATIONS)


def routed(patch: pytest.MonkeyPatch, change: Callable) -> None:
    """`change(router, routing, x)` -> what the layer gets of its router instead, and what is
    recorded."""
    original = router.Router.forward
    patch.setattr(
        router.Router, "forward", lambda self, x, *rest: change(self, original(self, x, *rest), x)
    )


def with_moe(patch: pytest.MonkeyPatch, **changes: object) -> None:
    """Routers of another plan."""
    make = router.Router.__init__
    patch.setattr(
        router.Router,
        "__init__",
        lambda self, model, moe: make(self, model, msgspec.structs.replace(moe, **changes)),
    )


# ---------------------------------------------------------------------------------------------------
#     routers


@mutation("weights of a token's choices do not sum to one", "choice weights", MIXTRAL)
def _(patch):
    with_moe(patch, norm_topk=False)


@mutation("the scaling factor of the choices is forgotten", "choice weights")
def _(patch):
    with_moe(patch, routed_scale=1.0)


@mutation("the scaling factor is forgotten behind what is recorded", "gradient", V2)
def _(patch):
    original = ExpertDispatch.__call__

    def unscaled(self, x, routing, *rest):
        return original(self, x, routing._replace(weights=routing.weights / 4.0), *rest)

    patch.setattr(ExpertDispatch, "__call__", unscaled)


@mutation("the balancing bias weighs results", "choice weights")
def _(patch):
    def weighed(self, routing, x):
        scores = routing.logits.sigmoid() + self.bias
        weights = scores.gather(-1, routing.experts)
        return routing._replace(
            weights=weights / weights.sum(-1, keepdim=True) * self.moe.routed_scale
        )

    routed(patch, weighed)


@mutation("the balancing bias does not move the choice", "choice", first=True)
def _(patch):
    original = router.Router._choosable

    def unmoved(self, scores):
        return original(self, scores - self.bias)

    patch.setattr(router.Router, "_choosable", unmoved)


@mutation("groups of sigmoid scores count by their best expert alone", "choice")
def _(patch):
    ranked_by(patch, 1)


@mutation("groups of soft-max scores count by their two best experts", "choice", V2)
def _(patch):
    ranked_by(patch, 2)


def ranked_by(patch: pytest.MonkeyPatch, count: int) -> None:
    def ranked(self, scores):
        moe = self.moe
        scores = scores if self.bias is None else scores + self.bias
        grouped = scores.unflatten(-1, (moe.groups, -1))
        value = grouped.topk(count, -1).values.sum(-1)
        kept_groups = torch.zeros_like(value, dtype=torch.bool).scatter_(
            -1, router.best(value, moe.top_groups), True
        )
        return grouped.masked_fill(~kept_groups[..., None], -torch.inf).flatten(-2)

    patch.setattr(router.Router, "_choosable", ranked)


@mutation("of equal scores the expert with the higher number is taken", "choice", MIXTRAL, "fp32")
def _(patch):
    def higher(scores, count):
        order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count]
        return (scores.shape[-1] - 1 - order).contiguous()

    patch.setattr(router, "best", higher)


@mutation("one token in a hundred takes the second best", "choice", MIXTRAL, "bf16")
def _(patch):
    def second(self, routing, x):
        worst = routing.scores.argmin(-1)
        chosen = routing.experts.clone()
        chosen[::100, -1] = worst[::100]
        weights = routing.scores.gather(-1, chosen)
        return routing._replace(experts=chosen, weights=weights / weights.sum(-1, keepdim=True))

    routed(patch, second)


@mutation("routers score in bf16", "narrow weights", MIXTRAL, "bf16")
def _(patch):
    def narrow(self, routing, x):
        scores = routing.logits.to(x.dtype).softmax(-1)
        chosen = router.best(scores.detach(), self.moe.top_k)
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return router.Routing(chosen, weights.float(), scores.float(), routing.logits)

    routed(patch, narrow)


@mutation("routers multiply in bf16 and go on in fp32", "narrow logits", QWEN3, "bf16")
def _(patch):
    def narrow(self, routing, x):
        logits = F.linear(x, self.weight).float()
        scores = logits.softmax(-1)
        chosen = router.best(scores.detach(), self.moe.top_k)
        weights = scores.gather(-1, chosen)
        return router.Routing(chosen, weights / weights.sum(-1, keepdim=True), scores, logits)

    routed(patch, narrow)


@mutation("weights of choices have no gradient", "gradient", QWEN3)
def _(patch):
    routed(patch, lambda self, routing, x: routing._replace(weights=routing.weights.detach()))


# ------------------------------------------------------------------------------------- experts and
#     their gradients


@mutation("gradients of experts are divided by the ranks that share them", "gradient", MIXTRAL)
def _(patch):
    reduced(patch, lambda grad: grad.div_(2))


def reduced(patch: pytest.MonkeyPatch, change: Callable) -> None:
    """`change` in place what the hooks of experts' parameters see."""
    build = apply.build

    def hooked(*args, **kwargs):
        module = build(*args, **kwargs)
        for name, param, _ in module.parameters():
            if ".experts." in name:
                param.register_hook(lambda grad: change(grad.clone()))
        return module

    patch.setattr(apply, "build", hooked)


@mutation(
    "gradients of experts are summed over ranks with other experts",
    "gradient",
    MIXTRAL,
    layouts=("ep2_dp2", "dp1"),
)
def _(patch):
    summed_over(patch, lambda: torch.distributed.group.WORLD)


@mutation(
    "gradients of experts are not summed over replicas",
    "ranks report",
    MIXTRAL,
    layouts=("ep2_dp2", "dp1"),
)
def _(patch):
    summed_over(patch, lambda: None)


def summed_over(patch: pytest.MonkeyPatch, group: Callable) -> None:
    """Sums over another group where four ranks hold the dense weights and two the same experts."""
    start = buckets.start_all_reduce

    def other(tensor, ranks, *rest):
        return start(tensor, group() if ranks is not None and ranks.size() == 2 else ranks, *rest)

    patch.setattr(buckets, "start_all_reduce", other)


def groups(patch: pytest.MonkeyPatch, name: str, members: Callable) -> None:
    original = mesh._of_experts
    patch.setattr(
        mesh,
        "_of_experts",
        lambda plan, axis, rank: (
            members(plan, rank) if axis == name else original(plan, axis, rank)
        ),
    )


@mutation("the norm counts the experts of one rank", "report", QWEN3)
def _(patch):
    groups(patch, "expert_model", lambda plan, rank: (rank,))


@mutation("shared experts are added twice", "loss")
def _(patch):
    forward = experts.MixtureOfExperts.forward

    def twice(self, x, *serial):
        return forward(self, x, *serial) + self.shared(x)

    patch.setattr(experts.MixtureOfExperts, "forward", twice)


@mutation("experts' first weights are drawn by their number on the rank", "loss")
def _(patch):
    fill = init.fill

    def local(out, name, shape, where, model, seed):
        if len(shape) == 3:
            for index in range(len(out)):
                fill(out[index], f"{name}/{index}", shape[1:], where[1:], model, seed)
        else:
            fill(out, name, shape, where, model, seed)

    patch.setattr(init, "fill", local)


@mutation("weights of experts do not decay", "weight", MIXTRAL, "fp32")
def _(patch):
    registry = apply.registry

    def light(plan, stage, coord):
        table = registry(plan, stage, coord)
        return type(table)(
            {
                name: replace(info, decay=info.decay and ".experts." not in name)
                for name, info in table.items()
            }
        )

    patch.setattr(apply, "registry", light)


@mutation("an expert takes the last tokens that choose it", "gradient", V2)
def _(patch):
    first = experts.first_choices
    patch.setattr(
        experts, "first_choices", lambda chosen, *rest: first(chosen.flip(1), *rest).flip(1)
    )


@mutation("an expert takes one token too many", "gradient", V2)
def _(patch):
    first = experts.first_choices
    patch.setattr(
        experts, "first_choices", lambda chosen, count, capacity: first(chosen, count, capacity + 1)
    )


@mutation(
    "an expert counts its tokens in a rank's part of the sequence",
    "gradient",
    V2,
    layouts=("ep2_tp2", "dp1"),
)
def _(patch):
    drop = experts.MixtureOfExperts._drop

    def alone(self, routing, sequences):
        self.of_sequences = experts._of_whole
        return drop(self, routing, sequences)

    patch.setattr(experts.MixtureOfExperts, "_drop", alone)


@mutation("choices that are left share the weights of those that are dropped", "gradient", V2)
def _(patch):
    drop = experts.MixtureOfExperts._drop

    def shared(self, routing, sequences):
        dropped = drop(self, routing, sequences)
        kept_weight = (routing.weights * dropped.accepted).sum(-1, keepdim=True).clamp_min(1e-9)
        return dropped._replace(
            weights=routing.weights * routing.weights.sum(-1, keepdim=True) / kept_weight
        )

    patch.setattr(experts.MixtureOfExperts, "_drop", shared)


@mutation("dropped choices are reported as taken", "dropped", V2)
def _(patch):
    loads = load.ExpertMeter.loads
    patch.setattr(
        load.ExpertMeter,
        "loads",
        lambda self, table: {
            layer: msgspec.structs.replace(load, dropped=0.0)
            for layer, load in loads(self, table).items()
        },
    )
