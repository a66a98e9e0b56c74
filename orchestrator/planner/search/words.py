"""A layout as it is typed."""

from __future__ import annotations

from orchestrator.config.grammar import canonical

from .search import Found


def words(found: Found) -> list[str]:
    """The overrides that give this layout: a parallel word, and what words cannot say."""
    par, choice = found.config.parallel, found.choice
    degrees: dict[str, int | bool] = {
        name: getattr(par, name) for name in ("tp", "pp", "cp", "ep", "vpp") if getattr(par, name) > 1
    }
    degrees |= {"zero": par.zero} if par.zero else {}
    degrees |= {"sp": False} if choice.spot.tp > 1 and not choice.spot.sp else {}
    told = [f"parallel={canonical(degrees)}", f"parallel.micro_batch_size={par.micro_batch_size}"]
    if par.schedule not in ("1f1b", "interleaved"):
        told.append(f"parallel.schedule={par.schedule}")
    if choice.spot.cp > 1 and choice.spot.cp_method != "zigzag":
        told.append(f"parallel.cp_method={choice.spot.cp_method}")
    return [*told, f"train.recompute={choice.recompute}"]
