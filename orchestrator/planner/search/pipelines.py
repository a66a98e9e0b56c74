"""Caches the pipelines that schedules make of meshes: each is computed once."""

from __future__ import annotations

from msgspec import structs

from orchestrator.cost.memory.deferred_weight_gradients import SPLIT_BACKWARD
from orchestrator.plan.document import Parallel

from .layout import Mesh
from .pipeline_shapes import PipelineShape, PipelineShapes, pipeline_shape, summarize
from .space import Space

LOOPED = ("afab", "1f1b", "interleaved", "zb_h1", "zb_h2")  # stage s is on rank s % pp
#: (stage placement, whether backward is split, virtual stages) -> the schedules that share these.
Alike = dict[tuple[str, bool, int], list[str]]


class PipelinesOfMeshes:
    """The pipelines of the meshes of one search."""

    def __init__(self, space: Space, par: Parallel):
        """`par` is the `parallel` of any layout."""
        self.space = space
        self.par = par
        self._alike: dict[tuple[int, int], Alike] = {}  # keyed by (pp, micro-batches)
        self._shapes: dict[tuple[str, int, int], PipelineShape] = {}
        self._summaries: dict[tuple[object, ...], PipelineShapes] = {}

    def alike(self, mesh: Mesh) -> Alike:
        """Returns the legal schedules of a mesh, grouped by the pipeline that they share."""
        key = mesh.pp, mesh.micro_batches
        if key not in self._alike:
            schedules_alike = self._alike[key] = Alike()
            for schedule, stages in self.space.schedules(*key).items():
                for vpp in stages:
                    placement = "loop" if schedule in LOOPED else schedule
                    schedules_alike.setdefault(
                        (placement, schedule in SPLIT_BACKWARD, vpp), []
                    ).append(schedule)
        return self._alike[key]

    def shape(self, placement: str, schedule: str, pp: int, vpp: int) -> PipelineShape:
        """Returns the shape of a pipeline."""
        key = placement, pp, vpp
        if key not in self._shapes:
            layers = self.space.stage_layers(pp * vpp)
            piped = structs.replace(
                self.par,
                schedule=schedule,
                pp=pp,
                vpp=vpp,
                stage_layers=layers,
            )
            self._shapes[key] = pipeline_shape(placement, self.space.context.model, piped)
        return self._shapes[key]

    def summary(self, mesh: Mesh) -> PipelineShapes:
        """Returns the bounds that hold for all pipelines of a mesh."""
        alike = self.alike(mesh)
        key = mesh.pp, *alike
        if key not in self._summaries:
            shapes = (
                (self.shape(placement, names[0], mesh.pp, vpp), split)
                for (placement, split, vpp), names in alike.items()
            )
            self._summaries[key] = summarize(shapes)
        return self._summaries[key]
