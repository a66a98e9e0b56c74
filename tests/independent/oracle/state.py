"""The state of training: initial weights by the documented function, and checkpoints, read and
written as docs/checkpoints.md says, with nothing but JSON and the safetensors library."""

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
    """Between two steps. `tensors[kind][name]`: whole parameters and moments; of kind "state" what
    has no gradient."""

    step: int
    samples: int  # consumed
    updates: int  # of the optimizer: steps that were not skipped
    scale: float = 1.0  # of the loss, in fp16
    good: int = 0  # steps since the scale last changed
    tensors: dict[str, Tensors] = field(default_factory=dict)

    def loads(self) -> dict[int, Tensor]:
        """By layer, where the whole batch is balanced: how often the step before chose each expert,
        over the mean."""
        states = self.tensors[STATE].items()
        return {
            int(name.split(".")[1]): tensor for name, tensor in states if name.endswith(".load")
        }


class Unreadable(ValueError):
    """A checkpoint that is not what docs/checkpoints.md says."""


def initial(model: dict[str, Any], seed: int, dtype: torch.dtype) -> State:
    """Before the first step: drawn in fp32, 4,096 rows from one generator, seeded by (seed, name,
    block of rows); of experts each matrix by a name of its own."""

    def drawn(name: str, shape: tuple[int, ...], deviation: float) -> Tensor:
        if len(shape) == 3:
            return torch.stack(
                [drawn(f"{name}/{expert}", shape[1:], deviation) for expert in range(shape[0])]
            )
        blocks = []
        for block, first in enumerate(range(0, shape[0], 4096)):
            digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
            rows = min(4096, shape[0] - first)
            blocks.append(
                torch.empty(rows, *shape[1:]).normal_(0.0, deviation, generator=generator)
            )
        return torch.cat(blocks)

    master = {}
    for name, shape in shapes(model).items():
        if len(shape) == 1:
            master[name] = torch.full(shape, float(name.endswith("weight")), dtype=dtype)
            continue
        deviation = (2 / (5 * model["hidden"])) ** 0.5
        if name.endswith((".wo.weight", ".down.weight")):
            deviation /= (2 * model["layers"]) ** 0.5
        master[name] = drawn(name, shape, deviation).to(dtype)
    zeros = [{name: torch.zeros_like(tensor) for name, tensor in master.items()} for _ in KINDS[1:]]
    states = {
        name: torch.full(shape, float(name.endswith("load")))
        for name, shape in state_shapes(model).items()
    }
    return State(
        0, 0, 0, SCALE, 0, dict(zip((*KINDS, STATE), (master, *zeros, states), strict=True))
    )


def harsh(model: dict[str, Any], seed: int, dtype: torch.dtype) -> State:
    """A state that hides less than the initial one: attention is sharp, so positions and masks
    matter; no norm is one and no bias is zero; routers prefer experts clearly, and three of the
    first layer that has some score equally; the moments and the number of updates are those of a
    run under way."""
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


# ---------------------------------------------------------------------------------------------------
#     checkpoints


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """Steps of a run's committed checkpoints, oldest first."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-????????"))


def read(folder: Path, model: dict[str, Any]) -> State:
    """A checkpoint, whole. Raises Unreadable unless it holds every element of every parameter
    once."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    wanted, states = (
        {name: list(one) for name, one in of(model).items()} for of in (shapes, state_shapes)
    )
    if (
        manifest["schema"] != SCHEMA
        or manifest["parameters"] != wanted
        or manifest.get("states", {}) != states
    ):
        raise Unreadable(f"{folder.name}: not the parameters of the plan's model, or not {SCHEMA}")
    tensors: dict[str, Tensors] = {kind: {} for kind in (*KINDS, STATE)}
    seen: dict[tuple[str, str], Tensor] = {}
    for record in manifest["files"]:
        raw = (folder / record["file"]).read_bytes()
        if len(raw) != record["bytes"] or hashlib.sha256(raw).hexdigest() != record["sha256"]:
            raise Unreadable(f"{folder.name}: {record['file']} is not what its manifest says")
        values = load_file(folder / record["file"])
        for part in record["slices"]:
            kind = part["kind"]
            name = part["name"]
            shape = (states if kind == STATE else wanted)[name]
            number = _numbers(part, shape)
            value = values[part["key"]]
            whole = tensors[kind].setdefault(name, torch.zeros(prod(shape), dtype=value.dtype))
            whole[number] = value
            count = seen.setdefault((kind, name), torch.zeros(prod(shape), dtype=torch.int64))
            count[number] += 1
    for kind in (*KINDS, STATE):
        for name, shape in (states if kind == STATE else wanted).items():
            if name not in tensors[kind] or not bool((seen[kind, name] == 1).all()):
                raise Unreadable(f"{folder.name}: {kind} of {name} is not there once")
            tensors[kind][name] = tensors[kind][name].view(shape)
    scalars = manifest["scalars"]
    scale = scalars.get("loss_scale", 1.0)
    good = int(scalars.get("loss_scale_good_steps", 0))
    return State(
        manifest["step"], manifest["samples"], int(scalars["optimizer_steps"]), scale, good, tensors
    )


def _numbers(part: dict[str, Any], shape: list[int]) -> Tensor:
    """Which elements of a flat parameter a slice holds."""
    number = torch.arange(prod(shape)).view(shape)
    cuts = (
        []
        if part["dim"] is None
        else [(part["dim"], part["start"], part["stop"]), *part.get("more", [])]
    )
    for dim, start, stop in cuts:
        number = number.narrow(dim, start, stop - start)
    return number.reshape(-1)[part["offset"] : part["offset"] + part["count"]]


def write(run: Path, state: State, precision: str) -> None:
    """`state` as a checkpoint from which a run of any layout starts; `precision`: of the plan."""
    folder = step_folder(run, state.step)
    dtype = NAMES.get(precision, "F32")
    folder.mkdir(parents=True)
    file = "start.safetensors"
    every = [
        (kind, name, tensor) for kind, of in state.tensors.items() for name, tensor in of.items()
    ]
    save_file(
        {f"{kind}/{name}@0": tensor.reshape(-1) for kind, name, tensor in every}, folder / file
    )
    raw = (folder / file).read_bytes()
    part = {"dim": None, "start": 0, "stop": 0, "offset": 0}
    slices = [
        {"key": f"{kind}/{name}@0", "name": name, "kind": kind, **part, "count": tensor.numel()}
        for kind, name, tensor in every
    ]
    dtypes = dict.fromkeys(KINDS, dtype) | {
        f"{STATE}/{name}": "F32" for name in state.tensors[STATE]
    }
    scalars = {"optimizer_steps": float(state.updates)}
    if precision == "fp16":
        scalars |= {"loss_scale": state.scale, "loss_scale_good_steps": float(state.good)}
    none = dict.fromkeys(
        ("tp", "cp", "ep", "pp", "dp", "zero", "vpp"), 0
    )  # no layout's: every run reshards
    record = {"file": file, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest = {
        "schema": SCHEMA,
        "hash": "",
        "run_id": "independent",
        "epoch": 0,
        "plan_hash": "",
        "layout": none,
        "step": state.step,
        "samples": state.samples,
        "created": 0.0,
        "data": "",
        "scalars": scalars,
        "parameters": {
            name: list(tensor.shape) for name, tensor in state.tensors["master"].items()
        },
        "states": {name: list(tensor.shape) for name, tensor in state.tensors[STATE].items()},
        "files": [record | {"dtypes": dtypes, "slices": slices}],
    }
    text = json.dumps(manifest, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(text.replace('"hash": ""', f'"hash": "{digest}"', 1))
