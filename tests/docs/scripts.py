"""The scripts of docs/, which are no package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.house.rooms import ROOT


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
