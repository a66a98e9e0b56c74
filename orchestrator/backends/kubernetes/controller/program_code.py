"""Checks the program of a run before the controller asks for nodes: pods that wait for a ConfigMap
would hold them, and say nothing."""

from __future__ import annotations

import base64
from functools import partial

from orchestrator.backends.kubernetes.api.client import Cluster, gather
from orchestrator.backends.kubernetes.names import JsonObject
from orchestrator.backends.kubernetes.objects.code_maps import check_archive, chunk_key, chunk_names
from orchestrator.backends.kubernetes.train_run import Bundle, TrainRun
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.request import PackedCode


class CodeChecks:
    """Checks each program once per attempt of its run. Several threads may use it."""

    def __init__(self) -> None:
        self._whole: dict[str, tuple[str, int]] = {}  # uid -> digest and attempt of what was whole

    def forget(self, uid: str) -> None:
        self._whole.pop(uid, None)

    def check(self, cluster: Cluster, run: TrainRun, bundle: Bundle) -> None:
        """Checks the program of a run that has not started. `cluster`: in the run's namespace.

        OrchError: 76 while a part of it is missing, 78 if it is not what was submitted.
        """
        packed = bundle.request.code.packed
        if not packed:
            return
        attempt = packed.sha256, run.spec.attempt
        if self._whole.get(run.metadata.uid) == attempt:
            return
        names = chunk_names(packed)
        stored = gather(partial(cluster.get, "ConfigMap", name) for name in names)
        missing = [name for name, body in zip(names, stored, strict=True) if body is None]
        if missing:
            message = f"the program's code is not in the cluster: ConfigMap {missing[0]} is missing"
            raise OrchError(f"{message}; submit it again to store it", Exit.CAPACITY)
        check_archive(packed, _archive(packed, stored))
        self._whole[run.metadata.uid] = attempt


def _archive(packed: PackedCode, stored: list[JsonObject | None]) -> bytes:
    chunks = []
    for index, body in enumerate(stored):
        content = ((body or {}).get("binaryData") or {}).get(chunk_key(index), "")
        chunks.append(base64.b64decode(content))
    return b"".join(chunks)
