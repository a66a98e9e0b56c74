"""Plans made before, by what they were made of: importing the planner and numpy costs more than most jobs take to plan.

A sealed plan is a pure function of its configuration, of the two files that one may name, of what `orch bench` has
measured, and of this package, so these are its key (`orchestrator.cache`). Nothing of the planner is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.machinery import PathFinder

import msgspec

from orchestrator.cache import Kept, code, content
from orchestrator.config.schema import Config
from orchestrator.plan import Plan, PlanError, from_json


def plan_of(config: Config) -> Plan:
    """What `build_plan` gives, or gave before. Raises OrchError (65) as it does: a refusal is not remembered."""
    if config.cluster.topology_file is not None:  # of several files, or of a cluster as it is now
        return _build(config)
    kept = Kept("plan", _parts(config))
    raw = kept.read()
    if raw is not None:
        try:
            return from_json(raw)
        except PlanError:  # damaged
            pass
    plan = _build(config)
    kept.write(msgspec.json.encode(plan))  # keys in the planner's order, which pages follow
    return plan


def _build(config: Config) -> Plan:
    from .build import build_plan

    return build_plan(config)


def _parts(config: Config) -> Iterator[bytes]:
    """Everything that a plan depends on, each part by itself."""
    from orchestrator.run.folder import home_folder

    home = home_folder(os.environ)
    yield msgspec.json.encode(config)
    yield str(home).encode(errors="surrogatepass")  # where token files go
    if (file := config.parallel.schedule_file) is not None:
        yield content(file)
    if config.cluster.measured and (home / "bench").is_dir():
        from orchestrator.cluster.measured import path_of

        yield content(path_of(config.cluster, home))
    yield from code("bench", "cluster", "config", "plan", "planner")
    yield msgspec.__version__.encode()
    if (numpy := PathFinder.find_spec("numpy")) and numpy.origin:
        found = os.stat(numpy.origin)
        yield f"numpy {found.st_size} {found.st_mtime_ns}".encode()
