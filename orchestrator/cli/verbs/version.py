"""`orch version`: what is installed, without importing any of it."""

from __future__ import annotations

import argparse
import json
import platform

STANDS_ON = ("torch", "hydra-core", "omegaconf", "msgspec", "numpy", "safetensors", "prometheus-client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from importlib.metadata import PackageNotFoundError, version

    from orchestrator import __version__

    found = {"orch": __version__, "python": platform.python_version()}
    for name in STANDS_ON:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    print(json.dumps(found) if args.json else "\n".join(f"{name} {number}" for name, number in found.items()))
    return 0
