"""Plans made before, by what they were made of: importing the planner and numpy costs more than most jobs take to plan.

A sealed plan is a pure function of its configuration, of the resolved cluster, of the schedule file that it may name,
and of this package, so these are its key (`orchestrator.cache`). Nothing of the planner is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.machinery import PathFinder

import msgspec

from orchestrator.cache import Kept, code, content
from orchestrator.config.schema import Config
from orchestrator.plan import Plan, PlanError, from_json
from orchestrator.plan.document import Cluster


def plan_of(config: Config, cluster: Cluster, any_layout: bool = False) -> Plan:
    """What `build_plan` gives, or gave before. Raises OrchError (65) as it does: a refusal is not remembered."""
    kept = Kept("plan", _parts(config, cluster, any_layout))
    raw = kept.read()
    if raw is not None:
        try:
            return from_json(raw)
        except PlanError:  # damaged
            pass
    from .build import build_plan

    plan = build_plan(config, cluster, any_layout)
    kept.write(msgspec.json.encode(plan))  # keys in the planner's order, which pages follow
    return plan


def _parts(config: Config, cluster: Cluster, any_layout: bool) -> Iterator[bytes]:
    """Everything that a plan depends on, each part by itself."""
    yield msgspec.json.encode(config)
    yield msgspec.json.encode(cluster)
    yield b"any" if any_layout and config.parallel.auto else b""
    if (file := config.parallel.schedule_file) is not None:
        yield content(file)
    yield from code("config", "plan", "planner")
    yield msgspec.__version__.encode()
    if (numpy := PathFinder.find_spec("numpy")) and numpy.origin:
        found = os.stat(numpy.origin)
        yield f"numpy {found.st_size} {found.st_mtime_ns}".encode()
