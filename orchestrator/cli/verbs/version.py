"""`orch version`: prints the installed versions, without importing the packages, and the formats of
files."""

from __future__ import annotations

import argparse
import json
import platform

DEPENDENCIES = (
    "torch",
    "hydra-core",
    "omegaconf",
    "msgspec",
    "numpy",
    "safetensors",
    "prometheus-client",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from importlib.metadata import PackageNotFoundError, version

    from orchestrator import __version__

    versions: dict[str, str] = {"orch": __version__, "python": platform.python_version()}
    for name in DEPENDENCIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    if args.json:
        print(json.dumps(versions | {"formats": formats()}))
        return 0
    print("\n".join(f"{name} {number}" for name, number in versions.items()))
    print("\n".join(f"{name} format {schemas}" for name, schemas in formats().items()))
    return 0


def formats() -> dict[str, str]:
    """Returns the file formats that this version writes, which are the newest that it reads."""
    from orchestrator.cluster.document import SCHEMA as TOPOLOGY
    from orchestrator.observe.report import SCHEMA as REPORT
    from orchestrator.plan.document import SCHEMA as PLAN
    from orchestrator.plan.worker import CHECKPOINT
    from orchestrator.run.request import SCHEMA as REQUEST
    from orchestrator.run.state import SCHEMA as STATE

    run = f"{REQUEST} {STATE}"
    return {
        "plan": PLAN,
        "run folder": run,
        "checkpoint": CHECKPOINT,
        "report": REPORT,
        "topology": TOPOLOGY,
    }
