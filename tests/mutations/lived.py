"""Mutants that live because they change nothing that a run could show: `Site.key` -> why."""

from __future__ import annotations

REASONS: dict[str, str] = {}
