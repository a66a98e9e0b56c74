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
    full_tensors = {}
    seen = {}
    for record in manifest["files"]:
        tensors = load_file(step / record["file"])
        for piece in record["slices"]:
            name = piece["name"]
            values = tensors[piece["key"]]
            shape = manifest["parameters"][name]
            positions = torch.arange(torch.Size(shape).numel()).view(shape)
            if piece["dim"] is not None:
                positions = positions.narrow(
                    piece["dim"], piece["start"], piece["stop"] - piece["start"]
                )
            positions = positions.reshape(-1)[piece["offset"] : piece["offset"] + piece["count"]]
            key = piece["kind"], name
            into = full_tensors.setdefault(
                key, torch.zeros(torch.Size(shape).numel(), dtype=values.dtype)
            )
            into[positions] = values
            seen.setdefault(key, torch.zeros(into.numel(), dtype=torch.int64)).index_add_(
                0, positions, torch.ones_like(positions)
            )
    assert all(bool((count == 1).all()) for count in seen.values())
    return {
        (kind, name): tensor.view(manifest["parameters"][name])
        for (kind, name), tensor in full_tensors.items()
    }
