"""A layout of the search together with its exact cost."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.config.grammar import canonical
from orchestrator.config.schema import Config
from orchestrator.plan.document import Memory
from orchestrator.plan.expert_mesh import in_words
from orchestrator.planner.placement.best_order import Solution

from .layout import Layout


class CostedLayout(NamedTuple):
    """A layout and its exact cost."""

    layout: Layout
    solution: Solution
    memory: Memory  # memory of the fullest pipeline rank
    config: Config  # the configuration with every key that the search chose
    fills: bool  # dp is the degree that is taken if it is left out
    #: Bytes per step over the highest switch level, by the busiest rank of each axis.
    spine_bytes: float = 0.0

    @property
    def step_s(self) -> float:
        """Predicted seconds per step."""
        return self.solution.time.step_s

    @property
    def overrides(self) -> list[str]:
        """The command-line overrides that give this layout.

        They are a parallelism spec, and the keys that a spec cannot hold.
        """
        par = self.config.parallel
        mesh = self.layout.mesh
        degrees: dict[str, int | bool] = {
            name: getattr(par, name)
            for name in ("tp", "pp", "cp", "ep", "vpp")
            if getattr(par, name) > 1
        }
        folds: dict[str, int | bool] = {"etp": par.etp} if par.etp else {}
        folds |= {"fold_cp": True} if par.fold_cp else {}
        fits_spec = not folds or in_words(mesh) is not None
        degrees |= folds if fits_spec else {}
        degrees |= {} if self.fills else {"dp": mesh.dp}
        degrees |= {"zero": par.zero} if par.zero else {}
        degrees |= {"sp": False} if mesh.tp > 1 and not mesh.sp else {}
        settings = [
            f"parallel={canonical(degrees)}",
            f"parallel.micro_batch_size={par.micro_batch_size}",
        ]
        if not fits_spec:
            settings += [f"parallel.{name}={str(value).lower()}" for name, value in folds.items()]
        if par.expert_all_to_all == "hierarchical":
            settings.append("parallel.expert_all_to_all=hierarchical")
        if par.schedule not in ("1f1b", "interleaved"):
            settings.append(f"parallel.schedule={par.schedule}")
        if mesh.cp > 1 and mesh.cp_method != "zigzag":
            settings.append(f"parallel.cp_method={mesh.cp_method}")
        return [*settings, f"train.recompute={self.layout.recompute}"]
