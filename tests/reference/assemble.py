"""Naive twin of resharding: whole parameters from the files of a checkpoint, element by element
where it can be."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def assemble(step: Path) -> dict[tuple[str, str], Tensor]:
    """(kind, full name) -> the whole tensor, from nothing but the manifest's JSON and the
    safetensors library.

    Asserts that each element is there exactly once.
    """
    manifest = json.loads((step / "manifest.json").read_text())
    whole = {}
    seen = {}
    for record in manifest["files"]:
        tensors = load_file(step / record["file"])
        for part in record["slices"]:
            name = part["name"]
            values = tensors[part["key"]]
            shape = manifest["parameters"][name]
            places = torch.arange(torch.Size(shape).numel()).view(shape)
            if part["dim"] is not None:
                places = places.narrow(part["dim"], part["start"], part["stop"] - part["start"])
            places = places.reshape(-1)[part["offset"] : part["offset"] + part["count"]]
            key = part["kind"], name
            into = whole.setdefault(key, torch.zeros(torch.Size(shape).numel(), dtype=values.dtype))
            into[places] = values
            seen.setdefault(key, torch.zeros(into.numel(), dtype=torch.int64)).index_add_(
                0, places, torch.ones_like(places)
            )
    assert all(bool((count == 1).all()) for count in seen.values())
    return {
        (kind, name): tensor.view(manifest["parameters"][name])
        for (kind, name), tensor in whole.items()
    }
