"""The ConfigMaps in which a program's folder travels into pods. Pure.

They are named after the digest of the packed folder and immutable, so that runs with the same code
share them. Each run's Secret is one of their owners: they are deleted with the last run.
"""

from __future__ import annotations

import base64
import hashlib

from orchestrator.backends.kubernetes import names
from orchestrator.backends.kubernetes.names import JsonObject
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.request import PackedCode

CHUNK_BYTES = 1_000_000  # a ConfigMap takes 1 MiB of values
MOST_BYTES = 20 * CHUNK_BYTES  # of one program; the kubelet of each node reads all of it
_DIGITS = 32  # of the digest, in names and labels


def chunk_names(packed: PackedCode) -> list[str]:
    """Returns the names of the ConfigMaps in the order of their chunks."""
    count = -(-packed.bytes // CHUNK_BYTES)
    return [f"orch-code-{packed.sha256[:_DIGITS]}-{index}" for index in range(count)]


def chunk_key(index: int) -> str:
    """Returns the name of a chunk in its ConfigMap, and of the file that pods read."""
    return f"code.{index:03}"


def code_maps(packed: PackedCode, archive: bytes | None, namespace: str) -> list[JsonObject]:
    """Returns the ConfigMaps of a packed folder. `archive`: its bytes; None for a dry run, which
    shows sizes in their place."""
    maps = []
    for index, name in enumerate(chunk_names(packed)):
        start = index * CHUNK_BYTES
        end = min(packed.bytes, start + CHUNK_BYTES)
        content = f"({end - start} bytes)"
        if archive is not None:
            content = base64.b64encode(archive[start:end]).decode()
        metadata: JsonObject = {"name": name}
        if namespace:
            metadata["namespace"] = namespace
        metadata["labels"] = {
            "app.kubernetes.io/name": "orch",
            names.MANAGED: "orch",
            names.CODE_DIGEST: packed.sha256[:_DIGITS],
        }
        chunk_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "immutable": True,
            "binaryData": {chunk_key(index): content},
        }
        maps.append(chunk_map)
    return maps


def check_archive(packed: PackedCode, archive: bytes) -> None:
    """Raises OrchError (78) if what the cluster holds is not what was submitted."""
    digest = hashlib.sha256(archive).hexdigest()
    if digest != packed.sha256:
        message = (
            f"the program's code in the cluster has the digest {digest[:12]}, and"
            f" {packed.sha256[:12]} was submitted: delete its ConfigMaps and submit again"
        )
        raise OrchError(message, Exit.SECURITY)


def code_sources(packed: PackedCode) -> list[JsonObject]:
    """Returns the sources of the pods' input volume that hold the chunks."""
    return [{"configMap": {"name": name}} for name in chunk_names(packed)]
