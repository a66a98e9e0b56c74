"""The state of training: initial weights by the documented function, and checkpoints, read and written as
docs/checkpoints.md says, with nothing but JSON and the safetensors library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
KINDS = ("master", "exp_avg", "exp_avg_sq")
SCHEMA = "orch.checkpoint/2"
NAMES = {"fp64": "F64", "fp32": "F32"}  # of dtypes, in safetensors
#: Loss scale at the start of an fp16 run (that of torch.amp.GradScaler).
SCALE = 2.0**16


@dataclass
class State:
    """Between two steps. `tensors[kind][name]`: whole parameters and moments."""

    step: int
    samples: int  # consumed
    updates: int  # of the optimizer: steps that were not skipped
    scale: float = 1.0  # of the loss, in fp16
    good: int = 0  # steps since the scale last changed
    tensors: dict[str, Tensors] = field(default_factory=dict)


class Unreadable(ValueError):
    """A checkpoint that is not what docs/checkpoints.md says."""


def shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter of a plan's model by name."""
    hidden, ffn, bias = model["hidden"], model["ffn_hidden"], model["bias"]
    queries, keys = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]

    def linear(name: str, outputs: int, inputs: int, own_bias: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (outputs, inputs)
        if bias:
            yield own_bias, (outputs,)

    def norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (size,)
        if model["norm"] == "layer":
            yield f"{name}.bias", (size,)

    def every() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embed.weight", (model["vocab"], hidden)
        if model["position"] == "learned":
            yield "embed_positions.weight", (model["max_seq_len"], hidden)
        for layer in (f"layers.{number}" for number in range(model["layers"])):
            yield from norm(f"{layer}.norm1", hidden)
            for one, outputs in (("wq", queries), ("wk", keys), ("wv", keys)):
                yield from linear(f"{layer}.attn.{one}", outputs, hidden, f"{layer}.attn.{one}.bias")
            yield from linear(f"{layer}.attn.wo", hidden, queries, f"{layer}.attn.out_bias")
            if model.get("qk_norm"):
                yield from ((f"{layer}.attn.{one}_norm.weight", (model["head_dim"],)) for one in "qk")
            yield from norm(f"{layer}.norm2", hidden)
            for one in ("gate", "up") if model["mlp"] == "gated" else ("up",):
                yield from linear(f"{layer}.mlp.{one}", ffn, hidden, f"{layer}.mlp.{one}.bias")
            yield from linear(f"{layer}.mlp.down", hidden, ffn, f"{layer}.mlp.out_bias")
        yield from norm("norm", hidden)
        if not model["tied_embeddings"]:
            yield "head.weight", (model["vocab"], hidden)

    return dict(every())


def initial(model: dict[str, Any], seed: int, dtype: torch.dtype) -> State:
    """Before the first step: drawn in fp32, 4,096 rows from one generator, seeded by (seed, name, block of rows)."""
    master = {}
    for name, shape in shapes(model).items():
        if len(shape) == 1:
            master[name] = torch.full(shape, float(name.endswith("weight")), dtype=dtype)
            continue
        deviation = (2 / (5 * model["hidden"])) ** 0.5
        if name.endswith((".wo.weight", ".down.weight")):
            deviation /= (2 * model["layers"]) ** 0.5
        blocks = []
        for block, first in enumerate(range(0, shape[0], 4096)):
            digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
            rows = min(4096, shape[0] - first)
            blocks.append(torch.empty(rows, *shape[1:]).normal_(0.0, deviation, generator=generator))
        master[name] = torch.cat(blocks).to(dtype)
    zeros = [{name: torch.zeros_like(tensor) for name, tensor in master.items()} for _ in KINDS[1:]]
    return State(0, 0, 0, SCALE, 0, dict(zip(KINDS, (master, *zeros), strict=True)))


def harsh(model: dict[str, Any], seed: int, dtype: torch.dtype) -> State:
    """A state that hides less than the initial one: attention is sharp, so positions and masks matter; no norm is one
    and no bias is zero; the moments and the number of updates are those of a run under way."""
    state, generator = initial(model, seed, dtype), torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape).normal_(generator=generator).to(dtype)

    for name, tensor in state.tensors["master"].items():
        if tensor.dim() == 1:
            tensor += 0.2 * noise(tensor)
        elif name.endswith((".wq.weight", ".wk.weight")):
            tensor *= 3.0
        state.tensors["exp_avg"][name] += 1e-4 * noise(tensor)
        state.tensors["exp_avg_sq"][name] += 1e-6 * noise(tensor).square()
    state.updates = 7
    return state


# --------------------------------------------------------------------------------------------------- checkpoints


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """Steps of a run's committed checkpoints, oldest first."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-????????"))


def read(folder: Path, model: dict[str, Any]) -> State:
    """A checkpoint, whole. Raises Unreadable unless it holds every element of every parameter once."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    wanted = {name: list(shape) for name, shape in shapes(model).items()}
    if manifest["schema"] != SCHEMA or manifest["parameters"] != wanted:
        raise Unreadable(f"{folder.name}: not the parameters of the plan's model, or not {SCHEMA}")
    tensors: dict[str, Tensors] = {kind: {} for kind in KINDS}
    seen: dict[tuple[str, str], Tensor] = {}
    for record in manifest["files"]:
        raw = (folder / record["file"]).read_bytes()
        if len(raw) != record["bytes"] or hashlib.sha256(raw).hexdigest() != record["sha256"]:
            raise Unreadable(f"{folder.name}: {record['file']} is not what its manifest says")
        values = load_file(folder / record["file"])
        for part in record["slices"]:
            kind, name, shape = part["kind"], part["name"], wanted[part["name"]]
            number = torch.arange(prod(shape)).view(shape)
            if part["dim"] is not None:
                number = number.narrow(part["dim"], part["start"], part["stop"] - part["start"])
            number = number.reshape(-1)[part["offset"] : part["offset"] + part["count"]]
            value = values[part["key"]]
            whole = tensors[kind].setdefault(name, torch.zeros(prod(shape), dtype=value.dtype))
            whole[number] = value
            count = seen.setdefault((kind, name), torch.zeros(prod(shape), dtype=torch.int64))
            count[number] += 1
    for kind in KINDS:
        for name, shape in wanted.items():
            if name not in tensors[kind] or not bool((seen[kind, name] == 1).all()):
                raise Unreadable(f"{folder.name}: {kind} of {name} is not there once")
            tensors[kind][name] = tensors[kind][name].view(shape)
    scalars = manifest["scalars"]
    scale, good = scalars.get("loss_scale", 1.0), int(scalars.get("loss_scale_good_steps", 0))
    return State(manifest["step"], manifest["samples"], int(scalars["optimizer_steps"]), scale, good, tensors)


def write(run: Path, state: State, precision: str) -> None:
    """`state` as a checkpoint from which a run of any layout starts; `precision`: of the plan."""
    folder, dtype = step_folder(run, state.step), NAMES.get(precision, "F32")
    folder.mkdir(parents=True)
    file = "start.safetensors"
    flat = {f"{kind}/{name}@0": tensor.reshape(-1) for kind in KINDS for name, tensor in state.tensors[kind].items()}
    save_file(flat, folder / file)
    raw = (folder / file).read_bytes()
    part = {"dim": None, "start": 0, "stop": 0, "offset": 0}
    slices = [
        {"key": f"{kind}/{name}@0", "name": name, "kind": kind, **part, "count": tensor.numel()}
        for kind in KINDS
        for name, tensor in state.tensors[kind].items()
    ]
    scalars = {"optimizer_steps": float(state.updates)}
    if precision == "fp16":
        scalars |= {"loss_scale": state.scale, "loss_scale_good_steps": float(state.good)}
    none = dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "zero", "vpp"), 0)  # no layout's: every run reshards
    record = {"file": file, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest = {
        **{"schema": SCHEMA, "hash": "", "run_id": "independent", "epoch": 0, "plan_hash": "", "layout": none},
        **{"step": state.step, "samples": state.samples, "created": 0.0, "data": "", "scalars": scalars},
        "parameters": {name: list(tensor.shape) for name, tensor in state.tensors["master"].items()},
        "files": [record | {"dtypes": dict.fromkeys(KINDS, dtype), "slices": slices}],
    }
    text = json.dumps(manifest, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(text.replace('"hash": ""', f'"hash": "{digest}"', 1))
