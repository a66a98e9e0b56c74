"""Compiled blocks on GPUs that compute nothing: what torch's compiler traces, where it stops, and
that depth and steps add nothing to it.

`test_compile.py` compares the numbers of compiled blocks on a CPU; here the path of a GPU runs (its
kernels, NCCL, FSDP2), with as many layers as make torch give up where each is compiled anew.
"""

from __future__ import annotations

import pytest
import torch

from tests.beds import fakegpu
from tests.trainer import compiled_steps
from tests.trainer.test_gpu import OF_EXPERTS, OF_OFFLOAD

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(bool(fakegpu.missing()), reason=fakegpu.missing() or "there are fake GPUs"),
]

#: More than torch's `recompile_limit`.
LAYERS = 12
#: Of the blocks of each layout: graphs, and places where the compiler stops, once a function that
#: such a place is in.
ROWS = {
    "alone": (1, 0),
    "alone, fp16": (1, 0),
    "alone, fp32": (1, 0),
    "alone, full": (1, 0),
    "alone, selective": (1, 0),
    "alone, full and none by turns": (2, 0),
    "alone, inputs on the host": (1, 1),
    "alone, deterministic": (1, 0),
    "alone, optimizer on the host": (1, 0),
    "packed documents": (4, 3),
    "packed documents, full": (4, 3),
    "packed documents, selective": (1, 2),
    "GPT, tied": (1, 0),
    "YaRN": (1, 0),
    "dropout": (1, 0),
    "norms of heads": (1, 0),
    "further predictions": (2, 0),
    "latents": (1, 0),
    "latents, selective": (1, 0),
    "experts": (3, 2),
    "experts, full": (3, 2),
    "experts, terms of the loss": (3, 2),
    "experts after a dense layer": (6, 2),
    "experts ep2": (3, 2),
    "experts tp2": (5, 9),
    "tp2": (6, 10),
    "tp2, full": (6, 10),
    "tp2, selective": (2, 8),
    "tp2 in pieces": (6, 10),
    "tp2 in pieces, full": (6, 10),
    "tp2 in pieces, selective": (2, 4),
    "tp2, dropout": (6, 10),
    "tp2, latents": (8, 11),
    "tp2 without sp": (6, 10),
    "tp2 without sp, full, shares of inputs": (6, 10),
    "cp2 zigzag": (4, 3),
    "cp2 ring": (4, 3),
    "cp2 allgather": (4, 3),
    "cp2 ulysses": (4, 3),
    "cp2, full": (4, 3),
    "cp2, selective": (1, 2),
    "dp2 zero1": (1, 0),
    "dp2 zero2": (1, 0),
    "dp2 zero3": (1, 0),
    "dp2 zero3, full": (1, 0),
    "pp2": (1, 0),
    "pp2 interleaved": (1, 0),
    "pp2 zb_h1": (6, 10),
    "pp2 zb_h1, full": (6, 10),
    "pp2 dualpipev": (6, 10),
    "tp2 pp2 dualpipev": (6, 16),
}
#: Of torch 2.11, where it differs: it compiles the loss anew for targets with other strides.
IN_TORCH_2_11 = {"further predictions": (5, 0)}
#: One of each reason not to trace a part, most inside a recomputation.
QUICK = [
    "alone",
    "packed documents, full",
    "packed documents, selective",
    "experts, full",
    "tp2, full",
    "pp2 zb_h1, full",
    "dp2 zero3, full",
]
MORE = [name for name in ROWS if name not in QUICK]


#: Where the host waits by design.
WAITS = (*OF_OFFLOAD, *OF_EXPERTS)


@pytest.fixture(scope="module")
def quick():
    return fakegpu.call(compiled_steps.compiled, QUICK, LAYERS, True)


@pytest.mark.parametrize("name", QUICK)
def test_twelve_layers_run_the_graphs_of_one(quick, name):
    """Fewer graphs mean that a part runs uncompiled, more that layers or steps are compiled anew:
    tensor parallelism did so until torch gave up, in the first step of two layers."""
    runs(name, quick[name])


@pytest.mark.full
@pytest.mark.parametrize("first", range(4))
def test_more_layouts_run_the_graphs_of_one_layer(first):
    """Generated code, too, of dropout, latents, experts, tp2 and ZeRO-3."""
    call = compiled_steps.compiled, MORE[first::4], LAYERS, True
    for name, ranks in fakegpu.call(*call, timeout=1800.0).items():
        runs(name, ranks)


@pytest.mark.full
def test_two_layers_run_the_same_graphs():
    for name, ranks in fakegpu.call(compiled_steps.compiled, QUICK, 2, False).items():
        runs(name, ranks, generated=False)


def runs(name: str, ranks: list[dict], generated: bool = True) -> None:
    oldest = torch.__version__ < (2, 12)
    graphs, breaks = IN_TORCH_2_11.get(name, ROWS[name]) if oldest else ROWS[name]
    for rank in ranks:
        assert rank["graphs"] == [graphs] * compiled_steps.STEPS, name
        assert rank["breaks"] == breaks, name
        if generated and name in compiled_steps.GENERATED:
            assert rank["generated"] > 4 * LAYERS, f"{name}: each layer launches generated kernels"
        if name == "packed documents, selective":
            assert rank["attention"] == 1, "its result is kept, not computed again"
        assert bool(rank["grouped"]) == ("experts" in name), "products of experts are one kernel"
        waits = [wait for wait in rank["waits"] if not any(at in wait for at in WAITS)]
        assert waits == [], f"{name}: the host enqueues a step without waiting for the device"


def test_the_guide_has_every_row():
    assert ROWS.keys() == compiled_steps.LAYOUTS.keys()
    guide = (fakegpu.ROOT / "docs" / "gpu.md").read_text()
    table = guide.split("<!-- graphs -->")[1].split("<!-- end of graphs -->")[0]
    lines = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    rows = {
        name: (int(graphs), int(breaks))
        for graphs, breaks, names in lines
        for name in names.split("; ")
    }
    assert rows == ROWS
