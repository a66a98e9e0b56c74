"""Checks the program of a run before the controller asks for nodes: pods that wait for a ConfigMap
would hold them, and say nothing."""

from __future__ import annotations

import base64
from functools import partial

from orchestrator.backends.kubernetes.api.client import Cluster, gather
from orchestrator.backends.kubernetes.code_store import field_manager, lacks_owner, store_code
from orchestrator.backends.kubernetes.names import JsonObject
from orchestrator.backends.kubernetes.objects.code_maps import (
    check_archive,
    chunk_key,
    chunk_names,
    code_maps,
)
from orchestrator.backends.kubernetes.train_run import Bundle, TrainRun, reference_to
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


class CodeChecks:
    """Checks each program once per start of its run. Several threads may use it."""

    def __init__(self) -> None:
        self._whole: dict[str, tuple[str, int]] = {}  # uid -> digest and start of what was whole

    def forget(self, uid: str) -> None:
        self._whole.pop(uid, None)

    def check(self, cluster: Cluster, run: TrainRun, bundle: Bundle) -> None:
        """Checks the program of a run that has not started, and makes the run one of its owners.
        `cluster`: in the run's namespace.

        OrchError: 76 while a part of it is missing, 78 if it is not what was submitted.
        """
        packed = bundle.request.code.packed
        if not packed:
            return
        start = packed.sha256, run.status.generation
        if self._whole.get(run.metadata.uid) == start:
            return
        names = chunk_names(packed)
        try:
            stored = gather(partial(cluster.get, "ConfigMap", name) for name in names)
        except OrchError as error:  # whatever it is, the run itself is not at fault
            raise OrchError(error.message, Exit.CAPACITY) from None
        missing = [name for name, body in zip(names, stored, strict=True) if body is None]
        if missing:
            message = f"the program's code is not in the cluster: ConfigMap {missing[0]} is missing"
            advice = "`orch resume` where it was submitted stores it again"
            raise OrchError(f"{message}; {advice}", Exit.CAPACITY)
        archive = _archive(stored)
        check_archive(packed, archive)
        uid = run.metadata.uid
        if any(lacks_owner(body, uid) for body in stored if body):
            # it was stored again for another run
            maps = code_maps(packed, archive, run.metadata.namespace)
            store_code(cluster, maps, reference_to(run), field_manager(uid))
        self._whole[run.metadata.uid] = start


def _archive(stored: list[JsonObject | None]) -> bytes:
    chunks = []
    for index, body in enumerate(stored):
        content = ((body or {}).get("binaryData") or {}).get(chunk_key(index), "")
        chunks.append(base64.b64decode(content))
    return b"".join(chunks)
