"""What tests of compiled blocks do in processes with fake GPUs (`tests.beds.fakegpu`)."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from typing import Any

from orchestrator.plan.model import Moe, Mtp, Yarn
from tests.beds import fakegpu
from tests.trainer.gpu_steps import LR, TOKENS, EvenCounts, gpu_plan
from tests.trainer.test_planned_memory import GPT, LATENT, LLAMA, MIXTURE, PIPE, SHARED
from trainer.comm.mesh import Mesh
from trainer.comm.settings import apply_settings
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.metrics.memory import StepMemory
from trainer.parallel.vocab import Passes
from trainer.precision import recipe
from trainer.verify.samples import micro_batch

STEPS = 3
DROPPED = LLAMA | {"dropout": 0.1}
STRETCHED = Yarn(factor=4.0, original_seq_len=32, mscale_all_dim=0.0)
WITH_TERMS = Moe(experts=8, top_k=2, ffn_hidden=48, balance_loss=0.01, z_loss=0.01)
FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}
PIECES = {"tp": 2, "tp_pieces": 2}
SHARES = {"tp": 2, "sp": False, "partition_activations": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "alone, fp16": {"precision": "fp16"},
    "alone, fp32": {"precision": "fp32"},
    "alone, full": FULL,
    "alone, selective": SELECTIVE,
    "alone, full and none by turns": {"recompute": "budget"},
    "alone, inputs on the host": {"offload": {"activations": "host"}} | FULL,
    "alone, deterministic": {"deterministic": True},
    "alone, optimizer on the host": {"offload": {"optimizer": "host"}},
    "packed documents": {"isolate_documents": True},
    "packed documents, full": {"isolate_documents": True} | FULL,
    "packed documents, selective": {"isolate_documents": True} | SELECTIVE,
    "GPT, tied": {"model": GPT},
    "YaRN": {"model": LLAMA | {"yarn": STRETCHED}},
    "dropout": {"model": DROPPED},
    "norms of heads": {"model": LLAMA | {"qk_norm": True}},
    "further predictions": {"model": LLAMA | {"mtp": Mtp(depth=2)}},
    "latents": {"model": LATENT},
    "latents, selective": {"model": LATENT} | SELECTIVE,
    "experts": {"model": MIXTURE},
    "experts, full": {"model": MIXTURE} | FULL,
    "experts, terms of the loss": {"model": LLAMA | {"moe": WITH_TERMS}},
    "experts after a dense layer": {"model": SHARED},
    "experts ep2": {"model": MIXTURE, "ep": 2},
    "experts tp2": {"model": MIXTURE, "tp": 2},
    "tp2": {"tp": 2},
    "tp2, full": {"tp": 2} | FULL,
    "tp2, selective": {"tp": 2} | SELECTIVE,
    "tp2 in pieces": PIECES,
    "tp2 in pieces, full": PIECES | FULL,
    "tp2 in pieces, selective": PIECES | SELECTIVE,
    "tp2, dropout": {"tp": 2, "model": DROPPED},
    "tp2, latents": {"tp": 2, "model": LATENT},
    "tp2 without sp": {"tp": 2, "sp": False},
    "tp2 without sp, full, shares of inputs": SHARES | FULL,
    "cp2 zigzag": {"cp": 2},
    "cp2 ring": {"cp": 2, "cp_method": "ring"},
    "cp2 allgather": {"cp": 2, "cp_method": "allgather"},
    "cp2 ulysses": {"cp": 2, "cp_method": "ulysses"},
    "cp2, full": {"cp": 2} | FULL,
    "cp2, selective": {"cp": 2} | SELECTIVE,
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "dp2 zero3, full": {"dp": 2, "zero": 3} | FULL,
    "pp2": PIPE,
    "pp2 interleaved": PIPE | {"vpp": 2, "schedule": "interleaved"},
    "pp2 zb_h1": PIPE | {"schedule": "zb_h1"},
    "pp2 zb_h1, full": PIPE | {"schedule": "zb_h1"} | FULL,
    "pp2 dualpipev": PIPE | {"vpp": 2, "schedule": "dualpipev"},
    "tp2 pp2 dualpipev": PIPE | {"tp": 2, "vpp": 2, "schedule": "dualpipev"},
}


#: Layouts whose code is generated, and built for the device by Triton. The graphs of the others run
#: as they were traced.
GENERATED = {"alone", "dropout", "latents", "experts", "tp2", "dp2 zero3"}


def compiled(names: list[str], layers: int, generate: bool) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout compiles in three steps of different samples, the second of
    them measured, and what it calls in the third."""
    import torch._inductor.config as config

    config.compile_threads = 1
    config.triton.autotune_pointwise = False
    config.coordinate_descent_tuning = False
    answers = {}
    with tempfile.TemporaryDirectory() as caches:
        os.environ["TRITON_CACHE_DIR"] = f"{caches}/triton"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/inductor"
        for name in names:
            layout = _deep(LAYOUTS[name], layers)
            world = gpu_plan(layout).parallel.world_size
            backend = "inductor" if generate and name in GENERATED else "eager"
            answers[name] = fakegpu.run_ranks(_steps, world, layout, backend)
    return answers


def _deep(layout: dict[str, Any], layers: int) -> dict[str, Any]:
    """The layout, compiled, with so many layers per stage."""
    total = layers * layout.get("pp", 1) * layout.get("vpp", 1)
    changes: dict[str, Any] = {"model": layout.get("model", LLAMA) | {"layers": total}}
    if layout.get("recompute") == "budget":
        changes["recompute_layers"] = [("full", "none")[layer % 2] for layer in range(total)]
    return layout | {"compile": True} | changes


def _steps(rank: int, layout: dict[str, Any], backend: str) -> dict[str, Any]:
    import torch._dynamo

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    counters = torch._dynamo.utils.counters
    torch.compile = functools.partial(torch.compile, backend=backend)  # in this forked process
    EvenCounts()
    plan = gpu_plan(layout)
    device = torch.device("cuda", rank)
    apply_settings(plan)
    engine = Engine(plan, Mesh.from_plan(plan, rank), device, recipe(plan.job.train))
    memory = StepMemory.of_engine(engine)
    graphs = []
    for step in range(STEPS):
        first = step * plan.parallel.global_batch_samples
        batches = [
            micro_batch(plan, indices, plan.job.data.isolate_documents).pinned()
            for indices in samples_of_step(plan.parallel, engine.mesh.coord, first)
        ]
        measured = memory.measure({}) if step == 1 else contextlib.nullcontext()
        with fakegpu.recording() as recording, measured:
            _, norm = engine.gradients([batch.to(device) for batch in batches], TOKENS)
            engine.update(norm, LR)
        of_loss = len(Passes._fields) if engine.has_loss else 0
        graphs.append(counters["stats"]["unique_graphs"] - of_loss)
    kernels = recording.names("K")
    passes = plan.model.layers * plan.parallel.micro_batches
    return {
        "graphs": graphs,
        "breaks": sum(counters["graph_break"].values()),
        "kernels": len(kernels),
        "generated": len([name for name in kernels if name.startswith("triton_")]),
        "attention": len([name for name in kernels if "flash_fwd" in name]) / passes,
        "grouped": len([name for name in kernels if "GroupProblemShape" in name]),
        "waits": [" at ".join(wait) for wait in recording.waits],
    }
