"""How Prometheus finds a run: file_sd JSON, there while the run lives.

Once in the run folder, and once in a folder that all runs of a user share, because Prometheus takes a `*` only in the
last part of a path: one static `files: [<home>/metrics.sd/*.json]` then follows every run there ever is.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from orchestrator.errors import OrchError

from .folder import RunFolder, make_private_folder, write_private


class Discovery:
    def __init__(self, folder: RunFolder, shared: str):
        self._run_id = folder.run_id
        self._files = [folder.discovery, Path(shared) / f"{folder.run_id}.json"]

    def publish(self, endpoints: dict[str, str]) -> None:
        """Node name -> host:port. A shared folder that cannot be written costs discovery, not the run."""
        targets = [
            {"targets": [address], "labels": {"run": self._run_id, "node": node}} for node, address in endpoints.items()
        ]
        raw = msgspec.json.format(msgspec.json.encode(targets), indent=1) + b"\n"
        for file in self._files:
            with contextlib.suppress(OSError, OrchError):
                make_private_folder(file.parent)
                write_private(file, raw, durable=False)

    def withdraw(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.unlink()
