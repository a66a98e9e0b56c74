"""python -m benchmarks.kernels [--torchtitan DIR]

Counts kernels and bytes of one decoder block, forward and backward, by the operators that torch
dispatches: ours, that of transformers and that of torchtitan, in one run, nothing compiled, and
again compiled (`compiled_kernels`). An operator reads each tensor once and writes its results once;
views and allocations are free. Counts are not timings: they need no GPU. In a block `F.rms_norm`
counts as the one operator that a GPU has for it; its own row is what torch dispatches on a fake
GPU. Writes benchmarks/results/kernels.json and the table of docs/gpu.md.

DIR holds torchtitan without what it depends on: pip install --no-deps --target DIR torchtitan
spmd_types tyro docstring_parser typeguard. Its FlexAttention is replaced by the same call of SDPA
that the others make.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import compiled_kernels
from benchmarks.pages import filled
from tests.beds import fakegpu
from tests.beds.plans import tiny_model
from tests.trainer.operations import Kernels, size
from trainer.model.block import Block
from trainer.model.dropout import Dropout, seed_dropout
from trainer.model.mlp import gated
from trainer.model.norm import RMSNorm
from trainer.model.rope import rope_tables, rotate

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "kernels.json"
PAGE = ROOT / "docs" / "gpu.md"
SHAPE = BATCH, LENGTH, HIDDEN = 2, 512, 256
HEADS = 16
FFN = 768
DTYPE = torch.bfloat16
#: Not element-wise: their bytes are not what this is about.
PRODUCTS = ("mm", "addmm", "bmm")
COUNTER = Kernels()


class FusedNorm(torch.autograd.Function):
    """`F.rms_norm` as a GPU dispatches it: one operator forward, one backward. Values do not matter
    here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inverse = x.new_ones((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse)
        out = torch.zeros_like(x)
        COUNTER.note("_fused_rms_norm", [x, weight], [out, inverse])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, inverse = ctx.saved_tensors
        COUNTER.muted = True
        found = torch.zeros_like(x), torch.zeros_like(weight)
        COUNTER.muted = False
        COUNTER.note("_fused_rms_norm_backward", [grad, x, weight, inverse], list(found))
        return found


def fused_norm(x: Tensor, shape: object, weight: Tensor, eps: float | None = None) -> Tensor:
    return _muted(lambda: FusedNorm.apply(x, weight))


def _muted(run: Callable[[], Tensor]) -> Tensor:
    COUNTER.muted = True
    out = run()
    COUNTER.muted = False
    return out


def counted(run: Callable[[], Tensor]) -> dict[str, float]:
    """Kernels and MB forward and backward; element-wise alone but for `all_kernels`."""
    row: dict[str, float] = {}
    COUNTER.seen.clear()
    COUNTER.bytes.clear()
    with COUNTER:
        out = run()
        half = len(COUNTER.seen)
        grad = torch.ones_like(out)
        COUNTER.seen.pop()
        COUNTER.bytes.pop()
        torch.autograd.backward(out, grad)
    for name, part in (("forward", slice(0, half)), ("backward", slice(half, None))):
        found = list(zip(COUNTER.seen[part], COUNTER.bytes[part], strict=True))
        own = [moved for op, moved in found if op not in PRODUCTS and "attention" not in op]
        row |= {
            f"{name}_kernels": len(own),
            f"{name}_mb": sum(own) / 1e6,
            f"{name}_all_kernels": len(found),
        }
    return row


def over_least(row: dict[str, float], forward: float, backward: float) -> dict[str, float]:
    """The row, with its bytes over the fewest that it can move."""
    return row | {
        "forward_over": row["forward_mb"] * 1e6 / forward,
        "backward_over": row["backward_mb"] * 1e6 / backward,
    }


def kept(run: Callable[[], Tensor]) -> float:
    """MB of the distinct storages that autograd keeps, parameters not counted."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not tensor.is_leaf | (tensor.numel() < 2):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(found.values()) / 1e6


# ----------------------------------------------------------------------------------------------
#     blocks


def of_ours() -> Callable[[], Tensor]:
    model = tiny_model(
        hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, head_dim=HIDDEN // HEADS, ffn_hidden=FFN
    )
    block, x = _ready(Block(model, 0))
    rope = rope_tables(torch.arange(LENGTH).expand(BATCH, -1), model, DTYPE)
    return lambda: block(x(), rope=rope)


def of_transformers() -> Callable[[], Tensor]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=FFN,
    )
    config._attn_implementation = "sdpa"
    block, x = _ready(LlamaDecoderLayer(config, 0))
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    tables = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=DTYPE), positions)

    def run() -> Tensor:
        out = block(x(), position_embeddings=tables, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    return run


def of_torchtitan(folder: str) -> Callable[[], Tensor]:
    sys.path.append(folder)
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel").model.layers[0]
    block, x = _ready(config.build())
    block.attention.inner_attention = Sdpa()
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    return lambda: block(x(), None, positions)


class Sdpa(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        fewer = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=fewer).transpose(
            1, 2
        )


def _ready(block: nn.Module) -> tuple[Any, Callable[[], Tensor]]:
    """The block with some weights, and its input, the result of something."""
    for param in block.parameters():
        nn.init.normal_(param, 0.0, 0.02)
    source = torch.randn(SHAPE, dtype=DTYPE, requires_grad=True)
    for param in block.parameters():
        param.data = param.data.to(DTYPE)
    return block, lambda: source.view(SHAPE)


# ----------------------------------------------------------------------------------------------
#     parts of ours


def parts() -> dict[str, tuple[Callable[[], Tensor], float, float]]:
    """Of each part of ours what runs, and the fewest MB that it can move forward and backward."""
    model = tiny_model(
        hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, head_dim=HIDDEN // HEADS, ffn_hidden=FFN
    )
    cos, sin = rope_tables(torch.arange(LENGTH).expand(BATCH, -1), model, DTYPE)
    q = torch.randn(BATCH, LENGTH, HEADS, HIDDEN // HEADS, dtype=DTYPE, requires_grad=True)
    gate, up = (torch.randn(BATCH, LENGTH, FFN, dtype=DTYPE, requires_grad=True) for _ in range(2))
    x = torch.randn(SHAPE, dtype=DTYPE, requires_grad=True)
    holder = nn.Module()
    holder.drop = drop = Dropout(0.1, HIDDEN)
    seed_dropout(holder, 1)
    serial = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    least = compiled_kernels.least(q, up, x, size(cos) + size(sin))
    return {
        "rotary positions of q": (lambda: rotate(q, (cos, sin)), *least["rotary positions of q"]),
        "gated activation": (lambda: gated(gate, up, "silu"), *least["gated activation"]),
        "dropout": (lambda: drop(x, serial), *least["dropout"]),
    }


# ---------------------------------------------------------------------------------------------- the
#     page


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--torchtitan", help="folder with torchtitan")
    args = parser.parse_args()
    F.rms_norm = fused_norm  # type: ignore[assignment]
    RMSNorm.forward = lambda self, x: fused_norm(x, None, self.weight)  # type: ignore[method-assign]
    blocks = {"ours": of_ours(), "transformers": of_transformers()}
    if args.torchtitan:
        blocks["torchtitan"] = of_torchtitan(args.torchtitan)
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "shape": [*SHAPE],
        "heads": HEADS,
        "ffn": FFN,
        "dtype": str(DTYPE),
    }
    found["blocks"] = {name: counted(run) | {"kept_mb": kept(run)} for name, run in blocks.items()}
    found["parts"] = {}
    for name, (run, least, least_back) in parts().items():
        found["parts"][name] = over_least(counted(run), least, least_back)
    if not fakegpu.missing():
        found["parts"]["RMS norm (F.rms_norm)"] = fakegpu.call(compiled_kernels.eager_norm)
        found["compiled"] = fakegpu.call(
            compiled_kernels.measured, args.torchtitan or "", timeout=3600.0
        )
        from benchmarks import step_kernels  # which takes the same attention as this

        found["step"] = fakegpu.call(step_kernels.measured, args.torchtitan or "", timeout=3600.0)
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), "kernels", table(found)))
    print(table(found))


def table(found: dict[str, Any]) -> str:
    lines = [
        "| block | kernels, all | element-wise kernels | their MB | kept for backward, MB |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"{_block(name, row, '.1f')} {row['kept_mb']:.1f} |"
        for name, row in found["blocks"].items()
    ]
    lines += ["", "| part of ours | kernels | bytes over the minimum |", "|---|---|---|"]
    lines += [_part(name, row) for name, row in found["parts"].items()]
    if "compiled" in found:
        compiled = found["compiled"]
        lines += [
            "",
            f"Compiled for an H100, {compiled['shape']} in bf16, the shapes of Llama 3 8B:",
            "",
        ]
        lines += [
            "| block | kernels launched | of them generated | MB that these move | over the minimum |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"{_block(name, row, ',.0f')} {row['over']:.2f} |"
            for name, row in compiled["blocks"].items()
        ]
        lines += ["", "| part of ours | kernels | bytes over the minimum |", "|---|---|---|"]
        lines += [_part(name, row) for name, row in compiled["parts"].items()]
    if "step" in found:
        lines += [
            "",
            "A steady step of Llama 3.2 1B, one sequence of 4,096 tokens in bf16: forward, backward,"
            " clipping, AdamW:",
            "",
            "| step | kernels launched | of them generated |",
            "|---|---|---|",
        ]
        lines += [
            f"| {name} | {row['kernels']} | {row['generated']} |"
            for name, row in found["step"].items()
        ]
    return "\n".join(lines)


def _block(name: str, row: dict[str, Any], form: str) -> str:
    """`form`: of MB."""
    cells = (
        f"{row['forward_' + what]:{how}} + {row['backward_' + what]:{how}}"
        for what, how in (("all_kernels", ""), ("kernels", ""), ("mb", form))
    )
    return f"| {name} | {' | '.join(cells)} |"


def _part(name: str, row: dict[str, Any]) -> str:
    over = f"{row['forward_over']:.1f} + {row['backward_over']:.1f}"
    return f"| {name} | {row['forward_kernels']} + {row['backward_kernels']} | {over} |"


if __name__ == "__main__":
    main()
