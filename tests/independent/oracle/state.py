"""The state of training: initial weights by the documented function, and checkpoints, read and
written as docs/checkpoints.md says, with JSON and the safetensors library alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .shapes import shapes, state_shapes

Tensors = dict[str, Tensor]
KINDS = ("master", "exp_avg", "exp_avg_sq")
#: State without gradient: the biases of routers' choices, and the loads of the step before.
STATE = "state"
SCHEMA = "orch.checkpoint/2"
NAMES = {"fp64": "F64", "fp32": "F32"}  # of dtypes, in safetensors
#: Matrices that a harsh state multiplies.
SHARP = (".wq.weight", ".wk.weight", ".kv_down.weight", ".router.weight")
#: Loss scale at the start of an fp16 run (that of torch.amp.GradScaler).
SCALE = 2.0**16


@dataclass
class State:
    """The state between two steps. `tensors[kind][name]` are whole parameters and moments, and of
    kind "state" the state without gradient."""

    step: int
    samples: int  # consumed
    updates: int  # of the optimizer: steps that were not skipped
    scale: float = 1.0  # of the loss, in fp16
    good_steps: int = 0  # steps since the scale last changed
    tensors: dict[str, Tensors] = field(default_factory=dict)

    def loads(self) -> dict[int, Tensor]:
        """Returns by layer, if the whole batch is balanced, how often the step before chose each
        expert, over the mean."""
        states = self.tensors[STATE].items()
        return {
            int(name.split(".")[1]): tensor for name, tensor in states if name.endswith(".load")
        }


class Unreadable(ValueError):
    """A checkpoint that is not as docs/checkpoints.md says."""


def initial(model: dict[str, Any], seed: int, dtype: torch.dtype) -> State:
    """Returns the state before the first step."""
    master = {}
    for name, shape in shapes(model).items():
        if len(shape) == 1:
            master[name] = torch.full(shape, float(name.endswith("weight")), dtype=dtype)
            continue
        deviation = (2 / (5 * model["hidden"])) ** 0.5
        if name.endswith((".wo.weight", ".down.weight")):
            deviation /= (2 * model["layers"]) ** 0.5
        master[name] = drawn(name, shape, deviation, seed).to(dtype)
    tensors = {"master": master}
    for kind in KINDS[1:]:
        tensors[kind] = {name: torch.zeros_like(tensor) for name, tensor in master.items()}
    tensors[STATE] = {
        name: torch.full(shape, float(name.endswith("load")))
        for name, shape in state_shapes(model).items()
    }
    return State(step=0, samples=0, updates=0, scale=SCALE, tensors=tensors)


def drawn(name: str, shape: tuple[int, ...], deviation: float, seed: int) -> Tensor:
    """Draws a parameter in fp32: 4,096 rows from one generator, seeded by (seed, name, block of
    rows); of experts each matrix under a name of its own."""
    if len(shape) == 3:
        matrices = [
            drawn(f"{name}/{expert}", shape[1:], deviation, seed) for expert in range(shape[0])
        ]
        return torch.stack(matrices)
    blocks = []
    for block, first in enumerate(range(0, shape[0], 4096)):
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
        rows = min(4096, shape[0] - first)
        blocks.append(torch.empty(rows, *shape[1:]).normal_(0.0, deviation, generator=generator))
    return torch.cat(blocks)


def harsh(model: dict[str, Any], seed: int, dtype: torch.dtype) -> State:
    """Returns a state that hides fewer bugs than the initial one.

    Attention is sharp, so positions and masks matter; no norm is one and no bias is zero; routers
    prefer some experts clearly, and three experts of the first sparse layer have equal scores; the
    moments and the number of updates are those of a run in progress.
    """
    state = initial(model, seed, dtype)
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape).normal_(generator=generator).to(tensor.dtype)

    for name, tensor in state.tensors["master"].items():
        if tensor.dim() == 1:
            tensor += 0.2 * noise(tensor)
        elif name.endswith(SHARP):
            tensor *= 3.0
        state.tensors["exp_avg"][name] += 1e-4 * noise(tensor)
        state.tensors["exp_avg_sq"][name] += 1e-6 * noise(tensor).square()
    for tensor in state.tensors[STATE].values():
        tensor += 0.1 * noise(tensor)
    routers = [name for name in state.tensors["master"] if name.endswith("router.weight")]
    for name in routers[:1]:
        router = state.tensors["master"][name]
        bias = state.tensors[STATE].get(name.replace("weight", "bias"))
        for values in (router,) if bias is None else (router, bias):
            values[1 : len(router) : max(1, len(router) // 3)] = 0.0
    state.updates = 7
    return state


# --------------------------------------------------------------------------------------------
#     checkpoints


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """Returns the steps of a run's committed checkpoints, oldest first."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-????????"))


def read(folder: Path, model: dict[str, Any]) -> State:
    """Reads a whole checkpoint. Raises Unreadable unless it holds every element of every parameter
    once."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    parameters = {name: list(shape) for name, shape in shapes(model).items()}
    states = {name: list(shape) for name, shape in state_shapes(model).items()}
    if (
        manifest["schema"] != SCHEMA
        or manifest["parameters"] != parameters
        or manifest.get("states", {}) != states
    ):
        raise Unreadable(f"{folder.name}: not the parameters of the plan's model, or not {SCHEMA}")
    shapes_of = dict.fromkeys(KINDS, parameters) | {STATE: states}
    tensors: dict[str, Tensors] = {kind: {} for kind in shapes_of}
    counts: dict[str, Tensors] = {kind: {} for kind in shapes_of}
    for record in manifest["files"]:
        stored = _read_file(folder, record)
        for stored_slice in record["slices"]:
            kind = stored_slice["kind"]
            name = stored_slice["name"]
            shape = shapes_of[kind][name]
            elements = stored[stored_slice["key"]]
            empty = torch.zeros(prod(shape), dtype=elements.dtype)
            indices = _indices(stored_slice, shape)
            tensors[kind].setdefault(name, empty)[indices] = elements
            uncounted = torch.zeros(prod(shape), dtype=torch.int64)
            counts[kind].setdefault(name, uncounted)[indices] += 1
    for kind, kind_shapes in shapes_of.items():
        for name, shape in kind_shapes.items():
            if name not in tensors[kind] or not bool((counts[kind][name] == 1).all()):
                raise Unreadable(f"{folder.name}: {kind} of {name} is not there once")
            tensors[kind][name] = tensors[kind][name].view(shape)
    scalars = manifest["scalars"]
    return State(
        step=manifest["step"],
        samples=manifest["samples"],
        updates=int(scalars["optimizer_steps"]),
        scale=scalars.get("loss_scale", 1.0),
        good_steps=int(scalars.get("loss_scale_good_steps", 0)),
        tensors=tensors,
    )


def _read_file(folder: Path, record: dict[str, Any]) -> Tensors:
    path = folder / record["file"]
    raw = path.read_bytes()
    if len(raw) != record["bytes"] or hashlib.sha256(raw).hexdigest() != record["sha256"]:
        raise Unreadable(f"{folder.name}: {record['file']} is not what its manifest says")
    return load_file(path)


def _indices(stored_slice: dict[str, Any], shape: list[int]) -> Tensor:
    """Returns the indices, in the flat parameter, of a slice's elements."""
    indices = torch.arange(prod(shape)).view(shape)
    if stored_slice["dim"] is not None:
        first_cut = (stored_slice["dim"], stored_slice["start"], stored_slice["stop"])
        for dim, start, stop in [first_cut, *stored_slice.get("more", [])]:
            indices = indices.narrow(dim, start, stop - start)
    offset = stored_slice["offset"]
    return indices.reshape(-1)[offset : offset + stored_slice["count"]]


def write(run: Path, state: State, precision: str) -> None:
    """Writes `state` as a checkpoint from which a run of any layout starts. `precision` is that of
    the plan."""
    folder = step_folder(run, state.step)
    folder.mkdir(parents=True)
    path = folder / "start.safetensors"
    flat = {
        (kind, name): tensor.reshape(-1)
        for kind, tensors in state.tensors.items()
        for name, tensor in tensors.items()
    }
    save_file({_key(kind, name): tensor for (kind, name), tensor in flat.items()}, path)
    raw = path.read_bytes()
    dtypes = dict.fromkeys(KINDS, NAMES.get(precision, "F32"))
    dtypes |= {f"{STATE}/{name}": "F32" for name in state.tensors[STATE]}
    record = {
        "file": path.name,
        "bytes": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "dtypes": dtypes,
        "slices": [_whole_slice(kind, name, flat[kind, name].numel()) for kind, name in flat],
    }
    document = json.dumps(_manifest(state, precision, record), indent=1)
    digest = hashlib.sha256(document.encode()).hexdigest()
    sealed = document.replace('"hash": ""', f'"hash": "{digest}"', 1)
    (folder / "manifest.json").write_text(sealed)


def _key(kind: str, name: str) -> str:
    return f"{kind}/{name}@0"


def _whole_slice(kind: str, name: str, count: int) -> dict[str, Any]:
    """Returns the record of a slice that is a whole parameter."""
    return {
        "key": _key(kind, name),
        "name": name,
        "kind": kind,
        "dim": None,
        "start": 0,
        "stop": 0,
        "offset": 0,
        "count": count,
    }


def _manifest(state: State, precision: str, record: dict[str, Any]) -> dict[str, Any]:
    scalars = {"optimizer_steps": float(state.updates)}
    if precision == "fp16":
        scalars |= {
            "loss_scale": state.scale,
            "loss_scale_good_steps": float(state.good_steps),
        }
    # The layout is that of no run: every run reshards.
    layout = dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "zero", "vpp"), 0)
    return {
        "schema": SCHEMA,
        "hash": "",
        "run_id": "independent",
        "epoch": 0,
        "plan_hash": "",
        "layout": layout,
        "step": state.step,
        "samples": state.samples,
        "created": 0.0,
        "data": "",
        "scalars": scalars,
        "parameters": _shapes_of(state.tensors["master"]),
        "states": _shapes_of(state.tensors[STATE]),
        "files": [record],
    }


def _shapes_of(tensors: Tensors) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
