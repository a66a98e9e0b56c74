"""The layouts that a search compares: device meshes, and the choices that a mesh leaves open."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET, UnsetType

from orchestrator.plan.document import CpMethod

RECOMPUTE_MODES = ("none", "selective", "full")
#: Simplest first: the order of preference where nothing else decides.
CP_METHODS: tuple[CpMethod, ...] = ("zigzag", "ring", "allgather", "ulysses")

Variant = tuple[bool, CpMethod]  # (sequence parallelism, method of context parallelism)
#: The folding of experts: (tp ranks that cut each expert, whether cp ranks hold different experts).
#: Experts do not fold if both are unset.
Fold = tuple[int | UnsetType, bool | UnsetType]
NO_FOLD: Fold = (UNSET, UNSET)


class Mesh(NamedTuple):
    """A device mesh with its micro-batches, one variant and one fold."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    micro_batch_size: int
    micro_batches: int
    sp: bool
    cp_method: CpMethod
    etp: int | UnsetType = UNSET
    fold_cp: bool | UnsetType = UNSET

    @property
    def fold(self) -> Fold:
        """The folding of experts."""
        return self.etp, self.fold_cp


class Layout(NamedTuple):
    """A mesh with the choices that it leaves open."""

    mesh: Mesh
    recompute: str
    zero: int
    schedule: str
    vpp: int
