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
    print("\nfile formats, read and written")
    width = max(map(len, formats()))
    for name, schema in formats().items():
        print(f"  {name:<{width}}  {schema}")
    return 0


def formats() -> dict[str, str]:
    """Returns the format of each kind of file and message. This version writes these and reads
    no others."""
    from orchestrator.agent.protocol.channel import PROTOCOL
    from orchestrator.backends.kubernetes import names as kubernetes
    from orchestrator.backends.ssh import wire
    from orchestrator.cluster.document import SCHEMA as TOPOLOGY
    from orchestrator.cluster.measured import SCHEMA as BENCH
    from orchestrator.cost.profile import SCHEMA as PROFILE
    from orchestrator.observe.report import SCHEMA as REPORT
    from orchestrator.plan.document import SCHEMA as PLAN
    from orchestrator.plan.worker import CHECKPOINT, TOKENS
    from orchestrator.run.bad_nodes import SCHEMA as BAD_NODES
    from orchestrator.run.request import SCHEMA as REQUEST
    from orchestrator.run.state import SCHEMA as STATE

    return {
        "plan": PLAN,
        "run folder: request": REQUEST,
        "run folder: state": STATE,
        "run folder: report": REPORT,
        "checkpoint manifest": CHECKPOINT,
        "tokens of a corpus": TOKENS,
        "cluster topology": TOPOLOGY,
        "measured links (orch bench)": BENCH,
        "cost profile (orch calibrate)": PROFILE,
        "bad nodes (orch nodes)": BAD_NODES,
        "messages of agents": PROTOCOL,
        "messages over ssh": str(wire.VERSION),
        "Kubernetes TrainRun": f"{kubernetes.GROUP}/{kubernetes.VERSION}",
    }
