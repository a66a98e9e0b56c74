"""What is compared: layouts of one card, each with what differs from a plain decoder in bf16."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from orchestrator.plan import Plan, seal
from orchestrator.plan.model import Mla, Moe, Mtp, Yarn
from tests.beds.plans import make_plan, tiny_model

LLAMA: dict[str, Any] = {
    "layers": 3,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn_hidden": 512,
}
LLAMA |= {"vocab": 512, "max_seq_len": 256}
GPT = LLAMA | {
    "kv_heads": 4,
    "norm": "layer",
    "mlp": "plain",
    "position": "learned",
    "activation": "gelu",
}
GPT |= {"bias": True, "tied_embeddings": True}
LATENTS = Mla(
    q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64
)
MIXTURE = LLAMA | {"moe": Moe(experts=8, top_k=2, ffn_hidden=256)}
DEEPSEEK = LLAMA | {"kv_heads": 4, "mla": LATENTS}
DEEPSEEK |= {
    "moe": Moe(experts=8, top_k=2, ffn_hidden=256, shared_ffn_hidden=256, first_dense_layers=1)
}

HOST = {"optimizer": "host"}
INPUTS = {"recompute": "full", "offload": {"activations": "host"}}

#: Name -> what differs from a plain decoder in bf16 on one card, as `make_plan` takes it. In
#: the order of what matters; each runs compiled and not. Products in 8 bits are for CPUs so far.
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"precision": "fp16"},
    "experts": {"model": MIXTURE},
    "packed documents": {"isolate_documents": True},
    "GPT-2": {"model": GPT},
    "dropout": {"model": GPT | {"dropout": 0.1}},
    "selective recomputation": {"recompute": "selective"},
    "full recomputation": {"recompute": "full"},
    "latent attention and experts": {"model": DEEPSEEK},
    "Muon": {"optim_kind": "muon"},
    "optimizer on the host": {"offload": HOST},
    "inputs on the host": INPUTS,
    "moments in bf16": {"optim_state": "bf16"},
    "moments in 8 bits": {"optim_state": "8bit"},
    "SGD": {"optim_kind": "sgd"},
    "deterministic": {"deterministic": True},
    "further predictions": {"model": LLAMA | {"mtp": Mtp(depth=1, weight=0.3)}},
    "YaRN": {"model": DEEPSEEK | {"yarn": Yarn(factor=4.0, original_seq_len=64)}},
    "norms of heads": {"model": LLAMA | {"qk_norm": True}},
    "experts, fp16": {"model": MIXTURE, "precision": "fp16"},
    "packed documents, fp16": {"isolate_documents": True, "precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "experts, fp32": {"model": MIXTURE, "precision": "fp32"},
    "packed documents, fp32": {"isolate_documents": True, "precision": "fp32"},
    "latent attention and experts, fp32": {"model": DEEPSEEK, "precision": "fp32"},
}


#: Without a product of many experts in their precision, the host asks how many tokens each has.
ASKS = ("experts, fp16", "experts, fp32", "latent attention and experts, fp32")


def may_wait(name: str, place: str) -> bool:
    """Whether the host of a case waits at a place ("file:line") by design."""
    if "offload" in CASES[name]:
        return True
    return name in ASKS and place.startswith("permutation.py:")


def activations_margin(name: str, compiled: bool) -> float | None:
    """How far the bytes of a case's activations may be from the plan; None: not to be judged."""
    layout = CASES[name]
    if compiled and "recompute" in layout:
        return None  # what a compiled block recomputes cannot be seen
    has_masks = name == "dropout" or "isolate_documents" in layout
    return 0.15 if has_masks else 0.05  # no card has measured how many masks it keeps


def plan_of(layout: dict[str, Any], device: str, compiled: bool) -> Plan:
    values = {"precision": "bf16", "compile": compiled} | layout
    model = tiny_model(**values.pop("model", LLAMA))
    plan = make_plan(
        model=model,
        seq_len=128,
        micro_batches=2,
        micro_batch_size=2,
        bucket_bytes=4 << 20,
        **values,
    )
    return seal(structs.replace(plan, cluster=structs.replace(plan.cluster, device=device)))
