"""Three training steps on one GPU beside the same steps on the host, technique by technique.

    python -m benchmarks.gpu_parity [--only NAME ...] [--dry]

Each case trains the same small model three times from the same weights and samples: on the host in
float64, which is the truth; on the host in the case's own precision, whose distance from the truth
is what rounding costs; and on the GPU, compiled block by block as `orch submit` trains by default.
The GPU may be `MARGIN` times as far from the truth as the host is, and never less than a floor that
follows from the precision. Compared are the loss of each step, the norm of each gradient, and the
first moments and weights after the last step. The attention kernels that context parallelism and
packed documents call directly are compared by themselves.

Prints a line a case, writes benchmarks/results/gpu_parity.json and ends with 1 if a case differs or
fails. Without CUDA it says so and ends with 0; `--dry` runs the same on the host alone and writes
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from benchmarks.vs_torch.harness import conditions
from orchestrator.plan import Plan, seal
from orchestrator.plan.model import Mla, Moe, Mtp, Yarn
from tests.beds.plans import make_plan, tiny_model
from trainer import compat
from trainer.comm.mesh import Mesh
from trainer.comm.settings import apply_settings
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.precision import FP64, Recipe, recipe
from trainer.verify.samples import micro_batch

RESULT = Path(__file__).parent / "results" / "gpu_parity.json"
STEPS = 3
LR = 1e-3
#: How much farther from float64 than the host's own rounding the GPU may be: its sums run in
#: another order, and its compiler keeps some intermediate results in fp32.
MARGIN = 3.0
#: Relative errors that rounding alone explains, per precision: a few units in the last place of
#: what is stored.
FLOORS = {"fp32": 2e-5, "bf16": 8e-3, "fp16": 2e-3}

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

#: Name -> what differs from a plain decoder in bf16 on one GPU, as `make_plan` takes it.
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, not compiled": {"compile": False},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "GPT-2": {"model": GPT},
    "dropout": {"model": GPT | {"dropout": 0.1}},
    "selective recomputation": {"recompute": "selective"},
    "full recomputation": {"recompute": "full"},
    "packed documents": {"isolate_documents": True},
    "packed documents, fp32": {"isolate_documents": True, "precision": "fp32"},
    "experts": {"model": MIXTURE},
    "experts, fp32": {"model": MIXTURE, "precision": "fp32"},
    "experts, fp16": {"model": MIXTURE, "precision": "fp16"},
    "latent attention and experts": {"model": DEEPSEEK},
    "latent attention and experts, fp32": {"model": DEEPSEEK, "precision": "fp32"},
    "further predictions": {"model": LLAMA | {"mtp": Mtp(depth=1, weight=0.3)}},
    "YaRN": {"model": DEEPSEEK | {"yarn": Yarn(factor=4.0, original_seq_len=64)}},
    "deterministic": {"deterministic": True},
    "Muon": {"optim_kind": "muon"},
    "moments in 8 bits": {"optim_state": "8bit"},
    "optimizer on the host": {"offload": {"optimizer": "host"}},
}


def plan_of(layout: dict[str, Any], device: str) -> Plan:
    values = {"precision": "bf16", "compile": True} | layout
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


State = dict[str, dict[str, Tensor]]


def state_of(engine: Engine) -> State:
    """Weights and moments by kind and name, on the host in float64."""
    state: State = {}
    for piece in engine.state_pieces(to_write=True):
        values = piece.data.detach().double().cpu().clone()
        state.setdefault(piece.kind, {})[f"{piece.info.name}@{piece.offset}"] = values
    return state


def begin_with(engine: Engine, weights: dict[str, Tensor]) -> None:
    """Give the engine these weights, as a restored checkpoint does: a GPU draws others from the
    same seed."""
    for piece in engine.state_pieces(to_write=False):
        if piece.kind == "master":
            piece.data.copy_(weights[f"{piece.info.name}@{piece.offset}"])
    engine.resumed(0, engine.scalars())


def train(
    plan: Plan, device: torch.device, precision: Recipe, weights: dict[str, Tensor]
) -> dict[str, Any]:
    """Losses and norms of each step from these weights, and the state after the last."""
    engine = Engine(plan, Mesh.alone(plan), device, precision)
    begin_with(engine, weights)
    losses = list[float]()
    norms = list[float]()
    begin = time.perf_counter()
    for step in range(STEPS):
        consumed = step * plan.parallel.global_batch_samples
        indices = samples_of_step(plan.parallel, engine.mesh.coord, consumed)
        batches = [micro_batch(plan, one, plan.job.data.isolate_documents) for one in indices]
        tokens = sum(batch.valid_tokens for batch in batches)
        on_device = [batch.to(device) for batch in batches]
        with waits_of_the_host(device) as waits:
            loss, norm = engine.gradients(on_device, tokens)
            engine.update(norm, LR)
        losses.append(float(loss) / tokens)
        norms.append(float(norm))
    measured = {"seconds": time.perf_counter() - begin, "waits": waits}
    return {"loss": losses, "norm": norms, "state": state_of(engine)} | measured


@contextlib.contextmanager
def waits_of_the_host(device: torch.device) -> Iterator[list[str]]:
    """The places, in this process, where the host waits for the device inside: "file:line" each,
    once."""
    places = list[str]()
    if device.type != "cuda":
        yield places
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one in caught:
        place = f"{Path(one.filename).name}:{one.lineno}"
        if "synchroniz" in str(one.message) and place not in places:
            places.append(place)


def distance(found: dict[str, Any], truth: dict[str, Any]) -> dict[str, float]:
    """Relative errors by what is compared; a number that is not finite is infinitely far."""
    errors = dict[str, float]()
    for name in ("loss", "norm"):
        pairs = zip(found[name], truth[name], strict=True)
        errors[name] = max(abs(here / there - 1) for here, there in pairs)
    for kind, tensors in truth["state"].items():
        if kind in ("exp_avg", "momentum", "master"):
            errors[kind] = _distance(found["state"].get(kind, {}), tensors)
    return {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}


def _distance(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """|found - truth| / |truth|, all tensors as one vector."""
    if found.keys() != truth.keys():
        return math.inf
    wrong = sum(float((found[name] - one).square().sum()) for name, one in truth.items())
    whole = sum(float(one.square().sum()) for one in truth.values())
    return math.sqrt(wrong / whole)


def judge(name: str, layout: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The row of a case."""
    host = torch.device("cpu")
    plain = plan_of(layout | {"compile": False}, "cpu")
    weights = state_of(Engine(plain, Mesh.alone(plain), host, FP64))["master"]
    truth = train(plain, host, FP64, weights)
    rounded = distance(train(plain, host, recipe(plain.job.train), weights), truth)
    plan = plan_of(layout, device.type) if device.type == "cuda" else plain
    if device.type == "cuda":
        apply_settings(plan)
        torch.cuda.reset_peak_memory_stats()
    try:
        trained = train(plan, device, recipe(plan.job.train), weights)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.compiler.reset()
    errors = distance(trained, truth)
    floor = FLOORS[plan.job.train.precision]
    bounds = {one: max(floor, MARGIN * rounded[one]) for one in errors}
    row = {"equal": all(errors[one] <= bounds[one] for one in errors)}
    row |= {"errors": errors, "host_errors": rounded, "bounds": bounds}
    row |= {"seconds": trained["seconds"], "waits_in_last_step": trained["waits"]}
    return row | {"loss": trained["loss"], "loss_float64": truth["loss"]}


# ------------------------------------------------------------------ the kernels that the trainer
#     calls directly


def attention(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of attention with its log-sum-exp, forward and backward, against float64 on
    the host: one block to another, and runs of tokens of several lengths, one of which has no
    keys."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    errors = dict[str, float]()
    for name, queries, keys, causal in (("diagonal", 192, 192, True), ("past", 128, 320, False)):
        q, k, v, grad = (drawn(2, 8, length, 64) for length in (queries, keys, keys, queries))
        results = list[list[Tensor]]()
        for place, kind in ((torch.device("cpu"), torch.float64), (device, dtype)):
            placed = [x.to(place, kind) for x in (q, k, v, grad)]
            out, lse = compat.flash_forward(*placed[:3], causal, 0.125)
            # The log-sum-exp of a longer row than this block's, as a ring of several ranks has it.
            longer = lse + 0.5
            gradients = compat.flash_backward(placed[3], *placed[:3], out, longer, causal, 0.125)
            results.append([out, lse, *gradients])
        errors[f"block, {name}"] = _worst(*results)
    runs = ((100, 100), (28, 60), (64, 0), (64, 96))
    rows = sum(queries for queries, _ in runs)
    columns = sum(keys for _, keys in runs)
    q = drawn(rows, 8, 64)
    k = drawn(columns, 4, 64)
    v = drawn(columns, 4, 64)
    grad = drawn(rows, 8, 64)
    results = []
    for place, kind in ((torch.device("cpu"), torch.float64), (device, dtype)):
        segments = compat.Segments.of(runs, place)
        placed = [x.to(place, kind) for x in (q, k, v, grad)]
        out, lse = compat.segments_forward(*placed[:3], segments, False, 0.125)
        finite = lse.masked_fill(lse.isinf(), 0.0)
        gradients = compat.segments_backward(
            placed[3], *placed[:3], out, lse, segments, False, 0.125
        )
        if not torch.equal(
            lse.isinf().cpu(), (results[0][1] == 0).cpu() if results else lse.isinf().cpu()
        ):
            errors["runs of tokens, rows without keys"] = math.inf
        results.append([out, finite, *gradients])
    errors["runs of tokens"] = _worst(*results)
    return errors


def _worst(truth: list[Tensor], found: list[Tensor]) -> float:
    pairs = zip(found, truth, strict=True)
    return max(float((here.double().cpu() - there).norm() / there.norm()) for here, there in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_parity", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.dry:
        print("skipped: this machine has no CUDA device")
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = dict[str, dict[str, Any]]()
    for name in args.only or CASES:
        try:
            rows[name] = judge(name, CASES[name], device)
        except Exception as error:  # the next case is still to be judged
            traceback.print_exc()
            rows[name] = {
                "equal": False,
                "failed": f"{type(error).__name__}: {str(error).splitlines()[0]}",
            }
        print(f"{name}: {line(rows[name])}", flush=True)
    kernels = dict[str, dict[str, float]]()
    for dtype in (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,):
        try:
            kernels[str(dtype)] = attention(device, dtype)
        except Exception:
            traceback.print_exc()
            kernels[str(dtype)] = {"failed": math.inf}
        print(f"attention, {dtype}: {kernels[str(dtype)]}", flush=True)
    differing = [name for name, row in rows.items() if not row["equal"]]
    differing += [
        f"attention, {name}" for name, errors in kernels.items() if max(errors.values()) > 2e-2
    ]
    print(f"{len(rows)} cases, {len(differing)} differ: {', '.join(differing) or 'none'}")
    if not args.dry:
        name = torch.cuda.get_device_name()
        record = {"device": name, "torch": torch.__version__, "cases": rows, "attention": kernels}
        args.out.write_text(json.dumps(record | {"conditions": conditions()}, indent=2) + "\n")
    return 1 if differing else 0


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"FAILED {row['failed']}"
    word = "equal" if row["equal"] else "DIFFERENT"
    parts = (
        f"{name} {error:.1e} (<= {row['bounds'][name]:.1e})"
        for name, error in row["errors"].items()
    )
    waits = (
        f"; the host waits at {', '.join(row['waits_in_last_step'])}"
        if row["waits_in_last_step"]
        else ""
    )
    return f"{word}: {', '.join(parts)}; {row['seconds']:.1f} s{waits}"


if __name__ == "__main__":
    sys.exit(main())
