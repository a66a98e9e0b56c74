"""The main line's plan, byte for byte. A change of any formula shows here and must be meant.

To accept a change: `python -m tests.planner.test_golden` writes the file anew.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.plan import Plan, load_plan, to_json

from . import configs, shapes
from .configs import build_plan

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_h100x64_tp8_pp4_zero1.json"


def main_line() -> Plan:
    return build_plan(configs.config(configs.cluster(), shapes.llama3_70b(), {"tp": 8, "pp": 4, "zero": 1}))


def test_main_line_is_the_golden_plan():
    assert to_json(main_line(), indent=1).decode() + "\n" == GOLDEN.read_text()


def test_the_golden_plan_loads_and_verifies():
    assert load_plan(GOLDEN) == main_line()


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_bytes(to_json(main_line(), indent=1) + b"\n")
