"""Initial weights, which are a function of (seed, parameter name): every layout starts from the
same model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from orchestrator.plan.document import Model

from .stage import Stage

#: Rows of dimension 0 drawn from one generator. A rank draws only the blocks that its rows touch,
#: and holds one block of a full tensor at a time.
ROWS = 4096


class Slice(Protocol):
    """The position of a local tensor in its global one (`trainer.parallel.params.ParamInfo`)."""

    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def global_slices(self) -> tuple[slice, ...]: ...
    def valid(self, local: Tensor) -> Tensor: ...


@torch.no_grad()
def init_stage(
    stage: Stage,
    model: Model,
    seed: int,
    table: Mapping[str, Slice] | None = None,
) -> None:
    """Fills parameters in place. `table` gives the slice of the full tensor that a parameter holds;
    others are left alone (default: all are filled, whole).

    Numbers are drawn in fp32 and then rounded, so all precisions start from the same numbers. The
    device of the parameter draws them: CPU and CUDA differ.
    """
    for name, param in stage.named_parameters():
        if param.is_meta:  # a dry build: shapes only
            continue
        if table is not None and name not in table:
            continue
        shape = tuple(param.shape)
        if table is None:
            slices = tuple(slice(0, size) for size in shape)
            fill(param, name, shape, slices, model=model, seed=seed)
        else:
            info = table[name]
            param.zero_()  # padding stays zero: its gradient is zero and weight decay keeps it zero
            local = info.valid(param)
            fill(
                local,
                name,
                info.global_shape,
                info.global_slices,
                model=model,
                seed=seed,
            )


def fill(
    out: Tensor,
    name: str,
    shape: tuple[int, ...],
    where: tuple[slice, ...],
    model: Model,
    seed: int,
) -> None:
    """Writes full_tensor(name)[where] into `out`, drawing only the blocks of rows that it needs."""
    if len(shape) == 1:  # norms begin as identity, biases at zero
        nn.init.constant_(out, 1.0 if name.endswith("weight") else 0.0)
        return
    rows = where[0]
    if len(shape) == 3:  # one matrix per expert, drawn by the expert's number
        for index in range(rows.start, rows.stop):
            expert = f"{name}/{index}"
            local = out[index - rows.start]
            fill(
                local,
                expert,
                shape[1:],
                where[1:],
                model=model,
                seed=seed,
            )
        return
    deviation = std(name, model)
    for block in range(rows.start // ROWS, -(-rows.stop // ROWS)):
        low = block * ROWS
        high = min((block + 1) * ROWS, shape[0])
        first = max(low, rows.start)
        stop = min(high, rows.stop)
        if first >= stop:
            continue
        generator = torch.Generator(out.device).manual_seed(_seed(seed, name, block))
        drawn = torch.empty(
            high - low,
            *shape[1:],
            dtype=torch.float32,
            device=out.device,
        )
        drawn.normal_(0.0, deviation, generator=generator)
        needed = drawn[first - low : stop - low][(slice(None), *where[1:])]
        out[first - rows.start : stop - rows.start].copy_(needed)


def std(name: str, model: Model) -> float:
    """Returns the standard deviation of a matrix: sqrt(2 / 5h) (Nguyen & Salazar 2019, arXiv
    1910.05895: 0.02 at h = 1000), divided by sqrt(2 layers) for matrices that write into the
    residual stream (GPT-2, section 2.3).
    """
    base = (2.0 / (5.0 * model.hidden)) ** 0.5
    writes = name.partition("/")[0].endswith((".wo.weight", ".down.weight"))
    return base / (2.0 * model.layers) ** 0.5 if writes else base


def _seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)
