"""One row of a table -> model, cluster, degrees. Missing values are assumed, and each assumption is reported."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import structs

from orchestrator.plan.document import AXES, Cluster, Matmul, Model, Moe, Parallel, Train
from orchestrator.planner.cost.software import SOFTWARE, Software, with_traits
from orchestrator.planner.model.layers import parameter_count
from orchestrator.planner.model.stages import balance_stages

from .hardware import GPUS, cluster_of, gpu_of, nic_gbit_per_s

SCHEDULE = {"1f1b": "1f1b", "zb-1p": "zb_h1", "zb-2p": "zb_h2", "none": "1f1b"}
NEEDED = ("layers", "hidden", "heads", "seq_len")


class RowError(ValueError):
    """A row that cannot be predicted; the message names the column."""


class Job(NamedTuple):
    cluster: Cluster
    model: Model
    parallel: Parallel
    train: Train
    matmul: Matmul  # precision of matrix products where it is narrower
    assumed: list[str]
    software: Software = SOFTWARE["eager"]
    task: str = "pretrain"
    slow_fabric: bool = False


class Row:
    """Typed access to one row; collects the assumptions."""

    def __init__(self, cells: Mapping[str, str]):
        self.cells = cells
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        return (self.cells.get(name) or "").strip()

    def number(self, name: str, default: int | None = None) -> int:
        text = self.text(name)
        if not text:
            if default is None:
                raise RowError(f"{name} is missing")
            self.assumed.append(f"{name}={default}")
            return default
        try:
            value = float(text)
        except ValueError:
            raise RowError(f"{name}={text!r} is not a number") from None
        if not (value.is_integer() and 0 <= value <= 2**40):
            raise RowError(f"{name}={text!r} is not a whole number in range")
        return int(value)

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value < 1:
            raise RowError(f"{name}={value} must be at least 1")
        return value


def read_row(cells: Mapping[str, str]) -> Job:
    """The job of one row. Raises RowError naming the column."""
    row = Row(cells)
    model = _model(row)
    tp, pp, cp = row.positive("tp", 1), row.positive("pp", 1), row.positive("cp", 1)
    gpus = row.positive("num_gpus", tp * pp * cp * row.positive("dp", 1))
    ranks = gpus // (tp * pp * cp)
    if ranks * tp * pp * cp != gpus:
        raise RowError(f"tp{tp} x pp{pp} x cp{cp} does not divide num_gpus={gpus}")
    ep = _experts(row, ranks)
    size = row.positive("micro_batch", 1)
    batch = row.positive("global_batch", ranks * size)
    vpp = row.positive("vpp", 1) if pp > 1 else 1
    vpp = min(vpp, model.layers // pp) or 1
    if pp > model.layers:
        raise RowError(f"pp={pp} stages for {model.layers} layers")
    micro_batches = max(1, math.ceil(batch / (size * ranks)))
    train, matmul = _train(row)
    zero = row.number("zero_stage", 1)
    if zero > 3:
        raise RowError(f"zero_stage={zero}: 0 to 3")
    degrees: dict[str, Any] = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": ranks // ep, "zero": zero, "vpp": vpp}
    parallel = Parallel(
        **degrees,
        sp=tp > 1 and row.text("sp") == "1",
        world_size=gpus,
        order=list(AXES),
        schedule=_schedule(row, pp, vpp),
        stage_layers=balance_stages(model, pp * vpp, train.seq_len),
        micro_batch_size=size,
        micro_batches=micro_batches,
        accumulation=micro_batches,
        global_batch_samples=batch,
        global_batch_tokens=batch * train.seq_len,
        bucket_bytes=_bucket(model, tp, zero),
    )
    return Job(
        _cluster(row, gpus),
        model,
        parallel,
        train,
        matmul,
        row.assumed,
        _software(row),
        row.text("task") or "pretrain",
        any(w in row.text("interconnect") for w in ("EFA", "RoCE", "not stated")),
    )


def _software(row: Row) -> Software:
    """The family of a row's software; replaced by a reader of its own."""
    notes, found = row.text("notes").lower(), _family(row)
    release = re.search(r"container (\d+)\.(\d+)", notes)
    late = release is not None and (int(release[1]), int(release[2])) >= (26, 6)
    if "hybridep" in notes or ("drop" in notes and "dropless" not in notes) or late:
        found = with_traits(found, host="modern")
    return with_traits(found, ep_overlap=True) if "hybridep" in notes or "ep overlap on" in notes else found


def _family(row: Row) -> Software:
    text = row.text("framework").lower()
    if "fms" in text:
        return with_traits(SOFTWARE["fsdp_compile"], selective="alternate")
    if "nemo" in text and "A100" in row.text("gpu"):
        return with_traits(SOFTWARE["nemo"], attention="unfused")
    words = {"zero-3": "deepspeed_2021", "deepspeed": "megatron_deepspeed", "zero bubble": "megatron_2021"}
    words |= {"simumax": "megatron", "core": "nemo", "bridge": "nemo", "nemo": "nemo", "megatron": "megatron_2021"}
    words |= {"maxtext": "maxtext", "paxml": "maxtext", "foundry": "fsdp_triton", "titan": "torchtitan"}
    words |= {"nanotron": "nanotron", "fsdp": "fsdp"}
    return SOFTWARE[next((name for word, name in words.items() if word in text), "eager")]


def _bucket(model: Model, tp: int, zero: int) -> int:
    """Bytes of a gradient bucket: a layer with ZeRO-3 (FSDP), else 25 MiB."""
    return 25 << 20 if zero < 3 else max(25 << 20, 4 * model.parameters // model.layers // tp)


def _experts(row: Row, ranks: int) -> int:
    """The ep axis. Tables count dp over all replicas of the dense weights; here ep and dp are separate axes."""
    ep = row.positive("ep", 1)
    fits = math.gcd(ep, ranks)
    if fits != ep:
        row.assumed.append(f"ep={fits} of {ep}: the rest folded over other axes")
    return fits


def _schedule(row: Row, pp: int, vpp: int) -> str:
    name = row.text("pp_schedule")
    if vpp > 1:
        return "interleaved"
    if pp > 1 and name not in SCHEDULE:
        row.assumed.append("pp_schedule=1f1b")
    return SCHEDULE.get(name, "1f1b")


def _train(row: Row) -> tuple[Train, Matmul]:
    precision = row.text("precision").lower()
    narrow = precision.startswith(("fp8", "mxfp8", "nvfp4", "fp4"))
    if narrow and "4" in precision:
        row.assumed.append("matmuls as fp8")
    wide = "fp16" if precision == "fp16" else "fp32" if precision == "fp32" else "bf16"
    if not precision:
        row.assumed.append("precision=bf16")
    recompute = row.text("recompute")
    mode = "full" if recompute.startswith("full") else recompute
    if mode not in ("none", "selective", "full"):
        mode = "none"
        row.assumed.append("recompute=none")
    elif mode != recompute:
        row.assumed.append("recompute=full for every layer")
    values: dict[str, Any] = {"seq_len": row.positive("seq_len"), "precision": wide, "recompute": mode}
    train = Train(steps=1, seed=0, grad_dtype="fp32", clip_grad_norm=1.0, log_every_steps=1, **values)
    return train, ("nvfp4" if "4" in precision else "mxfp8" if "mx" in precision else "fp8_tensor") if narrow else ""


def _cluster(row: Row, gpus: int) -> Cluster:
    network = row.text("interconnect")
    name, known = gpu_of(row.text("gpu"))
    if not known:
        row.assumed.append(f"gpu={name}")
    per_node = min(row.positive("gpus_per_node", 8), gpus)
    gbit = nic_gbit_per_s(network, per_node)
    if gbit is None:
        gbit = GPUS[name][5]
        if gpus > per_node:
            row.assumed.append(f"network {gbit:g} Gb/s a GPU")
    return cluster_of(name, gpus, per_node, gbit, 72 if "NVL72" in network else per_node)


def _model(row: Row) -> Model:
    vocab = row.positive("vocab", 51200)
    hidden, heads = row.positive("hidden"), row.positive("heads")
    experts = row.number("experts", 0) if row.text("experts") else 0
    moe = None
    if experts > 1:
        moe = (experts, row.positive("topk", 1), row.positive("moe_ffn", row.positive("ffn_hidden", 4 * hidden)))
    shape = (
        *(row.text("model") or "model", row.positive("layers"), hidden, heads, row.positive("kv_heads", heads)),
        *(row.positive("ffn_hidden", 4 * hidden), vocab, row.positive("seq_len"), moe),
    )
    try:
        billions = float(row.text("params_b") or 0)
    except ValueError:
        billions = 0.0
    return _nearest(shape, billions)


@lru_cache(maxsize=1024)
def _nearest(shape: tuple[Any, ...], billions: float) -> Model:
    """The model of this shape (gated or plain MLP, tied or untied head) whose size is nearest to `billions`."""
    name, layers, hidden, heads, kv_heads, ffn, vocab, seq_len, moe = shape
    found = []
    for mlp in ("gated", "plain"):
        for tied in (False, True):
            plain = mlp == "plain"
            values = dict(name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn_hidden=ffn)
            values |= dict(head_dim=max(1, hidden // heads), vocab=vocab, max_seq_len=seq_len, tied_embeddings=tied)
            values |= dict(norm="layer" if plain else "rms", norm_eps=1e-5, position="none" if plain else "rope")
            values |= dict(rope_theta=1e4, mlp=mlp, activation="gelu" if plain else "silu", bias=plain)
            experts = Moe(experts=moe[0], top_k=moe[1], ffn_hidden=moe[2]) if moe else None
            model = Model(**values, causal=True, parameters=0, source="table", moe=experts)
            found.append(structs.replace(model, parameters=parameter_count(model)))
    if not billions:
        return found[0]
    return min(found, key=lambda model: abs(model.parameters / 1e9 - billions))
