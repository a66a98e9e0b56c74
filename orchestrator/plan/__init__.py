"""The contract between orchestrator and trainer: everything that both use, and nothing else.

The trainer imports this package and no other part of the orchestrator. Names are loaded on first
use, so that `orch --help` can print the exit codes without loading the plan's codec.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .codec import PlanError, from_json, json_schema, load_plan, plan_hash, seal, to_json
    from .document import AXES, SCHEMA, Plan
    from .exits import Exit, meaning

_HOME = {
    **dict.fromkeys(
        ("PlanError", "from_json", "json_schema", "load_plan", "plan_hash", "seal", "to_json"),
        "codec",
    ),
    **dict.fromkeys(("AXES", "SCHEMA", "Plan"), "document"),
    **dict.fromkeys(("Exit", "meaning"), "exits"),
}

__all__ = [
    "AXES",
    "SCHEMA",
    "Exit",
    "Plan",
    "PlanError",
    "from_json",
    "json_schema",
    "load_plan",
    "meaning",
    "plan_hash",
    "seal",
    "to_json",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
