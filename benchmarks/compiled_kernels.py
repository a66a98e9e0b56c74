"""Kernels and bytes of compiled blocks, as torch's compiler makes them for an H100: no GPU is
needed to count.

Runs in a process with fake GPUs (tests/beds/fakegpu), on which compiled code is generated, loaded
and launched, and computes nothing. Bytes are those of the compiler's own account of each kernel
that it generates, every buffer once a kernel; matrix products and attention are not among them.
`benchmarks.kernels` calls it and prints its table.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.beds import fakegpu
from tests.beds.plans import tiny_model
from tests.trainer.operations import size
from trainer.comm.collectives import CommCounter
from trainer.model.block import Block
from trainer.model.dropout import Dropout, seed_dropout
from trainer.model.mlp import gated
from trainer.model.norm import RMSNorm
from trainer.model.rope import rope_tables, rotate
from trainer.parallel.vocab import VocabParallelLoss

#: The shapes of Llama 3 8B, one sequence.
SHAPE = BATCH, LENGTH, HIDDEN = 1, 8192, 4096
HEADS = 32
KV_HEADS = 8
FFN = 14336
VOCAB = 128256
SHARDS = 8  # of the vocabulary, over tensor-parallel ranks
DTYPE = torch.bfloat16
DEVICE = "cuda"
WIDE = [(BATCH, LENGTH, FFN)] * 2
Run = Callable[[], Tensor]


def measured(titan: str = "") -> dict[str, Any]:
    """{"blocks": {whose: row}, "parts": {name: row}}; `titan`: a folder with torchtitan."""
    import torch._inductor.config as config

    config.compile_threads = 1
    # What a cache has is not generated, so not counted. Only the environment reaches the threads
    # of backward, in which parts of the loss are compiled.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="kernels-")
    torch._logging.set_logs(inductor_metrics=True)  # without it the compiler does not count
    log = torch._logging.getArtifactLogger("torch._inductor.compile_fx", "inductor_metrics")
    log.handlers.clear()
    blocks = {"ours": of_ours, "transformers": of_transformers}
    if titan:
        blocks["torchtitan"] = lambda: of_torchtitan(titan)
    found: dict[str, Any] = {
        "shape": [*SHAPE],
        "blocks": {name: counted(make()) for name, make in blocks.items()},
    }
    minimum = least_of_block()
    for row in found["blocks"].values():
        row["over"] = (row["forward_mb"] + row["backward_mb"]) * 1e6 / minimum
    found["parts"] = {}
    for name, (run, forward, backward) in parts().items():
        # The loss compiles its passes itself.
        row = counted(run, inside=not name.startswith("cross-entropy"))
        row |= {
            "forward_over": row["forward_mb"] * 1e6 / forward,
            "backward_over": row["backward_mb"] * 1e6 / backward,
        }
        found["parts"][name] = row
    return found


def eager_norm() -> dict[str, float]:
    """The row of RMS norm in the table of what is not compiled: on a CPU torch has no one operator
    for it, so this counts those that torch dispatches for a GPU."""
    from benchmarks import kernels

    x = torch.zeros(kernels.SHAPE, dtype=DTYPE, device=DEVICE, requires_grad=True)
    norm = RMSNorm(kernels.HIDDEN, 1e-5).to(DTYPE).to(DEVICE)
    forward, backward = least(x, x, x, 0)["RMS norm"]
    return kernels.over_least(kernels.counted(lambda: norm(x)), forward, backward)


def counted(run: Run, inside: bool = True) -> dict[str, float]:
    """Kernels that are generated and launched, all that are launched, and MB of the generated ones,
    each forward and backward."""
    torch._dynamo.reset()
    row = {}
    account = _Account()
    with account:
        compiled = torch.compile(run) if inside else run
        out = compiled()
        # The graph of both passes is cut in two before its first kernel runs.
        forward_kernels = account.graphs[0] if inside else len(account.bytes)
        out.backward(torch.zeros_like(out))  # generates the code
        row["forward_mb"] = sum(account.bytes[:forward_kernels]) / 1e6
        row["backward_mb"] = sum(account.bytes[forward_kernels:]) / 1e6
    for name in ("forward", "backward"):
        with fakegpu.recording() as found:
            out = compiled() if name == "forward" else out.backward(torch.zeros_like(out))
        launched = [note.name for note in found.notes if note.kind == "K"]
        row[f"{name}_all_kernels"] = len(launched)
        row[f"{name}_kernels"] = sum(kernel.startswith("triton_") for kernel in launched)
    return row


class _Account:
    """Bytes of the kernels that the compiler generates, while it is entered. `graphs`: how many
    after each graph."""

    def __init__(self) -> None:
        self.bytes = list[int]()
        self.graphs = list[int]()

    def __enter__(self) -> _Account:
        from torch._inductor.graph import GraphLowering
        from torch._inductor.scheduler import ExternKernelSchedulerNode

        self.real = real = GraphLowering.count_bytes

        def count_bytes(graph: Any) -> Any:
            for node in graph.scheduler.nodes:
                if not isinstance(node, ExternKernelSchedulerNode):
                    self.bytes.append(node.get_read_write_buffers_sizes())
            self.graphs.append(len(self.bytes))
            return real(graph)

        GraphLowering.count_bytes = count_bytes  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        from torch._inductor.graph import GraphLowering

        GraphLowering.count_bytes = self.real  # type: ignore[method-assign]


# ----------------------------------------------------------------------------------------------
#     blocks


def model_of() -> Any:
    return tiny_model(
        hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, head_dim=HIDDEN // HEADS, ffn_hidden=FFN
    )


def of_ours() -> Run:
    with torch.device("meta"):
        block = Block(model_of(), 0)
    block, x = _ready(block)
    rope = tuple(table.to(DEVICE) for table in rope_tables(_positions("cpu"), model_of(), DTYPE))
    return lambda: block(x(), rope=rope)


def of_transformers() -> Run:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=FFN,
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        block = LlamaDecoderLayer(config, 0)
    block, x = _ready(block)
    tables = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=DTYPE), _positions("cpu"))
    tables = tuple(table.to(DEVICE) for table in tables)
    positions = _positions(DEVICE)

    def run() -> Tensor:
        out = block(x(), position_embeddings=tables, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    return run


def of_torchtitan(folder: str) -> Run:
    import sys

    from benchmarks.kernels import Sdpa

    sys.path.append(folder)
    from torchtitan.models.llama3 import model_registry

    config = model_registry("8B").model.layers[0]
    with torch.device("meta"):
        block = config.build()
    block, x = _ready(block)
    block.attention.inner_attention = Sdpa()
    positions = _positions(DEVICE)
    return lambda: block(x(), None, positions)


def least_of_block() -> int:
    """The fewest bytes that the element-wise kernels of a block can move, forward and backward, if
    between two products one kernel reads every input once and writes every result once."""
    element = DTYPE.itemsize
    hidden = BATCH * LENGTH * HIDDEN * element
    heads = hidden + hidden * KV_HEADS // HEADS  # queries and keys
    inner = BATCH * LENGTH * FFN * element
    norms = 2 * hidden + 4 * hidden  # the second one adds the residual, and writes the sum too
    residual = 3 * hidden
    forward = norms + 2 * heads + 3 * inner + residual
    # Of a norm: the gradients of two or three products, that of the residual, and its input.
    norms_back = (2 + 2 + 1) * hidden + (3 + 2 + 1) * hidden
    backward = norms_back + 2 * heads + 5 * inner
    return forward + backward


def _positions(device: str) -> Tensor:
    return torch.arange(LENGTH, device=device).expand(BATCH, -1)


def _ready(block: nn.Module) -> tuple[Any, Run]:
    source = torch.zeros(SHAPE, dtype=DTYPE, device=DEVICE, requires_grad=True)
    return block.to_empty(device=DEVICE).to(DTYPE), lambda: source.view(SHAPE)


# ----------------------------------------------------------------------------------------------
#     parts of ours


def parts() -> dict[str, tuple[Run, float, float]]:
    """Of each part of ours what runs, and the fewest bytes that it can move forward and backward:
    every input read once and every result written once."""
    serial = torch.arange(BATCH * LENGTH, device=DEVICE).view(BATCH, LENGTH)
    cos, sin = (table.to(DEVICE) for table in rope_tables(_positions("cpu"), model_of(), DTYPE))
    q, gate, up, x, y, logits, shard = (
        torch.zeros(*shape, dtype=DTYPE, device=DEVICE, requires_grad=True)
        for shape in (
            (BATCH, LENGTH, HEADS, HIDDEN // HEADS),
            *WIDE,
            SHAPE,
            SHAPE,
            (1, 4096, VOCAB),
            (1, 4096, VOCAB // SHARDS),
        )
    )
    counter = CommCounter(gloo=False)
    whole_loss = VocabParallelLoss(0, VOCAB, None, counter, True)
    shard_loss = VocabParallelLoss(shard.shape[-1], shard.shape[-1], None, counter, True)
    targets = serial[:, :4096]
    norm = RMSNorm(HIDDEN, 1e-5).to(DTYPE).to(DEVICE)
    holder = nn.Module()
    holder.drop = drop = Dropout(0.1, HIDDEN)
    seed_dropout(holder, 1, DEVICE)
    runs = {
        "rotary positions of q": lambda: rotate(q, (cos, sin)),
        "gated activation": lambda: gated(gate, up, "silu"),
        "RMS norm": lambda: norm(x),
        "dropout": lambda: drop(x, serial),
        "cross-entropy": lambda: whole_loss(logits, targets),
        f"cross-entropy, one shard of {SHARDS}": lambda: shard_loss(shard, targets),
        "dropout and residual": lambda: x + drop(y, serial),
    }
    bounds = least(q, up, x, size(cos) + size(sin)) | {
        "cross-entropy": (size(logits), 2 * size(logits)),
        f"cross-entropy, one shard of {SHARDS}": (size(shard), 2 * size(shard)),
    }
    return {name: (run, *bounds[name]) for name, run in runs.items()}


def least(q: Tensor, up: Tensor, x: Tensor, tables: int) -> dict[str, tuple[int, int]]:
    """The fewest bytes of parts of a block, forward and backward. `tables`: bytes of cosines and
    sines."""
    one = size(x)
    row = 4 * x.shape[:-1].numel()
    mask = x.numel()
    return {
        "rotary positions of q": (2 * size(q) + tables, 2 * size(q) + tables),
        "gated activation": (3 * size(up), 5 * size(up)),
        "RMS norm": (2 * one + row, 3 * one + row),
        "dropout": (2 * one + mask, 2 * one + mask),
        "dropout and residual": (3 * one + mask, 2 * one + mask),
    }
