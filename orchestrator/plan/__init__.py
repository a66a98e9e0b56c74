"""The plan module: everything that orchestrator and trainer share, and nothing else.

The trainer imports this package and no other part of the orchestrator.
"""

from .codec import PlanError, from_json, json_schema, load_plan, plan_hash, seal, to_json
from .document import AXES, SCHEMA, Plan
from .exits import Exit, meaning

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
