"""Small models of every kind, micro-batches for them and engines on them, that tests share."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

from orchestrator.plan import Plan
from orchestrator.plan.document import Model
from tests.beds.plans import tiny_model
from trainer.comm.mesh import Mesh
from trainer.engine import Engine
from trainer.model.documents import Documents
from trainer.model.experts import MixtureOfExperts
from trainer.model.loss import LossTerms
from trainer.precision import Recipe, recipe

LLAMA = {"norm": "rms", "position": "rope", "mlp": "gated", "activation": "silu", "bias": False}
GPT = {"norm": "layer", "position": "learned", "mlp": "plain", "activation": "gelu", "bias": True}
BERT = {
    "norm": "layer",
    "norm_eps": 1e-12,
    "position": "learned",
    "mlp": "plain",
    "activation": "gelu_erf",
    "bias": True,
    "tied_embeddings": True,
    "causal": False,
    "block": "post_norm",
    "head_transform": True,
}
MHA = {"kv_heads": 4}
GQA = {"kv_heads": 2}
MQA = {"kv_heads": 1}


def small(**changes) -> Model:
    """Two layers; vocabulary 257, which no tp > 1 divides."""
    return tiny_model(**({"layers": 2} | changes))


def batch(
    model: Model,
    b: int = 3,
    s: int = 8,
    seed: int = 0,
    documents: bool = False,
    ignored: float = 0.3,
):
    """A micro-batch with some targets ignored; with `documents`, two packed documents a sample."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.vocab, (b, s + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(b, s, generator=generator) < ignored] = -100
    ids = (torch.arange(s) >= s // 2 + 1).long().expand(b, s) if documents else None
    positions = torch.arange(s).expand(b, s)
    if documents:
        positions = torch.where(ids > 0, positions - (s // 2 + 1), positions)
    apart = None if ids is None else Documents.of(ids)
    return SimpleNamespace(
        tokens=tokens[:, :-1], targets=targets, positions=positions, documents=apart
    )


def mixture_on_meta(model: Model) -> tuple[nn.Module, LossTerms, Callable[[], None]]:
    """(a stage with one mixture of experts as its layer 1, its terms, a function that takes tokens
    through it). A tensor on "meta" has no values: whoever reads one fails."""
    with torch.device("meta"):
        mixture = MixtureOfExperts(model, model.moe)
        terms = LossTerms()
        terms.start(torch.ones(()), 1, 1, 1, 1)
        x = torch.zeros(2, 3, model.hidden)
    stage = nn.Module()
    stage.blocks = {"1": nn.Module()}
    stage.blocks["1"].mlp = mixture

    def enter() -> None:
        with terms.forward(0):
            mixture.enter(x, mixture.router(x.flatten(0, 1)))

    return stage, terms, enter


class NoGroups:
    """The mesh of one rank, as far as collectives ask it."""

    def group(self, name: str) -> None:
        return None


def engine_of(plan: Plan, rank: int, use: Recipe | None = None) -> Engine:
    """The engine of a rank that `run_ranks` has started; `use`: a precision other than the
    plan's."""
    return Engine(
        plan, Mesh.from_plan(plan, rank), torch.device("cpu"), use or recipe(plan.job.train)
    )
