"""The optimizers as one process computes them: AdamW by torch, the others by their formulas, one
parameter at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from orchestrator.plan.document import Optim

from .plain_state import narrowed

#: Updates the parameters from their `.grad` with a learning rate.
Step = Callable[[float], None]


def plain_optimizer(params: Mapping[str, Tensor], optim: Optim, seed: int = 0) -> Step:
    """Returns the plan's optimizer for a whole model, given by its parameters' names."""
    if optim.kind == "sgd":
        return _by_formula(params, optim, lambda gradient, momentum: momentum, seed)
    if optim.kind != "muon":
        return _adamw(params, optim, seed)
    matrices = {
        name
        for name, param in params.items()
        if param.dim() == 2 and name.split(".")[0] == "layers"
    }
    steps = (
        _by_formula(
            {name: params[name] for name in matrices},
            optim,
            _muon(optim.beta1),
        ),
        _adamw({name: param for name, param in params.items() if name not in matrices}, optim),
    )

    def step(lr: float) -> None:
        for group_step in steps:
            group_step(lr)

    return step


def _adamw(params: Mapping[str, Tensor], optim: Optim, seed: int = 0) -> Step:
    tensors = params.values()
    matrices = {
        "params": [param for param in tensors if param.dim() > 1],
        "weight_decay": optim.weight_decay,
    }
    vectors = {"params": [param for param in tensors if param.dim() == 1], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    adamw = torch.optim.AdamW(
        groups,
        lr=0.0,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=False,
    )

    def step(lr: float) -> None:
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for name, param in params.items() if optim.state else ():
            state = adamw.state[param]
            for kind in ("exp_avg", "exp_avg_sq"):
                number = int(state["step"])
                moment = narrowed(
                    state[kind],
                    str(optim.state),
                    kind=kind,
                    name=name,
                    seed=seed,
                    update=number,
                )
                state[kind].copy_(moment)

    return step


def _by_formula(
    params: Mapping[str, Tensor],
    optim: Optim,
    direction: Callable[[Tensor, Tensor], Tensor],
    seed: int = 0,
) -> Step:
    """Returns an optimizer that steps in `direction(gradient, momentum)`, where the momentum
    includes the gradient."""
    momenta = {name: torch.zeros_like(param) for name, param in params.items()}
    updates = itertools.count(1)

    def step(lr: float) -> None:
        number = next(updates)
        with torch.no_grad():
            for name, param in params.items():
                gradient = torch.zeros_like(param) if param.grad is None else param.grad
                momenta[name] = optim.beta1 * momenta[name] + gradient
                decay = optim.weight_decay if param.dim() > 1 else 0.0
                param.copy_((1 - lr * decay) * param - lr * direction(gradient, momenta[name]))
                if optim.state:
                    momenta[name] = narrowed(
                        momenta[name],
                        optim.state,
                        kind="momentum",
                        name=name,
                        seed=seed,
                        update=number,
                    )

    return step


def _muon(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns Muon's direction, which applies the polynomial of arXiv 2502.16982 to the values of a
    singular value decomposition."""

    def direction(gradient: Tensor, momentum: Tensor) -> Tensor:
        left_vectors, values, right_vectors = torch.linalg.svd(
            gradient + beta * momentum, full_matrices=False
        )
        values = values / (values.square().sum().sqrt() + 1e-7)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        return 0.2 * max(gradient.shape) ** 0.5 * (left_vectors * values) @ right_vectors

    return direction
